"""Conversions between float8 cache elements and floating-point numbers, and KV scales.

Encoding always uses integer arithmetic: the bits are then the same on every chip, and saturation is
explicit. Decoding uses the chip's own conversion where it has one (`KV_NATIVE`) and integer
arithmetic on the bytes where it has none. Both formats are exact in float16, to which bytes are
decoded. e5m2 is a truncated float16; e4m3 has a narrower exponent, so its bits, shifted to
float16's positions, are off by the factor 2^(15 - 7).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "KV_E4M3_BYTES",
    "KV_E5M2_BYTES",
    "KV_INT4",
    "KV_INT8",
    "KV_MXFP4",
    "KV_NATIVE",
    "KV_NVFP4",
    "KV_PLAIN",
    "SCALE_FLOAT",
    "SCALE_PER_HEAD",
    "SCALE_PER_TOKEN",
    "SCALE_TENSOR",
    "decode_kv",
    "encode_fp8",
    "load_scale",
    "valid_scale",
]

KV_PLAIN: tl.constexpr = tl.constexpr(0)  # float16, bfloat16, float32
KV_NATIVE: tl.constexpr = tl.constexpr(1)  # float8, converted by the chip
KV_E4M3_BYTES: tl.constexpr = tl.constexpr(2)  # float8_e4m3fn viewed as uint8
KV_E5M2_BYTES: tl.constexpr = tl.constexpr(3)  # float8_e5m2 viewed as uint8
KV_INT8: tl.constexpr = tl.constexpr(4)  # only with SCALE_PER_TOKEN
KV_INT4: tl.constexpr = tl.constexpr(5)  # four groups of a head, only with SCALE_PER_TOKEN
KV_NVFP4: tl.constexpr = tl.constexpr(6)  # of the Hopper decodes, with SCALE_PER_TOKEN
KV_MXFP4: tl.constexpr = tl.constexpr(7)  # the same

SCALE_FLOAT: tl.constexpr = tl.constexpr(0)  # a number
SCALE_TENSOR: tl.constexpr = tl.constexpr(1)  # a pointer to one float32
SCALE_PER_HEAD: tl.constexpr = tl.constexpr(2)  # a pointer to [num_kv_heads] float32
SCALE_PER_TOKEN: tl.constexpr = tl.constexpr(3)  # a view [B, N, Hkv, 1] float32 of pages (M16)


@triton.jit
def load_scale(scale, head, KIND: tl.constexpr):
    """Return the scale of a KV head, from a number or a pointer."""
    if KIND == SCALE_PER_HEAD:
        value = valid_scale(tl.load(scale + head))
    elif KIND == SCALE_TENSOR:
        value = valid_scale(tl.load(scale))
    else:
        value = scale
    return value


@triton.jit
def valid_scale(scale):
    """Return NaN for a scale outside `MIN_KV_SCALE` to `MAX_KV_SCALE` of `ops.scales` (M9)."""
    return tl.where((scale >= 2.0**-100) & (scale <= 2.0**100), scale, float("nan"))


@triton.jit
def decode_kv(x, KIND: tl.constexpr, COMPUTE: tl.constexpr):
    """Convert cache elements of any kind to COMPUTE (float16, bfloat16 or float32)."""
    if KIND == KV_E4M3_BYTES:
        # Sign, exponent and mantissa move to float16's positions; * 256 corrects the exponent bias.
        bits = x.to(tl.uint16)
        magnitude = bits & 0x7F
        shifted = ((bits & 0x80) << 8) | (magnitude << 7)
        number = shifted.to(tl.float16, bitcast=True) * 256.0
        # 0x7F is the only NaN of e4m3fn, which has no infinity.
        nan = tl.full(x.shape, 0x7E00, tl.uint16).to(tl.float16, bitcast=True)
        y = tl.where(magnitude == 0x7F, nan, number.to(tl.float16)).to(COMPUTE)
    elif KIND == KV_E5M2_BYTES:
        y = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(COMPUTE)
    else:
        y = x.to(COMPUTE)
    return y


@triton.jit
def encode_fp8(x, E5M2: tl.constexpr):
    """Convert float32 to the bits of float8_e4m3fn or float8_e5m2.

    Rounds to nearest even, saturates at the largest finite number, and keeps NaN.
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
    # Normal numbers: add just under half of the last kept bit to the float32 bits (exactly half if
    # that bit is odd), then truncate. A carry into the exponent is correct as it is.
    rounded = (bits + ((1 << (CUT - 1)) - 1) + ((bits >> CUT) & 1)) >> CUT
    normal = rounded - ((127 - BIAS) << BITS)
    # Subnormal numbers: add a power of two whose last bit is worth one step of the format, so that
    # the float32 adder rounds.
    zero_point = tl.full(x.shape, ROUNDER, tl.float32)
    subnormal = (magnitude + zero_point).to(tl.int32, bitcast=True) - zero_point.to(
        tl.int32, bitcast=True
    )
    code = tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal)
    code = tl.where(is_nan, 0x7F, code)
    return (code | sign).to(tl.uint8)
