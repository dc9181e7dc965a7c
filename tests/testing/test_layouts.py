"""Cache layouts: two views of one shape; writes and reads of slots."""

from __future__ import annotations

import math

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.testing.layouts import (
    CACHE_LAYOUTS,
    Dimensions,
    allocate_views,
    poison_value,
    read_slots,
    write_slots,
)

DIMS = Dimensions(head_size=16, head_size_v=8)


@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
@pytest.mark.parametrize(
    "cache_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_layouts_are_two_views_of_one_shape(layout: str, cache_dtype: torch.dtype) -> None:
    """P1, P2: a layout is an order in memory; what is written is read back."""
    dims = Dimensions(head_size=16, head_size_v=8, cache_dtype=cache_dtype)
    cache = allocate_views(dims, 5, layout)
    assert cache.key.shape == (5, 16, 2, 16)
    assert cache.value.shape == (5, 16, 2, 8)
    assert cache.key.stride(-1) == cache.value.stride(-1) == 1
    tokens_k, tokens_v = torch.randn(3, 2, 16), torch.randn(3, 2, 8)
    write_slots(cache.key, [0, 79, 33], tokens_k, 1.0)
    write_slots(cache.value, [0, 79, 33], tokens_v, 1.0)
    assert torch.equal(read_slots(cache.key, [33]).float(), tokens_k[2:].to(cache_dtype).float())
    assert torch.equal(
        read_slots(cache.value, [79, 0]).float(), tokens_v[[1, 0]].to(cache_dtype).float()
    )
    written = sum(int((storage != 0).sum()) for storage in cache.storage)
    assert written <= 3 * 2 * (16 + 8) * cache.key.element_size()


def test_interleaved_views_share_an_allocation_without_overlap() -> None:
    """P1: K and V may alternate in one tensor."""
    cache = allocate_views(DIMS, 4, "NHD_INTERLEAVED")
    assert len(cache.storage) == 1
    cache.key.fill_(1.0)
    assert (cache.value == 0).all()
    cache.value.fill_(2.0)
    assert (cache.key == 1).all()


def test_fp8_caches_store_the_scaled_value_saturated() -> None:
    """M9: writes saturate."""
    dims = Dimensions(cache_dtype=torch.float8_e4m3fn)
    view = allocate_views(dims, 1).key
    write_slots(view, [0], torch.full((1, 2, 32), 1e6), torch.tensor([1.0, 1e6]))
    stored = read_slots(view, [0]).float()
    assert stored[0, 0, 0] == 448.0
    assert stored[0, 1, 0] == 1.0


def test_unknown_layouts_and_poisons_list_the_valid_names() -> None:
    with pytest.raises(
        ContractError, match="no cache layout is named 'HDN'; the layouts are NHD, "
    ):
        allocate_views(DIMS, 1, "HDN")
    with pytest.raises(ContractError, match="no poison is named 'none'; the kinds are zero, "):
        poison_value(torch.float32, "none")
    assert math.isnan(poison_value(torch.float8_e4m3fn, "inf"))
