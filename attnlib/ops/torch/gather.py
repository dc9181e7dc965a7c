"""Copy or view the blocks of a request as consecutive rows.

The gather is what paged attention costs more than attention over contiguous keys. Blocks that are
consecutive in memory are therefore returned as a view; others are copied in the memory order head,
position, element, which fused attention reads fastest. Only the given block ids are dereferenced
(P3); torch computes addresses in 64 bits (P6).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["BlockBuffer", "Scratch", "consecutive_blocks", "gather_blocks", "request_positions"]


def consecutive_blocks(cache: Tensor, blocks: Tensor) -> Tensor | None:
    """The blocks as one view `[n * N, Hkv, D]` if they are consecutive in memory, otherwise None.

    Reads the ids on the host: for CPU tensors only.
    """
    num_blocks, block_size = blocks.numel(), cache.shape[1]
    if num_blocks == 0 or (num_blocks > 1 and cache.stride(0) != block_size * cache.stride(1)):
        return None
    first = int(blocks[0])
    ascending = torch.arange(first, first + num_blocks, dtype=blocks.dtype, device=blocks.device)
    if num_blocks > 1 and not torch.equal(blocks, ascending):
        return None
    shape = (num_blocks * block_size, cache.shape[2], cache.shape[3])
    return cache[first].as_strided(shape, cache.stride()[1:])


def gather_blocks(cache: Tensor, blocks: Tensor) -> Tensor:
    """A copy of the blocks, `[n * N, Hkv, D]`, in the memory order head, position, element."""
    return BlockBuffer([cache], blocks.numel(), Scratch(cache.device)).load(blocks)[0]


class Scratch:
    """Memory that the buffers of one call share; it grows to the largest of them.

    Each call of an operation allocates its own, so calls never share buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, num_bytes: int) -> Tensor:
        """`[num_bytes]` uint8, uninitialized; overlaps what earlier calls of `take` returned."""
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._memory.device)
        return self._memory[:num_bytes]


class BlockBuffer:
    """Copies of `num_blocks` blocks of each cache, in the memory order head, position, element.

    Attributes:
        rows: for each cache a view `[num_blocks * N, Hkv, D]` of the copies.
    """

    def __init__(self, caches: list[Tensor], num_blocks: int, scratch: Scratch) -> None:
        shapes = [(cache.shape[2], num_blocks, cache.shape[1], cache.shape[3]) for cache in caches]
        sizes = [
            math.prod(shape) * cache.element_size()
            for shape, cache in zip(shapes, caches, strict=True)
        ]
        memory = scratch.take(sum(_aligned(size) for size in sizes))
        self._copies: list[tuple[Tensor, Tensor]] = []
        self.rows: list[Tensor] = []
        begin = 0
        for cache, shape, size in zip(caches, shapes, sizes, strict=True):
            rows = memory[begin : begin + size].view(cache.dtype).view(shape)
            # float8 as uint8: index_select is not implemented for float8 on every device.
            source, target = (
                side.view(torch.uint8) if side.element_size() == 1 else side
                for side in (cache, rows)
            )
            self._copies.append((source, target.permute(1, 2, 0, 3)))
            self.rows.append(rows.view(shape[0], num_blocks * shape[2], shape[3]).transpose(0, 1))
            begin += _aligned(size)

    def load(self, blocks: Tensor) -> list[Tensor]:
        """Copy `num_blocks` blocks; returns `rows`, which is valid until the next load."""
        if blocks.numel() > 0:
            for source, target in self._copies:
                torch.index_select(source, 0, blocks, out=target)
        return self.rows


def request_positions(cache: Tensor, table_row: Tensor, start: int, end: int) -> Tensor:
    """Positions `[start, end)` of one request, `[end - start, Hkv, D]`: a view where possible."""
    block_size = cache.shape[1]
    first = start // block_size
    blocks = table_row[first : -(-end // block_size)]
    rows = consecutive_blocks(cache, blocks) if cache.device.type == "cpu" else None
    if rows is None:
        rows = gather_blocks(cache, blocks)
    return rows[start - first * block_size : end - first * block_size]


def _aligned(size: int) -> int:
    """`size` rounded up to a cache line of 64 bytes."""
    return -(-size // 64) * 64
