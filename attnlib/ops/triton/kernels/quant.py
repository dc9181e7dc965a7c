"""How float8 cache elements become numbers and numbers become float8.

Writing always goes through integer maths: the bits are then the same on every chip, and saturation is explicit. Reading
uses the chip's own conversion where it has one (`KV_NATIVE`) and integer maths on the bytes where it has none. Both
formats are exact in float16, which is what the bytes decode to: e5m2 is float16 cut short, and e4m3 has the narrower
exponent, so its bits moved into float16's places are off by the factor 2^(15 - 7).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "KV_E4M3_BYTES",
    "KV_E5M2_BYTES",
    "KV_NATIVE",
    "KV_PLAIN",
    "SCALE_FLOAT",
    "SCALE_PER_HEAD",
    "SCALE_TENSOR",
    "decode_kv",
    "encode_fp8",
    "load_scale",
]

KV_PLAIN: tl.constexpr = tl.constexpr(0)  # float16, bfloat16, float32
KV_NATIVE: tl.constexpr = tl.constexpr(1)  # float8, converted by the chip
KV_E4M3_BYTES: tl.constexpr = tl.constexpr(2)  # float8_e4m3fn seen as uint8
KV_E5M2_BYTES: tl.constexpr = tl.constexpr(3)  # float8_e5m2 seen as uint8

SCALE_FLOAT: tl.constexpr = tl.constexpr(0)  # a number
SCALE_TENSOR: tl.constexpr = tl.constexpr(1)  # a pointer to one float32
SCALE_PER_HEAD: tl.constexpr = tl.constexpr(2)  # a pointer to [num_kv_heads] float32


@triton.jit
def load_scale(scale, head, KIND: tl.constexpr):
    if KIND == SCALE_PER_HEAD:
        value = tl.load(scale + head)
    elif KIND == SCALE_TENSOR:
        value = tl.load(scale)
    else:
        value = scale
    return value


@triton.jit
def decode_kv(x, KIND: tl.constexpr, COMPUTE: tl.constexpr):
    """Cache elements of any kind as `COMPUTE` (float16, bfloat16 or float32)."""
    if KIND == KV_E4M3_BYTES:
        bits = x.to(tl.uint16)
        magnitude = bits & 0x7F
        shifted = ((bits & 0x80) << 8) | (magnitude << 7)
        number = shifted.to(tl.float16, bitcast=True) * 256.0
        nan = tl.full(x.shape, 0x7E00, tl.uint16).to(tl.float16, bitcast=True)
        y = tl.where(magnitude == 0x7F, nan, number.to(tl.float16)).to(COMPUTE)
    elif KIND == KV_E5M2_BYTES:
        y = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(COMPUTE)
    else:
        y = x.to(COMPUTE)
    return y


@triton.jit
def encode_fp8(x, E5M2: tl.constexpr):
    """float32 as the bits of float8_e4m3fn or float8_e5m2: round to nearest even, saturate, keep NaN.

    A normal number is rounded by adding just under half of the last kept bit (exactly half when that bit is odd) to
    its float32 bits. A subnormal one is added to a power of two whose last bit is worth one step of the format, which
    makes the float32 adder round it.
    """
    BITS: tl.constexpr = 2 if E5M2 else 3
    BIAS: tl.constexpr = 15 if E5M2 else 7
    LARGEST: tl.constexpr = 57344.0 if E5M2 else 448.0
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (-14) if E5M2 else 2.0 ** (-6)
    ROUNDER: tl.constexpr = 2.0**7 if E5M2 else 2.0**14
    CUT: tl.constexpr = 23 - BITS

    x = x.to(tl.float32)
    is_nan = x != x
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    magnitude = tl.minimum(tl.where(is_nan, 0.0, tl.abs(x)), LARGEST)
    bits = magnitude.to(tl.int32, bitcast=True)
    rounded = (bits + ((1 << (CUT - 1)) - 1) + ((bits >> CUT) & 1)) >> CUT
    normal = rounded - ((127 - BIAS) << BITS)
    zero_point = tl.full(x.shape, ROUNDER, tl.float32)
    subnormal = (magnitude + zero_point).to(tl.int32, bitcast=True) - zero_point.to(
        tl.int32, bitcast=True
    )
    code = tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal)
    code = tl.where(is_nan, 0x7F, code)
    return (code | sign).to(tl.uint8)
