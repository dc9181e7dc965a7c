"""Slots of a step's tokens, computed on the device of the lengths without a synchronization."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["compute_slot_mapping"]


@torch.no_grad()
def compute_slot_mapping(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    num_tokens: int,
    out: Tensor | None = None,
) -> Tensor:
    """The slot of every query token: block * N + offset of its position (P3, P4).

    Query token i of a request has position seq_len - query_len + i.

    Args:
        query_start_loc: `[R + 1]` int32, the first query token of each request, never decreasing.
        seq_lens: `[R]` int32, context and this step's tokens.
        block_table: `[R, M]` int32.
        block_size: N, positions per block.
        num_tokens: number of slots. Rows at or past `query_start_loc[-1]` and positions outside the
            block table get -1.
        out: `[num_tokens]` int64, written when given.

    Returns:
        `[num_tokens]` int64; `out` if given.
    """
    device = query_start_loc.device
    slots = out if out is not None else torch.empty(num_tokens, dtype=torch.int64, device=device)
    num_requests, width = block_table.shape
    if num_tokens == 0 or num_requests == 0 or width == 0:
        return slots.fill_(-1)
    starts = query_start_loc.long()
    tokens = torch.arange(num_tokens, device=device)
    request = (torch.searchsorted(starts.contiguous(), tokens, right=True) - 1).clamp_(
        0, num_requests - 1
    )
    first_position = seq_lens.long() - (starts[1:] - starts[:-1])
    position = first_position[request] + tokens - starts[request]
    column = torch.div(position, block_size, rounding_mode="floor")
    addressable = (tokens < starts[-1]) & (column >= 0) & (column < width)
    block = block_table[request, column.clamp(0, width - 1)].long()
    slot = block * block_size + position % block_size
    return slots.copy_(torch.where(addressable & (block >= 0), slot, -1))
