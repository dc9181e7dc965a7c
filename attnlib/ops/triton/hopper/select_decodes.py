"""Decides whether a Hopper decode serves a call, and with which tile; also of the batch-invariant
kernels, which decide for decodes and prefills alike. Kernels that few layers need are imported
where one is served."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnlib.kv_rotation import KVRotation
from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.shared_decode import DecodeItems
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.decode_schedule import DecodeSchedule
from attnlib.ops.triton.heuristics.hopper_decode_tiles import (
    DecodeTile,
    choose_hopper_decode_tile,
    supports_one_warp,
)
from attnlib.ops.triton.heuristics.hopper_tiles import padded_width
from attnlib.ops.triton.hopper.common_reasons import CallFeatures
from attnlib.ops.triton.hopper.decode_bounds import num_counters
from attnlib.ops.triton.hopper.decode_launches import HopperDecode
from attnlib.ops.triton.hopper.decode_plan import prepare_hopper_decode
from attnlib.ops.triton.hopper.prefill_plan import HopperPrefill
from attnlib.ops.triton.hopper.select_latents import select_latents
from attnlib.ops.triton.hopper.shared_decode_launches import HopperSharedDecode, SharedDecodeCall
from attnlib.ops.triton.hopper.sizes import PACKED_DECODE_ROWS, SMALL_SIZES, decode_rows, gathers
from attnlib.ops.triton.hopper.support import (
    decode_unsupported_reasons,
    invariant_unsupported_reasons,
    shared_decode_unsupported_reasons,
)
from attnlib.ops.triton.hopper.tensor_support import are_readable

__all__ = [
    "select_decode",
    "select_invariant",
    "select_packed_decode",
    "select_shared_decode",
]

_MOST_PAIRS = 16
"""Pairs per multiprocessor from which all numbers have the same tile."""


_MOST_ROTATED = 1
"""Pairs for each worker up to which decodes rotate queries and outputs in their kernels (P15)."""

_MOST_ROTATED_ALONE = 2
"""The same for a worker that has a multiprocessor alone."""

_MOST_ROTATED_FEW = 8
"""The same where a pair has at most 4 query rows, of which kernels rotate half as many."""


def select_decode(call: AttentionCall, schedule: DecodeSchedule) -> HopperDecode | None:
    """The Hopper decode for calls of this signature; None where the plain kernel serves them.

    Args:
        call: over pages.
        schedule: the bounds of its batch.
    """
    if call.shape.latent:
        return select_latents(
            call, schedule.max_query_len, schedule.max_ctas, schedule.hopper_keys_per_sm
        )
    shape, params, limits = call.shape, call.params, call.limits
    features, max_query_len = CallFeatures.of(params), schedule.max_query_len
    if decode_unsupported_reasons(shape, features, limits, max_query_len):
        return None
    if not are_readable(call.query, call.key, call.value, call.out, params):
        return None
    counters, tile = call.batch.counters, _choose_tile(call, schedule)
    if tile is None:
        return None
    if params.rotation is not None:
        rotated = _rotated_inside(params.rotation, call, tile, shape.group * max_query_len)
        call = replace(call, params=replace(params, rotation=rotated))
    return prepare_hopper_decode(
        call,
        tile,
        max_query_len,
        schedule.max_ctas,
        num_counters=0 if counters is None else counters.numel(),
    )


def _rotated_inside(
    rotation: KVRotation, call: AttentionCall, tile: DecodeTile, rows: int
) -> KVRotation | None:
    """What the kernels rotate (P15): both sides for few pairs per worker, otherwise nothing, and
    other launches do. `rows` are the query rows of a pair, at most.

    On an H200, int8, of the time with launches around: 4 rows 8 x 8k, 32 x 4k and 64 x 8k 0.97,
    256 x 1k 0.96; with a warp for the queries of each worker 1.00 and 0.99 of the last two, and 8
    rows 32 x 4k 0.97, 64 x 8k 1.01, 256 x 1k 1.04.
    """
    per_sm = max(1, tile.warps, tile.consumers)
    most = _MOST_ROTATED_ALONE if per_sm == 1 else _MOST_ROTATED
    pairs = call.batch.num_decodes * call.shape.num_kv_heads
    if pairs <= call.limits.num_sms * per_sm * (_MOST_ROTATED_FEW if rows <= 4 else most):
        return rotation
    return None


def _choose_tile(call: AttentionCall, schedule: DecodeSchedule) -> DecodeTile | None:
    """The tile; None for keys of 4-bit floats beside a prefill, which CTAs of one warp read."""
    shape, params = call.shape, call.params
    pairs, rows = call.batch.num_decodes * shape.num_kv_heads, shape.group * schedule.max_query_len
    gathered = shape.cache_dtype.itemsize == 1 and gathers(shape.block_size)
    # CTAs of one warp would run on all multiprocessors, also during a prefill.
    one_warp = (
        shape.cache_dtype.itemsize == 1
        and supports_one_warp(shape.head_sizes, rows)
        and params.score_function is None
        and schedule.max_ctas is None
        and not gathered
    )
    stored = shape.page_format
    if stored is not None and stored.elements_per_group and not one_warp:
        return None
    pairs_per_sm = min(_MOST_PAIRS, -(-pairs // call.limits.num_sms))
    tile = choose_hopper_decode_tile(
        *shape.head_sizes,
        cache_bits=8 * shape.cache_dtype.itemsize,
        stored=stored,
        values=shape.value_format,
        rows=rows,
        keys_per_sm=None if gathered else schedule.hopper_keys_per_sm,
        pairs_per_sm=None if gathered else pairs_per_sm,
        one_warp=one_warp,
        tuned=call.limits.tuned,
    )
    return replace(tile, consumers=1) if gathered else tile


def select_packed_decode(call: AttentionCall, keys_per_sm: int | None) -> HopperDecode | None:
    """The Hopper decode over a packed cache `[B, Hkv, D / 8, N, 8]` and `[B, Hkv, D, N]`; None
    where the plain kernel serves it.

    Args:
        call: of one query token per request.
        keys_per_sm: class of work that the tile depends on; None where it does not.
    """
    query, key, value, params, limits = call.query, call.key, call.value, call.params, call.limits
    table, lens = call.batch.block_table, call.batch.seq_lens
    assert table is not None
    num_kv_heads, head_size, block_size = value.shape[1:]
    shape = LayerShape(
        num_heads=query.shape[1],
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        head_size_v=head_size,
        query_dtype=query.dtype,
        cache_dtype=key.dtype,
        block_size=block_size,
    )
    if decode_unsupported_reasons(shape, CallFeatures.of(params), limits):
        return None
    if not are_readable(query, key, value, call.out, params):
        return None
    if (
        block_size in SMALL_SIZES
        or shape.group > PACKED_DECODE_ROWS
        or {table.dtype, lens.dtype} != {torch.int32}
    ):
        return None
    if key.dtype != query.dtype:  # a float8 cache has 16 elements together instead of 8
        return None
    width = padded_width(head_size)  # the rows of narrower heads are not apart in a packed cache
    tile = choose_hopper_decode_tile(width, width, keys_per_sm=keys_per_sm, tuned=limits.tuned)
    return prepare_hopper_decode(call, tile, 1, num_counters=num_counters(limits))


def select_invariant(
    call: AttentionCall, num_segments: int | None, max_ctas: int | None = None
) -> HopperDecode | HopperPrefill | None:
    """The batch-invariant Hopper launches for calls of this signature (M15); None where the plain
    kernel serves them, which follows from the layer and its tensors, not from the batch.

    Args:
        call: over pages, or over packed keys.
        num_segments: upper bound of the segments of a request, for the decode; None for the
            prefill.
        max_ctas: CTAs that may run at a time, where a prefill runs concurrently; None means all.
    """
    if call.key.dim() != 4 or not call.is_paged:
        return None
    shape, params, limits = call.shape, call.params, call.limits
    if invariant_unsupported_reasons(shape, CallFeatures.of(params), limits):
        return None
    if not are_readable(call.query, call.key, call.value, call.out, params):
        return None
    # The stride of the tokens counts for one token, too.
    if any(x.stride(0) * x.element_size() % 16 for x in (call.query, call.out)):
        return None
    from attnlib.ops.triton.hopper import invariant_plan

    max_query_len = max(1, call.max_query_len)
    if num_segments is None or shape.group * max_query_len > decode_rows(shape.head_size_v):
        return invariant_plan.prepare_hopper_invariant_prefill(call)
    bounds = (max_query_len, num_segments, max_ctas)
    return invariant_plan.prepare_hopper_invariant_decode(call, *bounds)


def select_shared_decode(call: SharedDecodeCall, items: DecodeItems) -> HopperSharedDecode | None:
    """The launches of decodes with shared prefixes; None where the kernel cannot read the tensors.

    Args:
        call: over pages.
        items: the work items of the batch.
    """
    query, key, value, table, out, _, params, limits = call
    shape = LayerShape.of(query, key, value, params)
    if shape.latent or isinstance(params.k_scale, Tensor):
        return None
    if shared_decode_unsupported_reasons(shape, limits):
        return None
    if not are_readable(query, key, value, out, params):
        return None
    from attnlib.ops.triton.hopper import shared_decode_plan

    tile = shared_decode_plan.shared_decode_tile(*shape.head_sizes)
    if table.dtype != torch.int32 or table.stride(1) != 1 or items.tile_keys != tile.block_n:
        return None
    return shared_decode_plan.prepare_shared_decode(call, tile, items.num_ranges)
