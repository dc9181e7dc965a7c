"""Names of the dtypes that a cache stores."""

from __future__ import annotations

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.kv_dtype import kv_cache_torch_dtype


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
