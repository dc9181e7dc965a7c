"""Which calls the Hopper kernels serve, by strides, and how mixed batches share the chip."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.ops.triton import hopper
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.hopper.dispatch import unsupported_strides
from attnlib.ops.triton.paged_decode import AttentionShape
from attnlib.ops.triton.paged_mixed import concurrent_ctas

BF16 = torch.bfloat16


def test_strides_that_tma_does_not_support() -> None:
    """P1, P9: TMA needs strides that are multiples of 16 bytes."""
    query = torch.empty(4, 8, 128, dtype=BF16)
    cache = torch.empty(3, 16, 2, 132, dtype=BF16)[..., :128]
    first, second = unsupported_strides(query=query, key_cache=cache, value_cache=cache, out=query)
    assert (
        "key_cache has stride 132 in dimension 2" in first
        and "value_cache has stride 132" in second
    )


def test_strides_of_dimensions_of_size_1_are_ignored() -> None:
    """P1: such a dimension may have any stride."""
    query = torch.empty(4, 8, 128, dtype=BF16)
    cache = torch.empty(4096, dtype=BF16).as_strided((1, 16, 1, 128), (3, 128, 7, 1))
    assert unsupported_strides(query=query, key_cache=cache, value_cache=cache, out=query) == []


def test_failed_import_of_gluon_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The portable kernels then serve every call."""

    def fail(name: str) -> Any:
        raise ImportError(f"no {name} in this Triton")

    monkeypatch.setattr(hopper, "import_module", fail)
    hopper._load.cache_clear()
    try:
        assert hopper.load() is None
        assert (
            hopper.import_error()
            == "ImportError: no attnlib.ops.triton.hopper.dispatch in this Triton"
        )
    finally:
        hopper._load.cache_clear()


def test_longer_prefills_get_more_multiprocessors() -> None:
    """60 decodes of 4k keys with a prefill of 8k tokens, and of 2k."""
    shape = AttentionShape(32, 8, 128, 128, BF16, BF16)
    chip = DeviceLimits(132, 227 * 1024, 228 * 1024, (9, 0), True)
    few, many = (
        concurrent_ctas(
            shape, chip, num_decodes=60, decode_visible=4096, prefill_tokens=tokens,
            prefill_visible=tokens, bounds=(tokens, tokens),
        )
        for tokens in (8192, 2048)
    )  # fmt: skip
    assert (few, many) == (48, 88)
