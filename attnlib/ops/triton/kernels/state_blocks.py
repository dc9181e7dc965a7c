"""Inverses of chunks of more than 32 rows, by blocks on and beside the diagonal."""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.state_sums import joins

__all__ = ["block_inverse"]


@triton.jit
def _is_diagonal(C: tl.constexpr, SIZE: tl.constexpr):
    """Return whether a block of a matrix is on the diagonal, [C / SIZE, 1, C / SIZE, 1]."""
    index = tl.arange(0, C // SIZE)
    return (index[:, None] == index[None, :])[:, None, :, None]


@triton.jit
def _diagonal(x, SIZE: tl.constexpr):
    """Return the blocks on the diagonal of x [C, C], [C / SIZE, SIZE, SIZE]."""
    C: tl.constexpr = x.shape[0]
    blocks = tl.reshape(x, [C // SIZE, SIZE, C // SIZE, SIZE])
    return tl.sum(tl.where(_is_diagonal(C, SIZE), blocks, 0.0), axis=2)


@triton.jit
def _halves(x):
    """Return the even and the odd ones of the blocks x [2 N, SIZE, COLUMNS]."""
    N: tl.constexpr = x.shape[0] // 2
    pairs = tl.reshape(x, [N, 2, x.shape[1], x.shape[2]])
    return tl.split(tl.permute(pairs, (0, 2, 3, 1)))


@triton.jit
def _quarters(x):
    """Return (upper left, lower left, lower right) of the blocks x [N, 2 SIZE, 2 SIZE]."""
    SIZE: tl.constexpr = x.shape[1] // 2
    parts = tl.reshape(x, [x.shape[0], 2, SIZE, 2, SIZE])
    upper, lower = tl.split(tl.permute(parts, (0, 2, 3, 4, 1)))
    first, _ = tl.split(tl.permute(upper, (0, 1, 3, 2)))
    left, right = tl.split(tl.permute(lower, (0, 1, 3, 2)))
    return first, left, right


@triton.jit
def _compose(first, left, right):
    """The opposite of `_quarters`, with 0 in the upper right."""
    N: tl.constexpr = first.shape[0]
    SIZE: tl.constexpr = first.shape[1]
    upper = tl.join(first, tl.zeros_like(first))
    both = tl.join(upper, tl.join(left, right))  # [N, SIZE, SIZE, column half, row half]
    return tl.reshape(tl.permute(both, (0, 4, 1, 3, 2)), [N, 2 * SIZE, 2 * SIZE])


@triton.jit
def multiply_float32(a, b, CONFIG: tl.constexpr):
    """Return a b with the precision of float32; Triton's own division of numbers looks for NaN."""
    if CONFIG.PRECISION == "tf32x3":
        a_high = (a.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        b_high = (b.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        acc = tl.dot(a - a_high, b_high, input_precision="tf32")
        acc = tl.dot(a_high, b - b_high, acc, input_precision="tf32")
        acc = tl.dot(a_high, b_high, acc, input_precision="tf32")
    else:
        acc = tl.dot(a, b, input_precision=CONFIG.PRECISION)
    return acc


@triton.jit
def block_inverse(a, CONFIG: tl.constexpr):
    """Return (I + a)^-1 of the part of `a` [C, C] below the diagonal."""
    LEVELS: tl.constexpr = CONFIG.LEVELS
    SIZE: tl.constexpr = 16
    index = tl.arange(0, SIZE)
    x = _diagonal(a, SIZE)
    # Levels before 4 share blocks of 16 rows, the fewest of a matrix product.
    inverse = tl.zeros_like(x) + (index[:, None] == index[None, :]).to(tl.float32)[None, :, :]
    for level in tl.static_range(4):
        part = tl.where(joins(level, SIZE)[None, :, :], x, 0.0)
        if level > 0:
            part = multiply_float32(inverse, part, CONFIG)
            part = multiply_float32(part, inverse, CONFIG)
        inverse = inverse - part
    for level in tl.static_range(4, LEVELS):
        first, last = _halves(inverse)
        _, left, _ = _quarters(_diagonal(a, 2 << level))
        left = multiply_float32(last, left, CONFIG)
        left = multiply_float32(left, first, CONFIG)
        inverse = _compose(first, -left, last)
    return tl.reshape(inverse, [CONFIG.C, CONFIG.C])
