"""Operands of WGMMA from float8 tiles: conversion to float16 in registers, without data movement.

A float8 tile is in shared memory as 16-bit words of two neighboring elements. Products are computed
in float16, which holds float8_e4m3fn and float8_e5m2 exactly: on SM90 the chip converts e4m3 to
float16 in one instruction per pair and e5m2 is a truncated float16, while bfloat16 would take three
more instructions.

The order of the contracted dimension of a product does not matter, as long as both operands agree,
and rows may have any order that the result is read in. Two permutations make every thread's part of
a WGMMA operand contiguous in shared memory:

- Keys: a thread needs elements 2t, 2t + 1, 2t + 8, 2t + 9, ... of a row (t = lane % 4), and reads
  16 contiguous bytes instead. `query_columns` gives the same order to the queries.
- Values: `ldmatrix` transposes 16-bit words, so that a thread has two neighboring elements d and
  d + 1 for two keys; WGMMA takes them as rows i and i + 8. `value_rows` gives the element of a row
  of the result.

bfloat16 queries may be outside of float16's range. Each row is multiplied by the power of two that
brings its largest magnitude to [2^14, 2^15): elements down to 2^-29 of the largest one stay exact.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.compat import (
    partition_barrier,
)
from attnlib.ops.triton.kernels.quant import KV_E5M2_BYTES, KV_INT8, KV_MXFP4, KV_NVFP4

__all__ = [
    "WEIGHT_EXPONENT",
    "WEIGHT_SCALE",
    "alternate_ptx",
    "float16_keys",
    "float16_pairs",
    "float16_values",
    "halve_queries",
    "key_layout",
    "neighbors_ptx",
    "query_columns",
    "query_powers",
    "split_pairs",
    "sum_exponent",
    "value_layout",
    "value_rows",
    "value_unit",
]

WEIGHT_EXPONENT: gl.constexpr = gl.constexpr(14.0)
WEIGHT_SCALE: gl.constexpr = gl.constexpr(2.0**14)
"""Factor of the weights, which are at most 1, in float16: weights down to 2^-28 are normal numbers.
"""


@gluon.constexpr_function
def value_unit(kind):
    """Return the factor of sums of weights times values of this kind: that of the weights that
    `sum_exponent` leaves, and for 4-bit floats the inverse, which their elements have."""
    of_elements = 1.0 / WEIGHT_SCALE.value if kind == KV_NVFP4 or kind == KV_MXFP4 else 1.0
    return of_elements * (1.0 if kind == KV_MXFP4 else WEIGHT_SCALE.value)


@gluon.constexpr_function
def sum_exponent(kind):
    """Return the exponent of the factor that sums of weights keep; maxima are less by it.

    Weights of values with scales up to 2^127 may be as small as 2^-113: their sum without the
    factor would be no normal number.
    """
    return WEIGHT_EXPONENT.value if kind == KV_MXFP4 else 0.0


@gluon.constexpr_function
def _e5m2_ptx(first, second):
    return f"prmt.b32 $0, $2, 0, {first}; prmt.b32 $1, $2, 0, {second};"


@gluon.constexpr_function
def _int8_ptx(first, second):
    # A byte plus 128 becomes the last bits of 1024; less 1152.
    return (
        "{ .reg .b32 s, b, c; xor.b32 s, $2, 0x80808080; mov.b32 b, 0x64646464;"
        f" mov.b32 c, 0x64806480; prmt.b32 $0, s, b, {first}; prmt.b32 $1, s, b, {second};"
        " sub.f16x2 $0, $0, c; sub.f16x2 $1, $1, c; }"
    )


_E4M3_PTX = gl.constexpr(" cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }")


@gluon.constexpr_function
def neighbors_ptx(kind):
    """Return PTX that converts the bytes 0 to 3 of a register to float16: (0, 1) and (2, 3)."""
    if kind == KV_E5M2_BYTES:
        return _e5m2_ptx("0x1404", "0x3424")
    if kind == KV_INT8:
        return _int8_ptx("0x5140", "0x5342")
    return "{ .reg .b16 a, b; mov.b32 {a, b}, $2;" + _E4M3_PTX.value


@gluon.constexpr_function
def alternate_ptx(kind):
    """Return PTX that converts the bytes 0 to 3 of a register to float16: (0, 2) and (1, 3)."""
    if kind == KV_E5M2_BYTES:
        return _e5m2_ptx("0x2404", "0x3414")
    if kind == KV_INT8:
        return _int8_ptx("0x5240", "0x5341")
    order = "prmt.b32 t, $2, 0, 0x3120;"
    return "{ .reg .b32 t; .reg .b16 a, b; " + order + " mov.b32 {a, b}, t;" + _E4M3_PTX.value


@gluon.jit
def float16_pairs(words, KV_KIND: gl.constexpr):
    """Convert words of two float8 elements to int32 words of two float16 elements."""
    # A register holds two words, that is four neighboring elements.
    ASM: gl.constexpr = neighbors_ptx(KV_KIND)
    return gl.inline_asm_elementwise(ASM, "=r,=r,r", [words], gl.int32, True, 2)


@gluon.jit
def split_pairs(pairs):
    """Split int32 words [M, N] into their float16 elements [M, 2 * N]."""
    low = pairs.to(gl.int16).to(gl.float16, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    return gl.reshape(gl.join(low, high), [pairs.shape[0], 2 * pairs.shape[1]])


@triton.constexpr_function
def key_layout(keys, words):
    """Layout of [keys, words]: lane % 4 selects a quarter of each 128-byte line of a row."""
    line = min(words, 64)
    registers = [[0, 1 << bit] for bit in range((line // 4).bit_length() - 1)]
    registers += [[0, line << bit] for bit in range((words // line).bit_length() - 1)]
    registers += [[8, 0], *([64 << bit, 0] for bit in range((keys // 64).bit_length() - 1))]
    lanes = [[0, line // 4], [0, line // 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [keys, words])


@triton.constexpr_function
def value_layout(words, keys):
    """Layout of [words, keys]: that of matrices which `ldmatrix` transposes."""
    registers = [[0, 1], *([0, 8 << bit] for bit in range((keys // 8).bit_length() - 1))]
    registers += [[32 << bit, 0] for bit in range((words // 32).bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0]], [], [words, keys])


@gluon.jit
def float16_keys(tile, KV_KIND: gl.constexpr, OPERAND: gl.constexpr):
    """Load keys [N, W // 2], pairs of float8, as float16 [N, W] in the order of `query_columns`.

    OPERAND is the layout of a WGMMA's first operand in registers.
    """
    KEYS: gl.constexpr = tile.shape[0]
    WORDS: gl.constexpr = tile.shape[1]
    LINE: gl.constexpr = min(WORDS, 64)
    pairs = float16_pairs(tile.load(key_layout(KEYS, WORDS)), KV_KIND)
    lines = gl.reshape(pairs, [KEYS, WORDS // LINE, 4, LINE // 4])
    pairs = gl.reshape(gl.permute(lines, (0, 1, 3, 2)), [KEYS, WORDS])
    return gl.convert_layout(split_pairs(pairs), OPERAND)


@gluon.jit
def query_columns(WIDTH: gl.constexpr, layout: gl.constexpr):
    """Return the elements of a query in the order of `float16_keys`."""
    LINE: gl.constexpr = min(WIDTH // 2, 64)
    columns = gl.arange(0, WIDTH, layout)
    word = columns // 2 % LINE
    line = columns // (2 * LINE) * (2 * LINE)
    place = (word % 4) * (LINE // 4) + word // 4
    return line + place * 2 + columns % 2


@gluon.jit
def float16_values(tile, valid, MASKED: gl.constexpr, KV_KIND: gl.constexpr, OPERAND: gl.constexpr):
    """Load values [N, W // 2], pairs of float8, as float16 [W, N] in the order of `value_rows`.

    With MASKED, keys from `valid` on are 0. A page may hold anything past the sequence's end, and
    0 * NaN is NaN (P5).
    """
    KEYS: gl.constexpr = tile.shape[0]
    WORDS: gl.constexpr = tile.shape[1]
    LAYOUT: gl.constexpr = value_layout(WORDS, KEYS)
    words = tile.permute((1, 0)).load(LAYOUT)
    if MASKED:
        keys = gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))
        words = gl.where(keys[None, :] < valid, words, gl.zeros([WORDS, KEYS], gl.int16, LAYOUT))
    # A register has the bytes (d, d + 1) of one key and of the next one.
    ASM: gl.constexpr = alternate_ptx(KV_KIND)
    even, odd = gl.inline_asm_elementwise(
        ASM, "=r,=r,r", [words], (gl.float16, gl.float16), True, 2
    )
    both = gl.reshape(gl.join(even, odd), [WORDS // 8, 8, KEYS, 2])
    return gl.convert_layout(gl.reshape(gl.permute(both, (0, 3, 1, 2)), [2 * WORDS, KEYS]), OPERAND)


@gluon.jit
def value_rows(WIDTH: gl.constexpr, layout: gl.constexpr):
    """Return the elements of a value in the order of `float16_values`."""
    rows = gl.arange(0, WIDTH, layout)
    return rows // 16 * 16 + rows % 8 * 2 + rows // 8 % 2


@gluon.jit
def query_powers(magnitude):
    """Return (power, 1 / power) that bring rows with these largest magnitudes into float16's range.

    The power is 1 for rows with infinities or NaN.
    """
    exponent = magnitude.to(gl.int32, bitcast=True) >> 23
    exponent = gl.where(exponent == 255, 141, gl.maximum(exponent, 15))
    power = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    return power, ((exponent - 14) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def halve_queries(source, target):
    """Write queries [64, W] as float16 to `target`, each row times a power of two.

    `target` may be the memory of `source`. Returns the inverse powers [64], in a layout of its own.
    One warpgroup.
    """
    WIDTH: gl.constexpr = source.shape[1]
    LANES: gl.constexpr = min(32, WIDTH // 8)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    rows = source.load(LAYOUT).to(gl.float32)
    power, inverse = query_powers(gl.max(gl.abs(rows), 1))
    target.store((rows * power[:, None]).to(gl.float16))
    # WGMMA reads shared memory through the async proxy: fence, then wait for all four warps.
    fence_async_shared()
    partition_barrier()
    return inverse
