"""Tiles and workspace slots of the batch-invariant Hopper decode (M15)."""

from __future__ import annotations

import math

from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.invariant_tiles import segment_keys
from attnlib.ops.triton.heuristics.tiles import next_power_of_2
from attnlib.ops.triton.hopper.decode_grid import workers_per_head
from attnlib.ops.triton.hopper.kernels.segments import query_rows, segment_table

__all__ = [
    "invariant_block_n",
    "invariant_slots",
    "invariant_workers",
    "split_tile",
]

_FEW_KEYS = 256
"""Visible keys up to which a layer has tiles of 64 keys."""

_FEW_ROWS, _MANY_ROWS = 256, 1024
"""Rows (tokens times query heads) up to which the second kernel has programs of 32 elements of the
values, for the most parallel loads, and of one head. With more rows, most have nothing to add."""


def invariant_block_n(head_sizes: tuple[int, int], params: AttentionParams) -> int:
    """Keys of a tile, in both kernels: the sums of weights are written for 128 and 64."""
    left, right = params.window[0], 0 if params.causal is True else params.window[1]
    few = left >= 0 and right >= 0 and left + right < _FEW_KEYS
    return (
        64 if few or 0 < params.attention_chunk_size <= _FEW_KEYS or max(head_sizes) > 128 else 128
    )


def invariant_workers(num_kv_heads: int, max_ctas: int) -> int:
    """CTAs of the decode, of which `max_ctas` run at a time."""
    return workers_per_head(max_ctas, num_kv_heads, 1) * num_kv_heads


def invariant_slots(num_segments: int, limits: DeviceLimits) -> int:
    """Upper bound of the segments of a row, given that of segments of `segment_keys`: the first
    queries of a request have shorter ones."""
    shorter: list[int] = [
        (position + query_rows(64, 1)) // keys + 1
        for position, keys in segment_table(128, 128)
        if keys < segment_keys(limits)
    ]
    return max([num_segments, *shorter])


def split_tile(num_rows: int, group: int, head_size_v: int, slots: int) -> dict[str, int]:
    """Tile of the kernel that adds partial results: heads of a program, elements of a value, and
    partial results that it loads at a time."""
    step = 8 if slots <= 12 else 16 if slots <= 17 else 32
    if num_rows <= _FEW_ROWS:
        return {"HEADS": 1, "COLUMNS": 32, "STEP": step, "num_warps": 1}
    columns = max(32, next_power_of_2(head_size_v))
    if num_rows <= _MANY_ROWS:
        return {"HEADS": 1, "COLUMNS": columns, "STEP": min(step, 16), "num_warps": 1}
    return {"HEADS": math.gcd(group, 4), "COLUMNS": columns, "STEP": 8, "num_warps": 1}
