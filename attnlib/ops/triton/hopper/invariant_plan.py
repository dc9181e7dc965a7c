"""Host side of the batch-invariant Hopper kernels (M15): which layers, tiles, grid and workspace.

A layer uses them for all batches or for none, because other kernels give other bits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.hopper_tiles import HopperTile, padded_width
from attnlib.ops.triton.heuristics.invariant_tiles import combine_columns, segment_keys
from attnlib.ops.triton.hopper.decode_plan import HopperDecode, unbounded, workers_per_head
from attnlib.ops.triton.hopper.descriptors import CacheView
from attnlib.ops.triton.hopper.kernels.invariant_decode import (
    invariant_decode_kernel,
    invariant_split_kernel,
)
from attnlib.ops.triton.hopper.prefill_plan import HopperPrefill, prepare_hopper_prefill
from attnlib.ops.triton.launch.attention import BatchTensors
from attnlib.ops.triton.launch.bound import BoundLaunch

__all__ = [
    "hopper_invariant_bytes", "prepare_hopper_invariant_decode", "prepare_hopper_invariant_prefill",
]  # fmt: skip

_BLOCK_N = 128
"""Keys of a tile, in both kernels: the sums of weights are written for this number."""
_STEP = 16
"""Partial results that the second kernel loads at a time."""


def _workers(num_kv_heads: int, limits: DeviceLimits) -> int:
    return workers_per_head(limits.num_sms, num_kv_heads, 1) * num_kv_heads


def hopper_invariant_bytes(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_size_v: int,
    max_query_len: int,
    num_segments: int,
    limits: DeviceLimits,
) -> int:
    """Workspace in bytes of a decode: partial results of each CTA, and headers.

    Args:
        num_tokens: query tokens.
        max_query_len: upper bound of the query lengths.
        num_segments: upper bound of the segments of a request.
        limits: the chip.
    """
    rows = num_heads // num_kv_heads * max_query_len
    partials = _workers(num_kv_heads, limits) * (num_segments + 1) * rows
    return 4 * (partials * (head_size_v + 2) + 4 * num_tokens * num_kv_heads)


def prepare_hopper_invariant_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    batch: BatchTensors,
    params: AttentionParams,
    limits: DeviceLimits,
) -> HopperPrefill:
    """The launch of prefills like this one."""
    # One query tile: the sums over earlier segments take the place of the second one.
    tile = HopperTile(_BLOCK_N, 2, persistent=True)
    return prepare_hopper_prefill(
        query, key, value, out, lse, batch, params, tile, limits, segment=segment_keys(limits)
    )


def prepare_hopper_invariant_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    batch: BatchTensors,
    params: AttentionParams,
    limits: DeviceLimits,
    max_query_len: int,
    num_segments: int,
) -> HopperDecode:
    """The launches of decodes like this one.

    Args:
        max_query_len: upper bound of the query lengths, at least 1.
        num_segments: upper bound of the segments of a request.
    """
    num_tokens, num_heads, head_size = query.shape
    num_blocks, block_size, num_kv_heads, head_size_v = value.shape
    table = batch.block_table
    assert table is not None and not isinstance(params.k_scale, Tensor)
    group, (left, right) = num_heads // num_kv_heads, params.window
    width, width_v = padded_width(head_size), padded_width(head_size_v)
    rows = group * max_query_len
    columns = max(8, 1 << (rows - 1).bit_length())
    workers, num_reqs = _workers(num_kv_heads, limits), batch.seq_lens.shape[0]
    partials = workers * (num_segments + 1) * rows
    chunk, cap = params.attention_chunk_size, params.logits_soft_cap
    box = min(block_size, _BLOCK_N)
    shared: dict[str, Any] = {
        "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "DV": head_size_v,
        "HAS_SINK": params.sinks is not None, "HAS_LSE": lse is not None,
        "enable_fp_fusion": True, "launch_pdl": True,
    }  # fmt: skip
    attend = {
        **shared, "D": head_size, "WIDTH": width, "WIDTH_V": width_v,
        "TILE_TOKENS": columns // group, "BLOCK_N": _BLOCK_N, "BLOCK_SIZE": block_size,
        "ROWS": columns, "STAGES": 3 if max(width, width_v) <= 64 else 2,
        "SEGMENT": segment_keys(limits), "CAUSAL": bool(params.causal), "HAS_LEFT": left >= 0,
        "HAS_RIGHT": right >= 0, "HAS_CHUNK": chunk > 0, "HAS_CAP": cap > 0, "num_warps": 4,
        "maxnreg": 240,
    }  # fmt: skip
    columns_v = combine_columns(head_size_v)
    split = {**shared, "COLUMNS": columns_v, "STEP": _STEP, "num_warps": 1}
    stride_lt = 0 if lse is None else lse.stride(0)
    return HopperDecode(
        limits=limits,
        index=query.get_device(),
        views=(CacheView.of(key, box, width), CacheView.of(value, box, width_v)),
        packed=False,
        scale=params.scale * float(params.k_scale),
        is_quantized=False,
        score_sizes=(),
        numbers=(
            float(cap), unbounded(left), unbounded(right), unbounded(chunk),
            num_reqs, num_tokens, num_blocks, rows, query.stride(0), query.stride(1),
            out.stride(0), out.stride(1), stride_lt, table.stride(0), num_segments,
        ),
        combine_tail=(
            num_reqs, rows, num_segments, workers, out.stride(0), out.stride(1), stride_lt
        ),
        lse_offset=partials * head_size_v,
        header_offset=partials * (head_size_v + 2),
        workspace_bytes=hopper_invariant_bytes(
            num_tokens, num_heads, num_kv_heads, head_size_v, max_query_len, num_segments, limits
        ),
        attend=BoundLaunch(invariant_decode_kernel, (workers, 1, 1), attend),
        combine=BoundLaunch(
            invariant_split_kernel, (num_tokens, num_heads, -(-head_size_v // columns_v)), split
        ),
    )  # fmt: skip
