"""Normalize and rotate query and key heads, and store keys and values in the paged cache.

One program per token and block of query, key or value heads. The products of a rotation and the sum
of squares are rounded as `ops.rotary` defines (P11); launches disable the fusion of a product and a
sum into one rounding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.cache_write import Heads, load_heads, slot_heads, store_heads
from attnlib.ops.triton.kernels.chunks import aligned
from attnlib.ops.triton.kernels.head_norm import NORM_NONE, inverse_rms, normalize

__all__ = ["Angles", "RotaryConfig", "rotate_and_write_kernel", "rotate_heads", "turn"]


class RotaryConfig(NamedTuple):
    """Constants of the kernel. Those that a `WriteConfig` has have the same meaning here.

    Attributes:
        HALF, HALF_PAD: angles of a head, and the power of two that holds them.
        REST_PAD: the power of two that holds the elements that do not rotate; 0 for none.
        Q_BLOCKS, KV_BLOCKS: programs of the query heads and of the KV heads of a token.
        INTERLEAVED: neighboring elements rotate.
        Q_NORM, K_NORM, Q_WEIGHT_OFFSET, K_WEIGHT_OFFSET: the norms (`NORM_*`).
        VEC_Q, VEC_O, VEC_A: as `WriteConfig.VEC_K`, for queries, their results and angles.
    """

    BLOCK_SIZE: int
    D: int
    DV: int
    D_PAD: int
    DV_PAD: int
    BLOCK_H: int
    HALF: int
    HALF_PAD: int
    REST_PAD: int
    Q_BLOCKS: int
    KV_BLOCKS: int
    INTERLEAVED: bool
    Q_NORM: int
    K_NORM: int
    Q_WEIGHT_OFFSET: float
    K_WEIGHT_OFFSET: float
    K_SCALE_KIND: int
    V_SCALE_KIND: int
    FP8: bool
    E5M2: bool
    VEC_Q: int
    VEC_O: int
    VEC_A: int
    VEC_K: int
    VEC_V: int
    VEC_KC: int
    VEC_VC: int


class Angles(NamedTuple):
    """Cosines and sines, and the strides of their tokens."""

    cos: Any
    sin: Any
    stride_ct: Any
    stride_nt: Any


@triton.jit
def turn(first, second, cos, sin, DTYPE: tl.constexpr):
    """`first * cos - second * sin`: both products and the sum are rounded to DTYPE."""
    left = (first.to(tl.float32) * cos).to(DTYPE).to(tl.float32)
    right = (second.to(tl.float32) * sin).to(DTYPE).to(tl.float32)
    return (left - right).to(DTYPE).to(first.dtype)


@triton.jit
def rotate_heads(
    source, target, token, weight, eps, angles, scale, NORM: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr, SCALE_KIND: tl.constexpr, FP8: tl.constexpr, VEC_S: tl.constexpr,
    VEC_T: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate the heads `source` of one token, and store them as `target`."""
    BLOCK_H: tl.constexpr = CONFIG.BLOCK_H
    HALF: tl.constexpr = CONFIG.HALF
    HALF_PAD: tl.constexpr = CONFIG.HALF_PAD
    E5M2: tl.constexpr = CONFIG.E5M2
    factor = tl.full([BLOCK_H, 1], 1.0, tl.float32)
    if NORM != NORM_NONE:
        x = load_heads(source, 0, CONFIG.D, CONFIG.D_PAD, VEC_S)
        factor = inverse_rms(x, eps, CONFIG.D, CONFIG.D_PAD, CONFIG.BLOCK_H)
    if HALF > 0:
        lanes = tl.arange(0, HALF_PAD)
        inside = lanes < HALF
        token64 = token.to(tl.int64)
        cos_row = angles.cos + aligned(token64 * angles.stride_ct, CONFIG.VEC_A) + lanes
        sin_row = angles.sin + aligned(token64 * angles.stride_nt, CONFIG.VEC_A) + lanes
        DTYPE: tl.constexpr = (
            tl.float32
            if angles.cos.dtype.element_ty == tl.float32
            else source.base.dtype.element_ty
        )
        c = tl.load(cos_row, mask=inside, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin_row, mask=inside, other=0.0).to(tl.float32)[None, :]
        if CONFIG.INTERLEAVED:
            x = load_heads(source, 0, 2 * HALF, 2 * HALF_PAD, VEC_S)
            x = normalize(x, factor, weight, 2 * HALF, 2 * HALF_PAD, NORM, WEIGHT_OFFSET)
            first, second = tl.split(tl.reshape(x, [BLOCK_H, HALF_PAD, 2]))
            x = tl.join(turn(first, second, c, s, DTYPE), turn(second, first, c, -s, DTYPE))
            store_heads(
                tl.reshape(x, [BLOCK_H, 2 * HALF_PAD]), target, scale, 0, 2 * HALF, 2 * HALF_PAD,
                SCALE_KIND, FP8, E5M2, VEC_T)  # fmt: skip
        else:
            first = load_heads(source, 0, HALF, HALF_PAD, VEC_S)
            second = load_heads(source, HALF, HALF, HALF_PAD, VEC_S)
            first = normalize(first, factor, weight, HALF, HALF_PAD, NORM, WEIGHT_OFFSET)
            second = normalize(second, factor, weight + HALF, HALF, HALF_PAD, NORM, WEIGHT_OFFSET)
            left = turn(first, second, c, s, DTYPE)
            store_heads(left, target, scale, 0, HALF, HALF_PAD, SCALE_KIND, FP8, E5M2, VEC_T)
            right = turn(second, first, c, -s, DTYPE)
            store_heads(right, target, scale, HALF, HALF, HALF_PAD, SCALE_KIND, FP8, E5M2, VEC_T)
    if CONFIG.REST_PAD > 0:
        REST: tl.constexpr = CONFIG.D - 2 * HALF
        REST_PAD: tl.constexpr = CONFIG.REST_PAD
        x = load_heads(source, 2 * HALF, REST, REST_PAD, VEC_S)
        x = normalize(x, factor, weight + 2 * HALF, REST, REST_PAD, NORM, WEIGHT_OFFSET)
        store_heads(x, target, scale, 2 * HALF, REST, REST_PAD, SCALE_KIND, FP8, E5M2, VEC_T)


