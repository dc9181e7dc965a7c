"""Rotate heads for the cache (P15): sums and differences in the order of `ops.hadamard`.

One program per token and group of blocks of its heads.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnlib.ops.hadamard import LARGEST_INPUT
from attnlib.ops.triton.kernels.chunks import aligned

__all__ = [
    "LIMIT",
    "HadamardConfig",
    "largest_number",
    "rotate_heads_kernel",
    "sign_word",
    "turned",
    "turned_back",
    "unit",
]

LIMIT = tl.constexpr(LARGEST_INPUT)
"""Magnitude to which elements are clamped before the sums."""


class HadamardConfig(NamedTuple):
    """Constants of the kernel.

    Attributes:
        BLOCK: elements that are rotated together, a power of two.
        BLOCKS: blocks of a head.
        ROWS: blocks of a program.
        INVERSE: rotate back.
        VEC_X, VEC_O: elements of which the offsets of the source and the target are multiples.
        FACTOR: 1 / sqrt(BLOCK).
        LIMIT: magnitude to which elements are clamped before the sums.
        LARGEST: the largest finite number of the elements.
        PDL: the launch is programmatic (`programmatic_launch`).
    """

    BLOCK: int
    BLOCKS: int
    ROWS: int
    INVERSE: bool
    VEC_X: int
    VEC_O: int
    FACTOR: float
    LIMIT: float
    LARGEST: float
    PDL: bool


@triton.jit
def _clamped(x, LIMIT: tl.constexpr):
    """`x` within the limits; NaN stays NaN."""
    x = tl.where(x > LIMIT, LIMIT, x)
    return tl.where(x < -LIMIT, -LIMIT, x)


@triton.jit
def _butterflies(x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums and differences of blocks, [ROWS, BLOCK]. Elements stay where they are: the threads of a
    warp exchange them, each once per level."""
    LEVELS: tl.constexpr = BLOCK.bit_length() - 1
    sign = 1.0 - 2.0 * tl.arange(0, 2)[None, :, None].to(tl.float32)
    for level in tl.static_range(LEVELS):
        pairs = tl.reshape(x, [ROWS << level, 2, BLOCK >> (level + 1)])
        bits = pairs.to(tl.int32, bitcast=True)
        # The bits of both elements without its own are those of the other one.
        other = (tl.xor_sum(bits, 1)[:, None, :] ^ bits).to(tl.float32, bitcast=True)
        x = other + pairs * sign  # the product is exact
    return tl.reshape(x, [ROWS, BLOCK])


@triton.jit
def turned(x, signs, SIDE: tl.constexpr):
    """Rotate heads in registers, [H, PADDED] with zeros behind their elements; in their own dtype.

    SIDE is a `page_store.PageSide`.
    """
    HEADS: tl.constexpr = x.shape[0]
    PADDED: tl.constexpr = x.shape[1]
    ROWS: tl.constexpr = HEADS * (PADDED // SIDE.TURN)
    lanes = tl.arange(0, PADDED)
    sign = tl.load(signs + lanes, mask=lanes < SIDE.SIZE, other=1.0)[None, :]
    y = _clamped(x.to(tl.float32), SIDE.LIMIT) * sign
    y = _butterflies(tl.reshape(y, [ROWS, SIDE.TURN]), ROWS, SIDE.TURN)
    y = _clamped(y * SIDE.FACTOR, SIDE.LARGEST_HEAD).to(x.dtype)
    return tl.reshape(y, [HEADS, PADDED])


@triton.constexpr_function
def sign_word(signs, number):
    """Return 32 bits of signs as a signed integer."""
    word = signs >> 32 * number & 0xFFFFFFFF
    return word - (word >> 31 << 32)


@triton.constexpr_function
def unit(size):
    """Return 1 / sqrt(elements of a head that are rotated together)."""
    return float(size & -size) ** -0.5


@triton.constexpr_function
def largest_number(dtype):
    """Return the largest finite number of a dtype of heads."""
    return 65504.0 if dtype == tl.float16 else 2.0**128 - 2.0**120


@triton.jit
def turned_back(x, lanes, SIGNS: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Rotate heads in registers back, [H, PADDED] with zeros from SIZE on; rounded to DTYPE.

    SIGNS has bit i where element i changes its sign. `lanes` are the elements, [PADDED].
    """
    PADDED: tl.constexpr = x.shape[1]
    BLOCK: tl.constexpr = SIZE & -SIZE
    ROWS: tl.constexpr = x.shape[0] * (PADDED // BLOCK)
    y = tl.reshape(_clamped(x.to(tl.float32), LIMIT), [ROWS, BLOCK])
    y = tl.reshape(_butterflies(y, ROWS, BLOCK), x.shape) * unit(SIZE)
    word = tl.full([PADDED], sign_word(SIGNS, 0), tl.int32)
    for number in tl.static_range(1, (SIZE + 31) // 32):
        word = tl.where(lanes >= 32 * number, sign_word(SIGNS, number), word)
    flip = (word >> (lanes % 32)) << 31
    y = (y.to(tl.int32, bitcast=True) ^ flip[None, :]).to(tl.float32, bitcast=True)
    return _clamped(y + 0.0, largest_number(DTYPE)).to(DTYPE)


@triton.jit(do_not_specialize=["stride_xt", "stride_xh", "stride_ot", "stride_oh"])
def rotate_heads_kernel(
    heads, out, signs, num_heads, stride_xt, stride_xh, stride_ot, stride_oh, CONFIG: tl.constexpr
):
    """Rotate the heads of one token. CONFIG is a `HadamardConfig`. Grid: (tokens, groups)."""
    ROWS: tl.constexpr = CONFIG.ROWS
    BLOCK: tl.constexpr = CONFIG.BLOCK
    if CONFIG.PDL:
        gdc_wait()  # nothing is read before
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    head, lanes = (row // CONFIG.BLOCKS).to(tl.int64), tl.arange(0, BLOCK)
    inner = (row % CONFIG.BLOCKS * BLOCK)[:, None] + lanes[None, :]
    mask = (head < num_heads)[:, None] & (lanes >= 0)[None, :]
    source = heads + aligned(token * stride_xt, CONFIG.VEC_X)
    source += aligned(head * stride_xh, CONFIG.VEC_X)[:, None] + inner
    sign = tl.load(signs + inner)
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    x = _clamped(x, CONFIG.LIMIT)
    if not CONFIG.INVERSE:
        x = x * sign
    x = _butterflies(x, ROWS, BLOCK) * CONFIG.FACTOR
    if CONFIG.INVERSE:
        x = x * sign + 0.0
    x = _clamped(x, CONFIG.LARGEST)
    target = out + aligned(token * stride_ot, CONFIG.VEC_O)
    target += aligned(head * stride_oh, CONFIG.VEC_O)[:, None] + inner
    tl.store(target, x.to(out.dtype.element_ty), mask=mask)
