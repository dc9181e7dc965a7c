"""Elements and scales of formats with scales in the page (M16).

A head of a token is read as 16-bit words. Each word holds PARTS elements, and part j of all words
is one operand of a matrix product: words go from memory to the operands of the product without
passing through shared memory a second time, because 16-bit tiles are loaded as operands directly.

- 8-bit formats: word i holds the elements 2 i and 2 i + 1.
- 4-bit integers: bits 4 j of word i hold element j * D / 4 + i. Each part has its own scale, so
  that a scale multiplies a product or a weight, and never a single element.
- 4-bit floats: word i holds the elements 4 i to 4 i + 3. 4 or 8 neighboring words have a scale,
  which multiplies their elements.
- Open formats (P16): word i holds the P elements from P i on. A head has one scale.

On NVIDIA GPUs, two words in a register are converted at a time by a few integer instructions that
place the bits of an element in the mantissa of a 16-bit float (PTX). Elsewhere the same
conversions are plain arithmetic. Both are exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.quant import KV_E4M3_BYTES, decode_kv

__all__ = [
    "PAGE_E4M3", "PAGE_INT4", "PAGE_INT8", "PAGE_MXFP4", "PAGE_NVFP4", "PAGE_OPEN4", "PAGE_OPEN8",
    "decode_scale", "element_step", "find_number", "first_element", "load_element_scales",
    "load_scales", "load_words", "scale_of_part", "scaled", "unpack", "unpack_ptx",
    "words_per_scale",
]  # fmt: skip

# Two parts per word, then four; from PAGE_NVFP4 on, elements are multiplied by their scales.
PAGE_OPEN8: tl.constexpr = tl.constexpr(0)
PAGE_INT8: tl.constexpr = tl.constexpr(1)
PAGE_E4M3: tl.constexpr = tl.constexpr(2)
PAGE_INT4: tl.constexpr = tl.constexpr(3)
PAGE_OPEN4: tl.constexpr = tl.constexpr(4)
PAGE_NVFP4: tl.constexpr = tl.constexpr(5)
PAGE_MXFP4: tl.constexpr = tl.constexpr(6)


@triton.constexpr_function
def first_element(part, words, kind):
    """Return the element in part `part` of word 0."""
    return part * words if kind == PAGE_INT4 else part


@triton.constexpr_function
def words_per_scale(kind):
    """Return the neighboring words that share a scale; 0 where each part of a head has one."""
    return 4 if kind == PAGE_NVFP4 else 8 if kind == PAGE_MXFP4 else 0


@triton.constexpr_function
def element_step(kind):
    """Return the distance between the elements of one part in neighboring words."""
    return 1 if kind == PAGE_INT4 else 4 if kind >= PAGE_OPEN4 else 2


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
    """Return the scales [BLOCK_N] of a part in float32."""
    if KIND == PAGE_INT4:
        bits = ((scales >> (16 * PART)) & 0xFFFF).to(tl.uint16)
        number = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        number = scales.to(tl.float32)
    return number


@triton.jit
def unpack(
    words, KIND: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr, NUMBER: tl.constexpr = None
):
    """Convert 16-bit words to COMPUTE (float16 or float32); return four parts, or two twice.

    4-bit floats are returned as float16, without their scales (`scaled`), open formats by NUMBER,
    PTX code (`launch.number_code`, `number_tables`) or their device function. With PTX above 0,
    COMPUTE is float16, and pairs of words of other formats are converted by PTX code for this
    compute capability.
    """
    if _is_code(NUMBER):
        x0, x1, x2, x3 = _convert_pairs(words, NUMBER, KIND == PAGE_OPEN4)
    elif NUMBER is not None:
        bits = words.to(tl.int32)
        x0 = NUMBER(bits, 0).to(COMPUTE)
        x1 = NUMBER(bits, 1).to(COMPUTE)
        x2, x3 = x0, x1
        if KIND == PAGE_OPEN4:
            x2 = NUMBER(bits, 2).to(COMPUTE)
            x3 = NUMBER(bits, 3).to(COMPUTE)
    elif PTX > 0 and KIND < PAGE_NVFP4:
        x0, x1, x2, x3 = _convert_pairs(words, unpack_ptx(KIND, PTX), KIND == PAGE_INT4)
    elif KIND >= PAGE_NVFP4:
        x0 = _e2m1(words)
        x1 = _e2m1(words >> 4)
        x2 = _e2m1(words >> 8)
        x3 = _e2m1(words >> 12)
    elif KIND == PAGE_INT8:
        x0 = words.to(tl.uint8).to(tl.int8, bitcast=True).to(COMPUTE)
        x1 = (words >> 8).to(tl.uint8).to(tl.int8, bitcast=True).to(COMPUTE)
        x2, x3 = x0, x1
    elif KIND == PAGE_E4M3:
        x0 = decode_kv(words.to(tl.uint8), KV_E4M3_BYTES, COMPUTE)
        x1 = decode_kv((words >> 8).to(tl.uint8), KV_E4M3_BYTES, COMPUTE)
        x2, x3 = x0, x1
    else:
        x0 = ((words & 15).to(tl.int16) - 8).to(COMPUTE)
        x1 = (((words >> 4) & 15).to(tl.int16) - 8).to(COMPUTE)
        x2 = (((words >> 8) & 15).to(tl.int16) - 8).to(COMPUTE)
        x3 = ((words >> 12).to(tl.int16) - 8).to(COMPUTE)
    return x0, x1, x2, x3


@triton.jit
def _e2m1(words):
    """Convert the low 4 bits of words to float16."""
    # The bits move to the positions of float16; 2^14 corrects the exponent bias.
    bits = ((words & 8) << 12) | ((words & 7) << 9)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def load_element_scales(
    base, offsets, inside, WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, KIND: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Load the scales of the words of a tile, [BLOCK_N, WORDS_PAD] float32, for 4-bit floats."""
    lanes = tl.arange(0, WORDS_PAD)
    groups = lanes // words_per_scale(KIND)
    mask = (lanes < WORDS)[None, :]
    if MASKED:
        mask = mask & inside[:, None]
    bits = tl.load(base + offsets[:, None] + groups[None, :], mask=mask, other=0)
    return decode_scale(bits, KIND)