# Slices with arbitrary offsets, read one element at a time: their alignment must not select a
# compilation.
@triton.jit(
    do_not_specialize="""
        num_slots stride_qt stride_qh stride_kt stride_kh stride_vt stride_vh stride_ot
        stride_oh stride_ct stride_nt stride_kcb stride_kcn stride_kch stride_vcb stride_vcn
        stride_vch
    """.split(),
    do_not_specialize_on_alignment=["slot_mapping", "k_scale", "v_scale"],
)
def rotate_and_write_kernel(
    query, key, value, out, key_cache, value_cache, slot_mapping, cos, sin, q_weight, k_weight,
    k_scale, v_scale, q_eps, k_eps, num_slots, num_heads, num_kv_heads, stride_qt, stride_qh,
    stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh, stride_ct, stride_nt,
    stride_kcb, stride_kcn, stride_kch, stride_vcb, stride_vcn, stride_vch, CONFIG: tl.constexpr,
):  # fmt: skip
    """Rotate the queries of one token into `out`, its keys into the cache, and copy its values.

    CONFIG is a `RotaryConfig`. Grid: (tokens, Q_BLOCKS + 2 * KV_BLOCKS). Blocks of query heads come
    first, then those of keys, then those of values.
    """
    token = tl.program_id(0)
    token64 = token.to(tl.int64)
    block = tl.program_id(1)
    lanes = tl.arange(0, CONFIG.BLOCK_H)
    angles = Angles(cos, sin, stride_ct, stride_nt)
    if block < CONFIG.Q_BLOCKS:
        heads = block * CONFIG.BLOCK_H + lanes
        exist = heads < num_heads
        source = Heads(query + aligned(token64 * stride_qt, CONFIG.VEC_Q), heads, exist, stride_qh)
        target = Heads(out + aligned(token64 * stride_ot, CONFIG.VEC_O), heads, exist, stride_oh)
        rotate_heads(
            source, target, token, q_weight, q_eps, angles, 1.0, CONFIG.Q_NORM,
            CONFIG.Q_WEIGHT_OFFSET, 0, False, CONFIG.VEC_Q, CONFIG.VEC_O, CONFIG)  # fmt: skip
    elif CONFIG.KV_BLOCKS > 0 and token < num_slots:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        # A negative slot writes nothing (P4).
        if slot >= 0:
            block -= CONFIG.Q_BLOCKS
            if block < CONFIG.KV_BLOCKS:
                heads = block * CONFIG.BLOCK_H + lanes
                exist = heads < num_kv_heads
                base = key + aligned(token64 * stride_kt, CONFIG.VEC_K)
                target = slot_heads(
                    key_cache, slot, heads, exist, stride_kcb, stride_kcn, stride_kch,
                    CONFIG.BLOCK_SIZE, CONFIG.VEC_KC)  # fmt: skip
                rotate_heads(
                    Heads(base, heads, exist, stride_kh), target, token, k_weight, k_eps, angles,
                    k_scale, CONFIG.K_NORM, CONFIG.K_WEIGHT_OFFSET, CONFIG.K_SCALE_KIND, CONFIG.FP8,
                    CONFIG.VEC_K, CONFIG.VEC_KC, CONFIG)  # fmt: skip
            else:
                heads = (block - CONFIG.KV_BLOCKS) * CONFIG.BLOCK_H + lanes
                exist = heads < num_kv_heads
                base = value + aligned(token64 * stride_vt, CONFIG.VEC_V)
                source = Heads(base, heads, exist, stride_vh)
                x = load_heads(source, 0, CONFIG.DV, CONFIG.DV_PAD, CONFIG.VEC_V)
                target = slot_heads(
                    value_cache, slot, heads, exist, stride_vcb, stride_vcn, stride_vch,
                    CONFIG.BLOCK_SIZE, CONFIG.VEC_VC)  # fmt: skip
                store_heads(
                    x, target, v_scale, 0, CONFIG.DV, CONFIG.DV_PAD, CONFIG.V_SCALE_KIND,
                    CONFIG.FP8, CONFIG.E5M2, CONFIG.VEC_VC)  # fmt: skip
