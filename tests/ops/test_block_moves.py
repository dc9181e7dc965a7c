"""Copies of whole blocks: reads before writes, between layouts, nothing on an invalid id."""

from typing import Any

import numpy as np
import pytest
import torch

from attnlib.cache.layout import LAYOUTS
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.spec import AttentionSpec


def _cache(layout: str = "NHD", blocks: int = 5, kv: str = "auto") -> PagedKVCache:
    spec = AttentionSpec(
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        head_size_v=6,
        dtype=torch.float32,
        block_size=4,
        kv_cache_dtype=kv,
    )
    cache = PagedKVCache.allocate(spec, blocks, "cpu", layout)
    for view in (cache.key_cache, cache.value_cache):
        view.copy_(torch.randn(view.shape).to(view.dtype))
    return cache


def _state(cache: PagedKVCache) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.key_cache.float().clone(), cache.value_cache.float().clone()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_copies_read_all_sources_first(layout: str, kv: str) -> None:
    """A rotation 0 -> 1 -> 2 -> 0 reads every source before it writes; other blocks stay."""
    cache = _cache(layout, kv=kv)
    before = _state(cache)
    cache.copy_blocks([(0, 1), (1, 2), (2, 0)])
    for view, old in zip(_state(cache), before, strict=True):
        assert torch.equal(view, old[[2, 0, 1, 3, 4]])


def test_swapping_out_and_in_again_through_another_layout() -> None:
    cache, host = _cache("NHD"), _cache("HND_PACKED", blocks=3)
    before = _state(cache)
    cache.swap_blocks(host, torch.tensor([[4, 0], [1, 2]]))
    cache.zero_blocks([4, 1])
    assert all((view[[1, 4]] == 0).all() for view in _state(cache))
    host.swap_blocks(cache, [(0, 4), (2, 1)])
    assert all(torch.equal(view, old) for view, old in zip(_state(cache), before, strict=True))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (
            [(0, 9)],
            r"destination block 9 \(index 0\) is outside the pool of 5 blocks \(0 to 4\) \[P3\]",
        ),
        ([(0, 1), (-1, 2)], r"source block -1 \(index 1\) is outside"),
        ([(0, 1), (2, 1)], "destination block 1 occurs more than once"),
    ],
)
def test_bad_pairs_change_nothing(pairs: list, message: str) -> None:
    cache = _cache()
    before = _state(cache)
    with pytest.raises(ContractError, match=message):
        cache.copy_blocks(pairs)
    assert all(torch.equal(view, old) for view, old in zip(_state(cache), before, strict=True))


def test_bad_zeroing_changes_nothing() -> None:
    cache = _cache()
    before = _state(cache)
    with pytest.raises(ContractError, match="block_ids 5"):
        cache.zero_blocks([0, 5])
    assert all(torch.equal(view, old) for view, old in zip(_state(cache), before, strict=True))


def test_caches_of_different_block_sizes_do_not_swap() -> None:
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_size=8, head_size_v=6, dtype=torch.float32, block_size=8
    )
    with pytest.raises(ContractError, match="block_size is 4 in the source and 8 in"):
        _cache().swap_blocks(PagedKVCache.allocate(spec, 2, "cpu"), [(0, 0)])


def test_empty_moves_are_legal() -> None:
    cache = _cache()
    cache.copy_blocks([])
    cache.zero_blocks([])
    cache.copy_blocks(torch.empty(0, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0.9, 1)], r"source block 0.9 \(index 0\) is a float"),
        ([(0, 1), (1, 2.0)], r"destination block 2.0 \(index 1\) is a float"),
        ([("0", 1)], "source block '0'"),
        ([(True, 1)], "source block True"),
        ([(0, 1, 2)], r"block pair \(0, 1, 2\)"),
        ([3], "block pair 3"),
        (torch.tensor([[0.0, 1.0]]), "block pairs are torch.float32"),
        (torch.tensor([[True, False]]), "block pairs are torch.bool"),
        (torch.tensor([0, 1]), "block pairs are torch.int64"),
    ],
)
def test_ids_that_are_not_integers_are_refused(pairs: Any, message: str) -> None:
    """P3: a fraction would be truncated, and another block copied."""
    cache = _cache()
    before = _state(cache)
    for move in (cache.copy_blocks, lambda pairs: cache.swap_blocks(_cache(), pairs)):
        with pytest.raises(ContractError, match=message):
            move(pairs)
    with pytest.raises(ContractError, match="block_ids 1.5"):
        cache.zero_blocks([0, 1.5])  # type: ignore[list-item]
    assert all(torch.equal(*pair) for pair in zip(_state(cache), before, strict=True))


def test_integers_of_other_types() -> None:
    cache = _cache()
    before = _state(cache)
    cache.copy_blocks([(np.int64(0), torch.tensor(3))])
    cache.copy_blocks(torch.tensor([[1, 2]], dtype=torch.uint8))
    for view, old in zip(_state(cache), before, strict=True):
        assert torch.equal(view, old[[0, 1, 1, 0, 4]])
