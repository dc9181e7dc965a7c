"""Host side of the batch-invariant Hopper kernels (M15): which layers, tiles, grid and workspace.

A layer uses them for all batches or for none, because other kernels give other bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
from torch import Tensor

from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.hopper_tiles import HopperTile, padded_width
from attnlib.ops.triton.hopper.decode_grid import decode_columns
from attnlib.ops.triton.hopper.decode_launches import PDL_OPTIONS, HopperDecode, call_numbers
from attnlib.ops.triton.hopper.decode_plan import decode_config
from attnlib.ops.triton.hopper.descriptors import CacheView
from attnlib.ops.triton.hopper.invariant_grid import (
    invariant_block_n,
    invariant_slots,
    invariant_workers,
    split_tile,
)
from attnlib.ops.triton.hopper.kernels.decode_call import DecodeConfig
from attnlib.ops.triton.hopper.kernels.invariant_decode import invariant_decode_kernel
from attnlib.ops.triton.hopper.kernels.invariant_split import invariant_split_kernel
from attnlib.ops.triton.hopper.kernels.invariant_window import invariant_window_kernel
from attnlib.ops.triton.hopper.prefill_plan import HopperPrefill, prepare_hopper_prefill
from attnlib.ops.triton.launch.bound import BoundLaunch

__all__ = [
    "hopper_invariant_bytes",
    "prepare_hopper_invariant_decode",
    "prepare_hopper_invariant_prefill",
]

_THREE_CONSUMERS = triton.__version__.startswith("3.6.")
"""Whether prefills with narrow heads have three consumer warpgroups. Triton 3.9 compiles them with
spills in the loops over keys."""


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
    workers = invariant_workers(num_kv_heads, limits.num_sms)
    partials = workers * (invariant_slots(num_segments, limits) + 1) * rows
    return 4 * (partials * (head_size_v + 2) + 8 * num_tokens * num_kv_heads)


def prepare_hopper_invariant_prefill(call: AttentionCall) -> HopperPrefill:
    """The launch of prefills like this one."""
    query, key, value, params = call.query, call.key, call.value, call.params
    # Wide heads have one query tile: the sums over earlier segments take the place of the second.
    head_sizes = key.shape[3], value.shape[3]
    q_stages = 2 if max(head_sizes) <= 64 else 1
    block_n, group = invariant_block_n(head_sizes, params), query.shape[1] // key.shape[2]
    stages = 2 if max(head_sizes) > 128 else 256 // block_n
    tile = HopperTile(block_n, stages, staged_store=True, persistent=True, q_stages=q_stages)
    if block_n == 64 and max(head_sizes) <= 64 and 64 % group == 0:
        # A work item has three steps, each of which waits for products, loads and barriers. Three
        # CTAs per multiprocessor hide more of this than two consumers with one loader.
        tile = replace(tile, consumers=1, producer_registers=24, stages=2, ctas_per_sm=3)
    elif _THREE_CONSUMERS and max(head_sizes) <= 64 and block_n == 128 and 64 % group == 0:
        # Narrow heads leave registers for a third consumer. It changes no bits.
        tile = replace(tile, consumers=3, consumer_registers=160, producer_registers=24)
    return prepare_hopper_prefill(call, tile, invariant=True)


def prepare_hopper_invariant_decode(
    call: AttentionCall, max_query_len: int, num_segments: int, max_ctas: int | None = None
) -> HopperDecode:
    """The launches of decodes like this one.

    Args:
        call: over 16-bit pages.
        max_query_len: upper bound of the query lengths, at least 1.
        num_segments: upper bound of the segments of a request.
        max_ctas: CTAs that may run at a time; None means one per SM.
    """
    params, limits = call.params, call.limits
    assert call.is_paged and not isinstance(params.k_scale, Tensor)
    num_blocks, _, num_kv_heads, head_size_v = call.value.shape
    config, slots = _config(call, max_query_len), invariant_slots(num_segments, limits)
    rows = config.GROUP * max_query_len
    workers = invariant_workers(num_kv_heads, max_ctas or limits.num_sms)
    partials = workers * (slots + 1) * rows
    box = min(config.BLOCK_SIZE, config.BLOCK_N)
    return HopperDecode(
        limits=limits,
        index=call.query.get_device(),
        views=(
            CacheView.of(call.key, box, config.WIDTH),
            CacheView.of(call.value, box, config.WIDTH_V),
        ),
        packed=False,
        scale=params.scale * float(params.k_scale),
        is_quantized=False,
        score_sizes=(),
        last_strides=(),
        numbers=(*call_numbers(call, num_blocks, rows), slots),
        combine_tail=(
            *(call.num_reqs, rows, slots, workers),
            *(*call.out.stride()[:2], call.lse_stride),
        ),
        lse_offset=partials * head_size_v,
        header_offset=partials * (head_size_v + 2),
        workspace_bytes=hopper_invariant_bytes(
            call.num_tokens,
            call.query.shape[1],
            num_kv_heads,
            head_size_v,
            max_query_len,
            num_segments,
            limits,
        ),
        attend=_attend_launch(call, config, workers),
        combine=None if _computes_whole_requests(config) else _split_launch(call, config, slots),
    )


def _computes_whole_requests(config: DecodeConfig) -> bool:
    """Whether a CTA computes a request: its queries see so few keys that dividing these and adding
    partial results would take longer."""
    return config.BLOCK_N == 64 and max(config.WIDTH, config.WIDTH_V) <= 128


def _config(call: AttentionCall, max_query_len: int) -> DecodeConfig:
    """The constants of both kernels."""
    _, block_size, num_kv_heads, head_size_v = call.value.shape
    _, num_heads, head_size = call.query.shape
    group = num_heads // num_kv_heads
    width, width_v = padded_width(head_size), padded_width(head_size_v)
    columns = decode_columns(group * max_query_len)
    config = decode_config(
        call.params,
        call.lse is not None,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        D=head_size,
        DV=head_size_v,
        WIDTH=width,
        WIDTH_V=width_v,
        TILE_TOKENS=columns // group,
        BLOCK_N=invariant_block_n((head_size, head_size_v), call.params),
        BLOCK_SIZE=block_size,
        ROWS=columns,
        STAGES=3 if max(width, width_v) <= 64 else 2,
    )
    # A window of 128 keys lies in up to three tiles.
    return config._replace(STAGES=3) if _computes_whole_requests(config) else config


def _attend_launch(call: AttentionCall, config: DecodeConfig, workers: int) -> BoundLaunch:
    """The launch of the kernel that attends."""
    options = {"num_warps": 4, **PDL_OPTIONS}
    if _computes_whole_requests(config):
        # The grid must not be empty.
        grid = (max(1, call.num_reqs) * config.NUM_KV_HEADS, 1, 1)
        return BoundLaunch(invariant_window_kernel, grid, {"CONFIG": config, **options})
    return BoundLaunch(
        invariant_decode_kernel, (workers, 1, 1), {"CONFIG": config, "maxnreg": 240, **options}
    )


def _split_launch(call: AttentionCall, config: DecodeConfig, slots: int) -> BoundLaunch:
    """The launch of the kernel that adds partial results."""
    num_heads = call.query.shape[1]
    tile = split_tile(call.num_tokens * num_heads, config.GROUP, config.DV, slots)
    options: dict[str, Any] = {
        "NUM_KV_HEADS": config.NUM_KV_HEADS,
        "GROUP": config.GROUP,
        "DV": config.DV,
        "HAS_SINK": config.HAS_SINK,
        "HAS_LSE": config.HAS_LSE,
        **tile,
        **PDL_OPTIONS,
    }
    blocks = -(-config.DV // tile["COLUMNS"])
    grid = (call.num_tokens, num_heads // tile["HEADS"], blocks)
    return BoundLaunch(invariant_split_kernel, grid, options)
