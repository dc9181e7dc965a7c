"""Requests of a pool of several groups that continue in another pool: swaps and transfers."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from attnlib.cache.prefix_tree import PrefixNode, TokenIds, as_tokens
from attnlib.cache.sequence_blocks import NULL_BLOCK, SequenceBlocks, as_sequence
from attnlib.errors import CacheExhaustedError, ContractError

if TYPE_CHECKING:
    from attnlib.cache.hybrid_allocator import HybridBlockAllocator

__all__ = ["SequenceMoves"]

Pairs = list[tuple[int, int]]


class SequenceMoves:
    """The method of `HybridBlockAllocator` that takes over a request of another pool."""

    def adopt(
        self, other: HybridBlockAllocator, sequence: SequenceBlocks, token_ids: TokenIds = ()
    ) -> tuple[SequenceBlocks, Pairs]:
        """A request here with the computed tokens of one of `other`, which stays as it is. Blocks
        behind windows have no copy.

        Args:
            other: the allocator of the request, with equal block sizes and layers.
            sequence: its request.
            token_ids: its computed tokens: full blocks whose contents are cached here are shared,
                and the copied ones become findable. Without them, all blocks are copied.

        Returns:
            The request, and the pairs for `other_pool.swap_blocks(this_pool, pairs)`, of keys and
            of states. Copy them before another request is started or adopted here, and before
            `other` releases this one.

        Raises:
            CacheExhaustedError: fewer blocks are free than are copied; nothing changes.
            ContractError: other groups, or fewer tokens than are computed.
        """
        mine = cast("HybridBlockAllocator", self)
        _check_groups(mine, other)
        tokens, computed = as_tokens(token_ids), as_sequence(sequence).num_computed
        if tokens and len(tokens) < computed:
            raise ContractError(
                f"{len(tokens)} token_ids are given, but {computed} tokens of the request are "
                "computed: give all of them, or none"
            )
        rows = {
            name: _Row(mine, sequence, name, tokens[:computed], group.block_size)
            for name, group in mine.groups.items()
        }
        read = _read_states(sequence)
        count = sum(row.num_copied for row in rows.values()) + sum(map(len, read.values()))
        fresh = _allocate(mine, [block for row in rows.values() for block in row.shared], count)
        adopted = SequenceBlocks({}, computed, sequence.num_cached_keys, sequence.key)
        pairs: Pairs = []
        for name, row in rows.items():
            own, fresh = fresh[: row.num_copied], fresh[row.num_copied :]
            pairs += row.fill(own)
            adopted.blocks[name], adopted._freed[name] = row.ids, row.first
            adopted._chains[name] = row.commit()
            mine._used[name] += len(row.ids) - row.first
        for name, held in read.items():
            own, fresh = fresh[: len(held)], fresh[len(held) :]
            pairs += zip(held, own, strict=True)
            adopted.states.slots[name] = own
        return adopted, pairs


class _Row:
    """The blocks of a request in one group of keys.

    Args:
        allocator: of the new request.
        sequence: the request.
        name: of the group.
        tokens: the computed tokens; () if they are not known.
        size: tokens of a block.
    """

    def __init__(
        self,
        allocator: HybridBlockAllocator,
        sequence: SequenceBlocks,
        name: str,
        tokens: tuple[int, ...],
        size: int,
    ) -> None:
        computed, key = sequence.num_computed, (name, sequence.key)
        self.pool, self.tokens, self.size = allocator.pool, tokens, size
        self.full = computed // size
        self.sources = sequence.blocks[name][: -(-computed // size)]
        self.first = min(sequence._freed[name], len(self.sources))
        self.contents = self.pool.find_contents(tokens, key, block_size=size)
        self.start = self.pool.start_of(key)
        cached = {n: one.block for n, one in enumerate(self.contents) if n >= self.first}
        held = [cached.get(n) for n in range(self.first, len(self.sources))]
        self.shared = [block for block in held if block is not None]
        self.num_copied = len(held) - len(self.shared)
        self._held = held
        self.ids: list[int] = []

    def fill(self, fresh: list[int]) -> Pairs:
        """Name the blocks of the new request; returns the pairs to copy."""
        left = iter(fresh)
        own = [next(left) if block is None else block for block in self._held]
        self.ids = [NULL_BLOCK] * self.first + own
        each = zip(self.sources[self.first :], own, self._held, strict=True)
        return [(source, block) for source, block, found in each if found is None]

    def commit(self) -> tuple[int, PrefixNode | None]:
        """Make the full blocks findable behind those that are; `SequenceBlocks._chains`."""
        if not self.pool.prefix_caching or not self.full:
            return 0, self.start
        node: PrefixNode | None = self.start if self.tokens else None
        for place in range(self.full):
            if node is None:
                break
            chunk = self.tokens[place * self.size : (place + 1) * self.size]
            is_copied = place >= self.first and self._held[place - self.first] is None
            if is_copied:
                node = self.pool.commit_block(node, chunk, self.ids[place])
            elif place < len(self.contents):
                node = self.contents[place]
            else:  # behind the window: the first block that is committed links it
                node = PrefixNode(node, chunk)
        return self.full, node


def _read_states(sequence: SequenceBlocks) -> dict[str, list[int]]:
    """Group of states -> the blocks that the next step reads; none before the first step."""
    states, started = sequence.states, sequence.num_computed > 0
    return {
        name: list(states.sources.get(name, own)) if started else []
        for name, own in states.slots.items()
    }


def _allocate(allocator: HybridBlockAllocator, shared: list[int], count: int) -> list[int]:
    """Hold blocks that are cached, and allocate others."""
    pool = allocator.pool
    pool.acquire(shared)
    try:
        return pool.allocate(count)
    except CacheExhaustedError:
        pool.free(shared)
        raise


def _check_groups(allocator: HybridBlockAllocator, other: HybridBlockAllocator) -> None:
    if not isinstance(other, type(allocator)):
        raise ContractError(
            f"other is a {type(other).__name__}; pass the HybridBlockAllocator of the request"
        )
    sizes = [
        {name: group.block_size for name, group in one.groups.items()}
        | {f"{name}, states": group.num_layers for name, group in one._states.groups.items()}
        for one in (allocator, other)
    ]
    if sizes[0] != sizes[1]:
        raise ContractError(
            f"blocks and state layers of the groups are {sizes[1]} in the other pool and "
            f"{sizes[0]} here: requests move between pools of equal groups",
            rule="T15",
        )
