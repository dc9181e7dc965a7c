"""Rotate heads for the cache (P15): sums and differences in the order of `ops.hadamard`.

One program per token and group of blocks of its heads.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.chunks import aligned

__all__ = ["HadamardConfig", "rotate_heads_kernel"]


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


@triton.jit
def _clamped(x, LIMIT: tl.constexpr):
    """`x` within the limits; NaN stays NaN."""
    x = tl.where(x > LIMIT, LIMIT, x)
    return tl.where(x < -LIMIT, -LIMIT, x)


@triton.jit(do_not_specialize=["stride_xt", "stride_xh", "stride_ot", "stride_oh"])
def rotate_heads_kernel(
    heads, out, signs, num_heads, stride_xt, stride_xh, stride_ot, stride_oh, CONFIG: tl.constexpr
):
    """Rotate the heads of one token. CONFIG is a `HadamardConfig`. Grid: (tokens, groups)."""
    ROWS: tl.constexpr = CONFIG.ROWS
    BLOCK: tl.constexpr = CONFIG.BLOCK
    LEVELS: tl.constexpr = BLOCK.bit_length() - 1
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
    # The halves of a block become neighbors, so that after all levels elements are in order again.
    for _ in tl.static_range(LEVELS):
        halves = tl.permute(tl.reshape(x, [ROWS, 2, BLOCK // 2]), [0, 2, 1])
        first, second = tl.split(halves)
        x = tl.reshape(tl.join(first + second, first - second), [ROWS, BLOCK])
    x = x * CONFIG.FACTOR
    if CONFIG.INVERSE:
        x = x * sign + 0.0
    x = _clamped(x, CONFIG.LARGEST)
    target = out + aligned(token * stride_ot, CONFIG.VEC_O)
    target += aligned(head * stride_oh, CONFIG.VEC_O)[:, None] + inner
    tl.store(target, x.to(out.dtype.element_ty), mask=mask)