@triton.jit
def decode_scale(bits, KIND: tl.constexpr):
    """Convert the bytes of e4m3 or e8m0 scales to float32. The e8m0 byte 0 counts as 0."""
    if KIND == PAGE_NVFP4:
        scale = decode_kv(bits, KV_E4M3_BYTES, tl.float32)
    else:
        number = (bits.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        scale = tl.where(bits == 255, float("nan"), number)
    return scale


@triton.jit
def scaled(x, scales, COMPUTE: tl.constexpr):
    """Return elements times their scales in COMPUTE; float16 saturates."""
    x = x.to(tl.float32) * scales
    if COMPUTE == tl.float16:
        x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
    return x.to(COMPUTE)


@triton.constexpr_function
def _is_code(number):
    """Return whether this is PTX code, and no device function."""
    return isinstance(number, str)


@triton.jit
def _convert_pairs(words, ASM: tl.constexpr, FOUR: tl.constexpr):
    """Convert words by PTX code for two of them; return four parts, or two twice."""
    if FOUR:
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r", [words], dtype=(tl.float16,) * 4, is_pure=True, pack=2
        )
    else:
        x0, x1 = tl.inline_asm_elementwise(
            ASM, "=r,=r,r", [words], dtype=(tl.float16,) * 2, is_pure=True, pack=2
        )
        x2, x3 = x0, x1
    return x0, x1, x2, x3


@triton.constexpr_function
def unpack_ptx(kind, capability):
    """Return PTX code that converts two words, the last operand, to pairs of float16, the others.

    `$n` is the pair of part n. `capability` is 80, or 89 where the chip converts float8.
    """
    if kind == PAGE_INT4:
        # Bits 0 to 3 are the last bits of 1024 + n, bits 4 to 7 those of 1024 + 16 n. n is stored
        # plus 8. lop3 0xEA is ($4 & mask) | s.
        code = (
            "mov.b32 s, 0x64006400; mov.b32 a, 0xE408E408; mov.b32 b, 0x2C002C00; "
            "mov.b32 c, 0xD480D480; mov.b32 u, 0x3C003C00; shr.u32 h, $4, 8; "
        )
        for part, word in enumerate(("$4", "$4", "h", "h")):
            factor, offset = (("u", "a"), ("b", "c"))[part % 2]  # n - 1032, n / 16 - 72
            code += (
                f"lop3.b32 t, {word}, {(0x000F000F, 0x00F000F0)[part % 2]:#010x}, s, 0xEA; "
                f"fma.rn.f16x2 ${part}, t, {factor}, {offset}; "
            )
    elif kind == PAGE_INT8:
        # `prmt` makes a byte of each word, plus 128, the last bits of 1024; less 1152.
        code = "xor.b32 s, $2, 0x80808080; mov.b32 b, 0x64646464; mov.b32 c, 0x64806480; "
        for part, selector in enumerate(("0x5240", "0x5341")):
            code += f"prmt.b32 t, s, b, {selector}; sub.f16x2 ${part}, t, c; "
    elif capability >= 89:
        code = ""
        for part, selector in enumerate(("0x4420", "0x4431")):
            code += (
                f"prmt.b32 t, $2, 0, {selector}; mov.b32 {{i, j}}, t; "
                f"cvt.rn.f16x2.e4m3x2 ${part}, i; "
            )
    else:
        # e4m3: exponent and mantissa move to the positions of float16, and 256 corrects the
        # exponent bias. A page holds no NaN: that of a group is in its scale.
        code = "mov.b32 b, 0x5C005C00; mov.b32 c, 0x80008000; "
        for part, selector in enumerate(("0x2404", "0x3414")):
            # lop3 0xF8 is s | (t & mask).
            code += (
                f"prmt.b32 t, $2, 0, {selector}; and.b32 s, t, c; shr.u32 t, t, 1; "
                f"lop3.b32 t, s, t, 0x3F803F80, 0xF8; mul.f16x2 ${part}, t, b; "
            )
    return "{.reg .b32 t, s, h, u, a, b, c; .reg .b16 i, j; " + code + "}"


TABLE: tl.constexpr = tl.constexpr((0.0,))


@triton.jit
def find_number(word, part):
    """Return the number in TABLE of 4 bits of a word (`KVFormat.number`)."""
    code = (word >> (4 * part)) & 15
    number = code * 0.0 + TABLE[0]
    for other in tl.static_range(1, 16):
        number = tl.where(code == other, TABLE[other], number)
    return number
