"""Steps of many tokens for layers whose bits may depend on the division into steps.

`long_matrices_kernel` prepares all chunks of C tokens in parallel, and `long_step_kernel` runs
through those of a request, one after the other. C is larger than the chunk of the slots, so that
the chain is shorter. Tails and positions are written as in `state_prefill`, whose matrices these
are:

    w = beta v - seen (k S)             seen = beta |k| exp(b)
    u = T w
    o = read (q S) + P u + skip v       read = scale |q| exp(b); P holds scale |q| and |k|
    S' = exp(b[last]) S + k^T (kept u)  kept = |k| exp(b[last] - b)

with |q| and |k| for the inverse lengths. Matrix units multiply bfloat16: two such numbers are 16
bits of one of float32, and queries and keys need one. Decays per channel are part of rows of keys
and queries that are prepared, too (`state_channels`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.hopper.kernels import state_pieces as pieces
from attnlib.ops.triton.hopper.kernels.state_channels import channel_products
from attnlib.ops.triton.kernels.schedule import find_request
from attnlib.ops.triton.kernels.state_arguments import (
    DECAY_CHANNEL,
    DECAY_CONSTANT,
    DECAY_HEAD,
    UNALIGNED,
    Chunk,
    Factors,
    StateBatch,
    Tail,
    Tokens,
)
from attnlib.ops.triton.kernels.state_matrices import head_products, key_pairs
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
"""Vectors [C] of a chunk: beta, seen, read, kept, and exp(b[last]) in all elements; with decays per
channel beta, and exp(b[last]) of at most 4 C channels."""


@triton.jit
def _open_chunk(part, tokens, tail, CONFIG: tl.constexpr):
    """Return the `Chunk` of one head, without decays per channel."""
    C: tl.constexpr = CONFIG.C
    beta = tl.full([C], 1.0, tl.float32)
    decay = beta
    if CONFIG.HAS_BETA:
        beta = pieces.load_numbers(part, tail.beta, tokens.beta, CONFIG.HV, CONFIG.B_T, CONFIG)
    if CONFIG.DECAY == DECAY_CONSTANT:
        exists = tl.arange(0, C) < part.stop - part.start
        decay = tl.where(exists, tl.load(tokens.decay), 0.0)
    elif CONFIG.DECAY == DECAY_HEAD:
        decay = pieces.load_numbers(part, tail.decay, tokens.decay, CONFIG.HV, CONFIG.G_T, CONFIG)
    columns = part_columns(0, CONFIG)
    k = pieces.load_keys(part, tokens, tail, columns, False, CONFIG)
    return Chunk(
        (pieces.load_queries(part, tokens, columns, CONFIG),), (k,), decay, beta, 0, tokens, tail
    )


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


@triton.constexpr_function
def plane_size(C, PART, DELTA, IS_CHANNEL):
    """Numbers of bfloat16 of a chunk of one head: P, T and, for decays per channel, rows."""
    return 2 * C * ((2 if DELTA else 1) * C + (3 * PART if IS_CHANNEL else 0))


@triton.jit
def _places(planes, factors, chunk, head, CONFIG: tl.constexpr):
    """Return pointers to the planes and the factors of a chunk of the batch."""
    IS_CHANNEL: tl.constexpr = CONFIG.DECAY == DECAY_CHANNEL
    PLANES: tl.constexpr = plane_size(CONFIG.C, CONFIG.PART, CONFIG.DELTA, IS_CHANNEL)
    number = chunk.to(tl.int64) * CONFIG.HV + head
    return planes + number * PLANES, factors + number * (FACTORS * CONFIG.C)


@triton.jit
def _load_parts(place, COLUMNS: tl.constexpr, CONFIG: tl.constexpr):
    columns = tl.arange(0, COLUMNS)
    high = tl.load(pieces.tile(place, columns, COLUMNS, CONFIG))
    return high, tl.load(pieces.tile(place + CONFIG.C * COLUMNS, columns, COLUMNS, CONFIG))


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

    planes: [chunks, HV, plane_size] bfloat16, P, T and rows in parts.
    factors: [chunks, HV, FACTORS, C] float32.
    """
    C: tl.constexpr = CONFIG.C
    place, head, row = tl.program_id(0), tl.program_id(1), tl.arange(0, C)
    number = find_request(query_start_loc, place, num_reqs, C, 128, CONFIG.EXTRA)
    if number == num_reqs:
        return
    request = open_request(StateBatch(query_start_loc, seq_lens, slots, sources), number)
    if (request.slot < 0) | (request.count <= 0):
        return
    base = load_base(positions, request, head, 0, CONFIG)
    own = place - request.first // C - number * CONFIG.EXTRA
    count, _ = pieces.count_chunks(request, base, CONFIG)
    if own >= count:
        return
    tokens = open_head(Tokens(q, k, k, decay, beta), head, CONFIG)
    tail = open_tail(Tail(tail_k, tail_k, tail_decay, tail_beta), request.source, head, CONFIG)
    part = pieces.open_part(request, base, own, CONFIG)
    chunk = _open_chunk(part, tokens, tail, CONFIG)
    given = _factors(chunk, scale, CONFIG)
    plane, vector = _places(planes, factors, place, head, CONFIG)
    if CONFIG.DECAY == DECAY_CHANNEL:
        kk, qk = channel_products(part, chunk, given, plane, vector, CONFIG)
    else:
        kk, qk = head_products(chunk, given, CONFIG)
        decays = tl.exp(given.total)
        end = tl.sum(tl.where(row == C - 1, given.total, 0.0), 0)
        tl.store(vector + C + row, chunk.beta * given.norm_k * decays)
        tl.store(vector + 2 * C + row, given.norm_q * decays)
        tl.store(vector + 3 * C + row, given.norm_k * tl.exp(end - given.total))
        tl.store(vector + 4 * C + row, tl.zeros([C], tl.float32) + tl.exp(end))
    tl.store(vector + row, chunk.beta)
    qk = qk * given.norm_q[:, None] * given.norm_k[None, :]
    pieces.store_parts(plane, row, qk, C, CONFIG)
    if CONFIG.DELTA:
        solve = pieces.invert(key_pairs(kk, chunk, given.norm_k, CONFIG), CONFIG)
        pieces.store_parts(plane + 2 * C * C, row, solve, C, CONFIG)


