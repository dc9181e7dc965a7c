"""Append keys and values at the end of each request. One program per token and block of heads."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnlib.ops.triton.kernels.cache_write import Heads, load_heads, store_heads
from attnlib.ops.triton.kernels.chunks import aligned

__all__ = ["append_kv_kernel"]


# Lengths and tables are read one element at a time: their alignment must not select a compilation.
@triton.jit(
    do_not_specialize="""
        new_tokens max_blocks stride_table stride_kr stride_kt stride_kh stride_vr stride_vt
        stride_vh stride_kcb stride_kcn stride_kch stride_vcb stride_vcn stride_vch
    """.split(),
    do_not_specialize_on_alignment=["cache_seqlens", "block_table", "seq_lens"],
)
def append_kv_kernel(
    key, value, key_cache, value_cache, cache_seqlens, block_table, seq_lens, num_heads, new_tokens,
    max_blocks, stride_table, stride_kr, stride_kt, stride_kh, stride_vr, stride_vt, stride_vh,
    stride_kcb, stride_kcn, stride_kch, stride_vcb, stride_vcn, stride_vch, CONFIG: tl.constexpr,
):  # fmt: skip
    """Write keys and values of one token; the first program of a request also writes its new
    length. CONFIG is a `WriteConfig`. Grid: (requests * new tokens, blocks of heads)."""
    if CONFIG.PDL:
        # This grid may start while the previous one drains, and the next one, which waits for the
        # cache and the lengths, may start now. Nothing is read before the wait.
        gdc_wait()
        gdc_launch_dependents()
    request = tl.program_id(0)
    token = request * 0
    if not CONFIG.ONE_TOKEN:
        token = request % new_tokens
        request = request // new_tokens
    row = request.to(tl.int64)
    token64 = token.to(tl.int64)
    heads = tl.program_id(1) * CONFIG.BLOCK_H + tl.arange(0, CONFIG.BLOCK_H)
    exist = heads < num_heads
    # The slot takes two loads, one after the other. The rows arrive meanwhile.
    base = key + aligned(row * stride_kr, CONFIG.VEC_K) + aligned(token64 * stride_kt, CONFIG.VEC_K)
    new_keys = Heads(base, heads, exist, stride_kh)
    new_key = load_heads(new_keys, 0, CONFIG.D, CONFIG.D_PAD, CONFIG.VEC_K)
    base = value + aligned(row * stride_vr, CONFIG.VEC_V)
    base += aligned(token64 * stride_vt, CONFIG.VEC_V)
    new_values = Heads(base, heads, exist, stride_vh)
    new_value = load_heads(new_values, 0, CONFIG.DV, CONFIG.DV_PAD, CONFIG.VEC_V)
    length = tl.load(cache_seqlens + request)
    if (token == 0) & (tl.program_id(1) == 0):
        tl.store(seq_lens + request, length + new_tokens)
    position = length + token
    column = position // CONFIG.BLOCK_SIZE
    # A position outside the block table has no slot.
    if (position >= 0) & (column < max_blocks):
        # The offset in the block is added first, so that little work follows the second load.
        offset = (position % CONFIG.BLOCK_SIZE).to(tl.int64)
        key_cache += aligned(offset * stride_kcn, CONFIG.VEC_KC)
        value_cache += aligned(offset * stride_vcn, CONFIG.VEC_VC)
        block = tl.load(block_table + row * stride_table + column).to(tl.int64)
        base = key_cache + aligned(block * stride_kcb, CONFIG.VEC_KC)
        store_heads(
            new_key, Heads(base, heads, exist, stride_kch), 1.0, 0, CONFIG.D, CONFIG.D_PAD, 0,
            False, False, CONFIG.VEC_KC)  # fmt: skip
        base = value_cache + aligned(block * stride_vcb, CONFIG.VEC_VC)
        store_heads(
            new_value, Heads(base, heads, exist, stride_vch), 1.0, 0, CONFIG.DV, CONFIG.DV_PAD, 0,
            False, False, CONFIG.VEC_VC)  # fmt: skip
