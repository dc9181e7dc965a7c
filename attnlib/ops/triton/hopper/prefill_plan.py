"""Host side of the Hopper prefill: what a call needs of the kernels, their constants and grid.

`support.prefill_unsupported_reasons` lists what the kernel does not implement.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.heuristics.device import DeviceLimits, programmatic_launch
from attnlib.ops.triton.heuristics.hopper_tiles import (
    HopperTile,
)
from attnlib.ops.triton.heuristics.tiles import next_power_of_2
from attnlib.ops.triton.hopper.descriptors import (
    CacheView,
    QueryView,
    TransposedView,
)
from attnlib.ops.triton.hopper.kernels.consumer_state import BOUNDED
from attnlib.ops.triton.hopper.kernels.prefill import hopper_prefill_kernel
from attnlib.ops.triton.hopper.kernels.prefill_call import PrefillConfig
from attnlib.ops.triton.hopper.kernels.two_accumulators import LOADED_PARTS, PART_COLUMNS
from attnlib.ops.triton.hopper.kernels.value_columns import PART_ELEMENTS
from attnlib.ops.triton.hopper.prefill_geometry import PrefillGeometry
from attnlib.ops.triton.hopper.prefill_kernels import choose_kernel
from attnlib.ops.triton.hopper.prefill_launches import HopperPrefill
from attnlib.ops.triton.hopper.prefill_numbers import (
    cache_strides,
    call_strides,
    prefill_numbers,
    prefill_scales,
)
from attnlib.ops.triton.hopper.sizes import gathers
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.partials import Partials
from attnlib.ops.triton.launch.scales import kv_kind, scale_kind
from attnlib.ops.triton.launch.score import (
    range_constants,
    score_constants,
    tensor_sizes,
)

__all__ = ["QUERIES_IN_REGISTERS", "HopperPrefill", "prepare_hopper_prefill"]

QUERIES_IN_REGISTERS = triton.__version__.startswith("3.6.")
"""Whether prefills over float8, or with two accumulators, keep their queries in registers, which
leaves more of the shared memory's throughput to other reads. Triton 3.9 compiles them with spills
in the loops over keys."""

_MOST_BOUNDED_CAP = 64.0
"""Soft cap up to which bfloat16 weights need no running maximum (`softmax.bounded_softmax`). Its
tanh is too coarse for float16, whose range does not hold the weights either."""


def prepare_hopper_prefill(
    call: AttentionCall,
    tile: HopperTile,
    *,
    one_head: bool = False,
    invariant: bool = False,
    unpaged: bool = False,
    transposed: TransposedView | None = None,
    num_splits: int = 1,
) -> HopperPrefill:
    """Prepare the launch of calls like this one with a given tile.

    Args:
        call: at least one query and block. With `unpaged`, the batch has the first row of each
            request's keys as `seq_lens` and as `block_table`.
        tile: tile shape and grid policy.
        one_head: a work tile has one query head, and uses `ScoreFunction.head_bounds`.
        invariant: use the batch-invariant kernel.
        unpaged: keys and values `[1, Tk, Hkv, D]` are packed.
        transposed: the values of the kernel with float8 products, over packed keys.
        num_splits: work tiles that share the keys of a query tile.
    """
    query, key, value, params = call.query, call.key, call.value, call.params
    sizes = PrefillGeometry.of(call, tile, one_head, invariant, unpaged)
    functions = _score_functions(call, one_head)
    config = _config(call, tile, sizes, functions, invariant)
    if num_splits > 1:  # the sink counts when the splits are combined (M4)
        config = config._replace(SPLIT=True, HAS_SINK=False)
    kernel, constants = choose_kernel(call, tile, config, functions, invariant, transposed)
    config = constants["CONFIG"]
    assert sizes.loads_queries or transposed is None
    scale, scales = prefill_scales(key.dtype.itemsize == 1, params)
    ctas = tile.ctas_per_sm * call.limits.num_sms
    count = sizes.num_work_tiles * num_splits
    grid = (min(count, ctas) if tile.persistent else count, 1, 1)
    return HopperPrefill(
        limits=call.limits,
        index=query.get_device(),
        tile=tile,
        num_kv_heads=key.shape[2],
        shared=sizes.shared,
        views=_views(call, tile, sizes, config, transposed),
        query_view=_query_view(call, sizes),
        scale=scale,
        scales=scales,
        score_sizes=tensor_sizes(params.layer_score_tensors()),
        num_batch_tensors=len(call.batch.score_tensors),
        totals_bytes=_totals_bytes(sizes, call.limits) if invariant else None,
        key_parts=sizes.key_parts,
        value_parts=LOADED_PARTS.value if sizes.rest_columns else 1,
        num_work_tiles=sizes.num_work_tiles,
        gathers=gathers(sizes.block_size),
        cache_strides=cache_strides(key, value) if kernel is hopper_prefill_kernel else (),
        numbers=prefill_numbers(call, sizes),
        last=call_strides(call),
        attend=BoundLaunch(kernel, grid, constants),
        partials=_partials(call, num_splits) if num_splits > 1 else None,
        combine_tail=(*call.out.shape[:2], *call.out.stride()[:2], call.lse_stride),
    )


def _partials(call: AttentionCall, num_splits: int) -> Partials:
    """The results of splits, which `combine_kernel` combines. All rows have splits, of which there
    are few: programs of one warp, for heads of up to 128 elements. Others were not measured."""
    form = {"num_warps": 1, "step": min(16, next_power_of_2(num_splits))}
    return Partials.of_splits(
        num_splits,
        *call.out.shape,
        has_sink=call.params.sink_kind,
        has_lse=call.lse is not None,
        overlap=programmatic_launch(call.limits),
        **(form if call.shape.head_size_v <= 128 else {}),
    )


def _views(
    call: AttentionCall,
    tile: HopperTile,
    sizes: PrefillGeometry,
    config: PrefillConfig,
    transposed: TransposedView | None,
) -> tuple[CacheView, CacheView | TransposedView]:
    """The key and value cache as TMA reads them."""
    box = min(sizes.block_size or tile.block_n, tile.block_n)
    width_v = PART_ELEMENTS.value if config.VALUE_PARTS else sizes.width_v
    if config.REST_COLUMNS:
        width_v = PART_COLUMNS.value
    values = transposed or CacheView.of(call.value, box, width_v)
    return CacheView.of(call.key, box, sizes.width), values


def _query_view(call: AttentionCall, sizes: PrefillGeometry) -> QueryView | None:
    """The queries as TMA reads them; None where the consumers load them."""
    if not sizes.loads_queries:
        return None
    query = call.query
    shape, strides = tuple(query.shape), tuple(query.stride())
    return QueryView(query.dtype, shape, strides, *sizes.query_box, sizes.width)


def _score_functions(call: AttentionCall, one_head: bool) -> dict[str, Any]:
    """SCORE, RAW_SCORE, KEY_SLOPE, BOUNDS, RANGES and EXACT of a call."""
    functions = score_constants(call.params, "gluon", True, call.key.dtype.itemsize > 1)
    functions |= range_constants(call.params, "gluon", one_head)
    if functions["EXACT"]:
        functions |= {"SCORE": None, "RAW_SCORE": False, "KEY_SLOPE": None}
    return functions


def _config(
    call: AttentionCall,
    tile: HopperTile,
    sizes: PrefillGeometry,
    functions: dict[str, Any],
    invariant: bool,
) -> PrefillConfig:
    """The constants of the general kernel, without options that depend on all others."""
    params, (left, right) = call.params, call.params.window
    is_staged = tile.staged_store and sizes.width == sizes.width_v and not sizes.split
    return PrefillConfig(
        NUM_KV_HEADS=call.key.shape[2],
        SHARED=sizes.shared,
        GROUP=sizes.group,
        D=call.query.shape[2],
        DV=call.value.shape[3],
        WIDTH=sizes.width,
        WIDTH_V=sizes.width_v,
        TILE_TOKENS=sizes.tile_tokens,
        BLOCK_N=tile.block_n,
        BLOCK_SIZE=sizes.block_size,
        STAGES=tile.stages,
        Q_STAGES=tile.q_stages,
        CONSUMERS=tile.consumers,
        LOAD_QUERY=sizes.loads_queries,
        PERSISTENT=tile.persistent,
        STAGED_STORE=is_staged,
        CONSUMER_REGISTERS=tile.consumer_registers,
        PRODUCER_REGISTERS=tile.producer_registers,
        CAUSAL=bool(params.causal),
        HAS_LEFT=left >= 0,
        HAS_RIGHT=right >= 0,
        HAS_CHUNK=params.attention_chunk_size > 0,
        HAS_CAP=BOUNDED.value if _has_bounded_cap(call, invariant) else params.logits_soft_cap > 0,
        HAS_SINK=params.sinks is not None,
        HAS_LSE=call.lse is not None,
        KV_KIND=kv_kind(call.key.dtype, has_fp8=False),
        K_SCALE_KIND=scale_kind("k_scale", params.k_scale),
        V_SCALE_KIND=scale_kind("v_scale", params.v_scale),
        RANGES=functions["RANGES"],
        EXACT=functions["EXACT"],
        RAW_SCORE=functions["RAW_SCORE"],
        GATHERS=gathers(sizes.block_size),
        SPLIT_V=sizes.split,
        KEY_PARTS=sizes.key_parts,
        REST_COLUMNS=sizes.rest_columns,
        BYTE_STAGES=tile.byte_stages,
        CONVERTER_WARPS=tile.converter_warps,
        CONVERTER_REGISTERS=tile.converter_registers,
        QUERY_REGISTERS=tile.query_registers and (QUERIES_IN_REGISTERS or not sizes.rest_columns),
        RARELY=sizes.rest_columns > 0 and functions["SCORE"] is None,
    )


def _has_bounded_cap(call: AttentionCall, invariant: bool) -> bool:
    """Whether the soft cap bounds the logits, so that weights need no running maximum."""
    return (
        0 < call.params.logits_soft_cap <= _MOST_BOUNDED_CAP
        and (call.query.dtype, call.key.dtype) == (torch.bfloat16, torch.bfloat16)
        and call.params.score_function is None
        and not invariant
    )


def _totals_bytes(sizes: PrefillGeometry, limits: DeviceLimits) -> int:
    """Global memory for the sums of the batch-invariant kernel: each CTA has one work tile at a
    time. 0 where the sums fit in shared memory."""
    return 4 * sizes.rows * sizes.width_v * limits.num_sms if sizes.width_v > 128 else 0