@triton.jit
def _store_outputs(out, part, o, columns, CONFIG: tl.constexpr):
    place, exists = pieces.places_of(part, out, out, 0, CONFIG.O_T, True, CONFIG)
    inside = exists[:, None] & (columns < CONFIG.DV)[None, :]
    tl.store(place[:, None] + columns[None, :], tl.trans(o.to(out.dtype.element_ty)), mask=inside)


@triton.jit
def _load_operands(part, tokens, tail, plane, FRESH: tl.constexpr, CONFIG: tl.constexpr):
    """Return what the state is multiplied by, each [C, PART] as it is or in two parts: rows for
    what it holds of the keys, for outputs, and for the next state. With FRESH they are in the
    step."""
    if CONFIG.DECAY == DECAY_CHANNEL:
        kept = _load_parts(pieces.rows_place(plane, 2, CONFIG), CONFIG.PART, CONFIG)
        seen, read = kept, kept
        if CONFIG.DELTA:
            seen = _load_parts(pieces.rows_place(plane, 0, CONFIG), CONFIG.PART, CONFIG)
        if FRESH:
            read = _load_parts(pieces.rows_place(plane, 1, CONFIG), CONFIG.PART, CONFIG)
    else:
        columns = part_columns(0, CONFIG)
        seen = (pieces.load_keys(part, tokens, tail, columns, FRESH, CONFIG),)
        read, kept = seen, seen
        if FRESH:
            read = (pieces.load_queries(part, tokens, columns, CONFIG),)
    return seen, read, kept


