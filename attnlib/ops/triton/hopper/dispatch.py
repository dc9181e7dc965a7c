"""Decides whether the Hopper kernels serve a call, and with which tile."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from attnlib.kv_dtype import page_format
from attnlib.ops.latent import values_are_prefix
from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.params import AttentionParams
from attnlib.ops.scales import MIN_LATE_SCALE
from attnlib.ops.shared_decode import DecodeItems
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.decode_schedule import DecodeSchedule
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.hopper_tiles import (
    MAX_CONSUMERS,
    MAX_WARPS,
    WARP_ROWS,
    choose_hopper_decode_tile,
    choose_hopper_tile,
    padded_width,
    supports_one_warp,
    with_leads,
    with_query_registers,
    with_short_ranges,
)
from attnlib.ops.triton.hopper.converted_prefill import (
    ConvertedPrefill,
    copied_rows,
    copied_sizes,
    multiplies_float8,
    prepare_converted_prefill,
    prepare_float8_prefill,
)
from attnlib.ops.triton.hopper.decode_plan import (
    HopperDecode,
    hopper_decode_workspace_bytes,
    prepare_hopper_decode,
)
from attnlib.ops.triton.hopper.invariant_plan import (
    prepare_hopper_invariant_decode,
    prepare_hopper_invariant_prefill,
)
from attnlib.ops.triton.hopper.kernels.work_counter import PREFILL_COUNTERS
from attnlib.ops.triton.hopper.latent_plan import (
    latent_decode_workspace_bytes,
    prepare_latent_decode,
)
from attnlib.ops.triton.hopper.prefill_plan import HopperPrefill, prepare_hopper_prefill
from attnlib.ops.triton.hopper.shared_decode_plan import (
    HopperSharedDecode,
    prepare_shared_decode,
    shared_decode_ranges,
    shared_decode_tile,
)
from attnlib.ops.triton.hopper.support import (
    BLOCK_SIZES,
    PACKED_DECODE_ROWS,
    SMALL_SIZES,
    decode_rows,
    decode_unsupported_reasons,
    gathers,
    invariant_unsupported_reasons,
    latent_unsupported_reasons,
    prefill_unsupported_reasons,
    shared_decode_unsupported_reasons,
)
from attnlib.ops.triton.launch.score import has_head_bounds, has_short_ranges

__all__ = [
    "decode_workspace_bytes",
    "supports_decode",
    "num_counters",
    "select_decode",
    "select_invariant",
    "select_packed_decode",
    "select_page_prefill",
    "select_prefill",
    "select_shared_decode",
    "shared_decode_shape",
    "select_unpaged",
    "unsupported_strides",
]

_LEAST_TOKENS_OF_ONE_HEAD = 64
"""Query tokens of the longest request from which a tile has the rows of one head, if the score
function has bounds for each head. Not tuned: a consumer warpgroup has 64 rows."""

_QUERIES_IN_REGISTERS = triton.__version__.startswith("3.6.")
"""Whether prefills over float8 keep their queries in registers, which leaves more of the shared
memory's throughput to the converter. Triton 3.9 compiles them with spills in the loops over keys.
"""

_MOST_PAIRS = 16
"""Pairs per multiprocessor from which all numbers have the same tile."""


def unsupported_strides(**tensors: Tensor) -> list[str]:
    """Why tensors cannot be read in units of 16 bytes, given aligned addresses."""
    reasons = []
    for name, tensor in tensors.items():
        strides = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        for dim, (size, stride) in enumerate(strides):
            elements = 16 // tensor.element_size()
            if size > 1 and (stride % elements or stride <= 0):
                reasons.append(
                    f"{name} has stride {stride} in dimension {dim}; the Hopper kernels need a "
                    f"multiple of {elements}"
                )
        if tensor.stride(-1) != 1:
            reasons.append(f"{name} has last stride {tensor.stride(-1)}; the Hopper kernels need 1")
    return reasons


def _features(params: AttentionParams) -> dict[str, Any]:
    return {
        "causal_per_request": isinstance(params.causal, Tensor),
        "alibi": params.alibi_slopes is not None,
        "bias": params.query_bias is not None,
        "scales": isinstance(params.k_scale, Tensor) or isinstance(params.v_scale, Tensor),
    }


def _layer(query: Tensor, key: Tensor, value: Tensor, limits: DeviceLimits) -> tuple[Any, ...]:
    sizes = (query.shape[2], value.shape[3] * query.shape[2] // key.shape[3])
    group = query.shape[1] // max(1, key.shape[2])
    return limits.capability, query.dtype, key.dtype, sizes, key.shape[1], group


def _is_unsupported(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, params: AttentionParams
) -> bool:
    """Conditions on tensors and values: strides, an empty pool, scales. The kernels apply the
    softmax scale to masked scores and to their maximum, so it must be positive."""
    is_quantized = key.dtype.itemsize == 1
    return (
        bool(unsupported_strides(query=query, key_cache=key, value_cache=value, out=out))
        or key.shape[0] == 0
        or value.dtype != key.dtype
        or out.dtype != query.dtype
        or params.scale < MIN_LATE_SCALE
        or (not is_quantized and (isinstance(params.v_scale, Tensor) or params.v_scale != 1.0))
    )


def _tensors(
    call: AttentionCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, BatchTensors, AttentionParams]:
    return call.query, call.key, call.value, call.out, call.lse, call.batch, call.params


def _visible(params: AttentionParams) -> int | None:
    """Keys that one query sees at most, where a window or a chunk bounds them."""
    left, right = params.window[0], 0 if params.causal is True else params.window[1]
    bounds = [left + right + 1] if left >= 0 and right >= 0 else []
    if params.attention_chunk_size > 0:
        bounds.append(params.attention_chunk_size)
    return min(bounds, default=None)


def select_prefill(
    call: AttentionCall,
) -> HopperPrefill | ConvertedPrefill | None:
    """The Hopper prefill for calls of this signature; None where the plain kernel serves them."""
    query, key, value, out, lse, batch, params = _tensors(call)
    limits, max_query_len = call.limits, call.max_query_len
    layer, score = _layer(query, key, value, limits), params.score_function is not None
    if prefill_unsupported_reasons(*layer, **_features(params), score=score):
        return None
    if _is_unsupported(query, key, value, out, params):
        return None
    group, copied = query.shape[1] // key.shape[2], 0
    rows = group * max_query_len
    if key.element_size() == 1 or gathers(key.shape[1]):
        sizes = key.shape[3], value.shape[3]
        copied = copied_rows(key, sizes, batch, params, max_query_len, group)
    if copied and multiplies_float8(query, key, value, params):
        return prepare_float8_prefill(query, key, value, out, lse, batch, params, limits, copied)
    tile = choose_hopper_tile(
        key.shape[3], value.shape[3], cache_bytes=2 if copied else key.element_size(),
        rows=min(1 << 20, 1 << max(0, rows - 1).bit_length()),
        block_size=None if copied else key.shape[1], visible=_visible(params),
        has_score=params.score_function is not None, tuned=limits.tuned,
    )  # fmt: skip
    tile = with_leads(tile, batch.max_seq_len, key.shape[3])
    if copied:
        return prepare_converted_prefill(
            query, key, value, out, lse, batch, params, tile, limits, copied
        )
    if _QUERIES_IN_REGISTERS and limits.tuned is None and params.score_function is None:
        tile = with_query_registers(tile)
    # Tiles of one head waste rows where queries are short.
    one_head = has_head_bounds(params) and max_query_len >= _LEAST_TOKENS_OF_ONE_HEAD
    if has_short_ranges(params, one_head):
        tile = with_short_ranges(tile)
    return prepare_hopper_prefill(
        query, key, value, out, lse, batch, params, tile, limits, one_head
    )


def select_page_prefill(
    call: AttentionCall,
) -> ConvertedPrefill | None:
    """`select_prefill` for pages that hold their scales (M16): long prompts."""
    query, key, value, out, lse, batch, params = _tensors(call)
    limits, max_query_len = call.limits, call.max_query_len
    stored = page_format(key, params.k_scale)
    if stored is None or stored.elements_per_group:
        return None  # layers over 4-bit floats use portable kernels only
    sizes, group = copied_sizes(key, value, params), query.shape[1] // max(1, key.shape[2])
    layer = (limits.capability, query.dtype, query.dtype, sizes, BLOCK_SIZES[-1], group)
    features = {**_features(params), "scales": False}
    if query.dtype.itemsize != 2 or prefill_unsupported_reasons(*layer, **features):
        return None
    if unsupported_strides(query=query, out=out) or key.shape[0] == 0 or out.dtype != query.dtype:
        return None
    if params.scale < MIN_LATE_SCALE:
        return None
    copied = copied_rows(key, sizes, batch, params, max_query_len, group)
    if not copied:
        return None
    tile = choose_hopper_tile(
        *sizes, rows=min(1 << 20, 1 << max(0, group * max_query_len - 1).bit_length()),
        visible=_visible(params), tuned=limits.tuned,
    )  # fmt: skip
    tile = with_leads(tile, batch.max_seq_len, sizes[0])
    return prepare_converted_prefill(
        query, key, value, out, lse, batch, params, tile, limits, copied
    )


def select_unpaged(
    call: AttentionCall,
) -> HopperPrefill | None:
    """The Hopper prefill over packed keys and values `[Tk, Hkv, D]`; None where the plain kernel
    serves them. The batch has the first rows of the requests' keys as `seq_lens` and as
    `block_table`, `[R + 1, 1]`."""
    query, key, value, out, lse, batch, params = _tensors(call)
    limits, max_query_len = call.limits, call.max_query_len
    key, value = key.unsqueeze(0), value.unsqueeze(0)
    capability, dtype, cache_dtype, sizes, _, group = _layer(query, key, value, limits)
    layer = capability, dtype, cache_dtype, sizes, BLOCK_SIZES[-1], group
    if prefill_unsupported_reasons(*layer, **_features(params)):
        return None
    if params.score_function is not None or key.dtype != query.dtype:
        return None
    if batch.seq_lens.dtype != torch.int32:
        return None
    if key.shape[1] == 0 or _is_unsupported(query, key, value, out, params):
        return None
    rows = query.shape[1] // key.shape[2] * max_query_len
    tile = choose_hopper_tile(
        key.shape[3], value.shape[3], cache_bytes=key.element_size(),
        rows=min(1 << 20, 1 << max(0, rows - 1).bit_length()), visible=_visible(params),
        tuned=limits.tuned,
    )  # fmt: skip
    return prepare_hopper_prefill(
        query, key, value, out, lse, batch, params, tile, limits, unpaged=True
    )


def select_decode(call: AttentionCall, schedule: DecodeSchedule) -> HopperDecode | None:
    """The Hopper decode for calls of this signature; None where the plain kernel serves them."""
    query, key, value, out, lse, batch, params = _tensors(call)
    limits, max_query_len, max_ctas = call.limits, schedule.max_query_len, schedule.max_ctas
    num_counters = 0 if batch.counters is None else batch.counters.numel()
    if values_are_prefix(key, value):
        return _select_latent_decode(
            query, key, value, out, lse, batch, params, limits, max_query_len, max_ctas
        )
    layer = (*_layer(query, key, value, limits), key.shape[2], limits.num_sms, max_query_len)
    if decode_unsupported_reasons(*layer, **_features(params)):
        return None
    if _is_unsupported(query, key, value, out, params):
        return None
    pairs = batch.seq_lens.shape[0] * key.shape[2]
    rows = query.shape[1] // key.shape[2] * max_query_len
    # CTAs of one warp would run on all multiprocessors, also during a prefill.
    one_warp = key.element_size() == 1 and supports_one_warp(layer[3], rows)
    one_warp = one_warp and params.score_function is None and max_ctas is None
    tile = choose_hopper_decode_tile(
        *layer[3], cache_bits=8 * key.shape[3] * key.element_size() // query.shape[2],
        scales_in_page=params.scales_in_page,
        rows=rows, keys_per_sm=schedule.hopper_keys_per_sm,
        pairs_per_sm=min(_MOST_PAIRS, -(-pairs // limits.num_sms)), one_warp=one_warp,
        tuned=limits.tuned,
    )  # fmt: skip
    return prepare_hopper_decode(
        query, key, value, out, lse, batch, params, tile, limits, max_query_len, max_ctas,
        num_counters,
    )  # fmt: skip


def select_packed_decode(call: AttentionCall, keys_per_sm: int | None) -> HopperDecode | None:
    """The Hopper decode over a packed cache `[B, Hkv, D / 8, N, 8]` and `[B, Hkv, D, N]`; None
    where the plain kernel serves it.

    Args:
        call: of one query token per request.
        keys_per_sm: class of work that the tile depends on; None where it does not.
    """
    query, key, value, out, _, batch, params = _tensors(call)
    limits = call.limits
    num_kv_heads, head_size, block_size = value.shape[1:]
    group, table = query.shape[1] // num_kv_heads, batch.block_table
    assert table is not None
    if decode_unsupported_reasons(
        limits.capability, query.dtype, key.dtype, (head_size, head_size), block_size, group,
        num_kv_heads, limits.num_sms, **_features(params),
    ):  # fmt: skip
        return None
    if _is_unsupported(query, key, value, out, params):
        return None
    if (
        block_size in SMALL_SIZES
        or group > PACKED_DECODE_ROWS
        or {table.dtype, batch.seq_lens.dtype} != {torch.int32}
    ):
        return None
    if key.dtype != query.dtype:  # a float8 cache has 16 elements together instead of 8
        return None
    width = padded_width(head_size)  # the rows of narrower heads are not apart in a packed cache
    tile = choose_hopper_decode_tile(width, width, keys_per_sm=keys_per_sm, tuned=limits.tuned)
    return prepare_hopper_decode(
        query, key, value, out, None, batch, params, tile, limits, 1,
        num_counters=num_counters(limits),
    )  # fmt: skip


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
    query, key, value, out, lse, batch, params = _tensors(call)
    limits, max_query_len = call.limits, max(1, call.max_query_len)
    if key.dim() != 4 or batch.block_table is None:
        return None
    layer = (*_layer(query, key, value, limits), key.shape[2], limits.num_sms)
    latent, score = values_are_prefix(key, value), params.score_function is not None
    if invariant_unsupported_reasons(*layer, **_features(params), score=score, latent=latent):
        return None
    if _is_unsupported(query, key, value, out, params):
        return None
    # The stride of the tokens counts for one token, too.
    if any(x.stride(0) * x.element_size() % 16 for x in (query, out)):
        return None
    tensors = (query, key, value, out, lse, batch, params, limits)
    rows = query.shape[1] // key.shape[2] * max_query_len
    if num_segments is None or rows > decode_rows(value.shape[3]):
        return prepare_hopper_invariant_prefill(*tensors)
    return prepare_hopper_invariant_decode(*tensors, max_query_len, num_segments, max_ctas)


def select_shared_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    items: DecodeItems,
    out: Tensor,
    lse: Tensor | None,
    params: AttentionParams,
    limits: DeviceLimits,
) -> HopperSharedDecode | None:
    """The launches of decodes with shared prefixes; None where the kernel cannot read the tensors.
    Arguments as in `ops.triton.shared_decode`."""
    layer = (*_layer(query, key, value, limits), key.shape[2], limits.num_sms)
    if shared_decode_unsupported_reasons(*layer) or _is_unsupported(query, key, value, out, params):
        return None
    if values_are_prefix(key, value) or isinstance(params.k_scale, Tensor):
        return None
    tile = shared_decode_tile(*layer[3])
    if table.dtype != torch.int32 or table.stride(1) != 1 or items.tile_keys != tile.block_n:
        return None
    return prepare_shared_decode(
        query, key, value, table, out, lse, params, limits, tile, items.num_ranges
    )


def shared_decode_shape(shape: LayerShape, limits: DeviceLimits) -> tuple[int, int] | None:
    """(keys of a tile, ranges) of the decode of shared prefixes; None where it does not support
    such layers.

    Args:
        shape: sizes and dtypes of the layer.
    """
    sizes, group = (shape.head_size, shape.head_size_v), shape.num_heads // shape.num_kv_heads
    reasons = shared_decode_unsupported_reasons(
        limits.capability, shape.query_dtype, shape.cache_dtype, sizes, shape.block_size, group,
        shape.num_kv_heads, limits.num_sms,
    )  # fmt: skip
    if reasons or shape.latent:
        return None
    ranges = shared_decode_ranges(shape.num_kv_heads, limits.num_sms)
    return shared_decode_tile(*sizes).block_n, ranges


def _select_latent_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    batch: BatchTensors,
    params: AttentionParams,
    limits: DeviceLimits,
    max_query_len: int,
    max_ctas: int | None,
) -> HopperDecode | None:
    """`select_decode` for values that are a prefix of the keys."""
    if latent_unsupported_reasons(
        limits.capability, query.dtype, key.dtype, (key.shape[3], value.shape[3]), key.shape[1],
        query.shape[1], limits.num_sms, max_query_len, **_features(params),
    ):  # fmt: skip
        return None
    if params.score_function is not None or _is_unsupported(query, key, value, out, params):
        return None
    return prepare_latent_decode(
        query, key, value, out, lse, batch, params, limits, max_query_len, max_ctas
    )


def num_counters(limits: DeviceLimits) -> int:
    """Counters (int32 zeros) that a step's Hopper kernels use."""
    return PREFILL_COUNTERS + MAX_CONSUMERS * limits.num_sms


