"""References to the blocks of a pool, and the order in which they are allocated again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from attnlib.cache.prefix_tree import PrefixNode, PrefixTree
from attnlib.errors import CacheExhaustedError, ContractError
from attnlib.ops.addresses import as_count, as_id, as_ids

__all__ = ["Block", "BlockPool"]


@dataclass
class Block:
    """State of one block.

    Attributes:
        references: number of holders.
        content: the content that it was committed with; None before.
        was_found: whether a lookup has returned it since.
    """

    references: int = 0
    content: PrefixNode | None = None
    was_found: bool = False


class BlockPool:
    """The blocks of a pool. Every method either succeeds or changes nothing.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens in one block, for messages.
        reserved: leading blocks that are never allocated.
        tree: the contents of blocks; one that is evicted leaves it.
    """

    def __init__(self, num_blocks: int, block_size: int, reserved: int, tree: PrefixTree) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._reserved = reserved
        self._tree = tree
        self.blocks = [Block() for _ in range(num_blocks)]
        self._empty: list[int] = list(range(num_blocks - 1, reserved - 1, -1))
        # Blocks without references that are still findable, in the order of eviction: those behind
        # a window, which few lookups need, then the others; least recently used first.
        self._seldom: OrderedDict[int, None] = OrderedDict()
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can return now."""
        return len(self._empty) + len(self._seldom) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self._reserved - self.num_free

    def block(self, block_id: int) -> Block:
        """A block by its id.

        Raises:
            ContractError: no integer, or outside the pool.
        """
        number = as_id("block", block_id)
        if not 0 <= number < self.num_blocks:
            raise ContractError(
                f"block {number} is outside the pool of {self.num_blocks} blocks "
                f"(0 to {self.num_blocks - 1})",
                rule="P3",
            )
        return self.blocks[number]

    def held(self, block_id: int, verb: str) -> Block:
        """A block that has references.

        Raises:
            ContractError: it has none; the message says what cannot be done.
        """
        block = self.block(block_id)
        if block.references == 0:
            raise ContractError(
                f"cannot {verb} block {block_id}: it has no references (freed twice, or never "
                f"allocated)"
            )
        return block

    def once(self, block_ids: Iterable[int]) -> list[int]:
        """The ids of blocks that get contents, as integers.

        Raises:
            ContractError: a block is given twice, so that it would have two contents.
        """
        ids = [as_id("block", block_id) for block_id in block_ids]
        if len(set(ids)) < len(ids):
            block_id, count = Counter(ids).most_common(1)[0]
            raise ContractError(
                f"block {block_id} is given {count} times in block_ids, and a block holds the "
                "tokens of one place: pass each block of the sequence once"
            )
        return ids

    def allocate(self, count: int) -> list[int]:
        """See `BlockAllocator.allocate`."""
        count = as_count("count", count)
        if count > self.num_free:
            raise CacheExhaustedError(
                f"{count} blocks of {self.block_size} tokens requested, {self.num_free} of "
                f"{self.num_blocks} are free: free finished requests, preempt one, or allocate a "
                f"larger cache"
            )
        allocated = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for block_id in allocated:
            self.blocks[block_id].references = 1
        return allocated

    def free(self, block_ids: Iterable[int], behind_window: bool) -> None:
        """See `BlockAllocator.free`."""
        ids = [as_id("block", block_id) for block_id in as_ids("block_ids", block_ids)]
        for block_id, count in Counter(ids).items():
            references = self.held(block_id, "free").references
            if references < count:
                raise ContractError(
                    f"block {block_id} is freed {count} times, but has {references} references"
                )
        # The tail of a sequence is evicted before its head: a head without its tail is still a
        # useful prefix, a tail without its head cannot be found.
        for block_id in reversed(ids):
            block = self.blocks[block_id]
            block.references -= 1
            if block.references == 0:
                if block.content is None or block.content.block != block_id:
                    block.content = None
                    self._empty.append(block_id)
                elif behind_window and not block.was_found:
                    self._seldom[block_id] = None
                else:
                    self._idle[block_id] = None

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block of contents that a lookup has found.

        Raises:
            ContractError: a block that has neither references nor content; none is added.
        """
        ids = [as_id("block", block_id) for block_id in as_ids("block_ids", block_ids)]
        for block_id in ids:
            block = self.block(block_id)
            if not block.references and block_id not in self._idle and block_id not in self._seldom:
                raise ContractError(
                    f"cannot acquire block {block_id}: it has no references and no content"
                )
        for block_id in ids:
            block = self.blocks[block_id]
            self._idle.pop(block_id, None)
            self._seldom.pop(block_id, None)
            block.references += 1
            block.was_found = True

    def commit(
        self, parent: PrefixNode, chunk: tuple[int, ...], block_id: int
    ) -> PrefixNode | None:
        """Give a block its content, the tokens that follow `parent`.

        Returns:
            The content; None if no lookup can reach it.
        """
        node = self._tree.add(parent, chunk, block_id)
        block = self.blocks[block_id]
        block.content, block.was_found = node, False
        return node

    def forget(self, block_id: int) -> None:
        """Drop the content of a block."""
        block = self.blocks[block_id]
        if block.content is not None and block.content.block == block_id:
            self._tree.drop(block.content)
        block.content = None

    def forget_all(self) -> None:
        """Drop the contents of all blocks."""
        self._tree.clear()
        for block in self.blocks:
            block.content = None
        for idle in (self._seldom, self._idle):
            self._empty.extend(idle)
            idle.clear()

    def _evict(self) -> int:
        block_id, _ = (self._seldom or self._idle).popitem(last=False)
        self.forget(block_id)
        return block_id
