"""Block allocation: reference counts, prefix caching and eviction.

A full block is identified by its content: its tokens and all tokens before it. Requests with a
common prefix find the same blocks and share them by reference count, as in RadixAttention and
vLLM's automatic prefix caching. Contents are compared as tokens, not as hashes, so two different
ones never collide. A block without references keeps its content until its memory is needed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from attnlib.cache.prefix_tree import PrefixNode, PrefixTree, TokenIds, as_tokens, chunks
from attnlib.errors import CacheExhaustedError, ContractError
from attnlib.ops.addresses import as_count, as_id

__all__ = ["BlockAllocator", "PrefixHit", "TokenIds", "as_tokens"]


@dataclass(frozen=True)
class PrefixHit:
    """The result of `BlockAllocator.acquire_prefix`.

    Attributes:
        block_ids: blocks that hold the first `num_tokens` tokens; the caller owns one reference
            to each.
        num_tokens: number of cached tokens, a multiple of the block size.
    """

    block_ids: tuple[int, ...]
    num_tokens: int


@dataclass
class _Block:
    """State of one block.

    Attributes:
        references: number of holders.
        content: the content that it was committed with; None before.
        was_found: whether a lookup has returned it since.
    """

    references: int = 0
    content: PrefixNode | None = None
    was_found: bool = False


class BlockAllocator:
    """Allocates the blocks of one pool. Every method either succeeds or changes nothing.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens in one block.
        prefix_caching: keep full blocks findable by content, also after the last reference to
            them is dropped.
        reserve_null_block: never allocate block 0, so that it can serve as a placeholder in block
            tables.

    Raises:
        ContractError: `num_blocks` or `block_size` is too small.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        reserve_null_block: bool = False,
    ) -> None:
        num_blocks, block_size = (
            as_count("num_blocks", num_blocks),
            as_count("block_size", block_size),
        )
        if num_blocks < 1 + reserve_null_block or block_size < 1:
            raise ContractError(
                f"a pool of {num_blocks} blocks of {block_size} tokens cannot hold anything"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._blocks = [_Block() for _ in range(num_blocks)]
        first = 1 if reserve_null_block else 0
        self._empty: list[int] = list(range(num_blocks - 1, first - 1, -1))
        # Blocks without references that are still findable, in the order of eviction: those behind
        # a window, which few lookups need, then the others; least recently used first.
        self._seldom: OrderedDict[int, None] = OrderedDict()
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._tree = PrefixTree()
        self._reserved = first

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can return now, including unreferenced blocks with content."""
        return len(self._empty) + len(self._seldom) + len(self._idle)

    @property
    def num_used_blocks(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self._reserved - self.num_free_blocks

    def ref_count(self, block_id: int) -> int:
        """Number of references to a block.

        Raises:
            ContractError: the id is outside the pool.
        """
        return self._block(block_id).references

    def allocate(self, count: int = 1) -> list[int]:
        """Allocate `count` blocks with one reference each. Their content is undefined.

        Raises:
            CacheExhaustedError: fewer blocks are free; none is allocated.
            ContractError: `count` is negative.
        """
        count = as_count("count", count)
        if count > self.num_free_blocks:
            raise CacheExhaustedError(
                f"{count} blocks of {self.block_size} tokens requested, {self.num_free_blocks} of "
                f"{self.num_blocks} are free: free finished requests, preempt one, or allocate a "
                f"larger cache"
            )
        allocated = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for block_id in allocated:
            self._blocks[block_id].references = 1
        return allocated

    def retain(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block, for forks (beams, parallel samples) that share them.

        Raises:
            ContractError: a block without references or outside the pool; no reference is added.
        """
        for block in [self._held(block_id, "retain") for block_id in block_ids]:
            block.references += 1

    def free(self, block_ids: Iterable[int], *, behind_window: bool = False) -> None:
        """Drop one reference for each id; time is linear in the number of ids.

        A committed block without references stays findable until its memory is needed.

        Args:
            block_ids: the blocks.
            behind_window: only a request that continues right behind these blocks needs them, as
                those behind the window of a running request. They are evicted before others,
                unless a lookup has found them before.

        Raises:
            ContractError: a block is freed more often than it is referenced; nothing is freed.
        """
        ids = list(block_ids)
        for block_id, count in Counter(ids).items():
            references = self._held(block_id, "free").references
            if references < count:
                raise ContractError(
                    f"block {block_id} is freed {count} times, but has {references} references"
                )
        # The tail of a sequence is evicted before its head: a head without its tail is still a
        # useful prefix, a tail without its head cannot be found.
        for block_id in reversed(ids):
            block = self._blocks[block_id]
            block.references -= 1
            if block.references == 0:
                if block.content is None or block.content.block != block_id:
                    block.content = None
                    self._empty.append(block_id)
                elif behind_window and not block.was_found:
                    self._seldom[block_id] = None
                else:
                    self._idle[block_id] = None

    def acquire_prefix(
        self, token_ids: TokenIds, key: Hashable = None, *, block_size: int | None = None
    ) -> PrefixHit:
        """Find and retain the longest chain of full blocks that holds a prefix of `token_ids`.

        At least one token stays uncached, because a request needs a query to produce its next
        token: if all blocks match, the last one is not returned.

        Args:
            token_ids: tokens of the request.
            key: everything else that the keys and values depend on (a LoRA adapter, the hash of an
                image, a tenant). Contents with different keys never match.
            block_size: tokens of these blocks, in a pool for several sizes, whose keys must then
                differ; None for that of the allocator.

        Raises:
            ContractError: `token_ids` are not integers.
        """
        size = block_size or self.block_size
        found: list[int] = []
        for node in self.find_contents(token_ids, key, block_size=size):
            if node.block is None:
                break
            found.append(node.block)
        self.acquire(found)
        return PrefixHit(tuple(found), len(found) * size)

    def find_contents(
        self, token_ids: TokenIds, key: Hashable = None, *, block_size: int | None = None
    ) -> list[PrefixNode]:
        """The contents of the full blocks of a prefix of `token_ids`, without retaining any.

        Unlike `acquire_prefix`, it passes contents whose blocks were evicted, as long as contents
        behind them are cached: layers with a window need the last blocks only.

        Args:
            token_ids, key, block_size: as in `acquire_prefix`; the last token is left out likewise.

        Raises:
            ContractError: `token_ids` are not integers.
        """
        size = self.block_size if block_size is None else as_count("block_size", block_size, 1)
        usable = max(len(token_ids) - 1, 0) // size if self.prefix_caching else 0
        return self._tree.find(chunks(token_ids, size, 0, usable), key)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block of contents that a lookup has found.

        Raises:
            ContractError: a block that has neither references nor content; none is added.
        """
        ids = list(block_ids)
        for block_id in ids:
            block = self._block(block_id)
            if not block.references and block_id not in self._idle and block_id not in self._seldom:
                raise ContractError(
                    f"cannot acquire block {block_id}: it has no references and no content"
                )
        for block_id in ids:
            block = self._blocks[block_id]
            self._idle.pop(block_id, None)
            self._seldom.pop(block_id, None)
            block.references += 1
            block.was_found = True

    def commit(self, token_ids: TokenIds, block_ids: Sequence[int], key: Hashable = None) -> None:
        """Make the full blocks of a sequence findable. Call it after the cache was written.

        The time is that of the blocks that are new since the last call: a block keeps the content
        that it was committed with until `make_writable` or its last reference is dropped, and its
        tokens are not read again.

        Args:
            token_ids: all tokens whose keys and values are in the cache, from the start of the
                sequence.
            block_ids: blocks of the sequence, in order.
            key: as in `acquire_prefix`. Blocks behind one with another key are not committed.

        Raises:
            ContractError: a block without references, fewer blocks than the tokens fill, or
                `token_ids` that are not integers; nothing is committed.
        """
        full = len(token_ids) // self.block_size
        if full > len(block_ids):
            raise ContractError(
                f"{len(token_ids)} tokens fill {full} blocks of {self.block_size}, but only "
                f"{len(block_ids)} blocks are given"
            )
        hash(key)  # an unhashable key must fail here, before the first block is changed
        node, first = None, full
        while first and node is None:
            node = self._held(block_ids[first - 1], "commit").content
            first -= node is None
            if not self.prefix_caching:
                return
        if node is None:
            node = self._tree.root(key)
        elif node.root.key != key or node.depth != first:
            return  # no lookup reaches the blocks that follow
        for block_id, chunk in zip(
            block_ids[first:full],
            list(chunks(token_ids, self.block_size, first, full)),
            strict=True,
        ):
            node = self._commit(node, chunk, block_id)
            if node is None:
                return

    def commit_block(
        self, parent: PrefixNode, token_ids: TokenIds, block_id: int
    ) -> PrefixNode | None:
        """Make one full block findable, behind others that may have been freed since.

        Args:
            parent: what the call for the block before returned, or a content of `find_contents`,
                or `start_of`.
            token_ids: the tokens of the block, all of them.
            block_id: the block.

        Returns:
            The content, the parent of the next one; None if no lookup can reach what follows.

        Raises:
            ContractError: a block without references, or `token_ids` that are not integers.
        """
        block = self._held(block_id, "commit")
        (chunk,) = chunks(token_ids, len(token_ids), 0, 1)
        return None if block.content is not None else self._commit(parent, chunk, block_id)

    def start_of(self, key: Hashable = None) -> PrefixNode:
        """The parent of the first block of sequences with this key."""
        return self._tree.root(key)

    def _commit(
        self, parent: PrefixNode, chunk: tuple[int, ...], block_id: int
    ) -> PrefixNode | None:
        node = self._tree.add(parent, chunk, block_id)
        block = self._blocks[block_id]
        block.content, block.was_found = node, False
        return node

    def make_writable(self, block_id: int) -> tuple[int, tuple[int, int] | None]:
        """Copy on write: replace a block that is shared by one that only the caller holds.

        Returns:
            The block to write to, and the (source, destination) pair to pass to
            `PagedKVCache.copy_blocks`, or None when nothing has to be copied.

        Raises:
            ContractError: a block without references.
            CacheExhaustedError: the block is shared and no block is free.
        """
        block = self._held(block_id, "write")
        if block.references == 1:
            self._forget(block_id)
            return block_id, None
        fresh = self.allocate(1)[0]
        block.references -= 1
        return fresh, (block_id, fresh)

    def reset_prefix_cache(self) -> None:
        """Forget all content, for example after the weights changed. References are kept."""
        self._tree.clear()
        for block in self._blocks:
            block.content = None
        for idle in (self._seldom, self._idle):
            self._empty.extend(idle)
            idle.clear()

    def _evict(self) -> int:
        block_id, _ = (self._seldom or self._idle).popitem(last=False)
        self._forget(block_id)
        return block_id

    def _forget(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.content is not None and block.content.block == block_id:
            self._tree.drop(block.content)
        block.content = None

    def _block(self, block_id: int) -> _Block:
        number = as_id("block", block_id)
        if not 0 <= number < self.num_blocks:
            raise ContractError(
                f"block {number} is outside the pool of {self.num_blocks} blocks "
                f"(0 to {self.num_blocks - 1})",
                rule="P3",
            )
        return self._blocks[number]

    def _held(self, block_id: int, verb: str) -> _Block:
        block = self._block(block_id)
        if block.references == 0:
            raise ContractError(
                f"cannot {verb} block {block_id}: it has no references (freed twice, or never "
                f"allocated)"
            )
        return block
