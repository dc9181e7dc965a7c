"""Block allocator, prefix cache and block table against simple models.

Hypothesis chooses sequences of calls and shrinks a failing one. A model states what the methods
promise: references per block, the content that can be found, rows as lists.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
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
from attnlib.cache.table import BlockTable
from attnlib.errors import CacheExhaustedError, ContractError

BOUNDED = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

SIZE = 3  # tokens per block; two token ids and three keys make equal prefixes frequent
tokens = st.lists(st.integers(0, 1), max_size=4 * SIZE)
keys = st.sampled_from([None, "adapter", ("image", 7)])


class AllocatorMachine(RuleBasedStateMachine):
    """`BlockAllocator` and its prefix cache.

    Model: the holders of blocks (each a list of block ids with one reference per entry), and the
    content of every committed block: the key and all tokens from the start of its sequence, or
    `LOST` once a block before it has lost its content.
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

    LOST = (None, ())

    def forget(self, block: int) -> None:
        """Remove the content of a block: what follows it in a sequence is not found any more."""
        key, start = self.content.pop(block, self.LOST)
        for other, (its_key, its_tokens) in self.content.items():
            if start and its_key == key and its_tokens[: len(start)] == start:
                self.content[other] = self.LOST

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
        self.pool.free(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

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
        for index, block in enumerate(holder[:full]):
            content = (key, tuple(ids[: (index + 1) * SIZE]))
            known = content in self.content.values()
            if not known and block in self.content:
                return  # the block holds other content: what follows cannot be reached
            if not known:
                self.content[block] = content

    @rule(ids=tokens, key=keys)
    def acquire(self, ids: list[int], key: object) -> None:
        """The longest chain of contents is found, and at least one token is left to compute."""
        expected = []
        by_content = {content: block for block, content in self.content.items()}
        usable = max(len(ids) - 1, 0) // SIZE if self.caching else 0
        for index in range(usable):
            block = by_content.get((key, tuple(ids[: (index + 1) * SIZE])))
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

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        references = self.references
        for block in range(self.size):
            assert self.pool.ref_count(block) == references[block]
        assert self.pool.num_used_blocks == len(references)
        assert self.pool.num_free_blocks == self.size - self.reserved - len(references)


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


@pytest.mark.parametrize("machine", [AllocatorMachine, TableMachine], ids=lambda m: m.__name__)
def test_random_sequences_of_calls(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(BOUNDED, derandomize=True))


@pytest.mark.slow
@pytest.mark.parametrize("machine", [AllocatorMachine, TableMachine], ids=lambda m: m.__name__)
def test_long_sequences_of_calls(machine: type[RuleBasedStateMachine]) -> None:
    long = settings(BOUNDED, max_examples=75, stateful_step_count=80, derandomize=True)
    run_state_machine_as_test(machine, settings=long)
