"""Which calls the Hopper kernels serve, by strides, and how mixed batches share the chip."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.ops.triton.hopper import loader as gluon
from attnlib.ops.triton.hopper.dispatch import slots_beside_prefill, stride_gaps

BF16 = torch.bfloat16


def test_strides_that_tma_cannot_take_are_gaps() -> None:
    """P1, P9: views are ordinary, but boxes of 16 bytes need strides that are multiples of them."""
    query = torch.empty(4, 8, 128, dtype=BF16)
    cache = torch.empty(3, 16, 2, 132, dtype=BF16)[..., :128]
    first, second = stride_gaps(query=query, key_cache=cache, value_cache=cache, out=query)
    assert (
        "key_cache has stride 132 in dimension 2" in first
        and "value_cache has stride 132" in second
    )


def test_arbitrary_strides_of_single_blocks_and_heads_are_no_gap() -> None:
    """P1: a dimension of size 1 carries any stride."""
    query = torch.empty(4, 8, 128, dtype=BF16)
    cache = torch.empty(4096, dtype=BF16).as_strided((1, 16, 1, 128), (3, 128, 7, 1))
    assert stride_gaps(query=query, key_cache=cache, value_cache=cache, out=query) == []


def test_a_gluon_that_cannot_be_imported_is_a_reason_and_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names under triton.experimental move: plain Triton then serves everything."""

    def gone(name: str) -> Any:
        raise ImportError(f"no {name} in this Triton")

    monkeypatch.setattr(gluon, "import_module", gone)
    gluon._load.cache_clear()
    try:
        assert gluon.hopper_choice() is None
        assert (
            gluon.hopper_missing()
            == "ImportError: no attnlib.ops.triton.hopper.dispatch in this Triton"
        )
    finally:
        gluon._load.cache_clear()


def test_decodes_leave_more_of_the_chip_to_a_longer_prefill() -> None:
    few, many = (
        slots_beside_prefill(132, 1 << 30, operations) for operations in (1 << 50, 1 << 30)
    )
    assert (few, many) == (48, 88)
