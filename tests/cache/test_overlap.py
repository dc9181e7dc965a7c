"""Blocks of keys and values that overlap, against the sets of their offsets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlib.cache.index_keys import IndexKeyCache
from attnlib.cache.layout import LAYOUTS
from attnlib.cache.overlap import (
    blocks_overlap,
    check_pair,
    elements_overlap,
    same_memory,
    tensors_overlap,
)
from attnlib.cache.packed_latents import PackedLatentCache
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.spec import AttentionSpec

POOL = torch.zeros(4096)


def _blocks(view: torch.Tensor) -> list[set[int]]:
    numbers = torch.arange(POOL.numel()).as_strided(
        view.shape, view.stride(), view.storage_offset()
    )
    return [set(block.flatten().tolist()) for block in numbers]


def _overlap(key: torch.Tensor, value: torch.Tensor) -> bool:
    return any(ours & theirs for ours, theirs in zip(_blocks(key), _blocks(value), strict=True))


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views with equal strides, as caches of one allocation have."""
    shape = [draw(st.integers(1, 4)) for _ in range(3)]
    strides = [draw(st.integers(1, 60)) for _ in range(3)]
    sizes = [draw(st.integers(1, 6)) for _ in range(2)]
    starts = [draw(st.integers(0, 300)) for _ in range(2)]
    first, second = (
        POOL.as_strided((*shape, size), (*strides, 1), start)
        for size, start in zip(sizes, starts, strict=True)
    )
    return first, second


@given(views())
def test_equal_strides_are_exact(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    first, second = pair
    assert blocks_overlap(first, second) == _overlap(first, second)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 20)), min_size=1, max_size=3),
    st.integers(1, 6),
)
def test_elements_of_one_tensor(dimensions: list[tuple[int, int]], last: int) -> None:
    shape, strides = zip(*dimensions, strict=True)
    view = POOL.as_strided((*shape, last), (*strides, 1))
    offsets = torch.arange(POOL.numel()).as_strided(view.shape, view.stride()).flatten().tolist()
    assert elements_overlap(view) == (len(set(offsets)) < len(offsets))


@st.composite
def rows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of one allocation, flat or per head."""
    width, count, both = draw(st.sampled_from([24, 30])), draw(st.integers(0, 4)), []
    for _ in range(2):
        heads, size, start = (draw(st.integers(least, 5)) for least in (1, 1, 0))
        view = POOL.as_strided((count, heads, size), (width, size, 1), start * 7)
        both.append(view.flatten(1) if count and draw(st.booleans()) else view)
    return both[0], both[1]


@given(rows())
def test_rows_of_one_allocation(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    first, second = pair
    elements = [_blocks(view[None])[0] for view in pair]
    assert tensors_overlap(first, second) == bool(elements[0] & elements[1])
    assert tensors_overlap(second, first) == tensors_overlap(first, second)
    if first.shape[0]:
        assert not same_memory(first, second) or elements[0] == elements[1]


def test_overlap_is_of_bytes() -> None:
    """Also of tensors with other dtypes, at odd addresses and in other storages."""
    pool = torch.zeros(16, dtype=torch.uint8)
    wide, one = pool[4:12].view(torch.float32), torch.from_dlpack(pool[11:12])
    assert tensors_overlap(wide, one) and not tensors_overlap(wide, pool[12:])
    assert not tensors_overlap(wide, pool[:4]) and tensors_overlap(wide, pool[3:5])
    assert same_memory(pool.view(2, 2, 4), pool.view(2, 8)) and not same_memory(pool, pool[1:])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_size_v", [8, 6])
def test_keys_and_values_of_an_allocation_are_separate(layout: str, head_size_v: int) -> None:
    spec = AttentionSpec(
        num_heads=2, num_kv_heads=2, head_size=8, head_size_v=head_size_v, dtype=torch.float32,
        block_size=4,
    )  # fmt: skip
    cache = PagedKVCache.allocate(spec, 3, "cpu", layout)
    assert not blocks_overlap(cache.key_cache, cache.value_cache)


def test_views_of_common_elements_are_refused() -> None:
    """P1"""
    pool = torch.zeros(8, 4, 2, 24)
    PagedKVCache.from_views(pool[..., :8], pool[..., 8:16])
    assert PagedKVCache.from_views(pool[..., :16], pool[..., :8]).values_alias_keys
    with pytest.raises(ContractError, match="overlap in each block, so values"):
        PagedKVCache.from_views(pool[..., :8], pool[..., 4:12])
    with pytest.raises(ContractError, match="overlap"):
        PagedKVCache.from_views(pool[:, :3], pool[:, 1:])
    PagedKVCache.from_views(pool[:7], pool[1:])  # other blocks: the block table decides


def test_memory_that_tokens_share_is_refused_where_tokens_are_written() -> None:
    """P1"""
    pool = torch.zeros(1, 4, 656, dtype=torch.uint8)
    with pytest.raises(ContractError, match=r"data has strides .*tokens share memory.*\[P1\]"):
        PackedLatentCache(pool.expand(3, 4, 656))
    with pytest.raises(ContractError, match="keys has strides .*tokens share memory"):
        IndexKeyCache(torch.zeros(1, 4, 8).expand(3, 4, 8))
    with pytest.raises(ContractError, match="scales has strides .*tokens share memory"):
        IndexKeyCache(torch.zeros(3, 4, 8).to(torch.float8_e4m3fn), torch.ones(1, 4).expand(3, 4))
    keys = torch.zeros(3, 4, 2, 8)
    with pytest.raises(ContractError, match="k and v share memory, so that new values would"):
        check_pair(k=keys, v=keys)
    with pytest.raises(ContractError, match="v has strides .*tokens share memory"):
        check_pair(k=keys, v=torch.zeros(1, 4, 2, 8).expand(3, 4, 2, 8))
    check_pair(k=keys, v=torch.zeros(3, 2, 4, 8).transpose(1, 2))
