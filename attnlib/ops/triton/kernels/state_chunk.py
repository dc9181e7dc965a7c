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

Value rows are the rows of all products here, so that what one gives is the operand of the next
where it is, in registers. Matrix units multiply bfloat16: three such numbers are one of float32.

T and P are in `state_matrices`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.state_arguments import Factors
from attnlib.ops.triton.kernels.state_rows import key_part, query_part
from attnlib.ops.triton.kernels.state_sums import running_sum, sum_products, summable

__all__ = ["advance_state", "chunk_factors", "chunk_outputs", "cut", "dot"]


@triton.jit
def _inverse_lengths(chunk, QUERIES: tl.constexpr, CONFIG: tl.constexpr):
    """Return 1 / sqrt(sum of squares + EPS) of each query or key, [C] float32."""
    root = tl.sqrt_rn(sum_products(chunk, not QUERIES, QUERIES, CONFIG) + CONFIG.EPS)
    return tl.math.div_rn(tl.full([CONFIG.C], 1.0, tl.float32), root)


@triton.jit
def chunk_factors(chunk, scale, CONFIG: tl.constexpr):
    """Return the `Factors` of a chunk."""
    C: tl.constexpr = CONFIG.C
    if CONFIG.DECAY == "channel":
        total = [running_sum(summable(decay), CONFIG) for decay in chunk.decay]
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
def cut(x):
    """Return the upper 16 bits of float32 numbers as bfloat16, and the rest of the numbers."""
    bits = x.to(tl.int32, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, x - (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _thirds(x):
    """Return three numbers of bfloat16 whose sum is x, the largest first; x, if it is one."""
    if x.dtype == tl.bfloat16:
        found = (x,)
    else:
        high, rest = cut(x.to(tl.float32))
        middle, rest = cut(rest)
        found = (high, middle, cut(rest)[0])
    return found


@triton.jit
def dot(a, b, acc, CONFIG: tl.constexpr):
    """Return acc + a b^T of numbers of bfloat16, in float32 where chips do not multiply them."""
    if CONFIG.WIDE:
        b = tl.trans(b.to(tl.float32))
        acc = tl.dot(a.to(tl.float32), b, acc, input_precision="ieee")
    else:
        acc = tl.dot(a, tl.trans(b), acc)
    return acc


@triton.jit
def _multiply(a, b, order: tl.constexpr, acc, CONFIG: tl.constexpr):
    """Return acc + a b^T of operands in thirds: the products of one order, of three."""
    for other in tl.static_range(order + 1):
        if other < len(b):
            acc = dot(a[order - other], b[other], acc, CONFIG)
    return acc


@triton.jit
def _add_products(a, b, acc, CONFIG: tl.constexpr):
    """Return acc + a b^T, with a sum for each order, so that few products wait for each other."""
    return (
        _multiply(a, b, 0, acc[0], CONFIG),
        _multiply(a, b, 1, acc[1], CONFIG),
        _multiply(a, b, 2, acc[2], CONFIG),
    )


@triton.jit
def _sum(acc):
    return (acc[2] + acc[1]) + acc[0]


@triton.jit
def chunk_outputs(s, chunk, value, factors, solve, pairs, CONFIG: tl.constexpr):
    """Return (u, o) of a chunk, [ROWS, C] float32; `s` are parts [PART, ROWS], `value` [C,
    ROWS]."""
    factor_k = factors.norm_k
    if CONFIG.DECAY != "channel":
        decay = tl.exp(factors.total)
        factor_k = factor_k * decay
    zeros = tl.full([CONFIG.ROWS, CONFIG.C], 0.0, tl.float32)
    seen = (zeros, zeros, zeros)
    o = seen
    for part in tl.static_range(len(s)):
        q, k = query_part(chunk, part, CONFIG), key_part(chunk, part, CONFIG)
        if CONFIG.DECAY == "channel":
            decays = tl.exp(factors.total[part])
            q, k = q.to(tl.float32) * decays, k.to(tl.float32) * decays
        rows = _thirds(tl.trans(s[part]))
        if CONFIG.DELTA:
            seen = _add_products(rows, _thirds(k), seen, CONFIG)
        o = _add_products(rows, _thirds(q), o, CONFIG)
    u = tl.trans(value)
    if CONFIG.DELTA:
        u = u - _sum(seen) * factor_k[None, :]
    if CONFIG.HAS_BETA:
        u = u * chunk.beta[None, :]
    if CONFIG.DELTA:
        u = _sum(_add_products(_thirds(u), _thirds(solve), (zeros, zeros, zeros), CONFIG))
    o = _sum(o)
    if CONFIG.DECAY != "channel":
        o = o * decay[None, :]
    o = _sum(_add_products(_thirds(u), _thirds(pairs), (o, zeros, zeros), CONFIG))
    return u, o * factors.norm_q[None, :]


@triton.jit
def advance_state(s, u, chunk, factors, CONFIG: tl.constexpr):
    """Return the state after a chunk, parts [PART, ROWS]."""
    last = tl.arange(0, CONFIG.C) == CONFIG.C - 1
    factor = factors.norm_k
    if CONFIG.DECAY != "channel":
        end = tl.sum(tl.where(last, factors.total, 0.0), 0)
        factor = factor * tl.exp(end - factors.total)
    rows = _thirds(u * factor[None, :])
    after = ()
    for part in tl.static_range(len(s)):
        k, x = key_part(chunk, part, CONFIG), tl.trans(s[part])
        if CONFIG.DECAY == "channel":
            total = factors.total[part]
            ends = tl.sum(tl.where(last[:, None], total, 0.0), 0)
            k = k.to(tl.float32) * tl.exp(ends[None, :] - total)
            x = x * tl.exp(ends)[None, :]
        else:
            x = x * tl.exp(end)
        k = _thirds(tl.trans(k))
        for order in tl.static_range(3):
            x = _multiply(rows, k, 2 - order, x, CONFIG)
        after = after + (tl.trans(x),)
    return after
