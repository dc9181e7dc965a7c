"""Blocks: reference counts, prefix reuse, eviction, copy on write."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib.cache.allocator import BlockAllocator
from attnlib.errors import CacheExhaustedError, ContractError


def test_blocks_come_and_go() -> None:
    pool = BlockAllocator(4, 8)
    blocks = pool.allocate(3)
    assert len(set(blocks)) == 3 and pool.num_free_blocks == 1 and pool.num_used_blocks == 3
    with pytest.raises(
        CacheExhaustedError, match="2 blocks of 8 tokens asked for, 1 of 4 are free"
    ):
        pool.allocate(2)
    assert pool.num_free_blocks == 1, "a refused request takes nothing"
    pool.free(blocks)
    assert pool.num_free_blocks == 4


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockAllocator(4, 8, reserve_null_block=True)
    assert 0 not in pool.allocate(3) and pool.num_free_blocks == 0 and pool.num_used_blocks == 3


def test_freeing_twice_is_an_error_that_frees_nothing() -> None:
    pool = BlockAllocator(4, 8)
    first, second = pool.allocate(2)
    with pytest.raises(
        ContractError, match=f"block {first} is freed 2 times, but held only 1 times"
    ):
        pool.free([second, first, first])
    assert pool.ref_count(second) == 1
    pool.free([first])
    with pytest.raises(ContractError, match="cannot free block"):
        pool.free([first])


def test_a_common_prefix_is_found_and_shared() -> None:
    pool, tokens = BlockAllocator(8, 4), list(range(10))
    blocks = pool.allocate(3)
    pool.commit(tokens, blocks)
    hit = pool.acquire_prefix([*range(8), 77, 78])
    assert hit.block_ids == tuple(blocks[:2]) and hit.num_tokens == 8
    assert [pool.ref_count(b) for b in blocks] == [2, 2, 1]
    assert pool.acquire_prefix([1, *range(1, 10)]).block_ids == (), (
        "another first token is another prefix"
    )
    assert pool.acquire_prefix(tokens, key="adapter").block_ids == (), (
        "another key is another content"
    )


def test_a_full_hit_leaves_a_token_to_compute() -> None:
    """A request must compute something: query_len 0 has no next token."""
    pool = BlockAllocator(8, 4)
    blocks = pool.allocate(2)
    pool.commit(list(range(8)), blocks)
    assert pool.acquire_prefix(list(range(8))).num_tokens == 4


def test_freed_content_stays_findable_until_its_memory_is_needed() -> None:
    pool = BlockAllocator(3, 2)
    blocks = pool.allocate(2)
    pool.commit([1, 2, 3, 4], blocks)
    pool.free(blocks)
    assert pool.num_free_blocks == 3
    hit = pool.acquire_prefix([1, 2, 3, 4, 5])
    assert hit.block_ids == tuple(blocks)
    pool.free(hit.block_ids)
    pool.allocate(2)  # the empty one, then the least useful: the tail
    assert pool.acquire_prefix([1, 2, 3, 4, 5]).block_ids == (blocks[0],), (
        "the head outlives its tail"
    )


def test_an_evicted_chain_never_matches_again_by_accident() -> None:
    """A child's key names its parent's content, not its parent's memory."""
    pool = BlockAllocator(2, 2)
    first, second = pool.allocate(2)
    pool.commit([1, 1, 5, 5], [first, second])
    pool.free([first])  # evicted next
    third = pool.allocate(1)[0]
    assert third == first
    pool.commit([9, 9], [third])
    assert pool.acquire_prefix([9, 9, 5, 5, 0]).block_ids == (third,), (
        "block 2 holds [5, 5] behind [1, 1], not behind [9, 9]"
    )


def test_copy_on_write() -> None:
    pool = BlockAllocator(4, 2)
    block = pool.allocate(1)[0]
    assert pool.make_writable(block) == (block, None)
    pool.retain([block])
    fresh, pair = pool.make_writable(block)
    assert (
        pair == (block, fresh)
        and fresh != block
        and pool.ref_count(block) == 1
        and pool.ref_count(fresh) == 1
    )
    pool.commit([1, 2], [block])
    assert pool.make_writable(block) == (block, None)
    assert pool.acquire_prefix([1, 2, 3]).block_ids == (), (
        "a block that will change is no longer findable"
    )


def test_reset_forgets_content_and_keeps_holders() -> None:
    pool = BlockAllocator(4, 2)
    held, idle = pool.allocate(1), pool.allocate(1)
    pool.commit([1, 2], held)
    pool.commit([3, 4], idle)
    pool.free(idle)
    pool.reset_prefix_cache()
    assert pool.num_free_blocks == 3 and pool.ref_count(held[0]) == 1
    assert pool.acquire_prefix([1, 2, 3]).block_ids == ()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=40), st.booleans())
def test_no_block_is_lost_or_handed_out_twice(steps: list, prefix_caching: bool) -> None:
    """Whatever happens: held + free = all, and two requests share a block only where their tokens agree."""
    pool = BlockAllocator(6, 2, prefix_caching=prefix_caching)
    running: list[tuple[list[int], list[int]]] = []
    for kind, length in steps:
        if kind == 0 and running:
            pool.free(running.pop(length % len(running))[1])
            continue
        tokens = [kind] * length
        hit = pool.acquire_prefix(tokens)
        need = -(-length // 2) - len(hit.block_ids)
        try:
            blocks = [*hit.block_ids, *pool.allocate(need)]
        except CacheExhaustedError:
            pool.free(hit.block_ids)
            continue
        pool.commit(tokens, blocks)
        running.append((tokens, blocks))
    holders: dict[int, list[tuple[int, ...]]] = {}
    for tokens, blocks in running:
        for index, block in enumerate(blocks):
            holders.setdefault(block, []).append(tuple(tokens[: (index + 1) * 2]))
    assert all(len(set(contents)) == 1 for contents in holders.values())
    assert {block: len(contents) for block, contents in holders.items()} == {
        b: pool.ref_count(b) for b in range(6) if pool.ref_count(b)
    }
    assert pool.num_free_blocks == 6 - len(holders)
