"""A second request with the computed tokens of a first one, in a pool of several groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnlib.cache.sequence_blocks import SequenceBlocks

if TYPE_CHECKING:
    from attnlib.cache.hybrid_allocator import HybridBlockAllocator

__all__ = ["fork_sequence"]


def fork_sequence(
    allocator: HybridBlockAllocator, sequence: SequenceBlocks
) -> tuple[SequenceBlocks, dict[str, list[list[int]]]]:
    """`HybridBlockAllocator.fork`."""
    computed, groups, pool = sequence.num_computed, allocator.groups, allocator.pool
    partial = [name for name, group in groups.items() if computed % group.block_size]
    fresh = dict(zip(partial, pool.allocate(len(partial)), strict=True))
    copied = SequenceBlocks({}, computed, sequence.num_cached_keys, sequence.key)
    copied.states = allocator._states.fork(sequence.states)
    pairs: dict[str, list[list[int]]] = {}
    for name, group in groups.items():
        count, ids = computed // group.block_size, sequence.blocks[name]
        freed = min(sequence._freed[name], count)
        pool.retain(ids[freed:count])
        own = [fresh[name]] if name in fresh else []
        copied.blocks[name] = ids[:count] + own
        copied._freed[name], copied._chains[name] = freed, sequence._chains[name]
        each = map(group.pages, (ids[count : count + 1], own))
        pairs[name] = [list(pair) for pair in zip(*each, strict=True)] if own else []
        allocator._used[name] += len(copied.blocks[name]) - freed
    return copied, pairs
