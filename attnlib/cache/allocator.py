"""Block allocation: reference counts, prefix caching and LRU eviction.

A full block is identified by its content: its tokens and the block before it. Requests with a
common prefix find the same blocks and share them by reference count, as in RadixAttention and
vLLM's automatic prefix caching. The lookup uses chains of exact keys instead of hashes, so two
different contents never collide. A block without references keeps its content until its memory
is needed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import index

import torch

from attnlib.errors import CacheExhaustedError, ContractError

__all__ = ["BlockAllocator", "PrefixHit", "TokenIds", "as_tokens"]

TokenIds = Sequence[int] | torch.Tensor
"""Token ids: a sequence of integers (0-d integer tensors included) or an integer tensor `[T]`."""

_ROOT = -1
"""The uid that precedes the first block of every sequence."""

_Content = tuple[int, Hashable, tuple[int, ...]]
"""(uid of the previous block, key of the caller, tokens of the block)."""


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
        content: set once the block is full and committed, None before.
        uid: identifies this content. Every commit assigns a new uid, so a key that names evicted
            content never matches again.
    """

    references: int = 0
    content: _Content | None = None
    uid: int = _ROOT


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
        # Blocks without references that are still findable, least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._by_content: dict[_Content, int] = {}
        self._next_uid = 0
        self._reserved = first

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can return now, including unreferenced blocks with content."""
        return len(self._empty) + len(self._idle)

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
        if count < 0:
            raise ContractError(f"count={count} must not be negative")
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

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference for each id; time is linear in the number of ids.

        A committed block without references stays findable until its memory is needed.

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
                if block.content is None:
                    self._empty.append(block_id)
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
        found: list[int] = []
        parent = _ROOT
        size = block_size or self.block_size
        usable = max(len(token_ids) - 1, 0) // size if self.prefix_caching else 0
        for chunk in _chunks(token_ids, size, usable):
            block_id = self._by_content.get((parent, key, chunk))
            if block_id is None:
                break
            found.append(block_id)
            parent = self._blocks[block_id].uid
        for block_id in found:
            self._idle.pop(block_id, None)
            self._blocks[block_id].references += 1
        return PrefixHit(tuple(found), len(found) * size)

    def commit(self, token_ids: TokenIds, block_ids: Sequence[int], key: Hashable = None) -> None:
        """Make the full blocks of a sequence findable. Call it after the cache was written.

        Args:
            token_ids: all tokens whose keys and values are in the cache, from the start of the
                sequence.
            block_ids: blocks of the sequence, in order.
            key: as in `acquire_prefix`.

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
        blocks = [self._held(block_id, "commit") for block_id in block_ids[:full]]
        if not self.prefix_caching:
            return
        contents = list(_chunks(token_ids, self.block_size, full))
        hash(key)  # an unhashable key must fail here, before the first block is changed
        parent = _ROOT
        for block_id, block, chunk in zip(block_ids, blocks, contents, strict=False):
            committed = self._commit((parent, key, chunk), block_id, block)
            if committed is None:
                return
            parent = committed

    def commit_block(
        self, parent: int, token_ids: TokenIds, block_id: int, key: Hashable = None
    ) -> int | None:
        """Make one full block findable, behind others that may have been freed since.

        Args:
            parent: what the call for the block before returned, or `chain_end`.
            token_ids: the tokens of the block, all of them.
            block_id: the block.
            key: as in `acquire_prefix`.

        Returns:
            What identifies the block as the parent of the next one; None if no lookup can reach the
            blocks that follow.

        Raises:
            ContractError: a block without references, or `token_ids` that are not integers.
        """
        block = self._held(block_id, "commit")
        (chunk,) = _chunks(token_ids, len(token_ids), 1)
        return self._commit((parent, key, chunk), block_id, block)

    def chain_end(self, block_ids: Sequence[int]) -> int:
        """The parent of the block that follows these blocks of an `acquire_prefix`."""
        return self._block(block_ids[-1]).uid if block_ids else _ROOT

    def _commit(self, content: _Content, block_id: int, block: _Block) -> int | None:
        known = self._by_content.get(content)
        if known is None and block.content is None:
            block.content, block.uid = content, self._next_uid
            self._next_uid += 1
            self._by_content[content] = known = block_id
        # Without `known` the block already holds the content of another chain, so no lookup can
        # reach the blocks that follow it.
        return None if known is None else self._blocks[known].uid

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
            self._forget(block)
            return block_id, None
        fresh = self.allocate(1)[0]
        block.references -= 1
        return fresh, (block_id, fresh)

    def reset_prefix_cache(self) -> None:
        """Forget all content, for example after the weights changed. References are kept."""
        for block in self._blocks:
            self._forget(block)
        self._empty.extend(self._idle)
        self._idle.clear()

    def _evict(self) -> int:
        block_id, _ = self._idle.popitem(last=False)
        self._forget(self._blocks[block_id])
        return block_id

    def _forget(self, block: _Block) -> None:
        if block.content is not None:
            del self._by_content[block.content]
            block.content, block.uid = None, _ROOT

    def _block(self, block_id: int) -> _Block:
        if not 0 <= block_id < self.num_blocks:
            raise ContractError(
                f"block {block_id} is outside the pool of {self.num_blocks} blocks "
                f"(0 to {self.num_blocks - 1})",
                rule="P3",
            )
        return self._blocks[block_id]

    def _held(self, block_id: int, verb: str) -> _Block:
        block = self._block(block_id)
        if block.references == 0:
            raise ContractError(
                f"cannot {verb} block {block_id}: it has no references (freed twice, or never "
                f"allocated)"
            )
        return block


def as_tokens(token_ids: TokenIds) -> tuple[int, ...]:
    """Token ids as Python integers.

    Raises:
        ContractError: they are not integers.
    """
    count = len(token_ids)
    return next(_chunks(token_ids, count, 1), ()) if count else ()


def _chunks(token_ids: TokenIds, size: int, count: int) -> Iterator[tuple[int, ...]]:
    """The first `count` blocks of `size` tokens, as Python integers.

    Integers of all types are converted to `int`: tensors hash by identity, so a key that contains
    them would never be found again.
    """
    tokens: Sequence[int]
    if isinstance(token_ids, torch.Tensor):
        if token_ids.dim() != 1 or token_ids.is_floating_point() or token_ids.is_complex():
            raise ContractError(
                f"token_ids is a {token_ids.dtype} tensor of shape {tuple(token_ids.shape)}: pass "
                f"an integer tensor [T] or a sequence of integers"
            )
        tokens = token_ids[: count * size].tolist()
    else:
        tokens = token_ids
    try:
        for start in range(0, count * size, size):
            yield tuple(map(index, tokens[start : start + size]))
    except TypeError as error:
        raise ContractError(f"token_ids must be integers: {error}") from None