def supports_decode(shape: LayerShape, limits: DeviceLimits, max_query_len: int) -> bool:
    """Whether the Hopper decode supports such layers.

    Args:
        shape: sizes and dtypes of the layer.
        max_query_len: upper bound of the query lengths.
    """
    sizes, group = (shape.head_size, shape.head_size_v), shape.num_heads // shape.num_kv_heads
    if shape.latent:
        return not latent_unsupported_reasons(
            limits.capability, shape.query_dtype, shape.cache_dtype, sizes, shape.block_size,
            shape.num_heads, limits.num_sms, max_query_len,
        )  # fmt: skip
    layer = (
        limits.capability,
        shape.query_dtype,
        shape.cache_dtype,
        sizes,
        shape.block_size,
        group,
    )
    return not decode_unsupported_reasons(*layer, shape.num_kv_heads, limits.num_sms, max_query_len)


def decode_workspace_bytes(
    shape: LayerShape, limits: DeviceLimits, num_tokens: int, max_query_len: int
) -> int:
    """Bytes of workspace of the Hopper decode.

    Args:
        shape: sizes and dtypes of the layer.
        num_tokens: query tokens of the step.
        max_query_len: upper bound of the query lengths.
    """
    if shape.latent:
        return latent_decode_workspace_bytes(
            num_tokens, shape.num_heads, max_query_len, limits.num_sms
        )
    return hopper_decode_workspace_bytes(
        num_tokens, shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, max_query_len,
        shape.head_size_v, limits.num_sms,
        _most_workers(shape, max_query_len),
    )  # fmt: skip


def _most_workers(shape: LayerShape, max_query_len: int) -> int:
    """Consumers of the Hopper decode on a multiprocessor, at most."""
    if shape.cache_dtype.itemsize != 1:
        return 1
    rows = shape.num_heads // shape.num_kv_heads * max_query_len
    return MAX_WARPS if rows <= WARP_ROWS else MAX_CONSUMERS
