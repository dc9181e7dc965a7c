"""Block allocator, prefix cache and block table against simple models.

Hypothesis chooses sequences of calls and shrinks a failing one. A model states what the methods
promise: references per block, the content that can be found, rows as lists.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from attnlib.cache.allocator import BlockAllocator
from attnlib.cache.hybrid import KVCacheGroup
from attnlib.cache.hybrid_allocator import NULL_BLOCK, HybridBlockAllocator, SequenceBlocks
from attnlib.cache.table import BlockTable
from attnlib.errors import CacheExhaustedError, ContractError
from attnlib.spec import AttentionSpec

BOUNDED = settings(
    max_examples=60,
    stateful_step_count=40,
)

SIZE = 3  # tokens per block; two token ids and three keys make equal prefixes frequent
tokens = st.lists(st.integers(0, 1), max_size=4 * SIZE)
keys = st.sampled_from([None, "adapter", ("image", 7)])


class AllocatorMachine(RuleBasedStateMachine):
    """`BlockAllocator` and its prefix cache.

    Model: the holders of blocks (each a list of block ids with one reference per entry), the
    content that every block was committed with (the key and all tokens from the start of its
    sequence), and the block that serves each content.
    """

    @initialize(blocks=st.integers(2, 8), caching=st.booleans(), null_block=st.booleans())
    def create(self, blocks: int, caching: bool, null_block: bool) -> None:
        self.pool = BlockAllocator(
            blocks, SIZE, prefix_caching=caching, reserve_null_block=null_block
        )
        self.size, self.caching, self.reserved = blocks, caching, int(null_block)
        self.holders: list[list[int]] = []
        # block -> (key, tokens up to its end); blocks without references keep it until eviction
        self.content: dict[int, tuple[object, tuple[int, ...]]] = {}
        self.serving: dict[tuple[object, tuple[int, ...]], int] = {}

    def forget(self, block: int) -> None:
        """Remove the content of a block."""
        content = self.content.pop(block, None)
        if content is not None and self.serving.get(content) == block:
            del self.serving[content]

    @property
    def references(self) -> Counter[int]:
        return Counter(block for holder in self.holders for block in holder)

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        free = self.size - self.reserved - len(self.references)
        if count > free:
            with pytest.raises(CacheExhaustedError):
                self.pool.allocate(count)
            return
        held = set(self.references)
        fresh = self.pool.allocate(count)
        assert len(set(fresh)) == count and not held & set(fresh), "only blocks without references"
        assert all(self.reserved <= block < self.size for block in fresh)
        for block in fresh:
            self.forget(block)  # it was evicted
        if fresh:
            self.holders.append(fresh)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        freed = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.free(freed, behind_window=data.draw(st.booleans()))
        for block in set(freed) - set(self.references):
            if self.serving.get(self.content.get(block, (None, ()))) != block:
                self.content.pop(block, None)  # another block serves its content

    @rule(blocks=st.lists(st.integers(-1, 8), min_size=1, max_size=4))
    def refused_free(self, blocks: list[int]) -> None:
        """More references than the blocks have: nothing is freed."""
        references = self.references
        if all(references[block] >= count for block, count in Counter(blocks).items()):
            return
        with pytest.raises(ContractError):
            self.pool.free(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), wrong=st.booleans())
    def retain(self, data: st.DataObject, wrong: bool) -> None:
        holder = list(data.draw(st.sampled_from(self.holders)))
        if wrong:
            with pytest.raises(ContractError):
                self.pool.retain([*holder, self.size])
            return
        self.pool.retain(holder)
        self.holders.append(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), ids=tokens, key=keys)
    def commit(self, data: st.DataObject, ids: list[int], key: object) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        full = len(ids) // SIZE
        if full > len(holder):
            with pytest.raises(ContractError):
                self.pool.commit(ids, holder, key)
            return
        self.pool.commit(ids, holder, key)
        if not self.caching:
            return
        # Blocks keep the content that they were committed with; new ones follow the last of them.
        known = [index for index in range(full) if holder[index] in self.content]
        first = known[-1] + 1 if known else 0
        before = self.content[holder[first - 1]] if known else (key, ())
        if before[0] != key or len(before[1]) != first * SIZE:
            return
        for index in range(first, full):
            before = (key, (*before[1], *ids[index * SIZE : (index + 1) * SIZE]))
            self.content[holder[index]] = before
            self.serving.setdefault(before, holder[index])

    @rule(ids=tokens, key=keys)
    def acquire(self, ids: list[int], key: object) -> None:
        """The longest chain of contents is found, and at least one token is left to compute."""
        expected = []
        usable = max(len(ids) - 1, 0) // SIZE if self.caching else 0
        for index in range(usable):
            block = self.serving.get((key, tuple(ids[: (index + 1) * SIZE])))
            if block is None:
                break
            expected.append(block)
        hit = self.pool.acquire_prefix(ids, key)
        assert list(hit.block_ids) == expected
        assert hit.num_tokens == len(expected) * SIZE < max(len(ids), 1)
        if expected:
            self.holders.append(list(hit.block_ids))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def make_writable(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        index = data.draw(st.integers(0, len(holder) - 1))
        block, references = holder[index], self.references
        if references[block] == 1:
            assert self.pool.make_writable(block) == (block, None)
            self.forget(block)  # it is about to change
            return
        if len(references) == self.size - self.reserved:
            with pytest.raises(CacheExhaustedError):
                self.pool.make_writable(block)
            return
        fresh, pair = self.pool.make_writable(block)
        assert pair == (block, fresh) and references[fresh] == 0
        self.forget(fresh)
        holder[index] = fresh

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()
        self.content.clear()
        self.serving.clear()

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        references = self.references
        for block in range(self.size):
            assert self.pool.ref_count(block) == references[block]
        assert self.pool.num_used_blocks == len(references)
        assert self.pool.num_free_blocks == self.size - self.reserved - len(references)


W, CHUNK = 5, 4
LAYERS = AttentionSpec(
    num_heads=2, num_kv_heads=1, head_size=8, dtype=torch.float32, block_size=2
)  # fmt: skip
GROUPS = {
    "full": KVCacheGroup(LAYERS.replace(block_size=4)),
    "sliding": KVCacheGroup(LAYERS.replace(sliding_window=W)),
    "chunked": KVCacheGroup(LAYERS.replace(attention_chunk_size=CHUNK)),
}
STEP = 4  # the common multiple of the block sizes


class HybridMachine(RuleBasedStateMachine):
    """`HybridBlockAllocator`: prefixes of groups with and without windows in one pool.

    Model: what the memory of each block holds (group, key, all tokens up to its end), which of it
    was committed, and the block that serves each content. A block loses its content when it is
    allocated again.
    """

    @initialize(
        blocks=st.integers(12, 40), names=st.sets(st.sampled_from(list(GROUPS)), min_size=1)
    )
    def create(self, blocks: int, names: set[str]) -> None:
        self.groups = {name: GROUPS[name] for name in GROUPS if name in names}
        self.size = blocks
        self.allocator = HybridBlockAllocator(self.groups, blocks)
        self.running: list[tuple[SequenceBlocks, list[int]]] = []
        self.serving: dict[tuple, int] = {}
        self.committed: dict[int, tuple] = {}

    def needed(self, name: str, end: int) -> range:
        """Blocks that the query at position `end`, or a later one, sees."""
        size = self.groups[name].block_size
        first = {"full": 0, "sliding": max(end - (W - 1), 0), "chunked": end // CHUNK * CHUNK}[name]
        return range(first // size, end // size)

    def content(self, name: str, key: object, tokens: list[int], index: int) -> tuple:
        size = self.groups[name].block_size
        return name, key, tuple(tokens[: (index + 1) * size])

    @rule(prefix=st.integers(0, 2), length=st.integers(0, 30), key=st.sampled_from([None, "a"]))
    def start(self, prefix: int, length: int, key: object) -> None:
        """The longest prefix is reused of which every group has the visible blocks."""
        if len(self.running) >= 4:
            return
        tokens = [prefix] * min(length, 17) + [prefix + 3] * max(length - 17, 0)
        step = max(group.block_size for group in self.groups.values())
        expected = 0
        for end in range(step, max(length, 1), step):
            if all(
                self.content(name, key, tokens, index) in self.serving
                for name in self.groups
                for index in self.needed(name, end)
            ) and self.is_reachable(key, tokens, end):
                expected = end
        sequence = self.allocator.start(tokens, key)
        assert sequence.num_computed == expected
        for name in self.groups:
            row, needed = sequence.blocks[name], self.needed(name, expected)
            assert len(row) == expected // self.groups[name].block_size
            for index, block in enumerate(row):
                if index in needed:
                    assert self.committed[block] == self.content(name, key, tokens, index)
                else:
                    assert block == NULL_BLOCK
        self.running.append((sequence, tokens))

    def is_reachable(self, key: object, tokens: list[int], end: int) -> bool:
        """A chunk that begins at `end` shows no block: the allocator passes contents only as far as
        something behind them is cached."""
        return all(
            any(
                content[:2] == (name, key)
                and len(content[2]) >= end // size * size
                and list(content[2][: end // size * size]) == tokens[: end // size * size]
                for content in self.serving
            )
            for name, size in ((name, group.block_size) for name, group in self.groups.items())
        )

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.integers(1, 9))
    def compute(self, data: st.DataObject, more: int) -> None:
        sequence, tokens = data.draw(st.sampled_from(self.running))
        count = min(sequence.num_computed + more, len(tokens))
        if self.allocator.num_missing_blocks(sequence, count) > self.allocator.num_free_blocks:
            with pytest.raises(CacheExhaustedError):
                self.allocator.grow(sequence, count)
            return
        before = {name: len(ids) for name, ids in sequence.blocks.items()}
        self.allocator.grow(sequence, count)
        rows = {name: list(ids) for name, ids in sequence.blocks.items()}
        for name, ids in rows.items():
            for block in ids[before[name] :]:
                content = self.committed.pop(block, None)  # it was evicted
                if content is not None and self.serving.get(content) == block:
                    del self.serving[content]
        first = {name: sequence.num_computed // g.block_size for name, g in self.groups.items()}
        self.allocator.advance(sequence, tokens[:count])
        for name, group in self.groups.items():
            for index in range(first[name], count // group.block_size):
                content = self.content(name, sequence.key, tokens, index)
                self.committed[rows[name][index]] = content
                self.serving.setdefault(content, rows[name][index])
        self.drop_duplicates()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence, _ = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.allocator.release(sequence)
        self.drop_duplicates()

    def drop_duplicates(self) -> None:
        """A block without references keeps its content only if it serves it."""
        held = self.held()
        for block, content in list(self.committed.items()):
            if not held[block] and self.serving.get(content) != block:
                del self.committed[block]

    def held(self) -> Counter[int]:
        return Counter(
            block
            for sequence, _ in self.running
            for ids in sequence.blocks.values()
            for block in ids
            if block != NULL_BLOCK
        )

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "allocator"):
            return
        held = self.held()
        for block in range(1, self.size):
            assert self.allocator.pool.ref_count(block) == held[block]
        assert self.allocator.num_free_blocks == self.size - 1 - len(held)
        for name in self.groups:
            assert self.allocator.num_used_blocks(name) == sum(
                block != NULL_BLOCK for one, _ in self.running for block in one.blocks[name]
            )


class TableMachine(RuleBasedStateMachine):
    """`BlockTable` against lists of lists."""

    ROWS, COLUMNS = 4, 5
    rows = st.integers(-1, ROWS)
    blocks = st.lists(st.integers(-1, 2**31), max_size=COLUMNS + 1)

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable(self.ROWS, self.COLUMNS)
        self.address = self.table.get_device_tensor().data_ptr()
        self.expected: list[list[int]] = [[] for _ in range(self.ROWS)]

    def valid(self, row: int, blocks: list[int] | None = None, start: int = 0) -> bool:
        fits = blocks is None or start + len(blocks) <= self.COLUMNS
        return 0 <= row < self.ROWS and fits and all(0 <= b < 2**31 for b in blocks or ())

    @rule(row=rows, blocks=blocks)
    def add_row(self, row: int, blocks: list[int]) -> None:
        if not self.valid(row, blocks):
            with pytest.raises(ContractError):
                self.table.add_row(blocks, row)
            return
        self.table.add_row(blocks, row)
        self.expected[row] = list(blocks)

    @rule(row=rows, blocks=blocks)
    def append_row(self, row: int, blocks: list[int]) -> None:
        start = len(self.expected[row]) if 0 <= row < self.ROWS else 0
        if not self.valid(row, blocks, start):
            with pytest.raises(ContractError):
                self.table.append_row(blocks, row)
            return
        self.table.append_row(blocks, row)
        self.expected[row] += blocks

    @rule(row=rows)
    def clear_row(self, row: int) -> None:
        if not self.valid(row):
            with pytest.raises(ContractError):
                self.table.clear_row(row)
            return
        self.table.clear_row(row)
        self.expected[row] = []

    @rule(source=rows, row=rows)
    def move_row(self, source: int, row: int) -> None:
        target = row
        if not (self.valid(source) and self.valid(target)):
            with pytest.raises(ContractError):
                self.table.move_row(source, target)
            return
        self.table.move_row(source, target)
        self.expected[target] = list(self.expected[source])

    @rule(first=rows, second=rows)
    def swap_row(self, first: int, second: int) -> None:
        if not (self.valid(first) and self.valid(second)):
            with pytest.raises(ContractError):
                self.table.swap_row(first, second)
            return
        self.table.swap_row(first, second)
        pair = self.expected[second], self.expected[first]
        self.expected[first], self.expected[second] = pair

    @invariant()
    def rows_agree(self) -> None:
        dense = [[*row, *[-1] * (self.COLUMNS - len(row))] for row in self.expected]
        assert self.table.commit(self.ROWS).tolist() == dense, "entries past a row are -1"
        assert [self.table.row(row) for row in range(self.ROWS)] == self.expected
        assert self.table.num_blocks_per_row.tolist() == [len(row) for row in self.expected]
        assert self.table.get_device_tensor().data_ptr() == self.address, "graphs keep the address"


MACHINES = [AllocatorMachine, HybridMachine, TableMachine]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.__name__)
def test_random_sequences_of_calls(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(BOUNDED, derandomize=True))


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.__name__)
def test_long_sequences_of_calls(machine: type[RuleBasedStateMachine]) -> None:
    long = settings(BOUNDED, max_examples=75, stateful_step_count=80, derandomize=True)
    run_state_machine_as_test(machine, settings=long)
