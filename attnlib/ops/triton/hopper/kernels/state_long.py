"""Steps of many tokens for layers whose bits may depend on the division into steps.

`long_matrices_kernel` prepares all chunks of C tokens in parallel, and `long_step_kernel` runs
through those of a request, one after the other. C is larger than the chunk of the slots, so that
the chain is shorter. Tails and positions are written as in `state_prefill`, whose matrices these
are:

    w = beta v - seen (k S)             seen = beta |k| exp(b)
    u = T w
    o = read (q S) + P u + skip v       read = scale |q| exp(b); P holds scale |q| and |k|
    S' = exp(b[last]) S + k^T (kept u)  kept = |k| exp(b[last] - b)

with |q| and |k| for the inverse lengths. Matrix units multiply bfloat16: three such numbers are one
of float32, and queries and keys need one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.schedule import find_request
from attnlib.ops.triton.kernels.state_arguments import (
    DECAY_CONSTANT,
    UNALIGNED,
    Chunk,
    Factors,
    StateBatch,
    Tail,
    Tokens,
)
from attnlib.ops.triton.kernels.state_matrices import chunk_matrices
from attnlib.ops.triton.kernels.state_requests import (
    kept_state,
    load_base,
    open_head,
    open_request,
    open_tail,
    part_columns,
    pass_columns,
)
from attnlib.ops.triton.kernels.state_rows import clear_tokens
from attnlib.ops.triton.kernels.state_sums import summable
from attnlib.ops.triton.kernels.stored_state import load_state, settle_state, store_state

__all__ = ["long_matrices_kernel", "long_step_kernel"]

FACTORS: tl.constexpr = tl.constexpr(5)
"""Vectors [C] of a chunk: beta, seen, read, kept, and exp(b[last]) in all elements."""
TERMS: tl.constexpr = tl.constexpr(3)
"""Numbers of bfloat16 for one of float32."""


@triton.jit
def _divide(request, base, CONFIG: tl.constexpr):
    """Return the two positions that divide the tokens after `base`: chunks end at the first new
    token, so that their rows come from the tail or from the step, and at the stored state."""
    keep = kept_state(request, CONFIG)
    return tl.minimum(request.computed, keep), tl.maximum(request.computed, keep)


class Part(NamedTuple):
    """The tokens of a chunk, all scalars.

    Attributes:
        start, stop: their positions, from the first one to behind the last.
        token: row of the first one in the batch, int64.
        is_old: they are in the tail.
    """

    start: Any
    stop: Any
    token: Any
    is_old: Any


@triton.jit
def _count_chunks(request, base, CONFIG: tl.constexpr):
    """Return the number of chunks of a request whose state is at `base`, and of those in the
    tail."""
    low, high = _divide(request, base, CONFIG)
    one, two = tl.cdiv(low - base, CONFIG.C), tl.cdiv(high - low, CONFIG.C)
    held = one + tl.where(high == request.computed, two, 0)
    return one + two + tl.cdiv(request.end - high, CONFIG.C), held


@triton.jit
def _open_part(request, base, number, CONFIG: tl.constexpr):
    """Return a chunk of a request as a `Part`."""
    low, high = _divide(request, base, CONFIG)
    one = tl.cdiv(low - base, CONFIG.C)
    two = one + tl.cdiv(high - low, CONFIG.C)
    begin = tl.where(number < one, base, tl.where(number < two, low, high))
    before = tl.where(number < one, 0, tl.where(number < two, one, two))
    limit = tl.where(number < one, low, tl.where(number < two, high, request.end))
    start = begin + (number - before) * CONFIG.C
    token = (request.first + start - request.computed).to(tl.int64)
    return Part(start, tl.minimum(start + CONFIG.C, limit), token, start < request.computed)


@triton.jit
def _places_of(
    part, old, new, OLD: tl.constexpr, NEW: tl.constexpr, FRESH: tl.constexpr, CONFIG: tl.constexpr
):
    """Return pointers to the rows of a chunk in the tail or in the step, [C], and which exist; OLD
    and NEW are the strides of rows. With FRESH they are in the step."""
    row = tl.arange(0, CONFIG.C)
    place = new + part.token * NEW + row * NEW
    if not FRESH:
        ring = ((part.start + row) % CONFIG.RING) * OLD
        place = tl.where(part.is_old, old, new + part.token * NEW) + tl.where(
            part.is_old, ring, row * NEW
        )
    return place, row < part.stop - part.start


@triton.jit
def _load(
    part,
    old,
    new,
    columns,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    OLD: tl.constexpr,
    NEW: tl.constexpr,
    FRESH: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Return the rows of a chunk, [C, columns], 0 where there is no token; with PADDED, there are
    fewer columns, SIZE."""
    place, exists = _places_of(part, old, new, OLD, NEW, FRESH, CONFIG)
    inside = exists[:, None]
    if PADDED:
        inside = inside & (columns < SIZE)[None, :]
    return tl.load(place[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _load_keys(part, tokens, tail, FRESH: tl.constexpr, CONFIG: tl.constexpr):
    DK: tl.constexpr = CONFIG.DK
    OLD: tl.constexpr = CONFIG.HK * DK
    PADDED: tl.constexpr = CONFIG.PART != DK
    columns = part_columns(0, CONFIG)
    return _load(part, tail.k, tokens.k, columns, DK, PADDED, OLD, CONFIG.K_T, FRESH, CONFIG)


@triton.jit
def _load_queries(part, tokens, CONFIG: tl.constexpr):
    DK: tl.constexpr = CONFIG.DK
    PADDED: tl.constexpr = CONFIG.PART != DK
    columns = part_columns(0, CONFIG)
    return _load(part, tokens.q, tokens.q, columns, DK, PADDED, 0, CONFIG.Q_T, True, CONFIG)


@triton.jit
def _load_values(part, tokens, tail, columns, FRESH: tl.constexpr, CONFIG: tl.constexpr):
    DV: tl.constexpr = CONFIG.DV
    OLD: tl.constexpr = CONFIG.HV * DV
    PADDED: tl.constexpr = DV % CONFIG.ROWS != 0
    x = _load(part, tail.v, tokens.v, columns, DV, PADDED, OLD, CONFIG.V_T, FRESH, CONFIG)
    return x.to(tl.float32)


@triton.jit
def _load_numbers(part, old, new, OLD: tl.constexpr, NEW: tl.constexpr, CONFIG: tl.constexpr):
    place, exists = _places_of(part, old, new, OLD, NEW, False, CONFIG)
    return tl.load(place, mask=exists, other=0.0)


@triton.jit
def _open_chunk(part, tokens, tail, CONFIG: tl.constexpr):
    """Return the `Chunk` of one head. Tokens in the tail have queries of 0."""
    C: tl.constexpr = CONFIG.C
    beta = tl.full([C], 1.0, tl.float32)
    if CONFIG.HAS_BETA:
        beta = _load_numbers(part, tail.beta, tokens.beta, CONFIG.HV, CONFIG.B_T, CONFIG)
    if CONFIG.DECAY == DECAY_CONSTANT:
        exists = tl.arange(0, C) < part.stop - part.start
        decay = tl.where(exists, tl.load(tokens.decay), 0.0)
    else:
        decay = _load_numbers(part, tail.decay, tokens.decay, CONFIG.HV, CONFIG.G_T, CONFIG)
    k = _load_keys(part, tokens, tail, False, CONFIG)
    stop = tl.where(part.is_old, part.start, part.stop)
    q = _load_queries(Part(part.start, stop, part.token, False), tokens, CONFIG)
    return Chunk((q,), (k,), decay, beta, 0, tokens, tail)


@triton.jit
def _factors(chunk, scale, CONFIG: tl.constexpr):
    """Return the `Factors` of a chunk."""
    norm_q = tl.full([CONFIG.C], 1.0, tl.float32)
    norm_k = norm_q
    if CONFIG.NORM:
        q, k = chunk.q[0].to(tl.float32), chunk.k[0].to(tl.float32)
        norm_q = tl.rsqrt(tl.sum(q * q, 1) + CONFIG.EPS)
        norm_k = tl.rsqrt(tl.sum(k * k, 1) + CONFIG.EPS)
    return Factors(tl.cumsum(summable(chunk.decay), 0), norm_q * scale, norm_k)


@triton.jit
def _places(planes, factors, chunk, head, CONFIG: tl.constexpr):
    """Return pointers to the first part of P, and to the factors, of a chunk of the batch."""
    MATRICES: tl.constexpr = 2 if CONFIG.DELTA else 1
    row = tl.arange(0, CONFIG.C)
    number = chunk.to(tl.int64) * CONFIG.HV + head
    plane = planes + number * (MATRICES * TERMS * CONFIG.C * CONFIG.C)
    return plane + row[:, None] * CONFIG.C + row[None, :], factors + number * (FACTORS * CONFIG.C)


@triton.jit
def _cut(x):
    """Return the upper 16 bits of float32 numbers as bfloat16, and the rest of the numbers."""
    bits = x.to(tl.int32, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, x - (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _parts_of(x):
    """Return TERMS numbers of bfloat16 whose sum is x, the largest first."""
    high, rest = _cut(x)
    middle, rest = _cut(rest)
    low, _ = _cut(rest)
    return high, middle, low


@triton.jit
def _store_planes(place, x, CONFIG: tl.constexpr):
    parts = _parts_of(x)
    for term in tl.static_range(TERMS):
        tl.store(place + term * CONFIG.C * CONFIG.C, parts[term])


@triton.jit
def _load_planes(place, CONFIG: tl.constexpr):
    planes = ()
    for term in tl.static_range(TERMS):
        planes = planes + (tl.load(place + term * CONFIG.C * CONFIG.C),)
    return planes


@triton.jit(do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=UNALIGNED)
def long_matrices_kernel(
    q,
    k,
    decay,
    beta,
    positions,
    tail_k,
    tail_decay,
    tail_beta,
    query_start_loc,
    seq_lens,
    slots,
    sources,
    planes,
    factors,
    scale,
    num_reqs,
    CONFIG: tl.constexpr,
):
    """Prepare one chunk of one state head. Grid: (chunks, HV).

    planes: [chunks, HV, 2, TERMS, C, C] bfloat16, P and T in parts; without T for additive updates.
    factors: [chunks, HV, FACTORS, C] float32.
    """
    C: tl.constexpr = CONFIG.C
    place, head = tl.program_id(0), tl.program_id(1)
    number = find_request(query_start_loc, place, num_reqs, C, 128, CONFIG.EXTRA)
    if number == num_reqs:
        return
    request = open_request(StateBatch(query_start_loc, seq_lens, slots, sources), number)
    if (request.slot < 0) | (request.count <= 0):
        return
    base = load_base(positions, request, head, 0, CONFIG)
    own = place - request.first // C - number * CONFIG.EXTRA
    count, _ = _count_chunks(request, base, CONFIG)
    if own >= count:
        return
    tokens = open_head(Tokens(q, k, k, decay, beta), head, CONFIG)
    tail = open_tail(Tail(tail_k, tail_k, tail_decay, tail_beta), request.source, head, CONFIG)
    chunk = _open_chunk(_open_part(request, base, own, CONFIG), tokens, tail, CONFIG)
    given = _factors(chunk, scale, CONFIG)
    solve, pairs = chunk_matrices(chunk, given, CONFIG)
    plane, vector = _places(planes, factors, place, head, CONFIG)
    _store_planes(plane, pairs * given.norm_q[:, None], CONFIG)
    if CONFIG.DELTA:
        _store_planes(plane + TERMS * C * C, solve, CONFIG)
    index = tl.arange(0, C)
    decays = tl.exp(given.total)
    end = tl.sum(tl.where(index == C - 1, given.total, 0.0), 0)
    vector += index
    tl.store(vector, chunk.beta)
    tl.store(vector + C, chunk.beta * given.norm_k * decays)
    tl.store(vector + 2 * C, given.norm_q * decays)
    tl.store(vector + 3 * C, given.norm_k * tl.exp(end - given.total))
    tl.store(vector + 4 * C, tl.zeros([C], tl.float32) + tl.exp(end))


@triton.jit
def _dot(a, b, acc, CONFIG: tl.constexpr):
    if CONFIG.WIDE:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def _multiply(rows, parts, acc, CONFIG: tl.constexpr):
    """Return acc + rows x, with x in TERMS parts."""
    for term in tl.static_range(TERMS):
        acc = _dot(rows, parts[TERMS - 1 - term], acc, CONFIG)
    return acc


@triton.jit
def _multiply_planes(planes, parts, acc, CONFIG: tl.constexpr):
    """Return acc + a x, with both in TERMS parts; products below the last part are left out."""
    acc = _dot(planes[2], parts[0], acc, CONFIG)
    acc = _dot(planes[1], parts[1], acc, CONFIG)
    acc = _dot(planes[1], parts[0], acc, CONFIG)
    return _multiply(planes[0], parts, acc, CONFIG)


@triton.jit
def _store_outputs(out, part, o, columns, CONFIG: tl.constexpr):
    place, exists = _places_of(part, out, out, 0, CONFIG.O_T, True, CONFIG)
    inside = exists[:, None] & (columns < CONFIG.DV)[None, :]
    tl.store(place[:, None] + columns[None, :], o.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _compute_chunk(s, q, k, v, skip, place, vector, OUTPUTS: tl.constexpr, CONFIG: tl.constexpr):
    """Return the state [PART, ROWS] after a chunk and, with OUTPUTS, its outputs [C, ROWS]."""
    C: tl.constexpr = CONFIG.C
    ROWS: tl.constexpr = CONFIG.ROWS
    row = tl.arange(0, C)
    beta, kept = tl.load(vector + row), tl.load(vector + 3 * C + row)
    decay = tl.load(vector + 4 * C)
    zeros = tl.zeros([C, ROWS], tl.float32)
    parts = _parts_of(s)
    u = v * beta[:, None]
    if CONFIG.DELTA:
        seen = tl.load(vector + C + row)
        u -= _multiply(k, parts, zeros, CONFIG) * seen[:, None]
        solve = _load_planes(place + TERMS * C * C, CONFIG)
        u = _multiply_planes(solve, _parts_of(u), zeros, CONFIG)
    o = zeros
    if OUTPUTS:
        read = tl.load(vector + 2 * C + row)
        o = _multiply(q, parts, zeros, CONFIG) * read[:, None]
        if CONFIG.HAS_SKIP:
            o += v * skip
        o = _multiply_planes(_load_planes(place, CONFIG), _parts_of(u), o, CONFIG)
    s = _multiply(tl.trans(k), _parts_of(u * kept[:, None]), s * decay, CONFIG)
    return s, o


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"], do_not_specialize_on_alignment=UNALIGNED)
def long_step_kernel(
    q,
    k,
    v,
    skip,
    out,
    state,
    positions,
    tail_k,
    tail_v,
    query_start_loc,
    seq_lens,
    slots,
    sources,
    planes,
    factors,
    num_reqs,
    num_tokens,
    CONFIG: tl.constexpr,
):
    """Compute a step of one request for ROWS value rows of one state head.

    CONFIG is a `StateConfig` with all columns of the keys in one part. Grid: (requests + 1,
    HV * BLOCKS). The last programs clear the rows after the last request.
    """
    C: tl.constexpr = CONFIG.C
    number = tl.program_id(0)
    head, block = tl.program_id(1) // CONFIG.BLOCKS, tl.program_id(1) % CONFIG.BLOCKS
    if number == num_reqs:
        first = tl.load(query_start_loc + num_reqs)
        clear_tokens(out, first, num_tokens, head, block, CONFIG)
        return
    request = open_request(StateBatch(query_start_loc, seq_lens, slots, sources), number)
    if request.slot < 0:
        clear_tokens(out, request.first, request.first + request.count, head, block, CONFIG)
        return
    if request.count <= 0:
        return
    base, columns = (
        load_base(positions, request, head, block, CONFIG),
        pass_columns(block, 0, CONFIG),
    )
    s = load_state(state, request.source, head, columns, base, CONFIG)
    s = settle_state(s, base, CONFIG)
    keep = kept_state(request, CONFIG)
    if (request.source != request.slot) & (base > 0) & (keep == base):
        store_state(state, request.slot, head, columns, s, CONFIG)
    s = s[0]
    tokens = open_head(Tokens(q, k, v, q, q), head, CONFIG)
    tail = open_tail(Tail(tail_k, tail_v, q, q), request.source, head, CONFIG)
    factor = 0.0
    if CONFIG.HAS_SKIP:
        factor = tl.load(skip + head).to(tl.float32)
    chunks = request.first // C + number * CONFIG.EXTRA
    count, held = _count_chunks(request, base, CONFIG)
    for own in tl.range(0, held, num_stages=1):
        part = _open_part(request, base, own, CONFIG)
        keys = _load_keys(part, tokens, tail, False, CONFIG)
        values = _load_values(part, tokens, tail, columns, False, CONFIG)
        place, vector = _places(planes, factors, chunks + own, head, CONFIG)
        s, _ = _compute_chunk(s, keys, keys, values, factor, place, vector, False, CONFIG)
        if part.stop == keep:
            store_state(state, request.slot, head, columns, (s,), CONFIG)
    for own in range(held, count):
        part = _open_part(request, base, own, CONFIG)
        queries = _load_queries(part, tokens, CONFIG)
        keys = _load_keys(part, tokens, tail, True, CONFIG)
        values = _load_values(part, tokens, tail, columns, True, CONFIG)
        place, vector = _places(planes, factors, chunks + own, head, CONFIG)
        s, o = _compute_chunk(s, queries, keys, values, factor, place, vector, True, CONFIG)
        _store_outputs(out + head * CONFIG.O_H, part, o, columns, CONFIG)
        if part.stop == keep:
            store_state(state, request.slot, head, columns, (s,), CONFIG)
