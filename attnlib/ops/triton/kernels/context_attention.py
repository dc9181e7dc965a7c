"""Attention within sequences that lie anywhere in the packed tokens, with gaps or in any order.

Work distribution: one program per (tile of query tokens, block of heads, sequence). Rows between
the sequences are neither read nor written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.attend import aligned, attend, pack_rows, store_rows
from attnlib.ops.triton.kernels.softmax import finish_rows

__all__ = ["context_attention_kernel"]


@triton.jit(
    do_not_specialize=[
        "left", "right", "stride_qt", "stride_qh", "stride_kn", "stride_kh", "stride_vn",
        "stride_vh", "stride_ot", "stride_oh",
    ],
    do_not_specialize_on_alignment=["b_start_loc", "b_seq_len"],
)  # fmt: skip
def context_attention_kernel(
    query, key, value, out, b_start_loc, b_seq_len, scale, left, right, stride_qt, stride_qh,
    stride_kn, stride_kh, stride_vn, stride_vh, stride_ot, stride_oh, TILE_HEADS: tl.constexpr,
    TILE_TOKENS: tl.constexpr, HEAD_BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D0: tl.constexpr,
    D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, KV_KIND: tl.constexpr,
    COMPUTE: tl.constexpr, CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SCALE_LATE: tl.constexpr, VEC_Q: tl.constexpr, VEC_K: tl.constexpr, VEC_V: tl.constexpr,
    VEC_O: tl.constexpr,
):  # fmt: skip
    """Compute one query tile. Grid: (tiles of the longest sequence, KV heads * HEAD_BLOCKS,
    sequences)."""
    request = tl.program_id(2)
    seq_len = tl.load(b_seq_len + request).to(tl.int32)
    # The last tiles first: under a causal mask they have the most keys.
    first_token = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_TOKENS
    if first_token >= seq_len:
        return
    start = tl.load(b_start_loc + request).to(tl.int64)
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    head_offset = tl.program_id(1) % HEAD_BLOCKS * TILE_HEADS
    kv_head64 = kv_head.to(tl.int64)
    key += aligned(kv_head64 * stride_kh, VEC_K) + aligned(start * stride_kn, VEC_K)
    value += aligned(kv_head64 * stride_vh, VEC_V) + aligned(start * stride_vn, VEC_V)
    token, head, valid = pack_rows(
        first_token, seq_len, head_offset, GROUP, TILE_HEADS, TILE_TOKENS, BLOCK_M
    )
    head = (kv_head * GROUP + head).to(tl.int64)
    last_token = tl.minimum(first_token + TILE_TOKENS, seq_len) - 1
    query_offsets = (start + token) * stride_qt + head * stride_qh
    acc0, acc1, row_max, row_sum = attend(
        query, query_offsets, valid, token, first_token, last_token, seq_len, seq_len, 0, key,
        value, b_start_loc, 0, 0, 0, stride_kn, 0, stride_vn, scale, 0.0, 0.0, b_start_loc, left,
        right, 0, head, 0, request, None, None, None, 0, False, False, False, False, BLOCK_M,
        BLOCK_N, 1, D, D0, D1, DV, DV0, DV1, KV_KIND, COMPUTE, CAUSAL, HAS_LEFT, HAS_RIGHT, False,
        False, False, False, SCALE_LATE, False, VEC_Q, VEC_K, VEC_V)  # fmt: skip
    factor, _ = finish_rows(row_max, row_sum, 0.0, False)
    offsets = (start + token) * stride_ot + head * stride_oh
    store_rows(out, offsets, acc0, factor, valid, DV, 0, DV0, VEC_O)
    if DV1 > 0:
        store_rows(out, offsets, acc1, factor, valid, DV, DV0, DV1, VEC_O)
