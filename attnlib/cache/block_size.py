"""One pool for backends with different block sizes.

A memory manager prefers large blocks; kernels support specific sizes (16, or multiples of 256). A
manager block of N tokens is also N / k kernel blocks of k tokens at the same addresses, so a common
kernel block size is negotiated and the block table is expanded. Nothing is copied: the split cache
is a view, in every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.capabilities import Sizes
from attnlib.errors import ContractError, LayoutMismatchError

__all__ = ["BlockSplit", "negotiate_block_size", "split_blocks"]

_SEARCH_LIMIT = 1 << 16


def negotiate_block_size(demands: Sequence[tuple[str, Sizes]], manager_block_size: int) -> int:
    """The largest block size that every demand supports and that divides the manager's blocks.

    Args:
        demands: (name, supported block sizes) of each layer or backend.
        manager_block_size: tokens in one block of the memory manager.

    Raises:
        LayoutMismatchError: there is none; the message lists all demands and a manager block size
            that satisfies them.
        ContractError: `manager_block_size` is below 1.
    """
    if manager_block_size < 1:
        raise ContractError(f"manager_block_size={manager_block_size} must be at least 1")
    for size in range(manager_block_size, 0, -1):
        if manager_block_size % size == 0 and all(size in sizes for _, sizes in demands):
            return size
    named = "; ".join(f"{name} supports {sizes}" for name, sizes in demands)
    better = _satisfying(demands, manager_block_size)
    advice = (
        f"use blocks of {better} tokens"
        if better
        else "no block size satisfies all of them: choose other backends"
    )
    raise LayoutMismatchError(
        f"no common block size divides the manager's blocks of {manager_block_size} tokens: "
        f"{named}; {advice}"
    )


def _satisfying(demands: Sequence[tuple[str, Sizes]], at_least: int) -> int | None:
    """The smallest supported size of at least `at_least`, else the smallest of all, or None."""
    listed = [set(sizes.exactly) for _, sizes in demands if sizes.exactly]
    step = lcm(*(sizes.multiple_of for _, sizes in demands if not sizes.exactly))
    candidates = (
        sorted(set.intersection(*listed))
        if listed
        else range(step, max(_SEARCH_LIMIT, at_least + step) + 1, step)
    )
    fitting = [size for size in candidates if all(size in sizes for _, sizes in demands)]
    return next((size for size in fitting if size >= at_least), fitting[0] if fitting else None)


@dataclass(frozen=True)
class BlockSplit:
    """The mapping from manager block ids to kernel block ids.

    Attributes:
        blocks_per_block: kernel blocks in one manager block; their ids are consecutive.
        ids_per_block: distance between the first kernel block ids of two neighboring manager
            blocks.
    """

    blocks_per_block: int
    ids_per_block: int

    def expand(self, block_table: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Convert a block table of manager blocks into one of kernel blocks.

        Args:
            block_table: `[R, max_blocks]` int32, any device. Undefined entries stay undefined (P3).
            out: `[R, max_blocks * blocks_per_block]` int32 that receives the result; None
                allocates it.

        Returns:
            `[R, max_blocks * blocks_per_block]` int32.
        """
        offsets = torch.arange(self.blocks_per_block, dtype=torch.int32, device=block_table.device)
        expanded = (block_table.unsqueeze(2) * self.ids_per_block + offsets).view(
            block_table.shape[0], -1
        )
        return expanded if out is None else out.copy_(expanded)


def split_blocks(cache: PagedKVCache, kernel_block_size: int) -> tuple[PagedKVCache, BlockSplit]:
    """View `cache` in blocks of `kernel_block_size` tokens.

    Slot mappings refer to the original cache: keep writing through `cache`.

    Returns:
        (the view, the mapping of block ids).

    Raises:
        ContractError: `kernel_block_size` does not divide the block size of the cache, or the ids
            exceed int32.
        LayoutMismatchError: keys and values would need two block tables (values of another head
            size, interleaved with the keys).
    """
    if kernel_block_size < 1 or cache.block_size % kernel_block_size:
        raise ContractError(
            f"kernel_block_size={kernel_block_size} does not divide the cache's "
            f"block_size={cache.block_size}"
        )
    count = cache.block_size // kernel_block_size
    if count == 1:
        return cache, BlockSplit(1, 1)
    if cache.page_format is not None:
        raise LayoutMismatchError(
            f"pages of {cache!r} hold elements and scales and cannot be split: choose kernels that "
            f"read blocks of {cache.block_size} tokens"
        )
    splits = {
        _split(view, kernel_block_size, count) for view in (cache.key_cache, cache.value_cache)
    }
    if len(splits) > 1 or None in splits:
        raise LayoutMismatchError(
            f"blocks of {cache!r} cannot be split into blocks of {kernel_block_size} tokens with "
            f"one table for keys and values: allocate it as NHD"
        )
    (split,) = splits
    assert split is not None  # checked just above
    views = [
        _split_view(view, kernel_block_size, split, cache.num_blocks)
        for view in (cache.key_cache, cache.value_cache)
    ]
    found = PagedKVCache.from_views(*views, k_scale=cache.k_scale, v_scale=cache.v_scale)
    found.rotation = cache.rotation
    return found, split


def _split(view: torch.Tensor, size: int, count: int) -> BlockSplit | None:
    """The id mapping of one view; None if its block stride is not a multiple of the unit.

    Consecutive kernel blocks start `size` tokens apart, which is the unit of kernel block ids. In
    NHD a manager block spans `count` units; in HND it spans more, because the other heads are
    stored in between.
    """
    unit = size * view.stride(1)
    if view.shape[0] == 1:
        return BlockSplit(count, count)
    return (
        BlockSplit(count, view.stride(0) // unit) if unit and view.stride(0) % unit == 0 else None
    )


def _split_view(view: torch.Tensor, size: int, split: BlockSplit, num_blocks: int) -> torch.Tensor:
    count = (num_blocks - 1) * split.ids_per_block + split.blocks_per_block
    if count > torch.iinfo(torch.int32).max:
        raise ContractError(
            f"a cache of {num_blocks} blocks would need block ids up to {count}, beyond int32: use "
            f"larger kernel blocks",
            rule="P3",
        )
    strides = (size * view.stride(1), view.stride(1), view.stride(2), view.stride(3))
    return view.as_strided(
        (count, size, view.shape[2], view.shape[3]), strides, view.storage_offset()
    )
