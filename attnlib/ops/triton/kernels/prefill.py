"""The prefill kernel, over a paged cache or packed keys and values.

Work distribution: one program per query tile and block of heads. The grid comes from upper bounds
(T // TILE_TOKENS tiles, one more for each request, one for the rest); a program finds its request
on the device. Tiles run from the last to the first, so that under a causal mask the longest rows
start first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.attend import (
    UNALIGNED,
    UNSPECIALIZED,
    aligned,
    attend,
    pack_rows,
    store_rows,
)
from attnlib.ops.triton.kernels.quant import load_scale
from attnlib.ops.triton.kernels.schedule import find_request
from attnlib.ops.triton.kernels.softmax import LN2, finish_rows

__all__ = ["prefill_kernel"]


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def prefill_kernel(
    query, key, value, out, lse, query_start_loc, seq_lens, causal_flags, alibi_slopes, sinks, bias,
    k_scale, v_scale, aux0, aux1, aux2, aux3, scale, soft_cap, left, right, chunk, num_reqs,
    num_tokens, stride_qt, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn,
    stride_vh, stride_ot, stride_oh, stride_lt, stride_bt, block_table, stride_table, num_tiles,
    rows0, columns0, rows1, columns1, rows2, columns2, rows3, columns3, SCORE: tl.constexpr,
    BOUNDS: tl.constexpr, RANGES: tl.constexpr, EXACT: tl.constexpr, PAGED: tl.constexpr,
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
    """Compute one query tile for a block of heads. Grid: (num_tiles, KV heads * HEAD_BLOCKS)."""
    tile = num_tiles - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    head_offset = tl.program_id(1) % HEAD_BLOCKS * TILE_HEADS
    request = find_request(query_start_loc, tile, num_reqs, TILE_TOKENS, 128)
    start = tl.load(query_start_loc + request)
    first_token = (tile - (start // TILE_TOKENS + request)) * TILE_TOKENS

    if request == num_reqs:
        # Rows after the last request become 0 (M6).
        token, head, valid = pack_rows(
            first_token, num_tokens - start, head_offset, GROUP, TILE_HEADS, TILE_TOKENS, BLOCK_M
        )
        head = kv_head * GROUP + head
        token64 = (start + token).to(tl.int64)
        zeros = tl.zeros([BLOCK_M], tl.float32)
        offsets = token64 * stride_ot + head.to(tl.int64) * stride_oh
        store_rows(
            out, offsets, tl.zeros([BLOCK_M, DV0], tl.float32), zeros, valid, DV, 0, DV0, VEC_O
        )
        if DV1 > 0:
            store_rows(
                out, offsets, tl.zeros([BLOCK_M, DV1], tl.float32), zeros, valid, DV, DV0, DV1,
                VEC_O)  # fmt: skip
        if HAS_LSE:
            tl.store(lse + token64 * stride_lt + head, zeros - float("inf"), mask=valid)
        return

    query_len = tl.load(query_start_loc + request + 1) - start
    # The number of tiles is an upper bound: a request may own one tile more than it needs.
    if first_token >= query_len:
        return
    kv_head64 = kv_head.to(tl.int64)
    key += aligned(kv_head64 * stride_kh, VEC_K)
    value += aligned(kv_head64 * stride_vh, VEC_V)
    if PAGED:
        seq_len = tl.load(seq_lens + request)
        table = block_table + request.to(tl.int64) * stride_table
    else:
        # Packed keys: `seq_lens` holds the start of each request's keys instead.
        first_key = tl.load(seq_lens + request)
        seq_len = tl.load(seq_lens + request + 1) - first_key
        key += aligned(first_key.to(tl.int64) * stride_kn, VEC_K)
        value += aligned(first_key.to(tl.int64) * stride_vn, VEC_V)
        table = block_table
    aux = (
        aux0, rows0, columns0, aux1, rows1, columns1, aux2, rows2, columns2, aux3, rows3, columns3,
    )  # fmt: skip
    causal = 0
    if CAUSAL == 2:
        causal = tl.load(causal_flags + request).to(tl.int32)

    token, head, valid = pack_rows(
        first_token, query_len, head_offset, GROUP, TILE_HEADS, TILE_TOKENS, BLOCK_M
    )
    head = kv_head * GROUP + head
    token64 = (start + token).to(tl.int64)
    slopes = 0.0
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes + head, mask=valid, other=0.0).to(tl.float32)
    bias_rows = bias
    if HAS_BIAS:
        bias_rows = bias + tl.where(valid, token64, 0) * stride_bt
    last_token = tl.minimum(first_token + TILE_TOKENS, query_len) - 1
    query_offsets = token64 * stride_qt + head.to(tl.int64) * stride_qh
    acc0, acc1, row_max, row_sum = attend(
        query, query_offsets, valid, token, first_token, last_token, query_len, seq_len, causal,
        key, value, table, 0, 0, stride_kb, stride_kn, stride_vb, stride_vn,
        scale * load_scale(k_scale, kv_head, K_SCALE_KIND), soft_cap, slopes, bias_rows, left,
        right, chunk, head, kv_head * GROUP + head_offset, request, aux, SCORE, BOUNDS, RANGES,
        EXACT, False, False, PAGED, BLOCK_M, BLOCK_N,
        BLOCK_SIZE, D, D0, D1, DV, DV0, DV1, KV_KIND, COMPUTE, CAUSAL, HAS_LEFT, HAS_RIGHT,
        HAS_CHUNK, HAS_CAP, HAS_ALIBI, HAS_BIAS, SCALE_LATE, LATENT, VEC_Q, VEC_K,
        VEC_V)  # fmt: skip

    sink = 0.0
    if HAS_SINK:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32)
    factor, base2_lse = finish_rows(row_max, row_sum, sink, HAS_SINK)
    # The scale of the values is constant per head, so it is applied once, to the output.
    factor = factor * load_scale(v_scale, kv_head, V_SCALE_KIND)
    offsets = token64 * stride_ot + head.to(tl.int64) * stride_oh
    store_rows(out, offsets, acc0, factor, valid, DV, 0, DV0, VEC_O)
    if DV1 > 0:
        store_rows(out, offsets, acc1, factor, valid, DV, DV0, DV1, VEC_O)
    if HAS_LSE:
        tl.store(lse + token64 * stride_lt + head, base2_lse * LN2, mask=valid)
