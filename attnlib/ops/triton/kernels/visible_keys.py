"""Compact the keys that single queries see into a block table. One program per row."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["visible_keys_kernel"]


@triton.jit(
    do_not_specialize=["num_keys", "width", "row_distance", "stride_visible", "stride_table"],
    do_not_specialize_on_alignment=["visible", "table", "lengths", "starts"],
)
def visible_keys_kernel(
    visible,
    table,
    lengths,
    starts,
    num_keys,
    width,
    row_distance,
    stride_visible,
    stride_table,
    BLOCK: tl.constexpr,
):
    """Write ids of visible keys in order, -1 behind them, and their number. Grid: (rows)."""
    row = tl.program_id(0)
    visible += row.to(tl.int64) * stride_visible
    table += row.to(tl.int64) * stride_table
    count = 0
    for base in range(0, num_keys, BLOCK):
        columns = base + tl.arange(0, BLOCK)
        seen = tl.load(visible + columns, mask=columns < num_keys, other=0).to(tl.int32)
        rank = count + tl.cumsum(seen, 0) - 1
        tl.store(table + rank, row * row_distance + columns, mask=(seen > 0) & (rank < width))
        count += tl.sum(seen, 0)
    for base in range(count // BLOCK * BLOCK, width, BLOCK):
        rest = base + tl.arange(0, BLOCK)
        tl.store(table + rest, -1, mask=(rest >= count) & (rest < width))
    tl.store(lengths + row, tl.minimum(count, width))
    tl.store(starts + row + 1, row + 1)
    tl.store(starts, 0, mask=row == 0)
