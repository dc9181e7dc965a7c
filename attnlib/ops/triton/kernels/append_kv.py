"""Append keys and values at the end of each request. One program per token and block of heads."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnlib.ops.triton.kernels.cache_write import load_heads, store_heads

__all__ = ["append_kv_kernel"]


# Lengths and tables are read one element at a time: their alignment must not select a compilation.
@triton.jit(
    do_not_specialize=["new_tokens", "max_blocks", "stride_table"],
    do_not_specialize_on_alignment=["cache_seqlens", "block_table", "seq_lens"],
)
def append_kv_kernel(
    key, value, key_cache, value_cache, cache_seqlens, block_table, seq_lens, num_heads, new_tokens,
    max_blocks, stride_table, stride_kr, stride_kt, stride_kh, stride_vr, stride_vt, stride_vh,
    stride_kcb, stride_kcn, stride_kch, stride_vcb, stride_vcn, stride_vch,
    BLOCK_SIZE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK_H: tl.constexpr, ONE_TOKEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write keys and values of one token; the first program of a request also writes its new
    length. Grid: (requests * new tokens, blocks of heads). ONE_TOKEN: new_tokens is 1."""
    if PDL:
        # This grid may start while the previous one drains, and the next one, which waits for the
        # cache and the lengths, may start now. Nothing is read before the wait.
        gdc_wait()
        gdc_launch_dependents()
    request = tl.program_id(0)
    token = request * 0
    if not ONE_TOKEN:
        token = request % new_tokens
        request = request // new_tokens
    row = request.to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_heads = heads < num_heads
    # The slot takes two loads, one after the other. The rows arrive meanwhile.
    new_key = load_heads(
        key + row * stride_kr, token, heads, mask_heads, stride_kt, stride_kh, D, D_PAD
    )
    new_value = load_heads(
        value + row * stride_vr, token, heads, mask_heads, stride_vt, stride_vh, DV, DV_PAD
    )
    length = tl.load(cache_seqlens + request)
    if (token == 0) & (tl.program_id(1) == 0):
        tl.store(seq_lens + request, length + new_tokens)
    position = length + token
    column = position // BLOCK_SIZE
    # A position outside the block table has no slot.
    if (position >= 0) & (column < max_blocks):
        # The offset in the block is added first, so that little work follows the second load: with
        # blocks of one slot from there on, the block is the slot.
        offset = (position % BLOCK_SIZE).to(tl.int64)
        block = tl.load(block_table + row * stride_table + column).to(tl.int64)
        store_heads(
            new_key, key_cache + offset * stride_kcn, block, heads, mask_heads, 1.0, stride_kcb, 0,
            stride_kch, 1, D, D_PAD, 0, False, False)  # fmt: skip
        store_heads(
            new_value, value_cache + offset * stride_vcn, block, heads, mask_heads, 1.0, stride_vcb,
            0, stride_vch, 1, DV, DV_PAD, 0, False, False)  # fmt: skip
