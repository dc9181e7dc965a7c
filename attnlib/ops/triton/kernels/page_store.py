"""Quantize heads and store them in pages that hold their scales (M16), in registers.

All arithmetic has one rounding per operation, as in `ops.torch.page_formats`, so that the stored
bits are equal.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

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

__all__ = ["PageSide", "load_parts", "split_heads", "store_parts"]


class PageSide(NamedTuple):
    """How keys or values are stored.

    Attributes:
        KIND, LARGEST, LARGEST_SCALE: the `PAGE_*` constant of the format, its largest element and
            its largest scale.
        WORDS, WORDS_PAD: words of a head, and of the rows that hold them (`page_parts`).
        VEC, VEC_C: as in `cache_write.WriteConfig`, for new rows and for the cache, in bytes.
        SIZE, PADDED: elements of a head, and of the rows of words that hold it.
        TURN, FACTOR, LIMIT, LARGEST_HEAD: `HadamardConfig.BLOCK` and so on, where heads are rotated
            for the cache (P15); TURN is 0 elsewhere.
    """

    KIND: int
    LARGEST: float
    LARGEST_SCALE: float
    WORDS: int
    WORDS_PAD: int
    VEC: int
    VEC_C: int
    SIZE: int
    PADDED: int
    TURN: int = 0
    FACTOR: float = 1.0
    LIMIT: float = 0.0
    LARGEST_HEAD: float = 0.0


@triton.jit
def _load_part(source, PART: tl.constexpr, SIDE: tl.constexpr):
    """Load one part of the heads of a token, [BLOCK_H, WORDS_PAD] float32."""
    lanes = tl.arange(0, SIDE.WORDS_PAD)
    FIRST: tl.constexpr = first_element(PART, SIDE.WORDS, SIDE.KIND)
    elements = FIRST + lanes * element_step(SIDE.KIND)
    offsets = aligned(source.numbers.to(tl.int64) * source.stride, SIDE.VEC)
    mask = source.exist[:, None] & (lanes < SIDE.WORDS)[None, :]
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
def _store_group_scales(x0, x1, x2, x3, scales, SIDE: tl.constexpr):
    """Store the scales of 4-bit floats; returns the scale of each word, [BLOCK_H, WORDS_PAD]."""
    TOGETHER: tl.constexpr = words_per_scale(SIDE.KIND)
    GROUPS: tl.constexpr = SIDE.WORDS_PAD // TOGETHER
    BLOCK_H: tl.constexpr = x0.shape[0]
    has_nan = (x0 != x0) | (x1 != x1) | (x2 != x2) | (x3 != x3)
    largest = tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3)))
    largest = tl.where(has_nan, 0.0, largest)
    largest = tl.max(tl.reshape(largest, [BLOCK_H, GROUPS, TOGETHER]), 2)
    has_nan = tl.max(tl.reshape(has_nan.to(tl.int32), [BLOCK_H, GROUPS, TOGETHER]), 2) > 0
    if SIDE.KIND == PAGE_NVFP4:
        scale = _scale(largest, SIDE.LARGEST, SIDE.LARGEST_SCALE)
        bits = tl.where(has_nan, 0x7F, encode_fp8(scale, False).to(tl.int32)).to(tl.uint8)
    else:
        # The exponent of the largest magnitude, less 2, which is that of the largest e2m1 number.
        largest = tl.where(largest > 3.4028234663852886e38, 3.4028234663852886e38, largest)
        exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 2, 1)
        bits = tl.where(has_nan, 255, exponent).to(tl.uint8)
    groups = tl.arange(0, GROUPS)
    mask = scales.exist[:, None] & (groups < SIDE.WORDS // TOGETHER)[None, :]
    target = scales.base.to(tl.pointer_type(tl.uint8))
    target = target + (scales.numbers.to(tl.int64) * scales.stride)[:, None] + groups[None, :]
    tl.store(target, bits, mask=mask)
    stored = tl.broadcast_to(decode_scale(bits, SIDE.KIND)[:, :, None], [BLOCK_H, GROUPS, TOGETHER])
    return tl.reshape(stored, [BLOCK_H, SIDE.WORDS_PAD])


@triton.jit
def _write_words(words, target, SIDE: tl.constexpr):
    """Store the words of the heads of a slot, whose stride is in bytes: rows are whole words."""
    lanes = tl.arange(0, SIDE.WORDS_PAD)
    base = target.base.to(tl.pointer_type(tl.uint16))
    offsets = aligned(target.numbers.to(tl.int64) * (target.stride // 2), SIDE.VEC_C // 2)
    mask = target.exist[:, None] & (lanes < SIDE.WORDS)[None, :]
    tl.store(base + offsets[:, None] + lanes[None, :], words.to(tl.uint16), mask=mask)


@triton.jit
def load_parts(source, SIDE: tl.constexpr):
    """Load the heads of a token in parts; 8-bit formats have two, which are returned twice."""
    x0 = _load_part(source, 0, SIDE)
    x1 = _load_part(source, 1, SIDE)
    x2, x3 = x0, x1
    if SIDE.KIND >= PAGE_INT4:
        x2 = _load_part(source, 2, SIDE)
        x3 = _load_part(source, 3, SIDE)
    return x0, x1, x2, x3


@triton.jit
def split_heads(x, SIDE: tl.constexpr):
    """Divide heads, [BLOCK_H, PADDED] with zeros behind their elements, into the parts of
    `load_parts`."""
    BLOCK_H: tl.constexpr = x.shape[0]
    WORDS_PAD: tl.constexpr = SIDE.WORDS_PAD
    if SIDE.KIND == PAGE_INT4:
        place = tl.arange(0, 4 * WORDS_PAD)  # part place % 4 of word place // 4
        inside = (place // 4 < SIDE.WORDS)[None, :]
        element = tl.where(inside, (place % 4 * SIDE.WORDS + place // 4)[None, :], 0)
        x = tl.where(inside, tl.gather(x, tl.broadcast_to(element, x.shape), 1), 0.0)
    x = x.to(tl.float32)
    if SIDE.KIND >= PAGE_INT4:
        even, odd = tl.split(tl.reshape(x, [BLOCK_H, WORDS_PAD, 2, 2]))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
    else:
        x0, x1 = tl.split(tl.reshape(x, [BLOCK_H, WORDS_PAD, 2]))
        x2, x3 = x0, x1
    return x0, x1, x2, x3


@triton.jit
def store_parts(x0, x1, x2, x3, target, scales, SIDE: tl.constexpr):
    """Quantize and store the parts of the heads of one token in a KV slot."""
    KIND: tl.constexpr = SIDE.KIND
    LARGEST: tl.constexpr = SIDE.LARGEST
    LARGEST_SCALE: tl.constexpr = SIDE.LARGEST_SCALE
    if KIND >= PAGE_NVFP4:
        divisor = _store_group_scales(x0, x1, x2, x3, scales, SIDE)
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
    _write_words(words, target, SIDE)
