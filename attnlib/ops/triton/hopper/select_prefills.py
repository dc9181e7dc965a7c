"""Decides whether a Hopper prefill serves a call, and with which tile."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.params import AttentionParams
from attnlib.ops.scales import MIN_LATE_SCALE
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.heuristics.hopper_tiles import (
    HopperTile,
    choose_hopper_tile,
    with_query_registers,
    with_short_ranges,
    with_sign_softmax,
)
from attnlib.ops.triton.hopper.common_reasons import CallFeatures
from attnlib.ops.triton.hopper.converted_prefill import (
    ConvertedPrefill,
    copied_rows,
    multiplies_float8,
    prepare_converted_prefill,
    prepare_float8_prefill,
)
from attnlib.ops.triton.hopper.decode_launches import HopperDecode
from attnlib.ops.triton.hopper.preference import LATENT_PREFILL_KEYS
from attnlib.ops.triton.hopper.prefill_geometry import PrefillGeometry
from attnlib.ops.triton.hopper.prefill_plan import (
    QUERIES_IN_REGISTERS,
    HopperPrefill,
    prepare_hopper_prefill,
)
from attnlib.ops.triton.hopper.select_latents import select_latents
from attnlib.ops.triton.hopper.sizes import (
    BLOCK_SIZES,
    COPIED_TOKENS,
    gathers,
    hopper_reads,
    only_copies,
)
from attnlib.ops.triton.hopper.support import prefill_unsupported_reasons
from attnlib.ops.triton.hopper.tensor_support import are_readable, unsupported_strides
from attnlib.ops.triton.key_splits import key_splits
from attnlib.ops.triton.launch.score import has_head_bounds, has_short_ranges

__all__ = ["select_page_prefill", "select_prefill", "select_unpaged"]

_LEAST_TOKENS_OF_ONE_HEAD = 64
"""Query tokens of the longest request from which a tile has the rows of one head, if the score
function has bounds for each head. Not tuned: a consumer warpgroup has 64 rows."""

_LEAST_TOKENS_OF_UNEVEN_GROUPS = 2048
"""Query tokens of the longest request from which groups that do not divide 64 rows, such as 5
heads, have tiles of one head, whose queries TMA loads and which fill all rows. On an H200, 10k
tokens and 40/8 heads take 1760 us instead of 1951, 16k and 20/4 heads 2058 instead of 2390. The
bound is not tuned."""


def select_prefill(
    call: AttentionCall, divides_keys: bool = False
) -> HopperPrefill | ConvertedPrefill | HopperDecode | None:
    """The Hopper prefill for calls of this signature; None where the plain kernel serves them.

    Args:
        call: over pages.
        divides_keys: several work tiles may share the keys of a query tile: there are no decodes,
            which run concurrently.
    """
    shape, params, limits = call.shape, call.params, call.limits
    if shape.latent:
        # A class of lengths begins after a power of 2 (`BatchTensors.length_class`).
        is_long = call.batch.max_seq_len > LATENT_PREFILL_KEYS
        return select_latents(call, call.max_query_len, is_prefill=True) if is_long else None
    features = CallFeatures.of(params)
    if only := only_copies(shape.cache_dtype.itemsize, shape.block_size):
        shape, features = _copied(shape), features._replace(tensor_scales=False)
    if prefill_unsupported_reasons(shape, features, limits):
        return None
    key, batch, shape = call.key, call.batch, call.shape
    if not are_readable(call.query, key, call.value, call.out, params):
        return None
    copied = 0
    if shape.cache_dtype.itemsize == 1 or gathers(shape.block_size):
        lengths = call.max_query_len, shape.group
        copied = copied_rows(key, shape.head_sizes, batch, params, *lengths, alone=divides_keys)
    if only and not copied:
        return None
    if copied and multiplies_float8(call):
        return prepare_float8_prefill(call, copied)
    tile = _choose_tile(call, cache_bytes=2, paged=False) if copied else _choose_tile(call)
    tile = with_sign_softmax(tile, batch.max_seq_len, shape.head_size)
    if copied:
        if call.num_reqs == 1 and call.max_query_len < COPIED_TOKENS:
            tile = replace(tile, persistent=False)  # see `sizes.CHUNK_TOKENS`
        return prepare_converted_prefill(call, tile, copied)
    has_score = params.score_function is not None
    if QUERIES_IN_REGISTERS and limits.tuned is None and not has_score:
        tile = with_query_registers(tile)
    # Tiles of one head waste rows where queries are short.
    one_head = has_head_bounds(params) and call.max_query_len >= _LEAST_TOKENS_OF_ONE_HEAD
    if not has_score and _fits_one_head(call):
        one_head = True
    if has_short_ranges(params, one_head):
        tile = with_short_ranges(tile)
    num_splits = _key_splits(call, tile) if divides_keys and not has_score else 1
    if num_splits > 1:  # one kernel for all lengths
        tile, one_head = replace(tile, sign_softmax=True), False
    return prepare_hopper_prefill(call, tile, one_head=one_head, num_splits=num_splits)


def _fits_one_head(call: AttentionCall) -> bool:
    """Whether a group leaves rows of its tiles empty, and its queries are long and see all keys:
    tiles of one head have more query tokens."""
    params, long = call.params, call.max_query_len >= _LEAST_TOKENS_OF_UNEVEN_GROUPS
    bounded = params.window[0] >= 0 or params.attention_chunk_size > 0
    group = call.shape.group
    return bool(64 % group and group % 64) and long and not bounded


def _key_splits(call: AttentionCall, tile: HopperTile) -> int:
    """Work tiles that share the keys of a query tile."""
    shape = call.shape
    if shape.cache_dtype.itemsize == 1 or gathers(shape.block_size):
        return 1
    sizes = PrefillGeometry.of(call, tile, one_head=False, invariant=False, unpaged=False)
    return key_splits(call, sizes.tile_tokens, shape.num_kv_heads)


def select_page_prefill(call: AttentionCall) -> ConvertedPrefill | None:
    """`select_prefill` for pages that hold their scales (M16): long prompts."""
    shape, params, limits = call.shape, call.params, call.limits
    stored = shape.page_format
    if stored is None or not hopper_reads(stored, shape.value_format):
        return None  # an open format, or two other formats
    features = CallFeatures.of(params)._replace(tensor_scales=False)
    copies = _copied(shape)
    if shape.query_dtype.itemsize != 2 or prefill_unsupported_reasons(copies, features, limits):
        return None
    query, key, out, batch = call.query, call.key, call.out, call.batch
    if unsupported_strides(query=query, out=out) or key.shape[0] == 0 or out.dtype != query.dtype:
        return None
    if params.scale < MIN_LATE_SCALE:
        return None
    copied = copied_rows(key, shape.head_sizes, batch, params, call.max_query_len, shape.group)
    if not copied:
        return None
    tile = _choose_tile(call, cache_bytes=2, paged=False)
    tile = with_sign_softmax(tile, batch.max_seq_len, shape.head_size)
    return prepare_converted_prefill(call, tile, copied)


def select_unpaged(call: AttentionCall) -> HopperPrefill | None:
    """The Hopper prefill over packed keys and values `[Tk, Hkv, D]`; None where the plain kernel
    serves them. The batch has the first rows of the requests' keys as `seq_lens` and as
    `block_table`, `[R + 1, 1]`."""
    call = replace(call, key=call.key.unsqueeze(0), value=call.value.unsqueeze(0))
    shape, params, batch = call.shape, call.params, call.batch
    packed = shape._replace(block_size=BLOCK_SIZES[-1])
    if prefill_unsupported_reasons(packed, CallFeatures.of(params), call.limits):
        return None
    if params.score_function is not None or shape.cache_dtype != shape.query_dtype:
        return None
    if batch.seq_lens.dtype != torch.int32 or call.key.shape[1] == 0:
        return None
    if not are_readable(call.query, call.key, call.value, call.out, params):
        return None
    return prepare_hopper_prefill(call, _choose_tile(call, paged=False), unpaged=True)


def _copied(shape: LayerShape) -> LayerShape:
    """The shape of a prefill over 16-bit copies of the keys and values."""
    return shape._replace(cache_dtype=shape.query_dtype, block_size=BLOCK_SIZES[-1])


def _choose_tile(
    call: AttentionCall, cache_bytes: int | None = None, paged: bool = True
) -> HopperTile:
    """The tile of a prefill.

    Args:
        call: the call.
        cache_bytes: bytes of an element that the kernel reads; None for those of the cache.
        paged: whether the kernel reads pages.
    """
    shape, params = call.shape, call.params
    rows = shape.group * call.max_query_len
    return choose_hopper_tile(
        *shape.head_sizes,
        cache_bytes=cache_bytes or shape.cache_dtype.itemsize,
        rows=min(1 << 20, 1 << max(0, rows - 1).bit_length()),
        block_size=shape.block_size if paged else None,
        visible=_visible(params),
        has_score=params.score_function is not None,
        tuned=call.limits.tuned,
    )


def _visible(params: AttentionParams) -> int | None:
    """Keys that one query sees at most, where a window or a chunk bounds them."""
    left, right = params.window[0], 0 if params.causal is True else params.window[1]
    bounds = [left + right + 1] if left >= 0 and right >= 0 else []
    if params.attention_chunk_size > 0:
        bounds.append(params.attention_chunk_size)
    return min(bounds, default=None)