@triton.jit
def _vector(vector, which: tl.constexpr, CONFIG: tl.constexpr):
    return tl.load(vector + which * CONFIG.C + tl.arange(0, CONFIG.C))[None, :]


@triton.jit
def _compute_chunk(s, rows, v, skip, plane, vector, OUTPUTS: tl.constexpr, CONFIG: tl.constexpr):
    """Return the state [ROWS, PART] after a chunk and, with OUTPUTS, its outputs [ROWS, C]. The
    left operands of all products are made of results, so that they stay in registers."""
    C: tl.constexpr = CONFIG.C
    ROWS: tl.constexpr = CONFIG.ROWS
    CHANNEL: tl.constexpr = CONFIG.DECAY == DECAY_CHANNEL
    v = tl.trans(v)
    zeros = tl.zeros([ROWS, C], tl.float32)
    parts, o = pieces.parts_of(s), zeros
    u = v * _vector(vector, 0, CONFIG)
    if CONFIG.DELTA:
        seen = pieces.multiply(parts, rows[0], zeros, CONFIG)
        if not CHANNEL:
            seen *= _vector(vector, 1, CONFIG)
        u -= seen
    if OUTPUTS:
        o = pieces.multiply(parts, rows[1], zeros, CONFIG)
        if not CHANNEL:
            o *= _vector(vector, 2, CONFIG)
        if CONFIG.HAS_SKIP:
            o += v * skip
    if CONFIG.DELTA:
        solve = _load_parts(plane + 2 * C * C, C, CONFIG)
        u = pieces.multiply(pieces.parts_of(u), solve, zeros, CONFIG)
    if OUTPUTS:
        o = pieces.multiply(pieces.parts_of(u), _load_parts(plane, C, CONFIG), o, CONFIG)
    if CHANNEL:
        s *= tl.load(vector + C + tl.arange(0, CONFIG.PART))[None, :]
    else:
        u *= _vector(vector, 3, CONFIG)
        s *= tl.load(vector + 4 * C)
    parts, kept = pieces.parts_of(u), ()
    for term in tl.static_range(len(rows[2])):
        kept = kept + (tl.trans(rows[2][term]),)
    return pieces.multiply(parts, kept, s, CONFIG), o


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
    columns = pass_columns(block, 0, CONFIG)
    base = load_base(positions, request, head, block, CONFIG)
    s = load_state(state, request.source, head, columns, base, CONFIG)
    s = settle_state(s, base, CONFIG)
    keep = kept_state(request, CONFIG)
    if (request.source != request.slot) & (base > 0) & (keep == base):
        store_state(state, request.slot, head, columns, s, CONFIG)
    s = tl.trans(s[0])
    tokens = open_head(Tokens(q, k, v, q, q), head, CONFIG)
    tail = open_tail(Tail(tail_k, tail_v, q, q), request.source, head, CONFIG)
    factor = 0.0
    if CONFIG.HAS_SKIP:
        factor = tl.load(skip + head).to(tl.float32)
    chunks = request.first // C + number * CONFIG.EXTRA
    count, held = pieces.count_chunks(request, base, CONFIG)
    for fresh in tl.static_range(2):
        for own in tl.range(held * fresh, count if fresh else held, num_stages=1 + fresh):
            part = pieces.open_part(request, base, own, CONFIG)
            plane, vector = _places(planes, factors, chunks + own, head, CONFIG)
            rows = _load_operands(part, tokens, tail, plane, fresh == 1, CONFIG)
            values = pieces.load_values(part, tokens, tail, columns, fresh == 1, CONFIG)
            s, o = _compute_chunk(s, rows, values, factor, plane, vector, fresh == 1, CONFIG)
            if fresh:
                _store_outputs(out + head * CONFIG.O_H, part, o, columns, CONFIG)
            if part.stop == keep:
                store_state(state, request.slot, head, columns, (tl.trans(s),), CONFIG)
