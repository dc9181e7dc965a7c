"""Block allocation: reference counts, prefix caching, eviction, copy on write."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib.cache.allocator import BlockAllocator
from attnlib.errors import CacheExhaustedError, ContractError
from tests.call_counts import counted_calls


def test_allocate_and_free() -> None:
    pool = BlockAllocator(4, 8)
    blocks = pool.allocate(3)
    assert len(set(blocks)) == 3 and pool.num_free_blocks == 1 and pool.num_used_blocks == 3
    with pytest.raises(
        CacheExhaustedError, match="2 blocks of 8 tokens requested, 1 of 4 are free"
    ):
        pool.allocate(2)
    assert pool.num_free_blocks == 1, "a refused request allocates nothing"
    pool.free(blocks)
    assert pool.num_free_blocks == 4


def test_the_null_block_is_never_allocated() -> None:
    pool = BlockAllocator(4, 8, reserve_null_block=True)
    assert 0 not in pool.allocate(3) and pool.num_free_blocks == 0 and pool.num_used_blocks == 3


def test_freeing_twice_is_an_error_that_frees_nothing() -> None:
    pool = BlockAllocator(4, 8)
    first, second = pool.allocate(2)
    with pytest.raises(
        ContractError, match=f"block {first} is freed 2 times, but has 1 references"
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
    """A request needs at least one query to produce its next token."""
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
    """The key of a block contains the uid of its parent's content, not the parent's block id."""
    pool = BlockAllocator(2, 2)
    first, second = pool.allocate(2)
    pool.commit([1, 1, 5, 5], [first, second])
    pool.free([first])  # evicted next
    third = pool.allocate(1)[0]
    assert third == first
    pool.commit([9, 9], [third])
    assert pool.acquire_prefix([9, 9, 5, 5, 0]).block_ids == (third,), (
        "block 2 holds [5, 5] after [1, 1], not after [9, 9]"
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


def test_reset_forgets_content_and_keeps_references() -> None:
    pool = BlockAllocator(4, 2)
    held, idle = pool.allocate(1), pool.allocate(1)
    pool.commit([1, 2], held)
    pool.commit([3, 4], idle)
    pool.free(idle)
    pool.reset_prefix_cache()
    assert pool.num_free_blocks == 3 and pool.ref_count(held[0]) == 1
    assert pool.acquire_prefix([1, 2, 3]).block_ids == ()


class _CountedId(int):
    """A block id; `uses` counts comparisons and look-ups of all of them."""

    uses = 0

    def __eq__(self, other: object) -> bool:
        _CountedId.uses += 1
        return int(self) == other

    def __hash__(self) -> int:
        _CountedId.uses += 1
        return hash(int(self))


def _work_of_free(num_blocks: int, repeats: int) -> int:
    pool = BlockAllocator(num_blocks, 16)
    pool.free(list(map(_CountedId, pool.allocate(num_blocks))))  # which it allocates again
    blocks = pool.allocate(num_blocks)
    for _ in range(repeats - 1):
        pool.retain(blocks)
    before = _CountedId.uses
    with counted_calls() as calls:
        pool.free(blocks * repeats)
    assert pool.num_free_blocks == num_blocks
    return _CountedId.uses - before + calls.total()


@pytest.mark.parametrize("repeats", [1, 2])
def test_free_takes_linear_time(repeats: int) -> None:
    """In calls and comparisons of block ids, also with two references to each block."""
    few, many = (_work_of_free(num_blocks, repeats) for num_blocks in (300, 600))
    assert few > 300 * repeats and many < 2.1 * few


@pytest.mark.parametrize("invalid", [3, 99])
def test_a_refused_retain_adds_no_reference(invalid: int) -> None:
    """Block 3 has no references, block 99 does not exist."""
    pool = BlockAllocator(4, 2)
    blocks = pool.allocate(2)
    with pytest.raises(ContractError, match=f"block {invalid}"):
        pool.retain([*blocks, invalid])
    assert [pool.ref_count(block) for block in blocks] == [1, 1]


def test_a_refused_commit_makes_nothing_findable() -> None:
    pool = BlockAllocator(4, 2)
    held, freed = pool.allocate(2)
    pool.free([freed])
    with pytest.raises(ContractError, match=f"cannot commit block {freed}"):
        pool.commit([1, 2, 3, 4], [held, freed])
    assert pool.acquire_prefix([1, 2, 9]).block_ids == ()
    with pytest.raises(ContractError, match="token_ids must be integers"):
        pool.commit([1, 2, 3.5, 4], [held, pool.allocate(1)[0]])
    assert pool.acquire_prefix([1, 2, 9]).block_ids == ()
    with pytest.raises(ContractError, match=r"key=\[\] cannot be looked up \(.*unhashable"):
        pool.commit([1, 2], [held], key=[])
    with pytest.raises(ContractError, match=f"block {held} is given 2 times in block_ids"):
        pool.commit([1, 2, 3, 4], [held, held])
    assert pool.acquire_prefix([1, 2, 3, 4, 5]).block_ids == ()
    with pytest.raises(ContractError, match="token_ids=None is not a sequence"):
        pool.commit(None, [held])
    assert pool.make_writable(held) == (held, None)


@pytest.mark.parametrize(
    "convert",
    [torch.tensor, lambda ids: list(torch.tensor(ids)), lambda ids: torch.tensor(ids).numpy()],
    ids=["tensor", "list of 0-d tensors", "numpy array"],
)
def test_tokens_of_any_integer_type_hit_the_prefix_cache(convert) -> None:
    """Tokens are compared by value: committed from one type and found with another."""
    pool = BlockAllocator(8, 4)
    tokens = list(range(12))
    first, second = pool.allocate(2), pool.allocate(2)
    pool.commit(convert(tokens[:8]), first)
    assert pool.acquire_prefix(convert(tokens)).block_ids == tuple(first)
    assert pool.acquire_prefix(tokens).block_ids == tuple(first)
    pool.commit([50 + token for token in tokens[:8]], second)
    assert pool.acquire_prefix(convert([50 + token for token in tokens])).num_tokens == 8


@pytest.mark.parametrize(
    "convert",
    [torch.tensor, lambda ids: list(torch.tensor(ids)), lambda ids: torch.tensor(ids).numpy()],
    ids=["tensor", "list of 0-d tensors", "numpy array"],
)
def test_block_ids_of_any_integer_type_are_the_same_blocks(convert) -> None:
    """Rows of a block table can be given back: two tensors of one id are one block, a block that
    was freed by a tensor is found again, and `allocate` returns integers."""
    pool = BlockAllocator(4, 2)
    tokens, blocks = list(range(8)), pool.allocate(4)
    with pytest.raises(ContractError, match="block 0 is freed 2 times, but has 1 references"):
        pool.free(convert([blocks[0]] * 2))
    pool.retain(convert(blocks))
    pool.commit(tokens, convert(blocks))
    pool.free(convert(blocks))
    pool.free(convert(blocks[::-1]), behind_window=True)
    assert pool.acquire_prefix(tokens).block_ids == tuple(blocks[:3])
    pool.free(blocks[:3])
    pool.acquire(convert(blocks[:2]))
    assert [pool.ref_count(block) for block in convert(blocks)] == [1, 1, 0, 0]
    pool.retain(blocks[:1])
    fresh, pair = pool.make_writable(convert(blocks[:1])[0])
    assert type(fresh) is int and [type(block) for block in pair] == [int, int]
    assert pool.make_writable(convert(blocks[:1])[0]) == (blocks[0], None)
    assert pool.commit_block(pool.start_of(), [7, 7], convert(blocks[:1])[0]).block == blocks[0]
    assert [type(block) for block in pool.allocate(1)] == [int]
    with pytest.raises(ContractError, match="block_ids=None is a NoneType"):
        pool.commit(tokens, None)
    with pytest.raises(ContractError, match="block_ids=3 is a int"):
        pool.acquire(3)


@pytest.mark.parametrize("kind", [set, dict.fromkeys], ids=["set", "dict"])
def test_blocks_of_a_sequence_have_an_order(kind) -> None:
    """A set gave blocks the contents of others, which later prefixes read."""
    pool = BlockAllocator(16, 2)
    blocks = pool.allocate(9)[::-1]
    with pytest.raises(ContractError, match=f"block_ids are a {kind([]).__class__.__name__}.*list"):
        pool.commit(list(range(18)), kind(blocks))
    assert not pool.acquire_prefix(list(range(18))).block_ids


def test_block_ids_without_values_are_refused() -> None:
    """The device `meta`, whose tensors raise another error than those of other types."""
    pool, ids = BlockAllocator(4, 2), torch.zeros(1, dtype=torch.int64, device="meta")
    pool.allocate(1)
    for take in (pool.free, pool.retain, lambda given: pool.commit([1, 2], given)):
        with pytest.raises(ContractError, match="meta.* is a Tensor; it must be an integer"):
            take(ids)


@pytest.mark.parametrize(
    "tokens", [torch.zeros(9), torch.zeros(3, 3, dtype=torch.int64), [0.0] * 9]
)
def test_tokens_that_are_not_integers_are_refused(tokens) -> None:
    pool = BlockAllocator(8, 2)
    with pytest.raises(ContractError, match="token_ids"):
        pool.acquire_prefix(tokens)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=40), st.booleans())
def test_no_block_is_lost_or_allocated_twice(steps: list, prefix_caching: bool) -> None:
    """Used plus free blocks are all blocks; requests share a block only if their tokens agree."""
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


class _Counted(list):
    """Tokens that count how many of them are read."""

    reads = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        self.reads += len(found) if isinstance(place, slice) else 1
        return found


@pytest.mark.parametrize("shares", [False, True])
def test_a_commit_reads_new_blocks_only(shares: bool) -> None:
    """Engines commit in every step: the time must not grow with the sequence. Also if another
    request has committed the same content first."""
    pool, tokens = BlockAllocator(600, 4), _Counted(range(1024))
    if shares:
        pool.commit(list(tokens), pool.allocate(256))
    blocks = pool.allocate(256)
    for count in range(4, 1025, 4):
        tokens.reads = 0
        pool.commit(_counted_prefix(tokens, count), blocks)
        assert tokens.reads <= 4
    hit = pool.acquire_prefix([*tokens, 7])
    assert hit.num_tokens == 1024 and (hit.block_ids == tuple(blocks)) == (not shares)


def _counted_prefix(tokens: _Counted, count: int) -> _Counted:
    """The first tokens, whose reads count for `tokens`."""

    class View(_Counted):
        def __getitem__(self, place):
            found = list.__getitem__(self, place)
            tokens.reads += len(found) if isinstance(place, slice) else 1
            return found

    return View(range(count))


def test_content_behind_an_evicted_head_is_found_again() -> None:
    """A tail keeps its content: once the head is computed again, both are found."""
    pool = BlockAllocator(4, 2)
    head, tail = pool.allocate(2)
    pool.commit([1, 2, 3, 4], [head, tail])
    pool.free([head])
    (other, another, third) = pool.allocate(3)  # evicts the head
    assert head in (other, another, third)
    assert pool.acquire_prefix([1, 2, 3, 4, 5]).num_tokens == 0
    assert [n.block for n in pool.find_contents([1, 2, 3, 4, 5])] == [None, tail]
    pool.commit([1, 2], [other])
    assert pool.acquire_prefix([1, 2, 3, 4, 5]).block_ids == (other, tail)


def test_blocks_behind_a_window_are_evicted_first_unless_they_were_found() -> None:
    pool = BlockAllocator(4, 2)
    blocks = pool.allocate(4)
    for token, block in enumerate(blocks):
        pool.commit([token, token], [block])
    pool.free([blocks[0]])
    pool.free([blocks[1]], behind_window=True)
    assert pool.acquire_prefix([2, 2, 9]).block_ids == (blocks[2],)
    pool.free([blocks[2], blocks[2]], behind_window=True)
    pool.free([blocks[3]], behind_window=True)
    assert pool.allocate(4) == [blocks[1], blocks[3], blocks[0], blocks[2]]


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.allocate(1.5),
        lambda pool: pool.free([1.0]),
        lambda pool: pool.ref_count("0"),
        lambda pool: pool.retain([True]),
        lambda pool: pool.commit([1, 2], [0.5]),
        lambda pool: pool.make_writable(None),
        lambda pool: pool.acquire([3]),
        lambda pool: pool.find_contents([1, 2, 3], block_size=0),
        lambda pool: BlockAllocator(4.5, 2),
        lambda pool: BlockAllocator(4, "2"),
    ],
)
def test_numbers_that_are_not_integers_change_nothing(call) -> None:
    pool = BlockAllocator(4, 2)
    pool.allocate(2)
    with pytest.raises(ContractError):
        call(pool)
    assert pool.num_free_blocks == 2 and pool.allocate(2) == [2, 3]
