"""Decode over the paged cache: few query tokens per request, so that reading keys and values once
dominates the time.

Work distribution: one program per (block of heads and tokens, split, request), and one more request
for the rows after the last one. The keys of a long request are split over several programs. The
combine kernel combines their partial results (float32, in the workspace). A request that needs one
split is written directly. Splits follow Flash-Decoding, the row packing follows FlashAttention's
GQA packing.

Workspace: partial outputs [tokens, heads, splits, DV], their base-2 LSEs [tokens, heads, splits],
and the number of splits of each token's request [tokens].
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnlib.ops.triton.kernels.attend import (
    UNALIGNED,
    UNSPECIALIZED,
    aligned,
    attend,
    pack_rows,
    store_rows,
)
from attnlib.ops.triton.kernels.quant import load_scale
from attnlib.ops.triton.kernels.schedule import request_tiles, tiles_per_split
from attnlib.ops.triton.kernels.softmax import LN2, finish_rows

__all__ = ["combine_kernel", "decode_kernel"]


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def decode_kernel(
    query, key, value, out, lse, query_start_loc, seq_lens, causal_flags, alibi_slopes, sinks, bias,
    k_scale, v_scale, aux0, aux1, aux2, aux3, scale, soft_cap, left, right, chunk, num_reqs,
    num_tokens, stride_qt, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn,
    stride_vh, stride_ot, stride_oh, stride_lt, stride_bt, block_table, stride_table, partials,
    num_splits, waves_per_split, num_heads, rows0, columns0, rows1, columns1, rows2, columns2,
    rows3, columns3, SCORE: tl.constexpr, BOUNDS: tl.constexpr, PDL: tl.constexpr,
    SPLIT: tl.constexpr, BALANCED: tl.constexpr, MIN_TILES: tl.constexpr, MAX_SPLITS: tl.constexpr,
    TILE_HEADS: tl.constexpr, TILE_TOKENS: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr,
    DV1: tl.constexpr, KV_KIND: tl.constexpr, COMPUTE: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_SINK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LSE: tl.constexpr,
    K_SCALE_KIND: tl.constexpr, V_SCALE_KIND: tl.constexpr, SCALE_LATE: tl.constexpr,
    LATENT: tl.constexpr, VEC_Q: tl.constexpr, VEC_K: tl.constexpr, VEC_V: tl.constexpr,
    VEC_O: tl.constexpr,
):  # fmt: skip
    """Compute one split of one request for a block of rows.

    Grid: (blocks of rows and KV heads, splits, requests + 1).
    """
    if PDL:
        # This grid may start while the previous one drains, and the next one may start now.
        # Nothing is read before the wait.
        gdc_wait()
        gdc_launch_dependents()
    aux = (
        aux0, rows0, columns0, aux1, rows1, columns1, aux2, rows2, columns2, aux3, rows3, columns3,
    )  # fmt: skip
    request = tl.program_id(2)
    split = tl.program_id(1)
    head_block = tl.program_id(0) % HEAD_BLOCKS
    num_kv_heads = num_heads // GROUP
    kv_head = tl.program_id(0) // HEAD_BLOCKS % num_kv_heads
    first_token = tl.program_id(0) // (HEAD_BLOCKS * num_kv_heads) * TILE_TOKENS
    head_offset = head_block * TILE_HEADS
    split_counts = partials
    if SPLIT:
        rows64 = num_tokens.to(tl.int64) * num_heads
        split_counts = partials + rows64 * num_splits * (DV + 1)

    start = tl.load(query_start_loc + request)
    if request == num_reqs:
        # Rows after the last request become 0 (M6).
        if split == 0:
            for tail in range(start + first_token, num_tokens, TILE_TOKENS):
                token, head, valid = pack_rows(
                    tail, num_tokens, head_offset, GROUP, TILE_HEADS, TILE_TOKENS, BLOCK_M
                )
                head = kv_head * GROUP + head
                zeros = tl.zeros([BLOCK_M], tl.float32)
                offsets = token.to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh
                store_rows(
                    out, offsets, tl.zeros([BLOCK_M, DV0], tl.float32), zeros, valid, DV, 0, DV0,
                    VEC_O)  # fmt: skip
                if DV1 > 0:
                    store_rows(
                        out, offsets, tl.zeros([BLOCK_M, DV1], tl.float32), zeros, valid, DV, DV0,
                        DV1, VEC_O)  # fmt: skip
                if HAS_LSE:
                    tl.store(
                        lse + token.to(tl.int64) * stride_lt + head,
                        zeros - float("inf"),
                        mask=valid,
                    )
                if SPLIT:
                    # No splits: the combine kernel leaves the rows alone.
                    tl.store(split_counts + token, zeros, mask=valid)
        return

    query_len = tl.load(query_start_loc + request + 1) - start
    # The grid covers the longest request of the batch.
    if first_token >= query_len:
        return
    seq_len = tl.load(seq_lens + request)
    causal = 0
    if CAUSAL == 2:
        causal = tl.load(causal_flags + request).to(tl.int32)
    splits_used = 1
    split_begin = 0
    split_end = 0
    if SPLIT:
        # Every program computes the same split size from the lengths; programs past the request's
        # last split have no work.
        first_tile, own_tiles = request_tiles(
            query_start_loc, seq_lens, causal_flags, request, True, left, right, chunk, aux, BOUNDS,
            BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        per_split = tiles_per_split(
            query_start_loc, seq_lens, causal_flags, num_reqs, own_tiles, num_splits,
            waves_per_split, left, right, chunk, aux, BOUNDS, BALANCED, MIN_TILES, MAX_SPLITS, 128,
            BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        splits_used = (own_tiles + per_split - 1) // per_split
        split_begin = (first_tile + split * per_split) * BLOCK_N
        split_end = split_begin + per_split * BLOCK_N
        if split >= tl.maximum(splits_used, 1):
            return

    token, head, valid = pack_rows(
        first_token, query_len, head_offset, GROUP, TILE_HEADS, TILE_TOKENS, BLOCK_M
    )
    head = kv_head * GROUP + head
    row_token = start + token
    kv_head64 = kv_head.to(tl.int64)
    slopes = 0.0
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes + head, mask=valid, other=0.0).to(tl.float32)
    bias_rows = bias
    if HAS_BIAS:
        bias_rows = bias + tl.where(valid, row_token, 0).to(tl.int64) * stride_bt
    last_token = tl.minimum(first_token + TILE_TOKENS, query_len) - 1
    query_offsets = row_token.to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
    acc0, acc1, row_max, row_sum = attend(
        query, query_offsets, valid, token, first_token, last_token, query_len, seq_len, causal,
        key + aligned(kv_head64 * stride_kh, VEC_K), value + aligned(kv_head64 * stride_vh, VEC_V),
        block_table + request.to(tl.int64) * stride_table, split_begin, split_end, stride_kb,
        stride_kn, stride_vb, stride_vn, scale * load_scale(k_scale, kv_head, K_SCALE_KIND),
        soft_cap, slopes, bias_rows, left, right, chunk, head, 0, request, aux, SCORE, BOUNDS, 0,
        False, SPLIT,
        True, True, BLOCK_M, BLOCK_N,
        BLOCK_SIZE, D, D0, D1, DV, DV0, DV1, KV_KIND, COMPUTE, CAUSAL, HAS_LEFT, HAS_RIGHT,
        HAS_CHUNK, HAS_CAP, HAS_ALIBI, HAS_BIAS, SCALE_LATE, LATENT, VEC_Q, VEC_K,
        VEC_V)  # fmt: skip

    sink = 0.0
    if HAS_SINK:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32)
    v_factor = load_scale(v_scale, kv_head, V_SCALE_KIND)
    if SPLIT:
        # One program per request tells the combine kernel how many splits there are.
        if tl.program_id(0) // HEAD_BLOCKS % num_kv_heads == 0 and split == 0:
            tl.store(
                split_counts + row_token,
                tl.zeros([BLOCK_M], tl.float32) + splits_used.to(tl.float32),
                mask=valid,
            )
    if splits_used <= 1:
        factor, base2_lse = finish_rows(row_max, row_sum, sink, HAS_SINK)
        offsets = row_token.to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh
        store_rows(out, offsets, acc0, factor * v_factor, valid, DV, 0, DV0, VEC_O)
        if DV1 > 0:
            store_rows(out, offsets, acc1, factor * v_factor, valid, DV, DV0, DV1, VEC_O)
        if HAS_LSE:
            tl.store(lse + row_token.to(tl.int64) * stride_lt + head, base2_lse * LN2, mask=valid)
    if SPLIT:
        if splits_used > 1:
            # The sink counts when the splits are combined (M4).
            factor, base2_lse = finish_rows(row_max, row_sum, sink, False)
            rows = (row_token.to(tl.int64) * num_heads + head) * num_splits + split
            store_rows(partials, rows * DV, acc0, factor * v_factor, valid, DV, 0, DV0, 1)
            if DV1 > 0:
                store_rows(partials, rows * DV, acc1, factor * v_factor, valid, DV, DV0, DV1, 1)
            lses = partials + num_tokens.to(tl.int64) * num_heads * num_splits * DV
            tl.store(lses + rows, base2_lse, mask=valid)


@triton.jit(
    do_not_specialize=[
        "num_splits", "num_tokens", "num_heads", "stride_ot", "stride_oh", "stride_lt",
    ],
    do_not_specialize_on_alignment=["sinks", "lse"],
)  # fmt: skip
def combine_kernel(
    partials, sinks, out, lse, num_splits, num_tokens, num_heads, stride_ot, stride_oh, stride_lt,
    HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one row, STEP at a time. Grid: (tokens, heads)."""
    if PDL:
        # Nothing may be read before the decode kernel has ended.
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0)
    head = tl.program_id(1)
    rows64 = num_tokens.to(tl.int64) * num_heads
    lses = partials + rows64 * num_splits * DV
    splits_used = tl.load(lses + rows64 * num_splits + token).to(tl.int32)
    if splits_used <= 1:
        # The decode kernel has written the output.
        return
    row = (token.to(tl.int64) * num_heads + head) * num_splits
    lanes = tl.arange(0, DV_PAD)
    acc = tl.zeros([DV_PAD], tl.float32)
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    for base in range(0, splits_used, STEP):
        splits = base + tl.arange(0, STEP)
        live = splits < splits_used
        split_lses = tl.load(lses + row + splits, mask=live, other=float("-inf"))
        values = tl.load(
            partials + (row + splits)[:, None] * DV + lanes[None, :],
            mask=live[:, None] & (lanes < DV)[None, :],
            other=0.0,
        )
        new_max = tl.maximum(row_max, tl.max(split_lses, 0))
        # -inf - -inf is NaN: splits without a visible key are measured from 0.
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(split_lses - finite_max)
        acc_scale = tl.exp2(row_max - finite_max)
        acc = acc * acc_scale + tl.sum(weights[:, None] * values, 0)
        row_sum = row_sum * acc_scale + tl.sum(weights, 0)
        row_max = new_max
    sink = tl.zeros([1], tl.float32)
    if HAS_SINK:
        sink += tl.load(sinks + head).to(tl.float32)
    factor, base2_lse = finish_rows(row_max, row_sum, sink, HAS_SINK)
    offsets = token.to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh + lanes
    tl.store(out + offsets, (acc * factor).to(out.dtype.element_ty), mask=lanes < DV)
    if HAS_LSE:
        one = tl.arange(0, 1)
        tl.store(lse + token.to(tl.int64) * stride_lt + head + one, base2_lse * LN2)
