"""Blocks of requests in a pool that several layer groups share.

Each request has one row of blocks per group. Blocks that no later query sees, because they lie
behind the window of their group, go back to the pool while the request runs; the null block takes
their place (P12). A group with a window of W tokens therefore holds a bounded number of blocks for
each request, however long it grows.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm

from attnlib.cache.allocator import BlockAllocator, TokenIds, as_tokens
from attnlib.cache.hybrid import KVCacheGroup
from attnlib.cache.prefix_tree import PrefixNode
from attnlib.errors import ContractError

__all__ = ["NULL_BLOCK", "HybridBlockAllocator", "SequenceBlocks"]

NULL_BLOCK = 0
"""The block that stands for blocks behind a window. It is never allocated."""


@dataclass(eq=False)
class SequenceBlocks:
    """The blocks of one request. Only its allocator changes it.

    Attributes:
        blocks: group name -> block ids in the order of positions: the row of the block table.
        num_computed: tokens whose keys and values are in the caches.
        key: what the keys and values depend on besides the tokens; see
            `BlockAllocator.acquire_prefix`.
    """

    blocks: dict[str, list[int]]
    num_computed: int = 0
    key: Hashable = None
    _freed: dict[str, int] = field(default_factory=dict)
    """Group name -> leading blocks that were freed."""
    _chains: dict[str, tuple[int, PrefixNode | None]] = field(default_factory=dict)
    """Group name -> (committed blocks, content of the last one; None after a broken chain)."""


class HybridBlockAllocator:
    """Allocates the blocks of a `HybridKVCache`. Every method succeeds or changes nothing.

    Args:
        groups: as in `HybridKVCache`.
        num_blocks: blocks of the pool, the null block included.
        prefix_caching: keep full blocks findable by content; see `BlockAllocator`.

    Raises:
        ContractError: there is no group, or fewer than two blocks.
    """

    def __init__(
        self,
        groups: Mapping[str, KVCacheGroup],
        num_blocks: int,
        *,
        prefix_caching: bool = True,
    ) -> None:
        if not groups:
            raise ContractError("an allocator needs at least one group of layers")
        self.groups = dict(groups)
        smallest = min(group.block_size for group in groups.values())
        self.pool = BlockAllocator(
            num_blocks, smallest, prefix_caching=prefix_caching, reserve_null_block=True
        )
        self._used = dict.fromkeys(groups, 0)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, for any group."""
        return self.pool.num_free_blocks

    def num_used_blocks(self, group: str) -> int:
        """Blocks that requests hold for a group; a shared block counts once for each holder."""
        return self._used[group]

    def start(self, token_ids: TokenIds = (), key: Hashable = None) -> SequenceBlocks:
        """The blocks of a new request, with the longest prefix that every group has cached.

        The prefix ends at a common multiple of the block sizes. A group with a window needs the
        blocks that its next query sees; blocks before them may have been evicted, and the null
        block stands for them.

        Args:
            token_ids: tokens of the request; without them, nothing is reused.
            key: as in `BlockAllocator.acquire_prefix`.

        Raises:
            ContractError: `token_ids` are not integers.
        """
        tokens = as_tokens(token_ids)
        found = {
            name: self.pool.find_contents(tokens, (name, key), block_size=group.block_size)
            for name, group in self.groups.items()
        }
        reused = self._longest(found)
        sequence = SequenceBlocks({}, reused, key)
        for name, group in self.groups.items():
            count = reused // group.block_size
            dead = min(group.first_visible(reused) // group.block_size, count)
            kept = [node.block for node in found[name][dead:count] if node.block is not None]
            self.pool.acquire(kept)
            sequence.blocks[name] = [NULL_BLOCK] * dead + kept
            sequence._freed[name] = dead
            last = found[name][count - 1] if count else self.pool.start_of((name, key))
            sequence._chains[name] = (count, last)
            self._used[name] += len(kept)
        return sequence

    def _longest(self, found: Mapping[str, Sequence[PrefixNode]]) -> int:
        """Tokens of the longest prefix whose visible blocks every group has."""
        step = lcm(*(group.block_size for group in self.groups.values()))
        cached = {name: _runs(nodes) for name, nodes in found.items()}
        most = min(
            len(nodes) * self.groups[name].block_size for name, nodes in found.items()
        )  # a group has no longer one
        for end in range(most // step * step, 0, -step):
            if all(
                cached[name][end // group.block_size - 1]
                >= end // group.block_size - group.first_visible(end) // group.block_size
                for name, group in self.groups.items()
            ):
                return end
        return 0

    def num_missing_blocks(self, sequence: SequenceBlocks, num_tokens: int) -> int:
        """Blocks of all groups to allocate before the first `num_tokens` tokens have slots."""
        return sum(self._missing(sequence, num_tokens).values())

    def grow(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """Allocate blocks for the first `num_tokens` tokens of a request in every group.

        Raises:
            CacheExhaustedError: fewer blocks are free; none is allocated.
        """
        missing = self._missing(sequence, num_tokens)
        fresh = self.pool.allocate(sum(missing.values()))
        for name, count in missing.items():
            sequence.blocks[name] += fresh[:count]
            self._used[name] += count
            del fresh[:count]

    def advance(self, sequence: SequenceBlocks, token_ids: TokenIds) -> None:
        """Record that a step has written keys and values: full blocks become findable, and blocks
        behind the windows are freed.

        Args:
            token_ids: all tokens of the request whose keys and values are in the caches.

        Raises:
            ContractError: fewer tokens than before, more than the blocks hold, or tokens that are
                not integers.
        """
        count = len(token_ids)
        if count < sequence.num_computed or any(self._missing(sequence, count).values()):
            raise ContractError(
                f"{count} tokens are computed, but {sequence.num_computed} were before, and the "
                f"blocks hold {self._capacity(sequence)}: grow the request first"
            )
        if self.pool.prefix_caching:
            first = min(sequence._chains[name][0] * g.block_size for name, g in self.groups.items())
            new = as_tokens(token_ids[first:count])
            for name, group in self.groups.items():
                self._commit(sequence, name, group.block_size, new, first)
        sequence.num_computed = count
        self._free_behind_windows(sequence)

    def release(self, sequence: SequenceBlocks) -> None:
        """Free all blocks of a request. It is then empty, like a new one without a prefix."""
        for name, ids in sequence.blocks.items():
            held = ids[sequence._freed[name] :]
            self.pool.free(held)
            self._used[name] -= len(held)
        sequence.num_computed = 0
        for name in self.groups:
            sequence.blocks[name], sequence._freed[name] = [], 0
            sequence._chains[name] = (0, self.pool.start_of((name, sequence.key)))

    def block_tables(self, sequences: Sequence[SequenceBlocks]) -> dict[str, list[list[int]]]:
        """Group name -> one row per request, for `CommonAttentionMetadata.from_lengths`."""
        return {name: [list(one.blocks[name]) for one in sequences] for name in self.groups}

    def _commit(
        self, sequence: SequenceBlocks, name: str, size: int, tokens: tuple[int, ...], first: int
    ) -> None:
        """Make the full blocks of a group findable; `tokens` begin at position `first`."""
        done, node = sequence._chains[name]
        for start in range(done * size - first, len(tokens) - size + 1, size):
            if node is None:
                return  # no lookup reaches the blocks that follow
            block = sequence.blocks[name][done]
            node, done = (
                self.pool.commit_block(node, tokens[start : start + size], block),
                done + 1,
            )
            sequence._chains[name] = (done, node)

    def _capacity(self, sequence: SequenceBlocks) -> int:
        return min(len(sequence.blocks[name]) * g.block_size for name, g in self.groups.items())

    def _missing(self, sequence: SequenceBlocks, num_tokens: int) -> dict[str, int]:
        return {
            name: max(-(-num_tokens // group.block_size) - len(sequence.blocks[name]), 0)
            for name, group in self.groups.items()
        }

    def _free_behind_windows(self, sequence: SequenceBlocks) -> None:
        for name, group in self.groups.items():
            ids, freed = sequence.blocks[name], sequence._freed[name]
            dead = group.first_visible(sequence.num_computed) // group.block_size
            dead = min(dead, len(ids))
            if dead > freed:
                self.pool.free(ids[freed:dead], behind_window=True)
                ids[freed:dead] = [NULL_BLOCK] * (dead - freed)
                sequence._freed[name] = dead
                self._used[name] -= dead - freed


def _runs(nodes: Sequence[PrefixNode]) -> list[int]:
    """For each content: cached contents in a row that end with it."""
    runs, run = [], 0
    for node in nodes:
        run = 0 if node.block is None else run + 1
        runs.append(run)
    return runs
