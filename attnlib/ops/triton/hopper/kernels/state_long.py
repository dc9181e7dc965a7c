"""Steps of many tokens, and all steps of layers whose bits must not depend on them (T18).

`long_matrices_kernel` prepares all chunks of C tokens in parallel, and `serial_step_kernel` of
`state_serial` runs through those of a request, one after the other. Where bits may depend on steps,
C is larger than the chunk of the slots, so that the chain is shorter. Else it is that chunk: then
a row is computed by the same instructions in all steps, from the rows up to it. Those that do not
exist yet are 0, as are their elements of T and P, and change no sum. Tails and positions are
written as in `state_prefill`, whose matrices these are:

    w = beta v - seen (k S)             seen = beta |k| exp(b)
    u = T w
    o = read (q S) + P u + skip v       read = scale |q| exp(b); P holds scale |q| and |k|
    S' = exp(b[last]) S + k^T (kept u)  kept = |k| exp(b[last] - b)

with |q| and |k| for the inverse lengths. Matrix units multiply bfloat16: two such numbers are 16
bits of one of float32, and queries and keys need one. Decays per channel are part of rows of keys
and queries that are prepared, too: by `channel_matrices_kernel` of `state_channel_chunks` where
bits may depend on steps, else in `state_channels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.hopper.kernels import state_pieces as pieces
from attnlib.ops.triton.hopper.kernels.state_channels import channel_products
from attnlib.ops.triton.kernels import state_arguments as arguments
from attnlib.ops.triton.kernels import state_requests as requests
from attnlib.ops.triton.kernels.schedule import find_request
from attnlib.ops.triton.kernels.state_matrices import head_products, invert, key_pairs
from attnlib.ops.triton.kernels.state_sums import summable

__all__ = ["factor_size", "long_matrices_kernel", "plane_size"]


@triton.jit
def _open_chunk(part, tokens, tail, CONFIG: tl.constexpr):
    """Return the `Chunk` of one head, without decays per channel."""
    row = tl.arange(0, CONFIG.C)
    beta = tl.full([CONFIG.C], 1.0, tl.float32)
    decay = beta
    if CONFIG.HAS_BETA:
        places = tail.beta, tokens.beta
        beta = pieces.load_numbers(part, row, *places, CONFIG.HV, CONFIG.B_T, CONFIG)
    if CONFIG.DECAY == "constant":
        decay = tl.where(row < part.stop - part.start, tl.load(tokens.decay), 0.0)
    elif CONFIG.DECAY == "head":
        places = tail.decay, tokens.decay
        decay = pieces.load_numbers(part, row, *places, CONFIG.HV, CONFIG.G_T, CONFIG)
    columns = requests.part_columns(0, CONFIG)
    k = pieces.load_keys(part, tokens, tail, columns, CONFIG)
    q = pieces.load_queries(part, tokens, columns, CONFIG)
    return arguments.Chunk(((q, k),), decay, beta, 0, tokens, tail)


@triton.jit
def _factors(chunk, scale, CONFIG: tl.constexpr):
    """Return the `Factors` of a chunk."""
    norm_q = tl.full([CONFIG.C], 1.0, tl.float32)
    norm_k = norm_q
    if CONFIG.NORM:
        q, k = chunk.parts[0]
        q, k = q.to(tl.float32), k.to(tl.float32)
        norm_q = tl.rsqrt(tl.sum(q * q, 1) + CONFIG.EPS)
        norm_k = tl.rsqrt(tl.sum(k * k, 1) + CONFIG.EPS)
    return arguments.Factors(tl.cumsum(summable(chunk.decay), 0), norm_q * scale, norm_k)


@triton.constexpr_function
def plane_size(C, PART, DELTA, IS_CHANNEL):
    """Numbers of bfloat16 of a chunk of one head: P, T and, for decays per channel, rows."""
    return 2 * C * ((2 if DELTA else 1) * C + (3 * PART if IS_CHANNEL else 0))


@triton.constexpr_function
def factor_size(C, PART, IS_CHANNEL):
    """Numbers of float32 of the same: vectors [C] of beta, seen, read, kept, and exp(b[last]) in
    all elements; with decays per channel beta, and exp(b[last]) of each channel."""
    return max(5 * C, C + PART if IS_CHANNEL else 0)


@triton.jit(do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=arguments.UNALIGNED)
def long_matrices_kernel(
    q, k, decay, beta, positions, tail_k, tail_decay, tail_beta, query_start_loc, seq_lens,
    slots, sources, planes, factors, scale, num_reqs, CONFIG: tl.constexpr,
):  # fmt: skip
    """Prepare one chunk of one state head. Grid: (chunks, HV).

    planes: [chunks, HV, plane_size] bfloat16, P, T and rows in parts.
    factors: [chunks, HV, factor_size] float32.
    """
    C: tl.constexpr = CONFIG.C
    CHANNEL: tl.constexpr = CONFIG.DECAY == "channel"
    PLANES: tl.constexpr = plane_size(C, CONFIG.PART, CONFIG.DELTA, CHANNEL)
    FACTORS: tl.constexpr = factor_size(C, CONFIG.PART, CHANNEL)
    place, head, row = tl.program_id(0), tl.program_id(1), tl.arange(0, C)
    number = find_request(query_start_loc, place, num_reqs, C, 128, CONFIG.EXTRA)
    if number == num_reqs:
        return
    request = requests.open_request(
        arguments.StateBatch(query_start_loc, seq_lens, slots, sources), number
    )
    if (request.slot < 0) | (request.count <= 0):
        return
    base = requests.load_base(positions, request, head, 0, CONFIG)
    own = place - request.first // C - number * CONFIG.EXTRA
    if own >= pieces.count_chunks(request, base, CONFIG):
        return
    tokens = requests.open_head(arguments.Tokens(q, k, k, decay, beta), head, CONFIG)
    tails = arguments.Tail(tail_k, tail_k, tail_decay, tail_beta)
    tail = requests.open_tail(tails, request.source, head, CONFIG)
    part = pieces.open_part(request, base, own, CONFIG)
    chunk = _open_chunk(part, tokens, tail, CONFIG)
    given = _factors(chunk, scale, CONFIG)
    index = place.to(tl.int64) * CONFIG.HV + head
    plane, vector = planes + index * PLANES, factors + index * FACTORS
    if CHANNEL:
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
        pairs = key_pairs(kk, chunk, given.norm_k, CONFIG)
        solve = invert(pairs, pieces.product, CONFIG)
        pieces.store_parts(plane + 2 * C * C, row, solve, C, CONFIG)
