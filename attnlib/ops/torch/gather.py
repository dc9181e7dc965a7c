"""From pages to rows.

Gathering is what paged attention costs more than the contiguous kind, so it is done as seldom and as cheaply as torch
allows: pages that follow each other in memory are a view, and the others are copied as `[Hkv, positions, D]`,
which fused attention reads fastest. Only the block ids that are passed in are dereferenced (P3); torch computes
addresses in 64 bits (P6).
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

__all__ = ["PageBuffer", "contiguous_run", "gather_pages", "read_pages"]

# The largest scratch that a thread keeps; what is larger is allocated for the call.
_KEPT_BYTES = 256 << 20
_kept = threading.local()


def contiguous_run(cache: Tensor, blocks: Tensor) -> Tensor | None:
    """The pages as one view `[n * N, Hkv, D]`, when their ids count upwards and the layout puts pages in a row.

    Otherwise None. Reads the ids on the host: call it for CPU tensors only.
    """
    num_blocks, block_size = blocks.numel(), cache.shape[1]
    if num_blocks == 0 or (num_blocks > 1 and cache.stride(0) != block_size * cache.stride(1)):
        return None
    first = int(blocks[0])
    if num_blocks > 1 and not torch.equal(blocks, torch.arange(first, first + num_blocks, dtype=blocks.dtype)):
        return None
    shape = (num_blocks * block_size, cache.shape[2], cache.shape[3])
    return cache[first].as_strided(shape, cache.stride()[1:])


def read_pages(caches: list[Tensor], blocks: Tensor) -> list[Tensor]:
    """The pages from each cache, `[n * N, Hkv, D]`: views where their ids allow it on a CPU, copies otherwise."""
    if blocks.device.type == "cpu":
        views = [contiguous_run(cache, blocks) for cache in caches]
        if all(view is not None for view in views):
            return [view for view in views if view is not None]
    return gather_pages(caches, blocks)


def gather_pages(caches: list[Tensor], blocks: Tensor) -> list[Tensor]:
    """Copies of the pages from each cache, `[n * N, Hkv, D]`; on a CPU the thread's next gather overwrites them."""
    return PageBuffer(caches, blocks.numel()).load(blocks)


class PageBuffer:
    """Room for the copies of `num_pages` pages from each cache, in the order head, position, element.

    On a CPU the memory is the thread's own and the next buffer shares it: an allocator hands megabytes back to the
    system, and faulting them in anew at every call costs as much as the gathering.
    """

    def __init__(self, caches: list[Tensor], num_pages: int) -> None:
        shapes = [(cache.shape[2], num_pages, cache.shape[1], cache.shape[3]) for cache in caches]
        sizes = [math.prod(shape) * cache.element_size() for shape, cache in zip(shapes, caches, strict=True)]
        memory = _scratch(sum(_aligned(size) for size in sizes), caches[0].device)
        self._copies: list[tuple[Tensor, Tensor]] = []
        self.rows: list[Tensor] = []
        begin = 0
        for cache, shape, size in zip(caches, shapes, sizes, strict=True):
            rows = memory[begin : begin + size].view(cache.dtype).view(shape)
            # One-byte floats as integers, because not every device selects them.
            source, target = (side.view(torch.uint8) if side.element_size() == 1 else side for side in (cache, rows))
            self._copies.append((source, target.permute(1, 2, 0, 3)))
            self.rows.append(rows.view(shape[0], num_pages * shape[2], shape[3]).transpose(0, 1))
            begin += _aligned(size)

    def load(self, blocks: Tensor) -> list[Tensor]:
        """Copy these pages, as many as there is room for; `[n * N, Hkv, D]` from each cache."""
        if blocks.numel() > 0:
            for source, target in self._copies:
                torch.index_select(source, 0, blocks, out=target)
        return self.rows


def _scratch(num_bytes: int, device: torch.device) -> Tensor:
    if device.type != "cpu" or num_bytes > _KEPT_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    kept: Tensor | None = getattr(_kept, "memory", None)
    if kept is None or kept.numel() < num_bytes:
        kept = _kept.memory = torch.empty(num_bytes, dtype=torch.uint8)
    return kept[:num_bytes]


def _aligned(size: int) -> int:
    return -(-size // 64) * 64
