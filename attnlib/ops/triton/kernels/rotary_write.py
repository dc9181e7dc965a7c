"""Normalize and rotate query and key heads, and store keys and values in the paged cache.

One program per token and block of query, key or value heads. The products of a rotation and the sum
of squares are rounded as `ops.rotary` defines (P11); launches disable the fusion of a product and a
sum into one rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.cache_write import load_heads, store_heads

__all__ = ["NORM_FLOAT32", "NORM_NONE", "NORM_ROUNDED", "rotate_and_write_kernel"]

NORM_NONE: tl.constexpr = tl.constexpr(0)
NORM_ROUNDED: tl.constexpr = tl.constexpr(1)  # rounded before the weight (Llama, Qwen3)
NORM_FLOAT32: tl.constexpr = tl.constexpr(2)  # the weight is applied in float32 (Gemma)


@triton.jit
def inverse_rms(x, eps, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_H: tl.constexpr):
    """1 / sqrt(mean of squares + eps) of each head, `[BLOCK_H, 1]` float32."""
    x = x.to(tl.float32)
    sums = x * x
    LEVELS: tl.constexpr = D_PAD.bit_length() - 1
    # Pairs of neighbors: an order that does not depend on how the elements are distributed over
    # threads, and that needs no communication for the elements of one thread.
    for level in tl.static_range(LEVELS):
        sums = tl.sum(tl.reshape(sums, [BLOCK_H, D_PAD >> (level + 1), 2]), axis=2)
    sums = tl.reshape(sums, [BLOCK_H, 1])
    root = tl.sqrt_rn(sums * (1.0 / D) + eps)
    return tl.math.div_rn(tl.full([BLOCK_H, 1], 1.0, tl.float32), root)


@triton.jit
def normalize(
    x, factor, weight, SIZE: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
):  # fmt: skip
    """Multiply the heads by the inverse RMS and by their weight; rounded to the dtype of `x`."""
    if NORM == NORM_NONE:
        y = x
    else:
        lanes = tl.arange(0, PADDED)
        w = tl.load(weight + lanes, mask=lanes < SIZE, other=0.0).to(tl.float32)[None, :]
        y = x.to(tl.float32) * factor
        if NORM == NORM_FLOAT32:
            if WEIGHT_OFFSET != 0:
                w = w + WEIGHT_OFFSET
            y = (y * w).to(x.dtype)
        else:
            y = (y.to(x.dtype).to(tl.float32) * w).to(x.dtype)
    return y


@triton.jit
def turn(first, second, cos, sin, DTYPE: tl.constexpr):
    """`first * cos - second * sin`: both products and the sum are rounded to DTYPE."""
    left = (first.to(tl.float32) * cos).to(DTYPE).to(tl.float32)
    right = (second.to(tl.float32) * sin).to(DTYPE).to(tl.float32)
    return (left - right).to(DTYPE).to(first.dtype)


@triton.jit
def rotate_heads(
    source, target, token, slot, heads, mask_heads, weight, eps, cos, sin, scale, stride_st,
    stride_sh, stride_ct, stride_nt, stride_tb, stride_tn, stride_th, BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, BLOCK_H: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr, SCALE_KIND: tl.constexpr, FP8: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate the heads of one token, and store them in a slot of `target`."""
    factor = tl.full([BLOCK_H, 1], 1.0, tl.float32)
    if NORM != NORM_NONE:
        x = load_heads(source, token, heads, mask_heads, stride_st, stride_sh, D, D_PAD)
        factor = inverse_rms(x, eps, D, D_PAD, BLOCK_H)
    if HALF > 0:
        lanes = tl.arange(0, HALF_PAD)
        inside = lanes < HALF
        cos_row = cos + token.to(tl.int64) * stride_ct + lanes
        sin_row = sin + token.to(tl.int64) * stride_nt + lanes
        DTYPE: tl.constexpr = (
            tl.float32 if cos.dtype.element_ty == tl.float32 else source.dtype.element_ty
        )
        c = tl.load(cos_row, mask=inside, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin_row, mask=inside, other=0.0).to(tl.float32)[None, :]
        if INTERLEAVED:
            x = load_heads(
                source, token, heads, mask_heads, stride_st, stride_sh, 2 * HALF, 2 * HALF_PAD
            )
            x = normalize(x, factor, weight, 2 * HALF, 2 * HALF_PAD, NORM, WEIGHT_OFFSET)
            first, second = tl.split(tl.reshape(x, [BLOCK_H, HALF_PAD, 2]))
            x = tl.join(turn(first, second, c, s, DTYPE), turn(second, first, c, -s, DTYPE))
            store_heads(
                tl.reshape(x, [BLOCK_H, 2 * HALF_PAD]), target, slot, heads, mask_heads, scale,
                stride_tb, stride_tn, stride_th, BLOCK_SIZE, 2 * HALF, 2 * HALF_PAD, SCALE_KIND,
                FP8, E5M2)  # fmt: skip
        else:
            first = load_heads(
                source, token, heads, mask_heads, stride_st, stride_sh, HALF, HALF_PAD
            )
            second = load_heads(
                source + HALF, token, heads, mask_heads, stride_st, stride_sh, HALF, HALF_PAD
            )
            first = normalize(first, factor, weight, HALF, HALF_PAD, NORM, WEIGHT_OFFSET)
            second = normalize(second, factor, weight + HALF, HALF, HALF_PAD, NORM, WEIGHT_OFFSET)
            store_heads(
                turn(first, second, c, s, DTYPE), target, slot, heads, mask_heads, scale,
                stride_tb, stride_tn, stride_th, BLOCK_SIZE, HALF, HALF_PAD, SCALE_KIND, FP8,
                E5M2)  # fmt: skip
            store_heads(
                turn(second, first, c, -s, DTYPE), target + HALF, slot, heads, mask_heads, scale,
                stride_tb, stride_tn, stride_th, BLOCK_SIZE, HALF, HALF_PAD, SCALE_KIND, FP8,
                E5M2)  # fmt: skip
    if REST_PAD > 0:
        REST: tl.constexpr = D - 2 * HALF
        x = load_heads(
            source + 2 * HALF, token, heads, mask_heads, stride_st, stride_sh, REST, REST_PAD
        )
        x = normalize(x, factor, weight + 2 * HALF, REST, REST_PAD, NORM, WEIGHT_OFFSET)
        store_heads(
            x, target + 2 * HALF, slot, heads, mask_heads, scale, stride_tb, stride_tn, stride_th,
            BLOCK_SIZE, REST, REST_PAD, SCALE_KIND, FP8, E5M2)  # fmt: skip


