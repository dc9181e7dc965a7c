"""Products and inverses of chunks of more than 32 rows, by blocks on and beside the diagonal."""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.state_rows import key_part, query_part
from attnlib.ops.triton.kernels.state_sums import border, is_upper, joins, sum_products

__all__ = ["block_inverse", "channel_blocks"]


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
def _place(blocks):
    """Return the matrix with these blocks [N, SIZE, SIZE] on its diagonal."""
    SIZE: tl.constexpr = blocks.shape[1]
    C: tl.constexpr = blocks.shape[0] * SIZE
    return tl.reshape(tl.where(_is_diagonal(C, SIZE), blocks[:, :, None, :], 0.0), [C, C])


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
def _multiply(a, b, acc, CONFIG: tl.constexpr):
    """Return acc + a b with the precision of float32; Triton's own division of numbers looks for
    NaN."""
    if CONFIG.PRECISION == "tf32x3":
        a_high = (a.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        b_high = (b.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        acc = tl.dot(a - a_high, b_high, acc, input_precision="tf32")
        acc = tl.dot(a_high, b - b_high, acc, input_precision="tf32")
        acc = tl.dot(a_high, b_high, acc, input_precision="tf32")
    else:
        acc = tl.dot(a, b, acc, input_precision=CONFIG.PRECISION)
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
            part = _multiply(inverse, part, tl.zeros_like(x), CONFIG)
            part = _multiply(part, inverse, tl.zeros_like(x), CONFIG)
        inverse = inverse - part
    for level in tl.static_range(4, LEVELS):
        first, last = _halves(inverse)
        _, left, _ = _quarters(_diagonal(a, 2 << level))
        left = _multiply(last, left, tl.zeros_like(left), CONFIG)
        left = _multiply(left, first, tl.zeros_like(left), CONFIG)
        inverse = _compose(first, -left, last)
    return tl.reshape(inverse, [CONFIG.C, CONFIG.C])


@triton.jit
def _level_products(k, q, kk, qk, level: tl.constexpr, CONFIG: tl.constexpr):
    """Add the products of a part of keys and queries to those of the blocks of a level: of all
    pairs of rows of 16 neighbors, and from level 4 on of those that the level joins."""
    BLOCK: tl.constexpr = kk.shape[1]
    shape: tl.constexpr = [CONFIG.C // BLOCK, BLOCK, CONFIG.PART]
    k, q = tl.reshape(k, shape), tl.reshape(q, shape)
    first = k
    if level >= 4:
        first, k = _halves(k)
        _, q = _halves(q)
    first = tl.permute(first, (0, 2, 1))
    if CONFIG.DELTA:
        kk = _multiply(k, first, kk, CONFIG)
    return kk, _multiply(q, first, qk, CONFIG)


@triton.jit
def _join_level(chunk, total, level: tl.constexpr, CONFIG: tl.constexpr):
    """Return (k . k, q . k) of the rows that a level joins, [C, C], and the sums of the decays from
    the beginning of the joined blocks; `total` are those of the blocks before."""
    SIZE: tl.constexpr = 1 << level if level > 4 else 16
    COUNT: tl.constexpr = CONFIG.C // (2 * SIZE) if level >= 4 else CONFIG.C // SIZE
    PARTS: tl.constexpr = CONFIG.PARTS
    upper = is_upper(level, CONFIG)[:, None]
    longer = ()
    kk = tl.zeros([COUNT, SIZE, SIZE], tl.float32)
    qk = kk
    for part in tl.static_range(PARTS):
        x = total[part]
        before = border(x, level, CONFIG)
        longer = longer + (tl.where(upper, x + before, x),)
        factor = tl.exp(tl.where(upper, x, before - x))
        k = key_part(chunk, part, CONFIG).to(tl.float32) * factor
        q = query_part(chunk, part, CONFIG).to(tl.float32) * factor
        kk, qk = _level_products(k, q, kk, qk, level, CONFIG)
    if level >= 4:
        zeros = tl.zeros_like(kk)
        kk, qk = _compose(zeros, kk, zeros), _compose(zeros, qk, zeros)
    return _place(kk), _place(qk), longer


@triton.jit
def channel_blocks(chunk, CONFIG: tl.constexpr):
    """Return what `state_matrices._channel_products` does."""
    LEVELS: tl.constexpr = CONFIG.LEVELS
    C: tl.constexpr = CONFIG.C
    index = tl.arange(0, C)
    own = sum_products(chunk, True, True, CONFIG)
    qk = tl.where(index[:, None] == index[None, :], own[:, None], 0.0)
    kk = qk
    total = chunk.decay  # from the beginning of each block
    for level in tl.static_range(LEVELS):
        key_products, query_products, total = _join_level(chunk, total, level, CONFIG)
        joined = joins(level, C)
        kk = tl.where(joined, key_products, kk)
        qk = tl.where(joined, query_products, qk)
    return kk, qk
