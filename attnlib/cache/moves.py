"""Copies of whole blocks, within a cache and between caches, and of single tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from attnlib.cache.scales import check_same_kind
from attnlib.ops.addresses import as_id, as_ids
from attnlib.ops.block_moves import BlockPairs, check_ids, checked_pairs, move_blocks, zero_blocks
from attnlib.ops.token_moves import move_tokens

if TYPE_CHECKING:
    from attnlib.cache.storage import PagedKVCache

__all__ = ["BlockMoves", "BlockPairs"]


class BlockMoves:
    """Methods of `PagedKVCache` that move or clear blocks, and move tokens."""

    if TYPE_CHECKING:

        @property
        def num_blocks(self) -> int: ...

        @property
        def block_views(self) -> tuple[torch.Tensor, ...]: ...

    def copy_blocks(self, pairs: BlockPairs) -> None:
        """Copy whole blocks within this cache. Every source is read before any block is written.

        Args:
            pairs: (source, destination) block ids, or an integer tensor `[n, 2]`.

        Raises:
            ContractError: an id is out of range, or a destination occurs twice; nothing is written.
        """
        source, destination = checked_pairs(pairs, self.num_blocks, self.num_blocks)
        move_blocks(self.block_views, self.block_views, source, destination)

    def swap_blocks(self, other: PagedKVCache, pairs: BlockPairs) -> None:
        """Copy whole blocks of this cache into `other` (swapping out and in).

        The caches may differ in device and layout. Elements are copied as stored, so quantized
        caches must have equal scales (M9); comparing scales that are distinct CUDA tensors
        synchronizes.

        Args:
            other: the destination.
            pairs: (block of this cache, block of `other`), or an integer tensor `[n, 2]`.

        Raises:
            ContractError: as `copy_blocks`, or `other` has another block shape, dtype or scale;
                nothing is written.
        """
        check_same_kind(self, other)  # type: ignore[arg-type]  # of a PagedKVCache
        source, destination = checked_pairs(pairs, self.num_blocks, other.num_blocks)
        move_blocks(self.block_views, other.block_views, source, destination)

    def move_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy single tokens to other slots of this cache: the accepted branch of a tree of tokens
        (M20). Every source is read before any slot is written. No synchronization on a GPU.

        Args:
            source: `[n]` int64 slots (P4) that are read, on the device of the cache.
            target: `[n]` int64 slots that are written; -1 skips the pair.

        Raises:
            ContractError: other shapes, dtypes or devices. On a CPU, and on a GPU with
                `ATTNLIB_VALIDATE=1`, also a slot outside of the cache or a target that occurs
                twice. Nothing is written.
        """
        move_tokens(self.block_views, source, target)

    def zero_blocks(self, block_ids: Iterable[int]) -> None:
        """Fill whole blocks with zeros.

        Raises:
            ContractError: an id is out of range; nothing is written.
        """
        given = as_ids("block_ids", block_ids)
        ids = [as_id("block_ids", block, place) for place, block in enumerate(given)]
        check_ids("block_ids", ids, self.num_blocks)
        zero_blocks(self.block_views, ids)
