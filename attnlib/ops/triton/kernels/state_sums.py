"""Sums over the rows and channels of a chunk, in an order that no layout of a tensor changes (T18).

Rows are joined by levels: level l joins two neighboring blocks of 2^l rows to a pair.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.state_arguments import LEAST_DECAY
from attnlib.ops.triton.kernels.state_rows import key_part, query_part

__all__ = ["border", "is_upper", "joins", "running_sum", "sum_products", "summable"]


@triton.jit
def sum_products(chunk, KEYS: tl.constexpr, QUERIES: tl.constexpr, CONFIG: tl.constexpr):
    """Return the sum of k * k, q * q or q * k of each row, [C] float32."""
    PARTS: tl.constexpr = CONFIG.PARTS
    C: tl.constexpr = CONFIG.C
    SIZE: tl.constexpr = CONFIG.PART
    LEVELS: tl.constexpr = SIZE.bit_length() - 1
    total = tl.zeros([C], tl.float32)
    for part in tl.static_range(PARTS):
        if KEYS:
            b = key_part(chunk, part, CONFIG).to(tl.float32)
            a = b
        if QUERIES:
            a = query_part(chunk, part, CONFIG).to(tl.float32)
            if not KEYS:
                b = a
        sums = a * b
        for level in tl.static_range(LEVELS):
            sums = tl.sum(tl.reshape(sums, [C, SIZE >> (level + 1), 2]), axis=2)
        total = total + tl.reshape(sums, [C])
    return total


@triton.jit
def summable(decay):
    """Return log decays that can be summed (`LEAST_LOG_DECAY`); NaN stays NaN."""
    return tl.where(decay < LEAST_DECAY, LEAST_DECAY, decay)


@triton.jit
def border(total, level: tl.constexpr, CONFIG: tl.constexpr):
    """Return the row before the border of each pair of blocks, at each row of the pair.

    `total` is [C, N], and a pair has 2 << level rows.
    """
    C: tl.constexpr = CONFIG.C
    PAIR: tl.constexpr = 2 << level
    SIZE: tl.constexpr = total.shape[1]
    pairs = tl.reshape(total, [C // PAIR, PAIR, SIZE])
    last = tl.arange(0, PAIR)[None, :, None] == (1 << level) - 1
    # One term is not zero, so the order of the sum makes no difference.
    row = tl.sum(tl.where(last, pairs, 0.0), axis=1)
    return tl.reshape(tl.broadcast_to(row[:, None, :], [C // PAIR, PAIR, SIZE]), [C, SIZE])


@triton.jit
def is_upper(level: tl.constexpr, CONFIG: tl.constexpr):
    """Return whether a row is in the later block of its pair, [C]."""
    return ((tl.arange(0, CONFIG.C) >> level) & 1) == 1


@triton.jit
def joins(level: tl.constexpr, SIZE: tl.constexpr):
    """Return whether row i is in the later and column j in the earlier block of a pair, [SIZE,
    SIZE]."""
    row = tl.arange(0, SIZE) >> level
    return ((row & 1) == 1)[:, None] & (row[:, None] - 1 == row[None, :])


@triton.jit
def running_sum(x, CONFIG: tl.constexpr):
    """Return the sums of the rows up to each row of x [C, N]."""
    LEVELS: tl.constexpr = CONFIG.LEVELS
    for level in tl.static_range(LEVELS):
        x = tl.where(is_upper(level, CONFIG)[:, None], x + border(x, level, CONFIG), x)
    return x