# Slices with arbitrary offsets, read one element at a time: their alignment must not select a
# compilation.
@triton.jit(
    do_not_specialize=["num_slots"],
    do_not_specialize_on_alignment=["slot_mapping", "k_scale", "v_scale"],
)
def rotate_and_write_kernel(
    query, key, value, out, key_cache, value_cache, slot_mapping, cos, sin, q_weight, k_weight,
    k_scale, v_scale, q_eps, k_eps, num_slots, num_heads, num_kv_heads, stride_qt, stride_qh,
    stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh, stride_ct, stride_nt,
    stride_kcb, stride_kcn, stride_kch, stride_vcb, stride_vcn, stride_vch,
    BLOCK_SIZE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr, Q_BLOCKS: tl.constexpr, KV_BLOCKS: tl.constexpr,
    INTERLEAVED: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    Q_WEIGHT_OFFSET: tl.constexpr, K_WEIGHT_OFFSET: tl.constexpr, K_SCALE_KIND: tl.constexpr,
    V_SCALE_KIND: tl.constexpr, FP8: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    """Rotate the queries of one token into `out`, its keys into the cache, and copy its values.

    Grid: (tokens, Q_BLOCKS + 2 * KV_BLOCKS). Blocks of query heads come first, then those of keys,
    then those of values.
    """
    token = tl.program_id(0)
    block = tl.program_id(1)
    lanes = tl.arange(0, BLOCK_H)
    if block < Q_BLOCKS:
        heads = block * BLOCK_H + lanes
        # A row of `out` is one slot of blocks with one slot each.
        rotate_heads(
            query, out, token, token.to(tl.int64), heads, heads < num_heads, q_weight, q_eps, cos,
            sin, 1.0, stride_qt, stride_qh, stride_ct, stride_nt, stride_ot, 0, stride_oh, 1, D,
            D_PAD, HALF, HALF_PAD, REST_PAD, BLOCK_H, INTERLEAVED, Q_NORM, Q_WEIGHT_OFFSET, 0,
            False, False)  # fmt: skip
    elif KV_BLOCKS > 0 and token < num_slots:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        # A negative slot writes nothing (P4).
        if slot >= 0:
            block -= Q_BLOCKS
            if block < KV_BLOCKS:
                heads = block * BLOCK_H + lanes
                rotate_heads(
                    key, key_cache, token, slot, heads, heads < num_kv_heads, k_weight, k_eps, cos,
                    sin, k_scale, stride_kt, stride_kh, stride_ct, stride_nt, stride_kcb,
                    stride_kcn, stride_kch, BLOCK_SIZE, D, D_PAD, HALF, HALF_PAD, REST_PAD,
                    BLOCK_H, INTERLEAVED, K_NORM, K_WEIGHT_OFFSET, K_SCALE_KIND, FP8,
                    E5M2)  # fmt: skip
            else:
                heads = (block - KV_BLOCKS) * BLOCK_H + lanes
                mask = heads < num_kv_heads
                x = load_heads(value, token, heads, mask, stride_vt, stride_vh, DV, DV_PAD)
                store_heads(
                    x, value_cache, slot, heads, mask, v_scale, stride_vcb, stride_vcn, stride_vch,
                    BLOCK_SIZE, DV, DV_PAD, V_SCALE_KIND, FP8, E5M2)  # fmt: skip
