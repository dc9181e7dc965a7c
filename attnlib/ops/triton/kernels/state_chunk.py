"""The arithmetic of one chunk of the recurrence (T2), for one state head.

With S the state before the chunk, and b the sum of the decays up to a row:

    A[i, j] = beta[i] (k[i] . k[j]) exp(b[i] - b[j])    for j < i
    T = (I + A)^-1, or I for additive updates
    u = T (beta (v - exp(b) S k))                       without S k for additive updates
    o = exp(b) S q + sum over j <= i of P[i, j] u[j],   P[i, j] = (q[i] . k[j]) exp(b[i] - b[j])
    S' = exp(b[last]) S + sum over j of u[j] (exp(b[last] - b[j]) k[j])

The bits of a row must not depend on the kernel that computes it, nor on the later rows (T18). So
all sums have one order that no layout of a tensor changes: sums of pairs, sums with one term that
is not zero, and matrix products of one shape. Launches disable the fusion of a product and a sum.

T and P are in `state_matrices`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.state_arguments import DECAY_CHANNEL, Factors
from attnlib.ops.triton.kernels.state_rows import key_part, query_part
from attnlib.ops.triton.kernels.state_sums import running_sum, sum_products, summable

__all__ = ["advance_state", "chunk_factors", "chunk_outputs"]


@triton.jit
def _inverse_lengths(chunk, QUERIES: tl.constexpr, CONFIG: tl.constexpr):
    """Return 1 / sqrt(sum of squares + EPS) of each query or key, [C] float32."""
    C: tl.constexpr = CONFIG.C
    root = tl.sqrt_rn(sum_products(chunk, not QUERIES, QUERIES, CONFIG) + CONFIG.EPS)
    return tl.math.div_rn(tl.full([C], 1.0, tl.float32), root)


@triton.jit
def chunk_factors(chunk, scale, CONFIG: tl.constexpr):
    """Return the `Factors` of a chunk."""
    PARTS: tl.constexpr = CONFIG.PARTS
    C: tl.constexpr = CONFIG.C
    if CONFIG.DECAY == DECAY_CHANNEL:
        total = ()
        for part in tl.static_range(PARTS):
            total = total + (running_sum(summable(chunk.decay[part]), CONFIG),)
    else:
        decay = tl.reshape(summable(chunk.decay), [C, 1])
        total = tl.reshape(running_sum(decay, CONFIG), [C])
    norm_q = tl.full([C], 1.0, tl.float32)
    norm_k = norm_q
    if CONFIG.NORM:
        norm_q = _inverse_lengths(chunk, True, CONFIG)
        norm_k = _inverse_lengths(chunk, False, CONFIG)
    return Factors(total, norm_q * scale, norm_k)


@triton.jit
def _multiply(rows, x, acc, CONFIG: tl.constexpr):
    """Return acc + rows x, where `rows` are queries or keys, with the precision of float32."""
    if CONFIG.EXACT:
        # Only `x` has bits that TF32 drops: two products do what takes three otherwise.
        high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        acc = tl.dot(rows, x - high, acc, input_precision="tf32")
        acc = tl.dot(rows, high, acc, input_precision="tf32")
    else:
        acc = tl.dot(rows, x, acc, input_precision=CONFIG.PRECISION)
    return acc


@triton.jit
def chunk_outputs(s, chunk, value, factors, solve, pairs, CONFIG: tl.constexpr):
    """Return (u, o) of a chunk, [C, ROWS] float32; `s` are parts [PART, ROWS], `value` [C, ROWS].

    The tokens are the rows of all products, so that warps divide the columns, and no warp holds an
    operand that another one needs, besides queries and keys.
    """
    PARTS: tl.constexpr = CONFIG.PARTS
    factor_k = factors.norm_k
    if CONFIG.DECAY != DECAY_CHANNEL:
        decay = tl.exp(factors.total)
        factor_k = factor_k * decay
    C: tl.constexpr = CONFIG.C
    ROWS: tl.constexpr = CONFIG.ROWS
    seen = tl.zeros([C, ROWS], tl.float32)
    o = seen
    for part in tl.static_range(PARTS):
        q = query_part(chunk, part, CONFIG).to(tl.float32)
        k = key_part(chunk, part, CONFIG).to(tl.float32)
        if CONFIG.DECAY == DECAY_CHANNEL:
            decays = tl.exp(factors.total[part])
            q, k = q * decays, k * decays
        if CONFIG.DELTA:
            seen = _multiply(k, s[part], seen, CONFIG)
        o = _multiply(q, s[part], o, CONFIG)
    u = value
    if CONFIG.DELTA:
        u = u - seen * factor_k[:, None]
    if CONFIG.HAS_BETA:
        u = u * chunk.beta[:, None]
    if CONFIG.DELTA:
        u = tl.dot(solve, u, input_precision=CONFIG.PRECISION)
    if CONFIG.DECAY != DECAY_CHANNEL:
        o = o * decay[:, None]
    o = tl.dot(pairs, u, o, input_precision=CONFIG.PRECISION)
    return u, o * factors.norm_q[:, None]


@triton.jit
def advance_state(s, u, chunk, factors, CONFIG: tl.constexpr):
    """Return the state after a chunk, parts [PART, ROWS]."""
    PARTS: tl.constexpr = CONFIG.PARTS
    last = tl.arange(0, CONFIG.C) == CONFIG.C - 1
    factor = factors.norm_k
    if CONFIG.DECAY != DECAY_CHANNEL:
        end = tl.sum(tl.where(last, factors.total, 0.0), 0)
        factor = factor * tl.exp(end - factors.total)
    u = u * factor[:, None]
    after = ()
    for part in tl.static_range(PARTS):
        k = key_part(chunk, part, CONFIG).to(tl.float32)
        if CONFIG.DECAY == DECAY_CHANNEL:
            total = factors.total[part]
            ends = tl.sum(tl.where(last[:, None], total, 0.0), 0)
            k = k * tl.exp(ends[None, :] - total)
            x = s[part] * tl.exp(ends)[:, None]
        else:
            x = s[part] * tl.exp(end)
        after = after + (_multiply(tl.trans(k), u, x, CONFIG),)
    return after
