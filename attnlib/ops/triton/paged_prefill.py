"""Prefill over the paged cache: whole prompts, chunks over a long context, and batches of both.

On Hopper, a Gluon kernel (`hopper/`) serves the calls that it supports.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.triton import hopper
from attnlib.ops.triton.heuristics.device import DeviceLimits, limits_of
from attnlib.ops.triton.heuristics.tiles import (
    choose_latent_tile,
    choose_prefill_tile,
    key_chunks,
    latents_in_place,
    next_power_of_2,
)
from attnlib.ops.triton.kernels.prefill import prefill_kernel
from attnlib.ops.triton.launch.attention import (
    BatchTensors,
    PlainAttention,
    attention_constants,
    attention_numbers,
    check_batch,
    holds_scales,
    reads_bytes,
    skip_exponent,
)
from attnlib.ops.triton.launch.bound import ALIGNMENT, BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.run import PreparedAttention, run_attention
from attnlib.ops.triton.launch.score import (
    count_lookups,
    count_score_tiles,
    has_head_bounds,
    range_constants,
)
from attnlib.ops.triton.launch.signature import batch_signature, call_signature, length_class

__all__ = ["paged_prefill", "prepare_plain_prefill", "prepare_prefill"]

_MAX_ROWS = 128
"""Rows of the largest tile."""


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    *,
    max_query_len: int,
    max_seq_len: int,
    out: Tensor,
    lse: Tensor | None = None,
    query_start_loc_cpu: Tensor | None = None,
    seq_lens_cpu: Tensor | None = None,
    batch_invariant: bool = False,
    kernels: str = "auto",
    counters: Tensor | None = None,
) -> None:
    """Attention of ragged query spans over the paged cache.

    Query i of request r is at position p = seq_len - query_len + i and sees the keys k in
    [0, seq_len) with k <= p (causal), p - left <= k <= p + right (window) and
    k // chunk == p // chunk (chunk).

    Args:
        query: `[T, Hq, D]` float16, bfloat16 or float32, last stride 1.
        key_cache: `[B, N, Hkv, D]`, any strides but the last (P1); float8 holds key / k_scale.
        value_cache: `[B, N, Hkv, Dv]`, likewise.
        block_table: `[R, M]` int32; entries at or past ceil(seq_len / N) are never read (P3).
        query_start_loc: `[R + 1]` int32, where each request's tokens start.
        seq_lens: `[R]` int32, context and this step's tokens.
        params: scale, mask, biases, sinks and KV scales.
        max_query_len: upper bound of the query lengths.
        max_seq_len: upper bound of the sequence lengths.
        out: `[T, Hq, Dv]`, written; rows at or past `query_start_loc[-1]` become 0 (M6).
        lse: `[T, Hq]` float32, written when given: natural log of the softmax denominator (M5).
        query_start_loc_cpu: ignored; see `attnlib.ops.torch.paged_prefill`.
        seq_lens_cpu: ignored, likewise.
        batch_invariant: the bits of a row depend on that row and its keys only (M15).
        kernels: "auto" uses the Hopper prefill where it supports the call, "portable" never.
        counters: int32 zeros. The Hopper prefill distributes work by the first two and leaves
            zeros; allocated when None or fewer. Concurrent calls need counters of their own.

    Raises:
        ContractError: tensors that the kernel cannot address.
        UnsupportedConfigError: head sizes for which no tile fits the device.
    """
    if query.numel() == 0:
        return
    limits = limits_of(query)
    batch = BatchTensors(
        query_start_loc, seq_lens, block_table,
        params.causal if isinstance(params.causal, Tensor) else None, params.query_bias,
        counters=counters, max_seq_len=max_seq_len, score_tensors=params.batch_score_tensors(),
    )  # fmt: skip
    signature = call_signature(query, key_cache, value_cache, out, lse, params)
    tensors = (query, key_cache, value_cache, out, lse)
    if batch_invariant:
        from attnlib.ops.triton.invariant_attention import run_invariant_prefill

        run_invariant_prefill(*tensors, batch, params, max_query_len, kernels)
        return
    prepared = prepare_prefill(signature, *tensors, batch, params, limits, max_query_len, kernels)
    if prepared.needs_alignment:
        addresses = query.data_ptr() | key_cache.data_ptr() | value_cache.data_ptr()
        if (addresses | out.data_ptr()) & ALIGNMENT:
            prepared = prepare_plain_prefill(
                signature, *tensors, batch, params, limits, max_query_len
            )
    run_attention(prepared, batch, query, key_cache, value_cache, out, lse, params)


def prepare_prefill(
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
    kernels: str,
) -> PreparedAttention:
    """The launch for calls of this signature: the Hopper prefill where it supports the call, else
    the plain kernel. Cached.

    Raises:
        ContractError: tensors that the kernel cannot address.
    """
    lengths = max_query_len, length_class(batch, key)
    key_ = ("prefill", signature, batch_signature(batch), lengths, kernels)
    found: PreparedAttention | None = LAUNCHES.get(key_)
    if found is not None and found.limits is limits:
        return found
    check_batch(batch, max_query_len)
    prepared: PreparedAttention | None = None
    wanted = limits.capability[0] == 9 and kernels != "portable"
    if wanted and (dispatch := hopper.load()) is not None:
        in_pages = holds_scales(params)
        select = dispatch.select_page_prefill if in_pages else dispatch.select_prefill
        prepared = select(query, key, value, out, lse, batch, params, limits, max_query_len)
    if prepared is None:
        prepared = prepare_plain_prefill(
            signature, query, key, value, out, lse, batch, params, limits, max_query_len
        )
    kept: PreparedAttention = LAUNCHES.keep(key_, prepared)
    return kept


def prepare_plain_prefill(
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
) -> PlainAttention:
    """The plain launch for calls of this signature, also over packed keys (no block table). Cached.

    Args:
        key: `[B, N, Hkv, D]`, or `[Tk, Hkv, D]` without a block table.
        value: likewise, with Dv.
        max_query_len: upper bound of the query lengths; chooses the tile.

    Raises:
        ContractError: tensors that the kernel cannot address.
        UnsupportedConfigError: head sizes for which no tile fits the chip.
    """
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads, head_size_v = value.shape[-2:]
    # Row counts that choose the same tile share a launch.
    one_head = has_head_bounds(params)
    heads = 1 if one_head else num_heads // max(1, num_kv_heads)
    rows = min(_MAX_ROWS, next_power_of_2(heads * max_query_len))
    key_ = ("plain prefill", signature, batch_signature(batch), rows, batch.block_table is None)
    found: PlainAttention | None = LAUNCHES.get(key_)
    if found is not None and found.limits is limits:
        return found
    check_batch(batch, max_query_len)
    if holds_scales(params):
        from attnlib.ops.triton.page_attention import page_prefill

        pages = page_prefill(query, key, value, out, lse, batch, params, limits, rows)
        kept_pages: PlainAttention = LAUNCHES.keep(key_, pages)
        return kept_pages
    constants = attention_constants(query, key, value, out, lse is not None, params, limits)
    group, table = constants["GROUP"], batch.block_table
    problem = (
        head_size, head_size_v, query.element_size(), key.element_size(), rows,
        limits.shared_memory, limits.products, count_score_tiles(params),
    )  # fmt: skip
    if latent := constants["LATENT"]:
        in_place = latents_in_place(limits.capability, *problem[2:4], constants["VEC_K"] > 1)
        tile = choose_latent_tile(
            *problem, in_place=in_place, native_fp8=limits.has_fp8, tuned=limits.tuned
        )
    else:
        lookups = count_lookups(params)
        tile = choose_prefill_tile(
            *problem, lookups=lookups, has_score=params.score_function is not None,
            native_fp8=limits.has_fp8, tuned=limits.tuned,
        )  # fmt: skip
    tile_heads = 1 if one_head else min(group, tile.block_m)
    tile_tokens, head_blocks = tile.block_m // tile_heads, triton.cdiv(group, tile_heads)
    constants |= {
        **range_constants(params, "triton", one_head),
        "PAGED": table is not None,
        "SKIP_BELOW": skip_exponent(params),
        **key_chunks((head_size, head_size_v), tile, query.element_size(), limits.products, latent),
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
    prepared = PlainAttention(
        limits,
        query.get_device(),
        BoundLaunch(prefill_kernel, (num_tiles, num_kv_heads * head_blocks, 1), constants),
        attention_numbers(query, key, value, batch.query_start_loc, out, lse, params),
        0 if table is None else table.stride(0),
        (num_tiles,),
        as_bytes=reads_bytes(key.dtype, limits),
        is_decode=False,
        score_tensors=params.layer_score_tensors(),
        num_batch_tensors=len(batch.score_tensors),
    )
    kept: PlainAttention = LAUNCHES.keep(key_, prepared)
    return kept
