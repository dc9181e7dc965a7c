"""The longest prefix that all groups of a pool have cached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from attnlib.cache.hybrid_groups import KVCacheGroup
from attnlib.cache.prefix_tree import PrefixNode

__all__ = ["CachedPrefix", "longest_prefix"]


class CachedPrefix(NamedTuple):
    """What a pool has cached of a sequence.

    Attributes:
        num_tokens: tokens of the longest prefix whose visible blocks every group has, with the
            states at its end.
        last: the content of its last block in the first group; None without a prefix.
        num_keys: the same without the states.
    """

    num_tokens: int = 0
    last: PrefixNode | None = None
    num_keys: int = 0


def longest_prefix(
    groups: Mapping[str, KVCacheGroup],
    found: Mapping[str, Sequence[PrefixNode]],
    step: int,
    has_states: Callable[[PrefixNode], bool],
) -> CachedPrefix:
    """The longest prefixes that every group has cached.

    Args:
        groups: the groups of keys.
        found: group name -> contents of the prefix.
        step: where prefixes end, a multiple of all block sizes.
        has_states: whether every state layer has a checkpoint behind a content of the first group.
    """
    cached = {name: _runs(nodes) for name, nodes in found.items()}
    most = min((len(nodes) * groups[name].block_size for name, nodes in found.items()), default=0)
    num_keys = 0
    for end in range(most // step * step, 0, -step):
        if all(
            cached[name][end // group.block_size - 1]
            >= end // group.block_size - group.first_visible(end) // group.block_size
            for name, group in groups.items()
        ):
            name, group = next(iter(groups.items()))
            last = found[name][end // group.block_size - 1]
            num_keys = num_keys or end
            if has_states(last):
                return CachedPrefix(end, last, num_keys)
    return CachedPrefix(num_keys=num_keys)


def _runs(nodes: Sequence[PrefixNode]) -> list[int]:
    """For each content: cached contents in a row that end with it."""
    runs, run = [], 0
    for node in nodes:
        run = 0 if node.block is None else run + 1
        runs.append(run)
    return runs
