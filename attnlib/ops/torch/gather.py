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

__all__ = ["contiguous_run", "gather_blocks", "gather_memory", "request_positions"]

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


def gather_blocks(cache: Tensor, blocks: Tensor, memory: Tensor | None = None) -> Tensor:
    """A copy of the pages, `[n * N, Hkv, D]` as a view of memory in the order head, position, element.

    `memory` is one-dimensional, uint8 and large enough for the copy; None allocates.
    """
    num_blocks, (_, block_size, num_heads, head_size) = blocks.numel(), cache.shape
    shape = (num_heads, num_blocks, block_size, head_size)
    if memory is None:
        rows = torch.empty(shape, dtype=cache.dtype, device=cache.device)
    else:
        rows = memory[: math.prod(shape) * cache.element_size()].view(cache.dtype).view(shape)
    if num_blocks > 0:
        # As integers, because not every device selects one-byte floats.
        source, target = (side.view(torch.uint8) if side.element_size() == 1 else side for side in (cache, rows))
        torch.index_select(source, 0, blocks, out=target.permute(1, 2, 0, 3))
    return rows.view(num_heads, num_blocks * block_size, head_size).transpose(0, 1)


def gather_memory(num_bytes: int) -> Tensor:
    """Scratch on the CPU, `[num_bytes]` uint8, the same for every call of a thread: use it up before asking again.

    An allocator hands a buffer of megabytes back to the system, and faulting it in anew at every call costs as much as
    the gathering. Larger requests than `_KEPT_BYTES` are allocated and not kept.
    """
    if num_bytes > _KEPT_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8)
    kept: Tensor | None = getattr(_kept, "memory", None)
    if kept is None or kept.numel() < num_bytes:
        kept = _kept.memory = torch.empty(num_bytes, dtype=torch.uint8)
    return kept[:num_bytes]


def request_positions(cache: Tensor, table_row: Tensor, start: int, end: int) -> Tensor:
    """Positions `[start, end)` of one request and no others, `[end - start, Hkv, D]`; a view where possible."""
    block_size = cache.shape[1]
    first = start // block_size
    blocks = table_row[first : -(-end // block_size)]
    rows = contiguous_run(cache, blocks) if cache.device.type == "cpu" else None
    if rows is None:
        rows = gather_blocks(cache, blocks)
    return rows[start - first * block_size : end - first * block_size]
