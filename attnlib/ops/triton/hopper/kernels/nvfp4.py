"""4-bit floats with a scale for each 16 elements (nvfp4), as operands of products.

Word i of a head holds the elements 4 i to 4 i + 3, and four neighboring words have a scale, whose
e4m3 bytes are one number of 64 bits for each head. The elements of a tile are multiplied by their
scales when they are converted: 2^-14 times an e2m1 number times an e4m3 number is exact in float16,
because the product has six significant bits and is a multiple of 2^-24. Weights have the factor
2^14, so that sums of values need no other one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from attnlib.ops.triton.hopper.kernels.int4 import value_pair_operand
from attnlib.ops.triton.hopper.kernels.quantized import value_layout

__all__ = [
    "e2m1_ptx",
    "nvfp4_scales",
    "nvfp4_value_products",
    "nvfp4_value_rows",
    "scaled_nvfp4",
]


@gluon.constexpr_function
def e2m1_ptx(part, target):
    """Return PTX that writes 2^-14 times the numbers of a part of two words in $4 to a pair of
    float16; it uses the registers t and u."""
    # Sign and magnitude move to bit 15 and bits 9 to 11 of each half.
    code = f"shl.b32 t, $4, {12 - 4 * part}; and.b32 t, t, 0x80008000; "
    code += f"shl.b32 u, $4, {9 - 4 * part}; " if part < 3 else "shr.u32 u, $4, 3; "
    # lop3 0xEA is (u & mask) | t.
    return code + f"lop3.b32 {target}, u, 0x0E000E00, t, 0xEA; "


@gluon.constexpr_function
def _parts_ptx():
    """Return PTX that converts two words in $4, with four bytes of the scales of their heads in $5
    and $6 and the selector of one of each in $7, to pairs of float16, $0 to $3."""
    code = "prmt.b32 t, $5, $6, $7; mov.b32 {i, j}, t; cvt.rn.f16x2.e4m3x2 s, i; "
    for part in range(4):
        code += e2m1_ptx(part, "u") + f"mul.f16x2 ${part}, u, s; "
    return "{ .reg .b32 s, t, u; .reg .b16 i, j; " + code + "}"


@gluon.jit
def nvfp4_scales(slot, first, valid, MASKED: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the scales of a tile's values, int64 [keys]. With MASKED, those of keys outside
    [first, valid) are 0: they may be NaN, and 0 * NaN is NaN."""
    scales = slot.load(LAYOUT)
    if MASKED:
        keys = gl.arange(0, scales.shape[0], LAYOUT)
        scales = gl.where((keys >= first) & (keys < valid), scales, 0)
    return scales


@gluon.jit
def scaled_nvfp4(words, scales, OF_KEYS: gl.constexpr):
    """Return the float16 elements of four parts, each of the shape of the words, times 2^-14 and
    their scales.

    Args:
        words: of values, [words, keys], or of keys, [keys, words]; a thread has two neighboring
            columns in a register.
        scales: from `nvfp4_scales`, of the heads.
        OF_KEYS: words of keys.
    """
    AXIS: gl.constexpr = 1 if OF_KEYS else 0
    WORDS: gl.constexpr = words.shape[AXIS]
    gl.static_assert(WORDS == 32, "the scales of a head are 8 bytes")
    LAYOUT: gl.constexpr = words.type.layout
    index = gl.expand_dims(gl.arange(0, WORDS, gl.SliceLayout(1 - AXIS, LAYOUT)), 1 - AXIS)
    none = gl.zeros(words.shape, gl.int32, LAYOUT)
    low = gl.expand_dims(scales.to(gl.int32), AXIS)
    high = gl.expand_dims((scales >> 32).to(gl.int32), AXIS)
    half = gl.where(index < 16, low + none, high + none)
    selector = (index // 4 % 4 * 0x11 + 0x40) + none
    return gl.inline_asm_elementwise(
        _parts_ptx(),
        "=r,=r,=r,=r,r,r,r,r,r",
        [words, half, selector],
        (gl.float16, gl.float16, gl.float16, gl.float16),
        True,
        2,
    )


@gluon.jit
def nvfp4_value_products(tile, slot, p_tile, acc, first, valid, MASKED: gl.constexpr):
    """Issue the products of parts 0 and 1, and of parts 2 and 3, [2 words, rows] each.

    Args:
        tile: words [keys, words] in shared memory.
        slot: the scales of its values.
        p_tile: weights [rows, keys].
        acc: two accumulators.
        first, valid, MASKED: see `nvfp4_scales`.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
    LAYOUT: gl.constexpr = value_layout(tile.shape[1], tile.shape[0])
    scales = nvfp4_scales(slot, first, valid, MASKED, gl.SliceLayout(0, LAYOUT))
    x0, x1, x2, x3 = scaled_nvfp4(tile.permute((1, 0)).load(LAYOUT), scales, False)
    weights = p_tile.permute((1, 0))
    acc0 = warpgroup_mma(value_pair_operand(x0, x1, OPERAND), weights, acc[0], is_async=True)
    acc1 = warpgroup_mma(value_pair_operand(x2, x3, OPERAND), weights, acc[1], is_async=True)
    return acc0, acc1


@gluon.jit
def nvfp4_value_rows(WIDTH: gl.constexpr, layout: gl.constexpr):
    """Return the elements of a value in the order of the results of `nvfp4_value_products`."""
    rows = gl.arange(0, WIDTH, layout)
    part = rows // (WIDTH // 2) * 2 + rows // 8 % 2
    return (rows % (WIDTH // 2) // 16 * 8 + rows % 8) * 4 + part
