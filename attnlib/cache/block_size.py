"""One pool for backends that want blocks of different sizes: a common size is negotiated, and the manager's blocks are cut into kernel blocks.

Who manages memory wants large blocks, kernels want theirs (16 for one, a multiple of 256 for another). A manager block of N tokens is also N / k
kernel blocks of k tokens, wherever it lies: only the table has to say so. Nothing is copied; the cut cache is a view, in every layout.
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
    """The largest kernel block size that everyone takes and that divides the manager's blocks.

    Args:
        demands: (who, block sizes that it takes) for each layer or backend.
        manager_block_size: tokens in one block as memory is managed.

    Raises:
        LayoutMismatchError: there is none; the message names everyone's demand and a manager block size that would satisfy all.
    """
    if manager_block_size < 1:
        raise ContractError(f"manager_block_size={manager_block_size} must be at least 1")
    for size in range(manager_block_size, 0, -1):
        if manager_block_size % size == 0 and all(size in sizes for _, sizes in demands):
            return size
    named = "; ".join(f"{who} takes {sizes}" for who, sizes in demands)
    better = _satisfying(demands, manager_block_size)
    advice = (
        f"use blocks of {better} tokens"
        if better
        else "no block size satisfies all of them: choose other backends"
    )
    raise LayoutMismatchError(
        f"no common block size divides the manager's blocks of {manager_block_size} tokens: {named}; {advice}"
    )


def _satisfying(demands: Sequence[tuple[str, Sizes]], at_least: int) -> int | None:
    """The smallest size from `at_least` up that everyone takes as it is; else the smallest of all; None when there is none."""
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
    """How block ids of a cut cache follow from the manager's.

    Attributes:
        parts: kernel blocks in one manager block.
        ids_per_block: how far apart the ids of two neighbouring manager blocks are; their own kernel blocks are numbered one after the other.
    """

    parts: int
    ids_per_block: int

    def expand(self, block_table: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The table of kernel blocks, `[R, max_blocks * parts]` int32, from the manager's `[R, max_blocks]`; undefined entries stay undefined (P3).

        Args:
            block_table: int32, any device.
            out: where to write; None allocates.
        """
        offsets = torch.arange(self.parts, dtype=torch.int32, device=block_table.device)
        expanded = (block_table.unsqueeze(2) * self.ids_per_block + offsets).view(
            block_table.shape[0], -1
        )
        return expanded if out is None else out.copy_(expanded)


def split_blocks(cache: PagedKVCache, kernel_block_size: int) -> tuple[PagedKVCache, BlockSplit]:
    """`cache` seen in blocks of `kernel_block_size` tokens: a view, and how its ids follow from the manager's.

    Slots do not change their meaning in the cache that they were made for: keep writing through `cache`.

    Raises:
        ContractError: the kernel's block size does not divide the cache's.
        LayoutMismatchError: keys and values would need two tables (values of another size, interleaved with the keys).
    """
    if kernel_block_size < 1 or cache.block_size % kernel_block_size:
        raise ContractError(
            f"kernel_block_size={kernel_block_size} does not divide the cache's block_size={cache.block_size}"
        )
    parts = cache.block_size // kernel_block_size
    if parts == 1:
        return cache, BlockSplit(1, 1)
    splits = {
        _split(view, kernel_block_size, parts) for view in (cache.key_cache, cache.value_cache)
    }
    if len(splits) > 1 or None in splits:
        raise LayoutMismatchError(
            f"blocks of {cache!r} cannot be cut into blocks of {kernel_block_size} tokens with one table for keys and values: allocate it as NHD"
        )
    (split,) = splits
    assert split is not None  # checked just above
    views = [
        _cut(view, kernel_block_size, split, cache.num_blocks)
        for view in (cache.key_cache, cache.value_cache)
    ]
    return PagedKVCache.from_views(*views, k_scale=cache.k_scale, v_scale=cache.v_scale), split


def _split(view: torch.Tensor, size: int, parts: int) -> BlockSplit | None:
    """A part starts `size` tokens behind the last, and everything else is a multiple of that: in NHD a block is `parts` of them, in HND more."""
    unit = size * view.stride(1)
    if view.shape[0] == 1:
        return BlockSplit(parts, parts)
    return (
        BlockSplit(parts, view.stride(0) // unit) if unit and view.stride(0) % unit == 0 else None
    )


def _cut(view: torch.Tensor, size: int, split: BlockSplit, num_blocks: int) -> torch.Tensor:
    count = (num_blocks - 1) * split.ids_per_block + split.parts
    if count > torch.iinfo(torch.int32).max:
        raise ContractError(
            f"a cache of {num_blocks} blocks would need block ids up to {count}, beyond int32: use larger kernel blocks",
            rule="P3",
        )
    strides = (size * view.stride(1), view.stride(1), view.stride(2), view.stride(3))
    return view.as_strided(
        (count, size, view.shape[2], view.shape[3]), strides, view.storage_offset()
    )
