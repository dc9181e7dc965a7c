"""Store new keys and values in the paged cache. One program per token and block of heads."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnlib.ops.triton.kernels.quant import encode_fp8, load_scale, valid_scale

__all__ = ["load_heads", "store_heads", "write_kv_kernel"]


@triton.jit
def load_heads(
    source, token, heads, mask_heads, stride_st, stride_sh, SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """The heads of one token."""
    lanes = tl.arange(0, PADDED)
    mask = mask_heads[:, None] & (lanes < SIZE)[None, :]
    source += token.to(tl.int64) * stride_st
    offsets = (heads.to(tl.int64) * stride_sh)[:, None] + lanes[None, :]
    return tl.load(source + offsets, mask=mask, other=0.0)


@triton.jit
def store_heads(
    x, cache, slot, heads, mask_heads, scale, stride_cb, stride_cn, stride_ch,
    BLOCK_SIZE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, SCALE_KIND: tl.constexpr,
    FP8: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    """Store the heads of one token in a KV slot; divide by the scale and convert for float8."""
    lanes = tl.arange(0, PADDED)
    mask = mask_heads[:, None] & (lanes < SIZE)[None, :]
    heads64 = heads.to(tl.int64)
    cache += (slot // BLOCK_SIZE) * stride_cb + (slot % BLOCK_SIZE) * stride_cn
    target = cache + (heads64 * stride_ch)[:, None] + lanes[None, :]
    if FP8:
        x = x.to(tl.float32)
        if SCALE_KIND == 2:
            divisor = valid_scale(tl.load(scale + heads, mask=mask_heads, other=1.0))[:, None]
        else:
            divisor = tl.zeros([1, 1], tl.float32) + load_scale(scale, 0, SCALE_KIND)
        divisor, x = tl.broadcast(divisor, x)
        # Round-to-nearest division: the stored bits are then the same on every chip.
        tl.store(target, encode_fp8(tl.math.div_rn(x, divisor), E5M2), mask=mask)
    else:
        tl.store(target, x.to(cache.dtype.element_ty), mask=mask)


# Slices with arbitrary offsets, read one element at a time: their alignment must not select a
# compilation.
@triton.jit(do_not_specialize_on_alignment=["slot_mapping", "k_scale", "v_scale"])
def write_kv_kernel(
    key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, num_heads, stride_kt,
    stride_kh, stride_vt, stride_vh, stride_kcb, stride_kcn, stride_kch, stride_vcb, stride_vcn,
    stride_vch, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK_H: tl.constexpr, K_SCALE_KIND: tl.constexpr,
    V_SCALE_KIND: tl.constexpr, FP8: tl.constexpr, E5M2: tl.constexpr, LATENT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write keys and values of one token; with LATENT, values are a prefix of the keys (P10).

    Grid: (tokens, blocks of heads).
    """
    if PDL:
        # This grid may start while the previous one drains, and the attention kernel, which waits
        # for the cache, may start now. Nothing is read before the wait.
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    # A negative slot writes nothing (P4).
    if slot >= 0:
        heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask_heads = heads < num_heads
        x = load_heads(key, token, heads, mask_heads, stride_kt, stride_kh, D, D_PAD)
        store_heads(
            x, key_cache, slot, heads, mask_heads, k_scale, stride_kcb, stride_kcn, stride_kch,
            BLOCK_SIZE, D, D_PAD, K_SCALE_KIND, FP8, E5M2)  # fmt: skip
        if not LATENT:
            x = load_heads(value, token, heads, mask_heads, stride_vt, stride_vh, DV, DV_PAD)
            store_heads(
                x, value_cache, slot, heads, mask_heads, v_scale, stride_vcb, stride_vcn,
                stride_vch, BLOCK_SIZE, DV, DV_PAD, V_SCALE_KIND, FP8, E5M2)  # fmt: skip
