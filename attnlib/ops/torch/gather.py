"""From pages to rows.

Gathering is what paged attention costs more than the contiguous kind, so it is done as seldom and as cheaply as torch
allows: pages that follow each other in memory are a view, and the others are copied as `[Hkv, positions, D]`,
which fused attention reads fastest. Only the block ids that are passed in are dereferenced (P3); torch computes
addresses in 64 bits (P6).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["PageBuffer", "Scratch", "contiguous_run", "gather_blocks", "request_positions"]


def contiguous_run(cache: Tensor, blocks: Tensor) -> Tensor | None:
    """The pages as one view `[n * N, Hkv, D]`, when their ids count upwards and the layout puts pages in a row.

    Otherwise None. Reads the ids on the host: call it for CPU tensors only.
    """
    num_blocks, block_size = blocks.numel(), cache.shape[1]
    if num_blocks == 0 or (num_blocks > 1 and cache.stride(0) != block_size * cache.stride(1)):
        return None
    first = int(blocks[0])
    if num_blocks > 1 and not torch.equal(
        blocks, torch.arange(first, first + num_blocks, dtype=blocks.dtype)
    ):
        return None
    shape = (num_blocks * block_size, cache.shape[2], cache.shape[3])
    return cache[first].as_strided(shape, cache.stride()[1:])


def gather_blocks(cache: Tensor, blocks: Tensor) -> Tensor:
    """A copy of the pages, `[n * N, Hkv, D]` as a view of memory in the order head, position, element."""
    return PageBuffer([cache], blocks.numel(), Scratch(cache.device)).load(blocks)[0]


class Scratch:
    """Memory of one call: grows to what is asked for, and whoever takes next overwrites what was taken before.

    It belongs to the call that made it, so that no call ever meets the pages of another.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, num_bytes: int) -> Tensor:
        """`[num_bytes]` uint8, aligned as the allocator aligns, with anything in it."""
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._memory.device)
        return self._memory[:num_bytes]


class PageBuffer:
    """Room for copies of `num_pages` pages from each cache, in the order head, position, element."""

    def __init__(self, caches: list[Tensor], num_pages: int, scratch: Scratch) -> None:
        shapes = [(cache.shape[2], num_pages, cache.shape[1], cache.shape[3]) for cache in caches]
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
            # One-byte floats as integers, because not every device selects them.
            source, target = (
                side.view(torch.uint8) if side.element_size() == 1 else side
                for side in (cache, rows)
            )
            self._copies.append((source, target.permute(1, 2, 0, 3)))
            self.rows.append(rows.view(shape[0], num_pages * shape[2], shape[3]).transpose(0, 1))
            begin += _aligned(size)

    def load(self, blocks: Tensor) -> list[Tensor]:
        """Copy these pages, exactly as many as there is room for; `[n * N, Hkv, D]` from each cache, until the next load."""
        if blocks.numel() > 0:
            for source, target in self._copies:
                torch.index_select(source, 0, blocks, out=target)
        return self.rows


def request_positions(cache: Tensor, table_row: Tensor, start: int, end: int) -> Tensor:
    """Positions `[start, end)` of one request and no others, `[end - start, Hkv, D]`; a view where possible."""
    block_size = cache.shape[1]
    first = start // block_size
    blocks = table_row[first : -(-end // block_size)]
    rows = contiguous_run(cache, blocks) if cache.device.type == "cpu" else None
    if rows is None:
        rows = gather_blocks(cache, blocks)
    return rows[start - first * block_size : end - first * block_size]


def _aligned(size: int) -> int:
    return -(-size // 64) * 64
