"""Store new keys and values in pages that hold their scales (M16): one launch quantizes and writes.

One program per token and block of heads. All arithmetic has one rounding per operation, as in
`ops.torch.page_formats`, so that the stored bits are equal.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.cache_write import Heads
from attnlib.ops.triton.kernels.chunks import aligned
from attnlib.ops.triton.kernels.page_formats import (
    PAGE_E4M3,
    PAGE_INT4,
    PAGE_NVFP4,
    decode_scale,
    element_step,
    first_element,
    words_per_scale,
)
from attnlib.ops.triton.kernels.quant import encode_fp8

__all__ = ["PageWriteConfig", "write_pages_kernel"]


class PageWriteConfig(NamedTuple):
    """Constants of the kernel.

    Attributes:
        BLOCK_SIZE: tokens per block of the cache.
        WORDS, WORDS_PAD, DV_WORDS, DV_PAD: words of a key and of a value, and of the rows that
            hold them (`page_parts`).
        BLOCK_H: heads of a program.
        K_KIND, K_LARGEST, K_LARGEST_SCALE: the `PAGE_*` constant of the format of keys, its
            largest element and its largest scale; V_KIND, ...: those of values. A tuple of them
            would lose its types in Triton 3.6.
        VEC_K, VEC_V, VEC_KC, VEC_VC: as in `cache_write.WriteConfig`; bytes for the caches.
    """

    BLOCK_SIZE: int
    WORDS: int
    WORDS_PAD: int
    DV_WORDS: int
    DV_PAD: int
    BLOCK_H: int
    K_KIND: int
    K_LARGEST: float
    K_LARGEST_SCALE: float
    V_KIND: int
    V_LARGEST: float
    V_LARGEST_SCALE: float
    VEC_K: int
    VEC_V: int
    VEC_KC: int
    VEC_VC: int


@triton.jit
def _load_part(
    source, PART: tl.constexpr, WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, VEC: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Load one part of the heads of a token, [BLOCK_H, WORDS_PAD] float32."""
    lanes = tl.arange(0, WORDS_PAD)
    FIRST: tl.constexpr = first_element(PART, WORDS, KIND)
    elements = FIRST + lanes * element_step(KIND)
    offsets = aligned(source.numbers.to(tl.int64) * source.stride, VEC)
    mask = source.exist[:, None] & (lanes < WORDS)[None, :]
    pointers = source.base + offsets[:, None] + elements[None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _largest(x):
    """Return the largest magnitude of each row; NaN for a row with a NaN."""
    has_nan = tl.max((x != x).to(tl.int32), 1) > 0
    largest = tl.max(tl.where(x != x, 0.0, tl.abs(x)), 1)
    return tl.where(has_nan, float("nan"), largest)


@triton.jit
def _scale(largest, LARGEST: tl.constexpr, LARGEST_SCALE: tl.constexpr):
    """Return the scales of groups, before the conversion to their dtype."""
    divisor = tl.full(largest.shape, LARGEST, tl.float32)
    scale = tl.math.div_rn(largest, divisor)
    scale = tl.where(scale > LARGEST_SCALE, LARGEST_SCALE, scale)
    return tl.where(scale < 2.0**-100, 0.0, scale)


@triton.jit
def _store_scale(scale, scales, PART: tl.constexpr):
    """Store the scale of one group per head; returns what is stored, in float32."""
    stored = scale.to(scales.base.dtype.element_ty)
    pointers = scales.base + scales.numbers.to(tl.int64) * scales.stride + PART
    tl.store(pointers, stored, mask=scales.exist)
    return stored.to(tl.float32)


@triton.jit
def _exact(x, scale, LARGEST: tl.constexpr):
    """Return x / scale, saturated; 0 where the scale is 0 or NaN."""
    divisor = tl.where(scale > 0.0, scale, 1.0)[:, None]
    divisor, x = tl.broadcast(divisor, x)
    exact = tl.math.div_rn(x, divisor)
    exact = tl.where(exact > LARGEST, LARGEST, tl.where(exact < -LARGEST, -LARGEST, exact))
    return tl.where((scale > 0.0)[:, None], exact, 0.0)


@triton.jit
def _nearest_integer(x):
    """Round |x| < 2^22 to the nearest integer, ties to even, as int32."""
    # The float32 adder rounds to the last bit of 1.5 * 2^23, which is worth 1.
    zero_point = tl.full(x.shape, 12582912.0, tl.float32)
    return (x + zero_point).to(tl.int32, bitcast=True) - zero_point.to(tl.int32, bitcast=True)


@triton.jit
def _bits(exact, KIND: tl.constexpr):
    """Return the stored bits of one part as int32."""
    if KIND == PAGE_E4M3:
        bits = encode_fp8(exact, False).to(tl.int32)
    elif KIND == PAGE_INT4:
        bits = _nearest_integer(exact) + 8
    else:
        bits = _nearest_integer(exact) & 0xFF
    return bits


@triton.jit
def _quotient(x, divisor, LARGEST: tl.constexpr):
    """Return x / divisor, element by element, saturated; 0 where the divisor is 0 or NaN."""
    exact = tl.math.div_rn(x, tl.where(divisor > 0.0, divisor, 1.0))
    exact = tl.where(exact > LARGEST, LARGEST, tl.where(exact < -LARGEST, -LARGEST, exact))
    return tl.where(divisor > 0.0, exact, 0.0)


@triton.jit
def _e2m1_bits(x):
    """Return the bits of the nearest e2m1 numbers, ties to even bits; |x| is at most 6."""
    magnitude = tl.abs(x)
    bits = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32)
    bits += (magnitude > 1.25).to(tl.int32) + (magnitude >= 1.75).to(tl.int32)
    bits += (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
    bits += (magnitude > 5.0).to(tl.int32)
    return bits | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _store_group_scales(
    x0,
    x1,
    x2,
    x3,
    scales,
    WORDS: tl.constexpr,
    WORDS_PAD: tl.constexpr,
    KIND: tl.constexpr,
    LARGEST: tl.constexpr,
    LARGEST_SCALE: tl.constexpr,
):
    """Store the scales of 4-bit floats; returns the scale of each word, [BLOCK_H, WORDS_PAD]."""
    TOGETHER: tl.constexpr = words_per_scale(KIND)
    GROUPS: tl.constexpr = WORDS_PAD // TOGETHER
    BLOCK_H: tl.constexpr = x0.shape[0]
    has_nan = (x0 != x0) | (x1 != x1) | (x2 != x2) | (x3 != x3)
    largest = tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3)))
    largest = tl.where(has_nan, 0.0, largest)
    largest = tl.max(tl.reshape(largest, [BLOCK_H, GROUPS, TOGETHER]), 2)
    has_nan = tl.max(tl.reshape(has_nan.to(tl.int32), [BLOCK_H, GROUPS, TOGETHER]), 2) > 0
    if KIND == PAGE_NVFP4:
        scale = _scale(largest, LARGEST, LARGEST_SCALE)
        bits = tl.where(has_nan, 0x7F, encode_fp8(scale, False).to(tl.int32)).to(tl.uint8)
    else:
        # The exponent of the largest magnitude, less 2, which is that of the largest e2m1 number.
        largest = tl.where(largest > 3.4028234663852886e38, 3.4028234663852886e38, largest)
        exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 2, 1)
        bits = tl.where(has_nan, 255, exponent).to(tl.uint8)
    groups = tl.arange(0, GROUPS)
    mask = scales.exist[:, None] & (groups < WORDS // TOGETHER)[None, :]
    target = scales.base.to(tl.pointer_type(tl.uint8))
    target = target + (scales.numbers.to(tl.int64) * scales.stride)[:, None] + groups[None, :]
    tl.store(target, bits, mask=mask)
    stored = tl.broadcast_to(decode_scale(bits, KIND)[:, :, None], [BLOCK_H, GROUPS, TOGETHER])
    return tl.reshape(stored, [BLOCK_H, WORDS_PAD])


@triton.jit
def _write_words(words, target, WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, VEC: tl.constexpr):
    """Store the words of the heads of a slot, whose stride is in bytes: rows are whole words."""
    lanes = tl.arange(0, WORDS_PAD)
    base = target.base.to(tl.pointer_type(tl.uint16))
    offsets = aligned(target.numbers.to(tl.int64) * (target.stride // 2), VEC // 2)
    mask = target.exist[:, None] & (lanes < WORDS)[None, :]
    tl.store(base + offsets[:, None] + lanes[None, :], words.to(tl.uint16), mask=mask)


@triton.jit
def _write_heads(
    source, target, scales, WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, VEC_S: tl.constexpr,
    VEC_T: tl.constexpr, KIND: tl.constexpr, LARGEST: tl.constexpr, LARGEST_SCALE: tl.constexpr,
):  # fmt: skip
    """Quantize and store the heads of one token in a KV slot."""
    x0 = _load_part(source, 0, WORDS, WORDS_PAD, VEC_S, KIND)
    x1 = _load_part(source, 1, WORDS, WORDS_PAD, VEC_S, KIND)
    if KIND >= PAGE_INT4:
        x2 = _load_part(source, 2, WORDS, WORDS_PAD, VEC_S, KIND)
        x3 = _load_part(source, 3, WORDS, WORDS_PAD, VEC_S, KIND)
    if KIND >= PAGE_NVFP4:
        divisor = _store_group_scales(
            x0, x1, x2, x3, scales, WORDS, WORDS_PAD, KIND, LARGEST, LARGEST_SCALE
        )
        words = _e2m1_bits(_quotient(x0, divisor, LARGEST))
        words |= _e2m1_bits(_quotient(x1, divisor, LARGEST)) << 4
        words |= _e2m1_bits(_quotient(x2, divisor, LARGEST)) << 8
        words |= _e2m1_bits(_quotient(x3, divisor, LARGEST)) << 12
    elif KIND == PAGE_INT4:
        s0 = _store_scale(_scale(_largest(x0), LARGEST, LARGEST_SCALE), scales, 0)
        s1 = _store_scale(_scale(_largest(x1), LARGEST, LARGEST_SCALE), scales, 1)
        s2 = _store_scale(_scale(_largest(x2), LARGEST, LARGEST_SCALE), scales, 2)
        s3 = _store_scale(_scale(_largest(x3), LARGEST, LARGEST_SCALE), scales, 3)
        words = _bits(_exact(x0, s0, LARGEST), KIND)
        words |= _bits(_exact(x1, s1, LARGEST), KIND) << 4
        words |= _bits(_exact(x2, s2, LARGEST), KIND) << 8
        words |= _bits(_exact(x3, s3, LARGEST), KIND) << 12
    else:
        first = _largest(x0)
        second = _largest(x1)
        largest = tl.where(first > second, first, second)
        largest = tl.where((first != first) | (second != second), float("nan"), largest)
        scale = _store_scale(_scale(largest, LARGEST, LARGEST_SCALE), scales, 0)
        words = _bits(_exact(x0, scale, LARGEST), KIND)
        words |= _bits(_exact(x1, scale, LARGEST), KIND) << 8
    _write_words(words, target, WORDS, WORDS_PAD, VEC_T)


@triton.jit
def _slot(base, slot, stride_b, stride_n, VEC: tl.constexpr, CONFIG: tl.constexpr):
    """Return the pointer to a KV slot."""
    block = slot // CONFIG.BLOCK_SIZE
    within = slot % CONFIG.BLOCK_SIZE
    return base + aligned(block * stride_b + within * stride_n, VEC)


@triton.jit(
    do_not_specialize="""
        stride_kt stride_kh stride_vt stride_vh stride_kcb stride_kcn stride_kch stride_vcb
        stride_vcn stride_vch stride_ksb stride_ksn stride_ksh stride_vsb stride_vsn stride_vsh
    """.split(),
    do_not_specialize_on_alignment=["slot_mapping", "k_scale", "v_scale"],
)
def write_pages_kernel(
    key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, num_heads, stride_kt,
    stride_kh, stride_vt, stride_vh, stride_kcb, stride_kcn, stride_kch, stride_vcb, stride_vcn,
    stride_vch, stride_ksb, stride_ksn, stride_ksh, stride_vsb, stride_vsn, stride_vsh,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Quantize and write keys and values of one token. CONFIG is a `PageWriteConfig`.

    Grid: (tokens, blocks of heads).
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    # A negative slot writes nothing (P4).
    if slot >= 0:
        heads = tl.program_id(1) * CONFIG.BLOCK_H + tl.arange(0, CONFIG.BLOCK_H)
        exist = heads < num_heads
        base = key + aligned(token * stride_kt, CONFIG.VEC_K)
        target = _slot(key_cache, slot, stride_kcb, stride_kcn, CONFIG.VEC_KC, CONFIG)
        scale = _slot(k_scale, slot, stride_ksb, stride_ksn, 1, CONFIG)
        _write_heads(
            Heads(base, heads, exist, stride_kh), Heads(target, heads, exist, stride_kch),
            Heads(scale, heads, exist, stride_ksh), CONFIG.WORDS, CONFIG.WORDS_PAD, CONFIG.VEC_K,
            CONFIG.VEC_KC, CONFIG.K_KIND, CONFIG.K_LARGEST, CONFIG.K_LARGEST_SCALE)  # fmt: skip
        base = value + aligned(token * stride_vt, CONFIG.VEC_V)
        target = _slot(value_cache, slot, stride_vcb, stride_vcn, CONFIG.VEC_VC, CONFIG)
        scale = _slot(v_scale, slot, stride_vsb, stride_vsn, 1, CONFIG)
        _write_heads(
            Heads(base, heads, exist, stride_vh), Heads(target, heads, exist, stride_vch),
            Heads(scale, heads, exist, stride_vsh), CONFIG.DV_WORDS, CONFIG.DV_PAD, CONFIG.VEC_V,
            CONFIG.VEC_VC, CONFIG.V_KIND, CONFIG.V_LARGEST, CONFIG.V_LARGEST_SCALE)  # fmt: skip
