"""Batch-invariant attention: launches whose results for a row do not depend on its batch (M15).

One kernel with one tile serves decodes, prefills and packed keys of a layer
(`kernels/invariant.py`). Decodes may divide a request's keys over several programs; bits are the
same as without. On Hopper, Gluon kernels serve the layers that they support
(`hopper/invariant_plan.py`), always or never for a layer.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton import hopper
from attnlib.ops.triton.heuristics.device import DeviceLimits, limits_of
from attnlib.ops.triton.heuristics.invariant_tiles import (
    choose_invariant_tile,
    combine_columns,
    count_segments,
    invariant_workspace_bytes,
    segment_keys,
)
from attnlib.ops.triton.heuristics.splits import visible_bound
from attnlib.ops.triton.heuristics.tiles import key_chunks
from attnlib.ops.triton.hopper.support import (
    INVARIANT_KERNELS,
    decode_rows,
    invariant_unsupported_reasons,
)
from attnlib.ops.triton.kernels.invariant import invariant_combine_kernel, invariant_kernel
from attnlib.ops.triton.launch.attention import (
    BatchTensors,
    PlainAttention,
    attention_constants,
    attention_numbers,
    check_batch,
    reads_bytes,
)
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.run import PreparedAttention, run_attention
from attnlib.ops.triton.launch.score import count_score_tiles
from attnlib.ops.triton.launch.signature import batch_signature, call_signature
from attnlib.ops.triton.paged_decode import AttentionShape, DecodeSchedule

__all__ = [
    "prepare_invariant", "run_invariant_decode", "run_invariant_prefill", "visible_segments",
    "workspace_bytes",
]  # fmt: skip

_STEP = 8
"""Segments that the combine kernel loads at a time."""
_MAX_SEGMENTS = 65535
"""Limit of a grid's third dimension."""


def visible_segments(
    max_query_len: int,
    max_seq_len: int,
    window: tuple[int, int],
    causal: bool,
    attention_chunk_size: int,
    limits: DeviceLimits,
) -> int:
    """Upper bound of the segments that the keys of one request lie in, by upper bounds of the
    lengths; arguments as in `splits.visible_bound`."""
    bounds = max_query_len, max_seq_len, window, causal, attention_chunk_size
    visible = visible_bound(*bounds)
    return count_segments(visible, visible < max_seq_len, limits)


def workspace_bytes(
    shape: AttentionShape,
    limits: DeviceLimits,
    num_tokens: int,
    schedule: DecodeSchedule,
    block_size: int,
    kernels: str,
) -> int:
    """Workspace in bytes of a decode with this schedule.

    Args:
        shape: sizes and dtypes of the layers.
        limits: the chip.
        num_tokens: query tokens.
        schedule: its number of splits is that of the segments.
        block_size: N.
        kernels: as in `prepare_invariant`.
    """
    plain = invariant_workspace_bytes(
        num_tokens, shape.num_heads, shape.head_size_v, schedule.num_splits
    )
    if limits.capability[0] != 9 or kernels not in INVARIANT_KERNELS or shape.latent:
        return plain
    group = shape.num_heads // shape.num_kv_heads
    reasons = invariant_unsupported_reasons(
        limits.capability, shape.query_dtype, shape.cache_dtype,
        (shape.head_size, shape.head_size_v), block_size, group, shape.num_kv_heads, limits.num_sms,
    )  # fmt: skip
    rows = group * schedule.max_query_len
    if reasons or rows > decode_rows(shape.head_size_v) or hopper.load() is None:
        return plain
    # Tensors may still require the plain kernel, which is found when a plan is made: it allocates.
    from attnlib.ops.triton.hopper.invariant_plan import hopper_invariant_bytes

    return hopper_invariant_bytes(
        num_tokens, shape.num_heads, shape.num_kv_heads, shape.head_size_v, schedule.max_query_len,
        schedule.num_splits, limits,
    )  # fmt: skip


