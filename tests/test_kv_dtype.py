"""Names of the dtypes that a cache stores."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.kv_dtype import PAGE_FORMATS, kv_cache_format, kv_cache_torch_dtype, page_format
from attnlib.spec import AttentionSpec


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("auto", torch.bfloat16),
        ("fp8", torch.float8_e4m3fn),
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
        ("float16", torch.float16),
        (torch.float32, torch.float32),
    ],
)
def test_names_and_dtypes(name: str | torch.dtype, stored: torch.dtype) -> None:
    assert kv_cache_torch_dtype(name, torch.bfloat16) is stored


def test_the_dtype_of_the_model_can_always_be_stored() -> None:
    assert kv_cache_torch_dtype(torch.float64, torch.float64) is torch.float64
    with pytest.raises(ContractError, match="torch.float64 cannot be stored; use one of auto, fp8"):
        kv_cache_torch_dtype(torch.float64, torch.bfloat16)


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ContractError, match="'fp4' is not known; use one of auto, fp8, fp8_e4m3"):
        kv_cache_torch_dtype("fp4", torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"value_cache_dtype": "fp4"}, "value_cache_dtype='fp4' is not known"),
        ({"value_cache_dtype": 4}, "value_cache_dtype is a int"),
        ({"value_cache_dtype": "mxfp4", "head_size_v": 16}, "of 32 for value_cache_dtype=mxfp4"),
        ({"kv_cache_dtype": "mxfp4", "head_size_v": 16}, "of 32 for kv_cache_dtype=mxfp4"),
        (
            {"value_cache_dtype": "nvfp4", "use_mla": True, "num_kv_heads": 1},
            "value_cache_dtype=nvfp4 stores keys and values separately",
        ),
    ],
)
def test_errors_name_the_field_that_was_given(changes: dict[str, Any], text: str) -> None:
    sizes: dict[str, Any] = {"num_heads": 2, "head_size": 64, "dtype": torch.float16}
    with pytest.raises(ContractError, match=re.escape(text)):
        AttentionSpec(**{**sizes, **changes})


def test_formats_with_scales_in_the_page() -> None:
    """M16: sizes per head, and no confusion with formats whose scales are outside (M9)."""
    int8, int4 = PAGE_FORMATS["int8_per_token_head"], PAGE_FORMATS["int4_per_group"]
    assert kv_cache_torch_dtype("int8_per_token_head", torch.bfloat16) is torch.int8
    assert (int8.bytes_per_head(128), int4.bytes_per_head(128)) == (132, 72)
    assert (int4.stored_size(96), int4.head_size(48), int4.num_scales(96)) == (48, 96, 4)
    assert kv_cache_format("fp8", torch.bfloat16).bytes_per_head(128) == 128
    assert not kv_cache_format("fp8", torch.bfloat16).scales_in_page
    nvfp4, mxfp4 = PAGE_FORMATS["nvfp4"], PAGE_FORMATS["mxfp4"]
    assert (nvfp4.bytes_per_head(128), mxfp4.bytes_per_head(128)) == (72, 68)
    scales, stored = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 64, dtype=torch.uint8)
    assert page_format(stored.view(torch.int8), scales) is int8
    assert page_format(stored[..., :8], stored[..., :1]) is nvfp4
    assert page_format(stored[..., :16], stored[..., :1]) is mxfp4
    assert page_format(stored.view(torch.float8_e4m3fn), torch.ones(2)) is None, "per head (M9)"
    with pytest.raises(ContractError, match="no KV format stores 64 elements of torch.int8 with 1"):
        page_format(stored.view(torch.int8), scales.double())


def test_a_spec_with_scales_in_the_page() -> None:
    spec = AttentionSpec(
        num_heads=8, num_kv_heads=2, head_size=64, dtype=torch.float16,
        kv_cache_dtype="int4_per_group",
    )  # fmt: skip
    assert spec.kv_dtype is torch.uint8 and spec.kv_format.name == "int4_per_group"
    assert spec.kv_bytes_per_token == 2 * 2 * (32 + 8)
    with pytest.raises(ContractError, match="head_size=60 must be a multiple of 8 for kv_cache_dt"):
        spec.replace(head_size=60, head_size_v=64)
    with pytest.raises(ContractError, match="stores keys and values separately, and use_mla"):
        spec.replace(num_kv_heads=1, use_mla=True)
