"""The blocks of one request in a pool of several groups."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from attnlib.cache.hybrid_groups import KVCacheGroup
from attnlib.cache.hybrid_states import SequenceStates
from attnlib.cache.prefix_tree import PrefixNode
from attnlib.errors import ContractError

__all__ = ["NULL_BLOCK", "SequenceBlocks", "as_sequence", "known_group"]

NULL_BLOCK = 0
"""The block that stands for blocks behind a window. It is never allocated."""


@dataclass(eq=False)
class SequenceBlocks:
    """The blocks of one request. Only its allocator changes it.

    Attributes:
        blocks: group of keys -> block ids in the order of positions: the row of the block table.
        states: blocks of the groups of states.
        num_computed: tokens whose keys and values are in the caches.
        num_cached_keys: tokens of the prefix whose keys `start` found, with states or without. If
            there are more of them than computed tokens, another request began alike, and a
            checkpoint there may be found again.
        key: what the keys and values depend on besides the tokens; see
            `BlockAllocator.acquire_prefix`.
    """

    blocks: dict[str, list[int]]
    num_computed: int = 0
    num_cached_keys: int = 0
    key: Hashable = None
    states: SequenceStates = field(default_factory=SequenceStates)
    _freed: dict[str, int] = field(default_factory=dict)
    """Group name -> leading blocks that were freed."""
    _chains: dict[str, tuple[int, PrefixNode | None]] = field(default_factory=dict)
    """Group name -> (committed blocks, content of the last one; None after a broken chain)."""

    def missing(self, groups: Mapping[str, KVCacheGroup], num_tokens: int) -> dict[str, int]:
        """Group of keys -> blocks to allocate before the first `num_tokens` tokens have slots."""
        return {
            name: max(-(-num_tokens // group.block_size) - len(self.blocks[name]), 0)
            for name, group in groups.items()
        }

    def capacity(self, groups: Mapping[str, KVCacheGroup]) -> int:
        """Tokens that the blocks hold."""
        sizes = (len(self.blocks[name]) * group.block_size for name, group in groups.items())
        return min(sizes, default=0)


def as_sequence(sequence: SequenceBlocks) -> SequenceBlocks:
    """The blocks of a request.

    Raises:
        ContractError: they are none.
    """
    if not isinstance(sequence, SequenceBlocks):
        raise ContractError(
            f"sequence is a {type(sequence).__name__}; pass the SequenceBlocks that start returned"
        )
    return sequence


def known_group(name: str, groups: Mapping[str, object]) -> str:
    """The name of a group of keys.

    Raises:
        ContractError: no group has this name; the message lists those that are.
    """
    if not isinstance(name, str) or name not in groups:
        raise ContractError(
            f"group {name!r} is no group of keys of the pool; they are {', '.join(groups)}"
        )
    return name
