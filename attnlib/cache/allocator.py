"""Block allocation: reference counts, prefix caching and eviction.

A full block is identified by its content (`prefix_tree`). Requests with a common prefix share its
blocks. A block without references keeps its content until its memory is needed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from attnlib.cache.block_pool import BlockPool
from attnlib.cache.prefix_tree import (
    Label,
    PrefixHit,
    PrefixNode,
    PrefixTree,
    TokenIds,
    as_tokens,
    chunks,
    token_count,
)
from attnlib.errors import ContractError
from attnlib.ops.addresses import as_count, as_id, as_ids

__all__ = ["BlockAllocator", "PrefixHit", "TokenIds", "as_tokens"]


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
        num_blocks = as_count("num_blocks", num_blocks, 1 + reserve_null_block)
        block_size = as_count("block_size", block_size, 1)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._tree = PrefixTree()
        self._pool = BlockPool(num_blocks, block_size, int(reserve_null_block), self._tree)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can return now, including unreferenced blocks with content."""
        return self._pool.num_free

    @property
    def num_used_blocks(self) -> int:
        """Blocks with at least one reference."""
        return self._pool.num_used

    def ref_count(self, block_id: int) -> int:
        """Number of references to a block.

        Raises:
            ContractError: the id is outside the pool.
        """
        return self._pool.block(block_id).references

    def allocate(self, count: int = 1) -> list[int]:
        """Allocate `count` blocks with one reference each. Their content is undefined.

        Raises:
            CacheExhaustedError: fewer blocks are free; none is allocated.
            ContractError: `count` is negative.
        """
        return self._pool.allocate(count)

    def retain(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block, for forks (beams, parallel samples) that share them.

        Raises:
            ContractError: a block without references or outside the pool; no reference is added.
        """
        for block in [self._pool.held(x, "retain") for x in as_ids("block_ids", block_ids)]:
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
        self._pool.free(block_ids, behind_window)

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
        size = self.block_size if block_size is None else block_size
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
        usable = max(token_count(token_ids) - 1, 0) // size if self.prefix_caching else 0
        return self._tree.find(chunks(token_ids, size, 0, usable), key)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block of contents that a lookup has found.

        Raises:
            ContractError: a block that has neither references nor content; none is added.
        """
        self._pool.acquire(block_ids)

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
            ContractError: a block without references or given twice, fewer blocks than the tokens
                fill, or `token_ids` that are not integers; nothing is committed.
        """
        full = (count := token_count(token_ids)) // self.block_size
        if full > len(block_ids := as_ids("block_ids", block_ids, ordered=True)):
            raise ContractError(
                f"{count} tokens fill {full} blocks of {self.block_size}, but only "
                f"{len(block_ids)} blocks are given"
            )
        self._tree.root(key)  # an unhashable key must fail here, before the first block is changed
        node, first = None, full
        while first and node is None:
            node = self._pool.held(block_ids[first - 1], "commit").content
            first -= node is None
            if not self.prefix_caching:
                return
        if node is None:
            node = self._tree.root(key)
        elif node.root.key != key or node.depth != first:
            return  # no lookup reaches the blocks that follow
        contents = list(chunks(token_ids, self.block_size, first, full))
        for block_id, chunk in zip(self._pool.once(block_ids[first:full]), contents, strict=True):
            node = self._pool.commit(node, chunk, block_id)
            if node is None:
                return

    def commit_block(
        self, parent: PrefixNode, token_ids: TokenIds | Label, block_id: int
    ) -> PrefixNode | None:
        """Make one full block findable, behind others that may have been freed since.

        Args:
            parent: what the call for the block before returned, or a content of `find_contents`,
                or `start_of`.
            token_ids: the tokens of the block, all of them, or a label.
            block_id: the block.

        Returns:
            The content, the parent of the next one; None if no lookup can reach what follows.

        Raises:
            ContractError: a block without references, or `token_ids` that are not integers.
        """
        block = self._pool.held(block_id := as_id("block", block_id), "commit")
        chunk = token_ids if isinstance(token_ids, Label) else as_tokens(token_ids)
        return None if block.content else self._pool.commit(parent, chunk, block_id)

    def start_of(self, key: Hashable = None) -> PrefixNode:
        """The parent of the first block of sequences with this key."""
        return self._tree.root(key)

    def make_writable(self, block_id: int) -> tuple[int, tuple[int, int] | None]:
        """Copy on write: replace a block that is shared by one that only the caller holds.

        Returns:
            The block to write to, and the (source, destination) pair to pass to
            `PagedKVCache.copy_blocks`, or None when nothing has to be copied.

        Raises:
            ContractError: a block without references.
            CacheExhaustedError: the block is shared and no block is free.
        """
        block = self._pool.held(block_id := as_id("block", block_id), "write")
        if block.references == 1:
            self._pool.forget(block_id)
            return block_id, None
        fresh = self.allocate(1)[0]
        block.references -= 1
        return fresh, (block_id, fresh)

    def reset_prefix_cache(self) -> None:
        """Forget all content, for example after the weights changed. References are kept."""
        self._pool.forget_all()