def prepare_invariant(
    signature: tuple[Any, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    batch: BatchTensors,
    params: AttentionParams,
    limits: DeviceLimits,
    max_query_len: int,
    num_segments: int | None = None,
    kernels: str = "auto",
    max_ctas: int | None = None,
) -> PreparedAttention:
    """The batch-invariant launches for calls of this signature. Cached.

    Args:
        key: `[B, N, Hkv, D]`, or `[Tk, Hkv, D]` without a block table.
        value: likewise, with Dv.
        max_query_len: upper bound of the query lengths.
        num_segments: upper bound of the segments of a request (`visible_segments`), over which a
            decode is divided; None for a prefill, where one program adds all segments.
        kernels: one of `hopper.support.INVARIANT_KERNELS` uses the Gluon kernels where they
            support the layer.
        max_ctas: CTAs of the Hopper decode, where a prefill runs concurrently; None means all.

    Raises:
        ContractError: tensors that the kernel cannot address, or sequences with too many segments.
        UnsupportedConfigError: head sizes for which no tile fits the chip.
    """
    key_ = (
        "invariant", signature, batch_signature(batch), batch.block_table is None, num_segments,
        kernels, max_ctas,
    )  # fmt: skip
    found: PreparedAttention | None = LAUNCHES.get(key_)
    if found is not None and found.limits is limits:
        return found
    check_batch(batch, max_query_len)
    if num_segments is not None and num_segments > _MAX_SEGMENTS:
        raise ContractError(
            f"a decode of sequences with {num_segments} segments of {segment_keys(limits)} keys "
            f"exceeds the limit of {_MAX_SEGMENTS}; lower max_seq_len"
        )
    prepared: PreparedAttention | None = None
    wanted = limits.capability[0] == 9 and kernels in INVARIANT_KERNELS
    if wanted and (dispatch := hopper.load()) is not None:
        prepared = dispatch.select_invariant(
            query, key, value, out, lse, batch, params, limits, max(1, max_query_len), num_segments,
            max_ctas,
        )  # fmt: skip
    if prepared is None:
        prepared = _prepare_plain(
            query, key, value, out, lse, batch, params, limits, num_segments or 1
        )
    kept: PreparedAttention = LAUNCHES.keep(key_, prepared)
    return kept


def run_invariant_decode(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None,
    batch: BatchTensors, params: AttentionParams, max_query_len: int, kernels: str = "auto",
) -> None:  # fmt: skip
    """`paged_decode` with `batch_invariant`: segments are divided over programs."""
    limits = limits_of(query)
    num_segments = visible_segments(
        max_query_len, batch.max_seq_len, params.window, params.causal is True,
        params.attention_chunk_size, limits,
    )  # fmt: skip
    signature = call_signature(query, key, value, out, lse, params)
    prepared = prepare_invariant(
        signature, query, key, value, out, lse, batch, params, limits, max_query_len, num_segments,
        kernels,
    )  # fmt: skip
    run_attention(prepared, batch, query, key, value, out, lse, params)


def run_invariant_prefill(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None,
    batch: BatchTensors, params: AttentionParams, max_query_len: int, kernels: str = "auto",
) -> None:  # fmt: skip
    """`paged_prefill` and `varlen_prefill` with `batch_invariant`."""
    signature = call_signature(query, key, value, out, lse, params)
    prepared = prepare_invariant(
        signature, query, key, value, out, lse, batch, params, limits_of(query), max_query_len,
        kernels=kernels,
    )  # fmt: skip
    run_attention(prepared, batch, query, key, value, out, lse, params)


def _prepare_plain(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None,
    batch: BatchTensors, params: AttentionParams, limits: DeviceLimits, num_segments: int,
) -> PlainAttention:  # fmt: skip
    """The launches of the plain kernel."""
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads, head_size_v = value.shape[-2:]
    constants = attention_constants(query, key, value, out, lse is not None, params, limits)
    group, table, latent = constants["GROUP"], batch.block_table, constants["LATENT"]
    sizes, element = (head_size, head_size_v), query.element_size()
    tile = choose_invariant_tile(
        *sizes, element, key.element_size(), limits, score_tiles=count_score_tiles(params),
        latent=latent,
    )  # fmt: skip
    tile_heads = min(group, tile.block_m)
    tile_tokens, head_blocks = tile.block_m // tile_heads, triton.cdiv(group, tile_heads)
    constants |= {
        "PAGED": table is not None,
        "SPLIT": num_segments > 1,
        "SEGMENT": segment_keys(limits),
        **key_chunks(sizes, tile, element, limits.products, latent),
        "TILE_HEADS": tile_heads,
        "TILE_TOKENS": tile_tokens,
        "HEAD_BLOCKS": head_blocks,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,
    }
    num_tiles = num_tokens // tile_tokens + batch.query_start_loc.shape[0]
    grid = (num_tiles, num_kv_heads * head_blocks, num_segments)
    stride_lt = 0 if lse is None else lse.stride(0)
    return PlainAttention(
        limits,
        query.get_device(),
        BoundLaunch(invariant_kernel, grid, constants),
        attention_numbers(query, key, value, batch.query_start_loc, out, lse, params),
        0 if table is None else table.stride(0),
        (num_tiles, num_segments, num_heads),
        as_bytes=reads_bytes(key.dtype, limits),
        is_decode=True,
        combine=_combine(query, head_size_v, lse is not None, params) if num_segments > 1 else None,
        combine_tail=(num_segments, num_tokens, num_heads, out.stride(0), out.stride(1), stride_lt),
        score_tensors=params.layer_score_tensors(),
        num_batch_tensors=len(batch.score_tensors),
        workspace_bytes=invariant_workspace_bytes(num_tokens, num_heads, head_size_v, num_segments),
    )


def _combine(
    query: Tensor, head_size_v: int, has_lse: bool, params: AttentionParams
) -> BoundLaunch:
    """The launch of the kernel that adds segments."""
    columns = combine_columns(head_size_v)
    constants = {
        "HAS_SINK": params.sinks is not None, "HAS_LSE": has_lse, "DV": head_size_v,
        "COLUMNS": columns, "STEP": _STEP, "num_warps": 1, "enable_fp_fusion": True,
    }  # fmt: skip
    grid = (query.shape[0], query.shape[1], triton.cdiv(head_size_v, columns))
    return BoundLaunch(invariant_combine_kernel, grid, constants)
