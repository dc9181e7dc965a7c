"""The blocks of one request in a pool of several groups."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from attnlib.cache.hybrid_states import SequenceStates
from attnlib.cache.prefix_tree import PrefixNode

__all__ = ["NULL_BLOCK", "SequenceBlocks"]

NULL_BLOCK = 0
"""The block that stands for blocks behind a window. It is never allocated."""


@dataclass(eq=False)
class SequenceBlocks:
    """The blocks of one request. Only its allocator changes it.

    Attributes:
        blocks: group of keys -> block ids in the order of positions: the row of the block table.
        states: blocks of the groups of states.
        num_computed: tokens whose keys and values are in the caches.
        key: what the keys and values depend on besides the tokens; see
            `BlockAllocator.acquire_prefix`.
    """

    blocks: dict[str, list[int]]
    num_computed: int = 0
    key: Hashable = None
    states: SequenceStates = field(default_factory=SequenceStates)
    _freed: dict[str, int] = field(default_factory=dict)
    """Group name -> leading blocks that were freed."""
    _chains: dict[str, tuple[int, PrefixNode | None]] = field(default_factory=dict)
    """Group name -> (committed blocks, content of the last one; None after a broken chain)."""
