"""Rows of expanded prefills: which latents of a batch and of its context are expanded together."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from attnlib.metadata.paged import PagedMetadata

__all__ = ["BLOCK", "Rows", "gather", "plan_rows"]

BLOCK = 128
"""Block size of expanded keys, a multiple of which each request occupies."""
_ALIGNED = 64
"""Bytes: a multiple of what kernels are specialized on."""


class Rows(NamedTuple):
    """Rows of several requests in blocks: each request begins a block. The rest of its last block
    holds other rows, which nobody reads.

    Attributes:
        place: int64. Of new tokens `[rows]`, the token of each row in the batch. Of context, by
            block: `[blocks, 1]` its request, `[blocks, pieces]` the columns of the block table, and
            where blocks of the cache are longer than a piece, the piece in them.
        table: `[R, most blocks]` int32.
        lengths: `[R]` int32, rows of each request; `lengths_cpu` is its host copy.
        longest: the longest request.
        counters: `[2]` int32 zeros, with which the kernel distributes work.
    """

    place: tuple[Tensor, ...]
    table: Tensor
    lengths: Tensor
    lengths_cpu: Tensor
    longest: int
    counters: Tensor


class _Plan(NamedTuple):
    """The rows of a batch, and the lengths on the host from which they follow."""

    starts: Tensor
    seq_lens: Tensor
    rows: list[Rows]


def gather(keys: Tensor, table: Tensor, place: tuple[Tensor, ...]) -> Tensor:
    """The latents `[rows, D]` of a chunk of context, from the key cache by the block table."""
    requests, columns, *inner = place
    blocks = table[requests, columns]
    if not inner:
        return keys[blocks].flatten(0, 3)
    piece = BLOCK // columns.shape[1]
    pieces = keys.view(keys.shape[0], -1, piece, *keys.shape[2:])
    return pieces[blocks, inner[0]].flatten(0, 3)


def plan_rows(batch: PagedMetadata, context_tokens: int, block_size: int) -> list[Rows]:
    """The new tokens of a batch, then the chunks of its context; arranged once for all layers, and
    again where lengths have changed in place.

    Args:
        batch: prefills with lengths on the host.
        context_tokens: latents of the context in a chunk, at most, or one block of each request.
        block_size: of the cache.
    """
    assert batch.query_start_loc_cpu is not None and batch.seq_lens_cpu is not None
    given = batch.query_start_loc_cpu, batch.seq_lens_cpu
    key = "expanded prefills", context_tokens, block_size
    found: _Plan | None = batch.plans.get(key)
    if found is not None and all(map(torch.equal, found[:2], given)):
        return found.rows
    starts, seq_lens = (each.clone() for each in given)
    begins, device = starts.long(), batch.query_start_loc.device
    counts = begins.diff()
    contexts = seq_lens - counts
    step = context_tokens // max(1, int(contexts.count_nonzero()))
    step = max(1, step // BLOCK) * BLOCK
    rows = [_in_blocks(begins[:-1], counts, None, device)]
    for first in range(0, int(contexts.amax()), step):
        firsts, lengths = torch.full_like(contexts, first), (contexts - first).clamp(0, step)
        rows.append(_in_blocks(firsts, lengths, block_size, device))
    batch.plans[key] = _Plan(starts, seq_lens, rows)
    return rows


def _in_blocks(
    firsts: Tensor, lengths: Tensor, block_size: int | None, device: torch.device
) -> Rows:
    """Rows of requests in blocks.

    Args:
        firsts, lengths: `[R]` int64 on the host, the first row of each request and how many.
        block_size: of the cache that has the rows, whose `firsts` are multiples of `BLOCK`; None
            for rows of the batch.
        device: of the batch.
    """
    blocks = (lengths + (BLOCK - 1)) // BLOCK
    blocks[0] += not blocks.any()  # one block that nobody reads
    begins = blocks.cumsum(0) - blocks
    columns = torch.arange(int(blocks.amax()), device="cpu")
    table = torch.where(columns < blocks[:, None], begins[:, None] + columns, 0)
    requests = torch.arange(len(blocks), device="cpu").repeat_interleave(blocks)
    piece = 1 if block_size is None else math.gcd(block_size, BLOCK)
    rows = torch.arange(0, len(requests) * BLOCK, piece, device="cpu").view(len(requests), -1)
    rows -= begins[requests, None] * BLOCK
    tokens = firsts[requests, None] + torch.where(rows < lengths[requests, None], rows, 0)
    if block_size is None:
        place = [tokens.flatten()]
    else:
        place = [requests[:, None], tokens // block_size]
        if piece < block_size:
            place.append(tokens % block_size // piece)
    lengths_cpu, zeros = lengths.int(), torch.zeros(2, dtype=torch.int32, device="cpu")
    there = _copies([table.int(), lengths_cpu, zeros, *place], device)
    return Rows(tuple(there[3:]), there[0], there[1], lengths_cpu, int(lengths.amax()), there[2])


def _copies(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Contiguous tensors of int32 and int64 of the host on a device, by one copy. Each begins on a
    multiple of `_ALIGNED` bytes, as one of its own would."""
    ends = list(accumulate(-(-each.nbytes // _ALIGNED) * _ALIGNED for each in tensors))
    begins = [0, *ends][:-1]

    def parts(memory: Tensor) -> list[Tensor]:
        of_size = {4: memory.view(torch.int32), 8: memory}
        return [
            of_size[size := each.itemsize].as_strided(each.shape, each.stride(), begin // size)
            for begin, each in zip(begins, tensors, strict=True)
        ]

    # From pinned memory: other copies of this size wait for the kernels before them.
    pinned = device.type == "cuda"
    host = torch.empty(ends[-1] // 8, dtype=torch.int64, device="cpu", pin_memory=pinned)
    for part, each in zip(parts(host), tensors, strict=True):
        part.copy_(each)
    there = host.to(device, non_blocking=True)
    return parts(there)
