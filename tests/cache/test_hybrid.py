"""One pool of blocks for several layer groups: views, block sizes, and blocks behind a window."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import attnlib
from attnlib.cache.hybrid import HybridKVCache, KVCacheGroup, with_equal_blocks
from attnlib.cache.hybrid_allocator import NULL_BLOCK, HybridBlockAllocator, SequenceBlocks
from attnlib.errors import CacheExhaustedError, ContractError
from attnlib.metadata.groups import group_batches

FULL = attnlib.AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, block_size=4
)
WINDOW = FULL.replace(sliding_window=6)
GROUPS = {"full": KVCacheGroup(FULL, 1), "sliding": KVCacheGroup(WINDOW, 2)}


def test_blocks_get_equal_bytes() -> None:
    """A group with half the bytes per token has twice the tokens per block."""
    groups = with_equal_blocks(GROUPS)
    assert {name: group.block_size for name, group in groups.items()} == {"full": 8, "sliding": 4}
    other = with_equal_blocks(
        {
            "a": KVCacheGroup(FULL, 5),
            "b": KVCacheGroup(FULL.replace(head_size=8, head_size_v=8), 3),
        }
    )
    assert other["a"].block_size == 4 and other["b"].block_size == 8  # 10 / 3 -> twice


@pytest.mark.parametrize(
    "changes",
    [{}, {"kv_cache_dtype": "fp8_e4m3"}, {"head_size_v": 8}, {"use_mla": True, "num_kv_heads": 1,
     "head_size_v": 8}],
)  # fmt: skip
def test_caches_are_separate_views_of_one_pool(changes: dict[str, Any]) -> None:
    """P1, P10: no element of a layer is one of another layer of its group, and blocks of the pool
    do not overlap."""
    spec = FULL.replace(**changes)
    groups = with_equal_blocks(
        {"full": KVCacheGroup(spec, 1), "sliding": KVCacheGroup(spec.replace(sliding_window=6), 2)}
    )
    pool = HybridKVCache(groups, 5, "cpu")
    assert pool.nbytes == 5 * pool.block_bytes and len(pool.caches["sliding"]) == 2
    used = []
    for name, group in groups.items():
        assert group.block_size * group.bytes_per_token <= pool.block_bytes
        for number, cache in enumerate(pool.caches[name]):
            assert cache.num_blocks == 5 and cache.block_size == group.block_size
            assert cache.key_cache.dtype == spec.kv_dtype
            for view in (cache.key_cache, cache.value_cache):
                view.view(torch.uint8).fill_(number + 1)
        for number, cache in enumerate(pool.caches[name]):
            for view in (cache.key_cache, cache.value_cache):
                assert (view.view(torch.uint8) == number + 1).all()
        used.append(int((pool._storage != 0).sum()) // 5)
        pool._storage.zero_()
    assert used == [group.block_size * group.bytes_per_token for group in groups.values()]


def test_pages_with_scales_share_the_pool() -> None:
    """P13: pages of all layers of a group are parts of its blocks, and nothing overlaps."""
    groups = with_equal_blocks(
        {
            "int8": KVCacheGroup(FULL.replace(kv_cache_dtype="int8_per_token_head"), 2),
            "int4": KVCacheGroup(FULL.replace(kv_cache_dtype="int4_per_group"), 3),
        }
    )
    pool = HybridKVCache(groups, 5)
    for caches in pool.caches.values():
        pool._storage.zero_()
        for number, cache in enumerate(caches):
            assert cache.pages is not None
            assert not cache.pages.any(), "the pages of two layers overlap"
            cache.pages.fill_(number + 1)
        for number, cache in enumerate(caches):
            assert cache.pages is not None and bool((cache.pages == number + 1).all())
            assert bool((cache.key_cache.view(torch.uint8) == number + 1).all())


def test_first_visible_positions() -> None:
    """M2: a window of W shows W keys; a chunk the keys from its start."""
    chunked = KVCacheGroup(FULL.replace(attention_chunk_size=8))
    for position in range(40):
        assert GROUPS["full"].first_visible(position) == 0
        assert GROUPS["sliding"].first_visible(position) == max(position - 5, 0)
        assert chunked.first_visible(position) == position // 8 * 8


def test_blocks_behind_the_window_return_to_the_pool() -> None:
    """P12: the windowed group holds a bounded number of blocks; the full one all of them."""
    allocator = HybridBlockAllocator(with_equal_blocks(GROUPS), 64)
    sequence = allocator.start()
    tokens = list(range(100))
    for count in range(1, 101):
        allocator.grow(sequence, count)
        assert all(len(ids) * g.block_size >= count for ids, g in zip(
            sequence.blocks.values(), allocator.groups.values(), strict=True))  # fmt: skip
        visible = sequence.blocks["sliding"][max(count - 1 - 5, 0) // 4 :]
        assert NULL_BLOCK not in visible
        allocator.advance(sequence, tokens[:count])
        assert allocator.num_used_blocks("sliding") <= 3
        assert allocator.num_used_blocks("full") == -(-count // 8)
    assert sequence.blocks["sliding"][:23] == [NULL_BLOCK] * 23
    allocator.release(sequence)
    assert allocator.num_free_blocks == 63
    assert allocator.num_used_blocks("full") == allocator.num_used_blocks("sliding") == 0


def test_prefixes_end_at_a_common_multiple() -> None:
    """A request reuses the longest prefix that every group has, and frees what its windows do not
    show."""
    allocator = HybridBlockAllocator(with_equal_blocks(GROUPS), 64)
    first, tokens = allocator.start(), list(range(40))
    allocator.grow(first, 39)
    allocator.advance(first, tokens[:39])
    held = {name: list(ids) for name, ids in first.blocks.items()}
    second = allocator.start(tokens)
    assert second.num_computed == 32  # 39 // 8 * 8 tokens of the full group
    assert second.blocks["full"] == held["full"][:4]
    assert second.blocks["sliding"] == [NULL_BLOCK] * 6 + second.blocks["sliding"][6:]
    assert len(second.blocks["sliding"]) == 8 and NULL_BLOCK not in second.blocks["sliding"][6:]
    assert allocator.start(tokens, key="other").num_computed == 0
    allocator.pool.reset_prefix_cache()
    assert allocator.start(tokens).num_computed == 0


def test_an_exhausted_pool_changes_nothing() -> None:
    """And so does a call with wrong tokens."""
    allocator = HybridBlockAllocator(with_equal_blocks(GROUPS), 4)
    sequence = allocator.start()
    assert allocator.num_missing_blocks(sequence, 9) == 2 + 3
    with pytest.raises(CacheExhaustedError):
        allocator.grow(sequence, 9)
    assert sequence.blocks == {"full": [], "sliding": []} and allocator.num_free_blocks == 3
    with pytest.raises(ContractError, match="5 tokens are computed"):
        allocator.advance(sequence, [1] * 5)
    allocator.grow(sequence, 8)
    with pytest.raises(ContractError, match="must be integers"):
        allocator.advance(sequence, [1.5] * 8)  # type: ignore[list-item]
    assert sequence.num_computed == 0
    allocator.advance(sequence, [1] * 8)
    with pytest.raises(ContractError, match="7 tokens are computed, but 8 were before"):
        allocator.advance(sequence, [1] * 7)
    with pytest.raises(ContractError, match="must be integers"):
        allocator.start([1] * 7 + ["x"] * 9)  # type: ignore[list-item]
    assert allocator.num_free_blocks == 0


def test_random_requests_never_share_a_written_block() -> None:
    """A block is written by one group of one request, whatever was freed and found before."""
    rng = random.Random(0)
    groups = {**with_equal_blocks(GROUPS), "chunk": KVCacheGroup(FULL.replace(
        attention_chunk_size=8))}  # fmt: skip
    allocator = HybridBlockAllocator(groups, 40)
    running: list[tuple[SequenceBlocks, list[int]]] = []
    reused = 0
    for _ in range(400):
        if running and rng.random() < 0.1:
            allocator.release(running.pop(rng.randrange(len(running)))[0])
        if len(running) < 4:
            tokens = [rng.randrange(2)] * 16 + [rng.randrange(50) for _ in range(40)]
            running.append((allocator.start(tokens), tokens))
            reused += running[-1][0].num_computed
        sequence, tokens = rng.choice(running)
        count = min(sequence.num_computed + rng.randrange(1, 9), len(tokens))
        if allocator.num_missing_blocks(sequence, count) > allocator.num_free_blocks:
            allocator.release(running.pop(0)[0])
            continue
        allocator.grow(sequence, count)
        writable: dict[int, Any] = {}
        for other, _ in running:
            for name, group in groups.items():
                for block in other.blocks[name][other.num_computed // group.block_size :]:
                    assert block != NULL_BLOCK and writable.setdefault(block, (other, name))
                    assert writable[block] == (other, name)
        allocator.advance(sequence, tokens[:count])
    for sequence, _ in running:
        allocator.release(sequence)
    assert allocator.num_free_blocks == 39 and reused > 0


def test_values_behind_the_window_change_nothing() -> None:
    """P12: with null blocks, and NaN in every free block, the output has the bits of a table with
    all blocks."""
    groups = with_equal_blocks(GROUPS)
    spec = groups["sliding"].spec
    layer = attnlib.Attention(spec, backend="torch", device="cpu")
    builder = layer.backend.make_builder(spec, "cpu")
    allocator, pool = HybridBlockAllocator(groups, 32), HybridKVCache(groups, 32, "cpu")
    whole = attnlib.PagedKVCache.allocate(spec, 32, "cpu")
    sequence, cache = allocator.start(), pool.caches["sliding"][1]
    torch.manual_seed(0)
    done = 0
    for count in (7, 1, 1, 5, 1, 9, 1):
        allocator.grow(sequence, done + count)
        q, k, v = (torch.randn(count, heads, 16) for heads in (4, 2, 2))
        outs = []
        # torch reads consecutive blocks in place, where products of some processors have other
        # bits; neither table is consecutive.
        for table, kept in (
            (sequence.blocks["sliding"], cache), (list(range(9, -1, -1)), whole)
        ):  # fmt: skip
            common = attnlib.CommonAttentionMetadata.from_lengths(
                [count], [done + count], [table], 4, "cpu"
            )
            outs.append(layer(q, k, v, kept, builder.build(0, common)))
        assert torch.equal(*outs)
        done += count
        allocator.advance(sequence, list(range(done)))
        held = {block for ids in sequence.blocks.values() for block in ids}
        free = [block for block in range(1, 32) if block not in held]
        pool._storage[free] = 0xFF  # NaN


def test_unusable_pools_are_refused() -> None:
    with pytest.raises(ContractError, match="block 0 is the null block"):
        HybridKVCache(GROUPS, 1)
    with pytest.raises(ContractError, match="at least one group"):
        HybridBlockAllocator({}, 8)
    for make in (
        with_equal_blocks,
        lambda x: HybridKVCache(x, 8),
        lambda x: HybridBlockAllocator(x, 8),
    ):
        with pytest.raises(ContractError, match="group 'full' is a AttentionSpec: give a KVCache"):
            make({"full": FULL})
    with pytest.raises(ContractError, match="has no paged cache"):
        KVCacheGroup(FULL, 0)
    with pytest.raises(ContractError, match="attn_type=encoder_only"):
        replace(GROUPS["full"], spec=FULL.replace(attn_type="encoder_only", mask_kind=None))


@pytest.mark.parametrize("count", [2.5, -1, None])
def test_tokens_are_counted(count: Any) -> None:
    allocator = HybridBlockAllocator(GROUPS, 8)
    with pytest.raises(ContractError, match=f"num_tokens[ =]{count}"):
        allocator.grow(allocator.start(), count)
    assert allocator.num_free_blocks == 7


def test_a_prefix_survives_the_eviction_of_what_its_windows_do_not_show() -> None:
    """A request of 1025 tokens, three of 160 under memory pressure, then the first again: the full
    group holds its prefix, and a windowed one needs only the last W tokens of it."""
    sliding = FULL.replace(sliding_window=64, block_size=16)
    groups = {"full": KVCacheGroup(FULL.replace(block_size=16)), "sliding": KVCacheGroup(sliding)}
    allocator = HybridBlockAllocator(groups, 141)

    def serve(tokens: list[int]) -> int:
        sequence = allocator.start(tokens)
        reused = sequence.num_computed
        while sequence.num_computed < len(tokens):
            count = min(sequence.num_computed + 128, len(tokens))
            allocator.grow(sequence, count)
            allocator.advance(sequence, tokens[:count])
        allocator.release(sequence)
        return reused

    first = list(range(1025))
    assert serve(first) == 0
    for other in range(3):
        assert serve([10_000 * (other + 1) + i for i in range(160)]) == 0
    assert serve(first) == 1024


def test_objects_of_other_types_are_refused() -> None:
    """A request of the engine in place of its blocks, an unknown group, a list of groups."""
    spec = attnlib.AttentionSpec(num_heads=2, head_size=8, dtype=torch.float32, block_size=4)
    groups = {"full": KVCacheGroup(spec)}
    allocator = HybridBlockAllocator(groups, 4)
    wrong: Any = object()
    for call in (
        lambda: allocator.grow(wrong, 1),
        lambda: allocator.num_missing_blocks(wrong, 1),
        lambda: allocator.advance(wrong, [1]),
        lambda: allocator.keep(wrong),
        lambda: allocator.fork(wrong),
        lambda: allocator.release(wrong),
    ):
        with pytest.raises(ContractError, match="sequence is a object; pass the SequenceBlocks"):
            call()
    with pytest.raises(ContractError, match="group 'ful' is no group of keys .* they are full"):
        allocator.num_used_blocks("ful")
    one = allocator.start()
    for given, message in (
        ((groups, [one], [1]), "allocator is a dict; pass the HybridBlockAllocator"),
        ((allocator, [wrong], [1]), "sequence is a object"),
        ((allocator, one, [1]), "sequences=.* must be a list"),
        ((allocator, [one], 1), "query_lens=1 is a int; it must be a list"),
        ((allocator, [one], [1.5]), "query_lens 1.5 is a float"),
    ):
        with pytest.raises(ContractError, match=message):
            group_batches(*given, device="cpu")
    make: Any
    for make in (
        with_equal_blocks,
        lambda x: HybridKVCache(x, 4),
        lambda x: HybridBlockAllocator(x, 4),
    ):
        for given in (None, [KVCacheGroup(spec)], torch.zeros(2)):
            with pytest.raises(ContractError, match="groups is a .* must be a dictionary"):
                make(given)
