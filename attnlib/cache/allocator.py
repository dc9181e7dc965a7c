"""Who holds which block: reference counts, reuse of common prefixes, and eviction of what nobody holds.

A full block is known by its content: the tokens in it and the block before it. Requests that start alike find the same blocks and share them by
reference count (RadixAttention and vLLM's automatic prefix caching do this; the bookkeeping here is a chain of exact keys, so two contents can
never be mistaken for each other as with hashes). A block that nobody holds keeps its content until its memory is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from attnlib.errors import CacheExhaustedError, ContractError

__all__ = ["BlockAllocator", "PrefixHit"]

_ROOT = -1


@dataclass(frozen=True)
class PrefixHit:
    """What `acquire_prefix` found: blocks that already hold the first `num_tokens` tokens. The caller now holds one reference to each."""

    block_ids: tuple[int, ...]
    num_tokens: int


@dataclass
class _Block:
    references: int = 0
    content: tuple[int, Hashable, tuple[int, ...]] | None = None
    """(uid of the block before it, caller's key, its tokens): set once the block is full and committed."""
    uid: int = _ROOT
    """Identity of this content; a new one is given each time content is committed, so that a stale chain can never match."""


class BlockAllocator:
    """Hands out the blocks of one pool.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens in one block.
        prefix_caching: keep the content of full blocks findable, after their last holder let go, too.
        reserve_null_block: never hand out block 0, so that it can stand in wherever a table needs some block.

    Raises:
        ContractError: sizes below 1.
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
        self._idle: OrderedDict[int, None] = (
            OrderedDict()
        )  # unreferenced but findable, least recently used first
        self._by_content: dict[tuple[int, Hashable, tuple[int, ...]], int] = {}
        self._next_uid = 0
        self._reserved = first

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` could hand out now, findable but unreferenced ones included."""
        return len(self._empty) + len(self._idle)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self._reserved - self.num_free_blocks

    def ref_count(self, block_id: int) -> int:
        """How many holders a block has."""
        return self._block(block_id).references

    def allocate(self, count: int = 1) -> list[int]:
        """`count` blocks with one reference each; their content is undefined.

        Raises:
            CacheExhaustedError: fewer are free; none is handed out then.
        """
        if count < 0:
            raise ContractError(f"count={count} must not be negative")
        if count > self.num_free_blocks:
            raise CacheExhaustedError(
                f"{count} blocks of {self.block_size} tokens asked for, {self.num_free_blocks} of {self.num_blocks} are free: "
                f"free finished requests, preempt one, or allocate a larger cache"
            )
        taken = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for block_id in taken:
            self._blocks[block_id].references = 1
        return taken

    def retain(self, block_ids: Iterable[int]) -> None:
        """One more reference to each block: for forks (beams, parallel samples) that share them."""
        for block_id in list(block_ids):
            block = self._held(block_id, "retain")
            block.references += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Give one reference back for each block. The last one out leaves committed content findable until its memory is needed.

        Raises:
            ContractError: a block that nobody holds (freed twice); nothing is freed then.
        """
        ids = list(block_ids)
        for block_id in set(ids):
            if self._held(block_id, "free").references < ids.count(block_id):
                raise ContractError(
                    f"block {block_id} is freed {ids.count(block_id)} times, but held only {self.ref_count(block_id)} times"
                )
        # The tail of a sequence is evicted before its head: a head without its tail is still a useful prefix, a tail without its head is not.
        for block_id in reversed(ids):
            block = self._blocks[block_id]
            block.references -= 1
            if block.references == 0:
                if block.content is None:
                    self._empty.append(block_id)
                else:
                    self._idle[block_id] = None

    def acquire_prefix(self, token_ids: Sequence[int], key: Hashable = None) -> PrefixHit:
        """The longest chain of full blocks that already holds a prefix of `token_ids`, retained for the caller.

        At least one token is always left over: a request must compute something to have a next token, so a full hit gives its last block up.

        Args:
            token_ids: the request's tokens.
            key: whatever else the keys depend on (a LoRA adapter, an image's hash, a tenant); contents under different keys never match.
        """
        found: list[int] = []
        parent = _ROOT
        usable = max(len(token_ids) - 1, 0) // self.block_size if self.prefix_caching else 0
        for index in range(usable):
            tokens = tuple(token_ids[index * self.block_size : (index + 1) * self.block_size])
            block_id = self._by_content.get((parent, key, tokens))
            if block_id is None:
                break
            found.append(block_id)
            parent = self._blocks[block_id].uid
        for block_id in found:
            self._idle.pop(block_id, None)
            self._blocks[block_id].references += 1
        return PrefixHit(tuple(found), len(found) * self.block_size)

    def commit(
        self, token_ids: Sequence[int], block_ids: Sequence[int], key: Hashable = None
    ) -> None:
        """Make the full blocks of a sequence findable: call it when keys and values of `token_ids` are in the cache.

        Args:
            token_ids: all tokens whose keys and values are written, from the start of the sequence.
            block_ids: the blocks of the sequence, in order.
            key: as in `acquire_prefix`.

        Raises:
            ContractError: a block that nobody holds, or fewer blocks than the tokens fill.
        """
        full = len(token_ids) // self.block_size
        if full > len(block_ids):
            raise ContractError(
                f"{len(token_ids)} tokens fill {full} blocks of {self.block_size}, but only {len(block_ids)} blocks are given"
            )
        parent = _ROOT
        for index in range(full if self.prefix_caching else 0):
            block = self._held(block_ids[index], "commit")
            content = (
                parent,
                key,
                tuple(token_ids[index * self.block_size : (index + 1) * self.block_size]),
            )
            known = self._by_content.get(content)
            if known is None and block.content is None:
                block.content, block.uid = content, self._next_uid
                self._next_uid += 1
                self._by_content[content] = known = block_ids[index]
            if known is None:
                return  # this block already stands for another chain; what follows cannot be reached from here
            parent = self._blocks[known].uid

    def make_writable(self, block_id: int) -> tuple[int, tuple[int, int] | None]:
        """Copy on write: a block that only the caller holds, in place of one that is shared or findable.

        Returns:
            the block to write to, and the (source, destination) pair for `PagedKVCache.copy_blocks` or None when nothing has to move.
        """
        block = self._held(block_id, "write")
        if block.references == 1 and block.content is None:
            return block_id, None
        if block.references == 1:
            self._forget(block)
            return block_id, None
        fresh = self.allocate(1)[0]
        block.references -= 1
        return fresh, (block_id, fresh)

    def reset_prefix_cache(self) -> None:
        """Forget all content (after a change of weights, say). Held blocks stay held."""
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
                f"block {block_id} is outside the pool of {self.num_blocks} blocks (0 to {self.num_blocks - 1})",
                rule="P3",
            )
        return self._blocks[block_id]

    def _held(self, block_id: int, verb: str) -> _Block:
        block = self._block(block_id)
        if block.references == 0:
            raise ContractError(
                f"cannot {verb} block {block_id}: nobody holds it (freed twice, or never allocated)"
            )
        return block
