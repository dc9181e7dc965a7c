"""Normalize and rotate query and key heads, rotate heads for the cache (P15), and quantize keys and
values in pages that hold their scales (M16), in one launch.

One program per token and block of query, key or value heads, as in `rotary_write`. The stored bits
are those of the separate launches.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.cache_write import Heads, load_heads
from attnlib.ops.triton.kernels.chunks import aligned
from attnlib.ops.triton.kernels.hadamard import turned
from attnlib.ops.triton.kernels.head_norm import NORM_NONE, inverse_rms, normalize, weighted
from attnlib.ops.triton.kernels.page_store import split_heads, store_parts
from attnlib.ops.triton.kernels.page_write import page_slot, store_rows
from attnlib.ops.triton.kernels.rotary_write import Angles, rotate_heads, turn

__all__ = ["ScaleStrides", "rotate_and_write_pages_kernel"]


class ScaleStrides(NamedTuple):
    """Strides of the scales of keys and of values: blocks, tokens, heads. Those of pages do not
    change from step to step."""

    KB: int
    KN: int
    KH: int
    VB: int
    VN: int
    VH: int


@triton.jit
def _pairs_in_order(source, factor, weight, cos, sin, DTYPE: tl.constexpr, CONFIG: tl.constexpr):
    """Heads of 2 * HALF elements, a power of two, rotated in halves; [BLOCK_H, D]."""
    HALF: tl.constexpr = CONFIG.HALF
    NORM: tl.constexpr = CONFIG.K_NORM
    OFFSET: tl.constexpr = CONFIG.K_WEIGHT_OFFSET
    lanes = tl.arange(0, HALF)
    c = tl.load(cos + lanes).to(tl.float32)[None, :]
    s = tl.load(sin + lanes).to(tl.float32)[None, :]
    first = load_heads(source, 0, HALF, HALF, CONFIG.VEC_K)
    second = load_heads(source, HALF, HALF, HALF, CONFIG.VEC_K)
    first = normalize(first, factor, weight, HALF, HALF, NORM, OFFSET)
    second = normalize(second, factor, weight + HALF, HALF, HALF, NORM, OFFSET)
    both = tl.join(turn(first, second, c, s, DTYPE), turn(second, first, c, -s, DTYPE))
    return tl.reshape(tl.permute(both, [0, 2, 1]), [CONFIG.BLOCK_H, CONFIG.D])


@triton.jit
def _pairs(
    source, factor, weight, cos, sin, DTYPE: tl.constexpr, FULL: tl.constexpr, CONFIG: tl.constexpr
):
    """Heads with any pairs: each element is loaded with its partner; [BLOCK_H, FULL]."""
    D: tl.constexpr = CONFIG.D
    HALF: tl.constexpr = CONFIG.HALF
    lanes = tl.arange(0, FULL)
    if CONFIG.INTERLEAVED:
        partner, angle, is_first = lanes ^ 1, lanes // 2, lanes % 2 == 0
    else:
        is_first = lanes < HALF
        partner = tl.where(is_first, lanes + HALF, lanes - HALF)
        angle = tl.where(is_first, lanes, lanes - HALF)
    turns = lanes < 2 * HALF
    base = source.base + (source.numbers.to(tl.int64) * source.stride)[:, None]
    mask = source.exist[:, None]
    x = tl.load(base + lanes[None, :], mask=mask & (lanes < D)[None, :], other=0.0)
    y = tl.load(base + partner[None, :], mask=mask & turns[None, :], other=0.0)
    if CONFIG.K_NORM != NORM_NONE:
        w = tl.load(weight + lanes, mask=lanes < D, other=0.0)
        x = weighted(x, factor, w, CONFIG.K_NORM, CONFIG.K_WEIGHT_OFFSET)
        w = tl.load(weight + partner, mask=turns, other=0.0)
        y = weighted(y, factor, w, CONFIG.K_NORM, CONFIG.K_WEIGHT_OFFSET)
    c = tl.load(cos + angle, mask=turns, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=turns, other=0.0).to(tl.float32)
    s = tl.where(is_first, s, -s)
    x = tl.where(turns[None, :], turn(x, y, c[None, :], s[None, :], DTYPE), x)
    return tl.where((lanes < D)[None, :], x, 0.0).to(x.dtype)


@triton.jit
def _rotated_keys(source, token, weight, eps, angles, FULL: tl.constexpr, CONFIG: tl.constexpr):
    """Normalized and rotated keys of one token in their own dtype, [BLOCK_H, FULL], elements in
    order and zeros behind them."""
    NORM: tl.constexpr = CONFIG.K_NORM
    factor = tl.full([CONFIG.BLOCK_H, 1], 1.0, tl.float32)
    if NORM != NORM_NONE:
        x = load_heads(source, 0, CONFIG.D, CONFIG.D_PAD, CONFIG.VEC_K)
        factor = inverse_rms(x, eps, CONFIG.D, CONFIG.D_PAD, CONFIG.BLOCK_H)
    DTYPE: tl.constexpr = (
        tl.float32 if angles.cos.dtype.element_ty == tl.float32 else source.base.dtype.element_ty
    )
    token64 = token.to(tl.int64)
    cos = angles.cos + aligned(token64 * angles.stride_ct, CONFIG.VEC_A)
    sin = angles.sin + aligned(token64 * angles.stride_nt, CONFIG.VEC_A)
    if CONFIG.HALF == 0:
        x = load_heads(source, 0, CONFIG.D, FULL, CONFIG.VEC_K)
        x = normalize(x, factor, weight, CONFIG.D, FULL, NORM, CONFIG.K_WEIGHT_OFFSET)
    elif 2 * CONFIG.HALF == FULL and not CONFIG.INTERLEAVED:
        x = _pairs_in_order(source, factor, weight, cos, sin, DTYPE, CONFIG)
    else:
        x = _pairs(source, factor, weight, cos, sin, DTYPE, FULL, CONFIG)
    return x


@triton.jit
def _write_keys(
    source, target, scales, signs, token, norm, angles, CONFIG: tl.constexpr, KEYS: tl.constexpr
):
    """Normalize, rotate, turn and quantize the keys of one token in a KV slot."""
    x = _rotated_keys(source, token, norm[0], norm[1], angles, KEYS.PADDED, CONFIG)
    if KEYS.TURN > 0:
        x = turned(x, signs, KEYS)
    x0, x1, x2, x3 = split_heads(x, KEYS)
    store_parts(x0, x1, x2, x3, target, scales, KEYS)


# As in `rotate_and_write_kernel`.
@triton.jit(
    do_not_specialize="""
        num_slots stride_qt stride_qh stride_kt stride_kh stride_vt stride_vh stride_ot
        stride_oh stride_ct stride_nt stride_kcb stride_kcn stride_kch stride_vcb stride_vcn
        stride_vch
    """.split(),
    do_not_specialize_on_alignment=["slot_mapping", "k_scale", "v_scale"],
)
def rotate_and_write_pages_kernel(
    query, key, value, out, key_cache, value_cache, slot_mapping, cos, sin, q_weight, k_weight,
    k_scale, v_scale, q_eps, k_eps, num_slots, num_heads, num_kv_heads, stride_qt, stride_qh,
    stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh, stride_ct, stride_nt,
    stride_kcb, stride_kcn, stride_kch, stride_vcb, stride_vcn, stride_vch, signs,
    CONFIG: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Rotate the queries of one token into `out`; rotate, turn and quantize its keys; turn and
    quantize its values.

    CONFIG is a `RotaryConfig`, KEYS and VALUES are `PageSide`s, SCALES is a `ScaleStrides`. `signs`
    and the grid are those of `write_pages_kernel` and `rotate_and_write_kernel`.
    """
    token = tl.program_id(0)
    token64 = token.to(tl.int64)
    block = tl.program_id(1)
    lanes = tl.arange(0, CONFIG.BLOCK_H)
    SIZE: tl.constexpr = CONFIG.BLOCK_SIZE
    if block < CONFIG.Q_BLOCKS:
        angles = Angles(cos, sin, stride_ct, stride_nt)
        heads = block * CONFIG.BLOCK_H + lanes
        exist = heads < num_heads
        source = Heads(query + aligned(token64 * stride_qt, CONFIG.VEC_Q), heads, exist, stride_qh)
        target = Heads(out + aligned(token64 * stride_ot, CONFIG.VEC_O), heads, exist, stride_oh)
        rotate_heads(
            source, target, token, q_weight, q_eps, angles, 1.0, CONFIG.Q_NORM,
            CONFIG.Q_WEIGHT_OFFSET, 0, False, CONFIG.VEC_Q, CONFIG.VEC_O, CONFIG)  # fmt: skip
    elif token < num_slots:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        # A negative slot writes nothing (P4).
        if slot >= 0:
            block -= CONFIG.Q_BLOCKS
            if block < CONFIG.KV_BLOCKS:
                angles = Angles(cos, sin, stride_ct, stride_nt)
                heads = block * CONFIG.BLOCK_H + lanes
                exist = heads < num_kv_heads
                rows = key + aligned(token64 * stride_kt, CONFIG.VEC_K)
                source = Heads(rows, heads, exist, stride_kh)
                target = page_slot(key_cache, slot, stride_kcb, stride_kcn, SIZE, KEYS.VEC_C)
                target = Heads(target, heads, exist, stride_kch)
                k_scale = page_slot(k_scale, slot, SCALES.KB, SCALES.KN, SIZE, 1)
                norm = (k_weight, k_eps)
                k_scales = Heads(k_scale, heads, exist, SCALES.KH)
                _write_keys(source, target, k_scales, signs, token, norm, angles, CONFIG, KEYS)
            else:
                heads = (block - CONFIG.KV_BLOCKS) * CONFIG.BLOCK_H + lanes
                exist = heads < num_kv_heads
                rows = value + aligned(token64 * stride_vt, CONFIG.VEC_V)
                source = Heads(rows, heads, exist, stride_vh)
                target = page_slot(value_cache, slot, stride_vcb, stride_vcn, SIZE, VALUES.VEC_C)
                target = Heads(target, heads, exist, stride_vch)
                v_scale = page_slot(v_scale, slot, SCALES.VB, SCALES.VN, SIZE, 1)
                v_scales = Heads(v_scale, heads, exist, SCALES.VH)
                if VALUES.TURN > 0:
                    signs += KEYS.SIZE
                store_rows(source, target, v_scales, signs, VALUES)
