"""Elements and scales of formats with scales in the page (M15).

A head of a token is read as 16-bit words. Each word holds PARTS elements, and part j of all words
is one operand of a matrix product: words go from memory to the operands of the product without
passing through shared memory a second time, because 16-bit tiles are loaded as operands directly.

- 8-bit formats: word i holds the elements 2 i and 2 i + 1.
- 4-bit integers: bits 4 j of word i hold element j * D / 4 + i. Each part has its own scale, so
  that a scale multiplies a product or a weight, and never a single element.

On NVIDIA GPUs, two words in a register are converted at a time by a few integer instructions that
place the bits of an element in the mantissa of a 16-bit float (PTX). Elsewhere the same
conversions are plain arithmetic. Both are exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.quant import KV_E4M3_BYTES, decode_kv

__all__ = [
    "PAGE_E4M3", "PAGE_INT4", "PAGE_INT8", "element_step", "first_element", "load_scales",
    "load_words", "scale_of_part", "unpack", "unpack_ptx",
]  # fmt: skip

PAGE_INT8: tl.constexpr = tl.constexpr(0)
PAGE_E4M3: tl.constexpr = tl.constexpr(1)
PAGE_INT4: tl.constexpr = tl.constexpr(2)


@triton.constexpr_function
def first_element(part, words, kind):
    """Return the element in part `part` of word 0."""
    return part * words if kind == PAGE_INT4 else part


@triton.constexpr_function
def element_step(kind):
    """Return the distance between the elements of one part in neighboring words."""
    return 1 if kind == PAGE_INT4 else 2


@triton.jit
def load_words(
    base, offsets, inside, WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, MASKED: tl.constexpr
):
    """Load [BLOCK_N, WORDS_PAD] of 16-bit words.

    Masked tiles read nothing outside the visible keys and hold 0 there (P5).
    """
    lanes = tl.arange(0, WORDS_PAD)
    pointers = base + offsets[:, None] + lanes[None, :]
    if MASKED and WORDS_PAD > WORDS:
        words = tl.load(pointers, mask=inside[:, None] & (lanes < WORDS)[None, :], other=0)
    elif MASKED:
        words = tl.load(pointers, mask=inside[:, None], other=0)
    elif WORDS_PAD > WORDS:
        words = tl.load(pointers, mask=(lanes < WORDS)[None, :], other=0)
    else:
        words = tl.load(pointers)
    return words


@triton.jit
def load_scales(base, offsets, inside, MASKED: tl.constexpr):
    """Load the scales of a tile's tokens, [BLOCK_N]: one float32, or four float16 as an int64."""
    if MASKED:
        scales = tl.load(base + offsets, mask=inside, other=0)
    else:
        scales = tl.load(base + offsets)
    return scales


@triton.jit
def scale_of_part(scales, PART: tl.constexpr, KIND: tl.constexpr):
    """Return the scales [BLOCK_N] of a part in float32; NaN for a scale that is not valid (M15)."""
    if KIND == PAGE_INT4:
        bits = ((scales >> (16 * PART)) & 0xFFFF).to(tl.uint16)
        number = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        number = scales
    return tl.where((number >= 0.0) & (number <= 2.0**100), number, float("nan"))


@triton.jit
def unpack(words, PART: tl.constexpr, KIND: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr):
    """Convert part PART of 16-bit words to COMPUTE (float16, bfloat16 or float32).

    With PTX, COMPUTE has 16 bits, and pairs of words are converted by PTX code for sm_80 and later.
    """
    if PTX:
        ASM: tl.constexpr = unpack_ptx(PART, KIND, COMPUTE == tl.bfloat16)
        y = tl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=COMPUTE, is_pure=True, pack=2)
    elif KIND == PAGE_INT8:
        y = (words >> (8 * PART)).to(tl.uint8).to(tl.int8, bitcast=True).to(COMPUTE)
    elif KIND == PAGE_E4M3:
        y = decode_kv((words >> (8 * PART)).to(tl.uint8), KV_E4M3_BYTES, COMPUTE)
    else:
        y = (((words >> (4 * PART)) & 15).to(tl.int16) - 8).to(COMPUTE)
    return y


@triton.constexpr_function
def unpack_ptx(part, kind, is_bfloat16):
    """Return PTX code that converts part `part` of two words in $1 to two numbers in $0."""
    registers = "{.reg .b32 t, s, b, c; "
    if kind == PAGE_INT4:
        nibbles = f"shr.u32 t, $1, {4 * part}; and.b32 t, t, 0x000F000F; "
        if is_bfloat16:  # 128 + (n + 8), less 136
            code = (
                "or.b32 t, t, 0x43004300; mov.b32 b, 0x3F803F80; mov.b32 c, 0xC308C308; "
                "fma.rn.bf16x2 $0, t, b, c;"
            )
        else:  # 1024 + (n + 8), less 1032
            code = "or.b32 t, t, 0x64006400; mov.b32 b, 0x64086408; sub.f16x2 $0, t, b;"
        return registers + nibbles + code + "}"
    if kind == PAGE_INT8:
        # `prmt` places a byte of each word in the low byte of a number.
        low = ("0x5240", "0x5341")[part]
        if is_bfloat16:
            # bfloat16 holds 7 bits after the first: 128 + the low 7 bits, less 128 or, for a
            # negative number, 256.
            code = (
                f"prmt.b32 t, $1, 0, {low}; and.b32 b, t, 0x007F007F; or.b32 b, b, 0x43004300; "
                "and.b32 s, t, 0x00800080; or.b32 s, s, 0x43004300; mov.b32 c, 0xBF80BF80; "
                "fma.rn.bf16x2 $0, s, c, b;"
            )
        else:  # 1024 + (n + 128), less 1152
            code = (
                f"xor.b32 t, $1, 0x80808080; mov.b32 b, 0x64646464; prmt.b32 t, t, b, {low}; "
                "mov.b32 c, 0x64806480; sub.f16x2 $0, t, c;"
            )
        return registers + code + "}"
    # e4m3: exponent and mantissa move to the positions of the 16-bit format, and a factor corrects
    # the exponent bias. A page holds no NaN: that of a group is in its scale.
    high = ("0x2404", "0x3414")[part]
    shift, factor = (4, "0x7B807B80") if is_bfloat16 else (1, "0x5C005C00")
    code = (
        f"prmt.b32 t, $1, 0, {high}; and.b32 s, t, 0x80008000; and.b32 t, t, 0x7F007F00; "
        f"shr.u32 t, t, {shift}; or.b32 t, t, s; mov.b32 b, {factor}; "
    )
    multiply = "mov.b32 c, 0x80008000; fma.rn.bf16x2 $0, t, b, c;"  # less 0, which keeps the sign
    return registers + code + (multiply if is_bfloat16 else "mul.f16x2 $0, t, b;") + "}"
