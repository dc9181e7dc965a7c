"""The matrices T and P of one chunk, see `state_chunk`.

No exponent is positive (T5). Decays per channel cannot be divided between the operands of one
product: `exp(b[i])` underflows and `exp(-b[j])` overflows. A product per level does it: level l
joins two neighboring blocks of 2^l rows, and both operands are measured from the border between
them. The inverse of I + A is built by the same levels, as inverses of triangular blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.state_rows import key_part, query_part
from attnlib.ops.triton.kernels.state_sums import border, is_upper, joins, sum_products, summable

__all__ = ["chunk_matrices", "head_products", "invert", "key_pairs"]


@triton.jit
def _channel_products(chunk, CONFIG: tl.constexpr):
    """Return (k . k, q . k) of all pairs of rows with their decays, [C, C], by levels. The first is
    defined below the diagonal, for delta updates. Products of float32, as in `_product`."""
    LEVELS: tl.constexpr = CONFIG.LEVELS
    PARTS: tl.constexpr = CONFIG.PARTS
    C: tl.constexpr = CONFIG.C
    index = tl.arange(0, C)
    own = sum_products(chunk, True, True, CONFIG)
    qk = tl.where(index[:, None] == index[None, :], own[:, None], 0.0)
    kk = qk
    total = [summable(decay) for decay in chunk.decay]  # from the beginning of each block
    for level in tl.static_range(LEVELS):
        upper = is_upper(level, CONFIG)[:, None]
        longer = ()
        key_products = tl.zeros([C, C], tl.float32)
        query_products = key_products
        for part in tl.static_range(PARTS):
            x = total[part]
            before = border(x, level, CONFIG)
            longer = longer + (tl.where(upper, x + before, x),)
            factor = tl.exp(tl.where(upper, x, before - x))
            k = key_part(chunk, part, CONFIG).to(tl.float32) * factor
            q = query_part(chunk, part, CONFIG).to(tl.float32) * factor
            if CONFIG.DELTA:
                key_products = tl.dot(k, tl.trans(k), key_products, input_precision="ieee")
            query_products = tl.dot(q, tl.trans(k), query_products, input_precision="ieee")
        joined = joins(level, C)
        kk = tl.where(joined, key_products, kk)
        qk = tl.where(joined, query_products, qk)
        total = longer
    return kk, qk


@triton.jit
def head_products(chunk, factors, CONFIG: tl.constexpr):
    """The same for decays that all channels share."""
    PARTS: tl.constexpr = CONFIG.PARTS
    C: tl.constexpr = CONFIG.C
    index = tl.arange(0, C)
    lower = index[:, None] >= index[None, :]
    kk = tl.zeros([C, C], tl.float32)
    qk = kk
    for part in tl.static_range(PARTS):
        q, k = query_part(chunk, part, CONFIG), key_part(chunk, part, CONFIG)
        if CONFIG.WIDE:
            q, k = q.to(tl.float32), k.to(tl.float32)
        if CONFIG.DELTA:
            kk = tl.dot(k, tl.trans(k), kk, input_precision=CONFIG.PRECISION)
        qk = tl.dot(q, tl.trans(k), qk, input_precision=CONFIG.PRECISION)
    gap = factors.total[:, None] - factors.total[None, :]
    pair = tl.exp(tl.where(lower, gap, 0.0))
    return kk * pair, tl.where(lower, qk * pair, 0.0)


@triton.jit
def _product(a, b, CONFIG: tl.constexpr):
    """Return a b. They are too small for matrix instructions: three of TF32 take four times as many
    instructions as one of float32."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def invert(a, PRODUCT: tl.constexpr, CONFIG: tl.constexpr):
    """Return (I + a)^-1 of the part of `a` below the diagonal, [C, C]. PRODUCT is a function."""
    LEVELS: tl.constexpr = CONFIG.LEVELS
    C: tl.constexpr = CONFIG.C
    index = tl.arange(0, C)
    inverse = (index[:, None] == index[None, :]).to(tl.float32)
    for level in tl.static_range(LEVELS):
        part = tl.where(joins(level, C), a, 0.0)
        if level > 0:
            part = PRODUCT(inverse, part, CONFIG)
            part = PRODUCT(part, inverse, CONFIG)
        inverse = inverse - part
    return inverse


@triton.jit
def key_pairs(kk, chunk, norm_k, CONFIG: tl.constexpr):
    """Return A of a chunk from the products of its keys."""
    kk = kk * norm_k[:, None] * norm_k[None, :]
    return kk * chunk.beta[:, None]


@triton.jit
def chunk_matrices(chunk, factors, CONFIG: tl.constexpr):
    """Return (T, P) of a chunk, [C, C] float32, without the norm of the queries."""
    if CONFIG.DECAY == "channel":
        kk, qk = _channel_products(chunk, CONFIG)
    else:
        kk, qk = head_products(chunk, factors, CONFIG)
    solve = kk
    if CONFIG.DELTA:
        solve = invert(key_pairs(kk, chunk, factors.norm_k, CONFIG), _product, CONFIG)
    return solve, qk * factors.norm_k[None, :]
