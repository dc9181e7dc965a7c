"""Attention within sequences that lie anywhere in the packed tokens, with gaps or in any order.

Work distribution: one program per (tile of query tokens, block of heads, sequence). Rows between
the sequences are neither read nor written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.arguments import Cache, Logits, Mask, Output, Query, Rows, Tile
from attnlib.ops.triton.kernels.attend import attend
from attnlib.ops.triton.kernels.chunks import aligned, pack_rows
from attnlib.ops.triton.kernels.program import store_results

__all__ = ["context_attention_kernel"]


@triton.jit(
    do_not_specialize="""
        left right stride_qt stride_qh stride_kn stride_kh stride_vn stride_vh stride_ot
        stride_oh
    """.split(),
    do_not_specialize_on_alignment=["b_start_loc", "b_seq_len"],
)
def context_attention_kernel(
    query, key, value, out, b_start_loc, b_seq_len, scale, left, right, stride_qt, stride_qh,
    stride_kn, stride_kh, stride_vn, stride_vh, stride_ot, stride_oh, CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute one query tile. CONFIG is an `AttentionConfig`. Grid: (tiles of the longest sequence,
    KV heads * HEAD_BLOCKS, sequences)."""
    request = tl.program_id(2)
    seq_len = tl.load(b_seq_len + request).to(tl.int32)
    # The last tiles first: under a causal mask they have the most keys.
    first_token = (tl.num_programs(0) - 1 - tl.program_id(0)) * CONFIG.TILE_TOKENS
    if first_token >= seq_len:
        return
    start = tl.load(b_start_loc + request).to(tl.int64)
    kv_head = tl.program_id(1) // CONFIG.HEAD_BLOCKS
    head_offset = tl.program_id(1) % CONFIG.HEAD_BLOCKS * CONFIG.TILE_HEADS
    kv_head64 = kv_head.to(tl.int64)
    key += aligned(kv_head64 * stride_kh, CONFIG.VEC_K) + aligned(start * stride_kn, CONFIG.VEC_K)
    value += aligned(kv_head64 * stride_vh, CONFIG.VEC_V)
    value += aligned(start * stride_vn, CONFIG.VEC_V)
    last_token = tl.minimum(first_token + CONFIG.TILE_TOKENS, seq_len) - 1
    tile = Tile(request, kv_head, head_offset, start, first_token, last_token, seq_len, seq_len, 0)
    token, head, valid = pack_rows(first_token, seq_len, head_offset, CONFIG)
    rows = Rows(token, start + token, kv_head * CONFIG.GROUP + head, valid)
    cache = Cache(
        key, value, None, 0, 0, stride_kn, stride_kh, 0, stride_vn, stride_vh, None, None, None,
        None, None, None, None, None)  # fmt: skip
    logits = Logits(scale, 0.0, 0.0, 0.0, None, None)
    state = attend(
        Query(query, stride_qt, stride_qh), rows, tile, cache, logits, Mask(left, right, 0), 0, 0,
        0, None, None, CONFIG)  # fmt: skip
    output = Output(out, None, stride_ot, stride_oh, 0)
    store_results(output, rows, state, None, 1.0, CONFIG)
