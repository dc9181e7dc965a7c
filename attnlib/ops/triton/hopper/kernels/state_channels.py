"""Decays per channel in chunks of batch-invariant layers (`state_long`), by products of bfloat16.

With b the sums of the decays up to each token, of each channel, a product of two tokens i > j is
the sum over the channels of k_i k_j exp(b_i - b_j). A border r between them divides the factor
between the operands: exp(b_i - r) exp(r - b_j). Blocks of 2, 4, ... tokens are joined as in
`state_matrices`, so that no exponent is positive. Where the decays up to a row are so weak that
both exponents are bounded, one product with the start of the chunk as the border gives all of its
pairs: no later row changes the choice for one (T18).
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.hopper.kernels import state_pieces as pieces
from attnlib.ops.triton.kernels.state_sums import summable

__all__ = ["channel_products"]

SIZE: tl.constexpr = tl.constexpr(32)
"""Channels at a time: all of them do not fit the registers."""
MOST: tl.constexpr = tl.constexpr(40.0)
"""Largest exponent of a factor: that of bounded gates (-5) over half of 16 tokens. Products of two
do not overflow, and the second number of bfloat16 keeps its bits."""


@triton.jit
def _border(total, level, CONFIG: tl.constexpr):
    """Return the row before the middle of each block of 2 << level rows, at each of its rows."""
    row = tl.arange(0, CONFIG.C)
    place = (row >> (level + 1) << (level + 1)) + (1 << level) - 1
    return tl.gather(total, tl.broadcast_to(place[:, None], total.shape), 0)


@triton.jit
def _add_pairs(q, k, gap, joined, kk, qk, CONFIG: tl.constexpr):
    """Add the products of the pairs `joined` [C, C]; `gap` is `total` above their borders. Pairs
    whose factors this limits are others."""
    C: tl.constexpr = CONFIG.C
    zeros = tl.zeros([C, C], tl.float32)
    left, right = tl.exp(tl.minimum(gap, MOST)), tl.exp(tl.minimum(-gap, MOST))
    keys = pieces.parts_of(k * right)
    if CONFIG.DELTA:
        kk += tl.where(joined, pieces.multiply(pieces.parts_of(k * left), keys, zeros, CONFIG), 0.0)
    qk += tl.where(joined, pieces.multiply(pieces.parts_of(q * left), keys, zeros, CONFIG), 0.0)
    return kk, qk


@triton.jit
def _add_products(q, k, total, kk, qk, CONFIG: tl.constexpr):
    """Return kk + k . k and qk + q . k of some channels, see `channel_products`. The first three
    are [C, SIZE] float32, `total` the sums of decays."""
    C: tl.constexpr = CONFIG.C
    LEVELS: tl.constexpr = CONFIG.LEVELS
    row = tl.arange(0, C)
    lower = row[:, None] > row[None, :]
    qk += tl.where(row[:, None] == row[None, :], tl.sum(q * k, 1)[:, None], 0.0)
    weak = tl.min(total, 1) >= -MOST
    kk, qk = _add_pairs(q, k, total, lower & weak[:, None], kk, qk, CONFIG)
    lower = lower & (tl.min(total, 1) < -MOST)[:, None]
    for level in range(tl.where(tl.min(weak.to(tl.int32), 0) > 0, LEVELS, 0), LEVELS):
        gap = total - _border(total, level, CONFIG)
        half = row >> level
        joined = lower & (half[:, None] & 1 == 1) & (half[:, None] - 1 == half[None, :])
        kk, qk = _add_pairs(q, k, gap, joined, kk, qk, CONFIG)
    return kk, qk


@triton.jit
def channel_products(part, chunk, factors, plane, vector, CONFIG: tl.constexpr):
    """Return (k . k, q . k) of all pairs of rows with their decays, [C, C]; the first below the
    diagonal, for delta updates. Store the rows of the chunk, and the decays [PART] of its state."""
    C: tl.constexpr = CONFIG.C
    PART: tl.constexpr = CONFIG.PART
    SPAN: tl.constexpr = min(PART, SIZE)
    kk = tl.zeros([C, C], tl.float32)
    qk = kk
    for start in range(0, PART, SPAN):
        columns = start + tl.arange(0, SPAN)
        q = pieces.load_queries(part, chunk.tokens, columns, CONFIG).to(tl.float32)
        k = pieces.load_keys(part, chunk.tokens, chunk.tail, columns, CONFIG).to(tl.float32)
        places = (chunk.tail.decay, chunk.tokens.decay)
        decay = pieces.load(part, *places, columns, CONFIG.HV * CONFIG.DK, CONFIG.G_T, CONFIG)
        total = tl.cumsum(summable(decay), 0)
        kk, qk = _add_products(q, k, total, kk, qk, CONFIG)
        end = tl.sum(tl.where((tl.arange(0, C) == C - 1)[:, None], total, 0.0), 0)
        q, k = q * factors.norm_q[:, None], k * factors.norm_k[:, None]
        decays = tl.exp(total)
        if CONFIG.DELTA:
            seen = k * decays * chunk.beta[:, None]
            pieces.store_rows(plane, 0, columns, seen, part, CONFIG)
        pieces.store_rows(plane, 1, columns, q * decays, part, CONFIG)
        kept = k * tl.exp(end[None, :] - total)
        pieces.store_rows(plane, 2, columns, kept, part, CONFIG)
        tl.store(vector + C + columns, tl.exp(end))
    return kk, qk
