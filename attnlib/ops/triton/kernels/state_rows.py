"""Requests of a step of a state layer, and the rows of their chunks: from the tail and the step.

Row p % RING of a tail belongs to position p.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.state_arguments import (
    DECAY_CHANNEL,
    DECAY_CONSTANT,
    DECAY_HEAD,
    Chunk,
    Request,
    Rows,
    Tail,
    Tokens,
)

__all__ = [
    "choose",
    "choose_rows",
    "chunk_rows",
    "clear_tokens",
    "first_kept",
    "first_written",
    "key_part",
    "load_chunk",
    "load_base",
    "load_values",
    "open_head",
    "open_request",
    "open_tail",
    "part_columns",
    "query_part",
    "store_chunk",
    "store_positions",
]


@triton.jit
def open_request(batch, request):
    """Return the `Request`."""
    first = tl.load(batch.query_start_loc + request)
    count = tl.load(batch.query_start_loc + request + 1) - first
    end = tl.load(batch.seq_lens + request)
    slot = tl.load(batch.slots + request).to(tl.int64)
    source = tl.load(batch.sources + request).to(tl.int64)
    return Request(slot, source, first, count, end - count, end)


@triton.jit
def load_base(positions, request, head, block, CONFIG: tl.constexpr):
    """Return the position of the stored state of the source, 0 for a first step (T1)."""
    low = request.computed
    # Without tokens that can be taken back, a slot continues from the first new token only.
    if (CONFIG.D > 0) & (request.computed > 0):
        place = request.source * CONFIG.POSITIONS + (head * CONFIG.COPIES + block) * 2
        low = tl.load(positions + place)
        # A slot that cannot continue from here has any number there: the loop must end anyway.
        low = tl.minimum(tl.maximum(low, request.computed - CONFIG.D), request.computed)
    return tl.maximum(low, 0) // CONFIG.C * CONFIG.C


@triton.jit
def first_kept(request, CONFIG: tl.constexpr):
    """Return the first position that the next step may continue from (T10)."""
    return tl.maximum(request.computed, request.end - CONFIG.D)


@triton.jit
def first_written(request, CONFIG: tl.constexpr):
    """Return the first position whose inputs the step writes to the tail: those since the state
    that it keeps, without the ones that the slot has."""
    first = first_kept(request, CONFIG) // CONFIG.C * CONFIG.C
    if request.source == request.slot:
        first = tl.maximum(first, request.computed)
    return first


@triton.jit
def store_positions(positions, request, head, block, CONFIG: tl.constexpr):
    """Store the positions that the slot can continue from (T8): the copies of this program."""
    BLOCKS: tl.constexpr = CONFIG.BLOCKS
    COPIES: tl.constexpr = CONFIG.COPIES
    low = first_kept(request, CONFIG)
    base = positions + request.slot * CONFIG.POSITIONS + head * (2 * CONFIG.COPIES)
    tl.store(base + 2 * block, low)
    tl.store(base + 2 * block + 1, request.end)
    if block == 0:
        for other in tl.static_range(BLOCKS, COPIES):
            tl.store(base + 2 * other, low)
            tl.store(base + 2 * other + 1, request.end)


@triton.jit
def open_head(tokens, head, CONFIG: tl.constexpr):
    """Return the `Tokens` of one state head."""
    key_head = head // (CONFIG.HV // CONFIG.HK)
    decay = tokens.decay + head * CONFIG.G_H
    return Tokens(
        tokens.q + key_head * CONFIG.Q_H,
        tokens.k + key_head * CONFIG.K_H,
        tokens.v + head * CONFIG.V_H,
        decay,
        tokens.beta + head * CONFIG.B_H,
    )


@triton.jit
def open_tail(tail, slot, head, CONFIG: tl.constexpr):
    """Return the `Tail` of one slot and state head."""
    key_head = head // (CONFIG.HV // CONFIG.HK)
    width = 1
    if CONFIG.DECAY == DECAY_CHANNEL:
        width = CONFIG.DK
    return Tail(
        tail.k + slot * CONFIG.TAIL_K + key_head * CONFIG.DK,
        tail.v + slot * CONFIG.TAIL_V + head * CONFIG.DV,
        tail.decay + slot * CONFIG.TAIL_G + head * width,
        tail.beta + slot * CONFIG.TAIL_B + head,
    )


@triton.jit
def chunk_rows(request, start, CONFIG: tl.constexpr):
    """Return the `Rows` of the chunk that begins at position `start`."""
    position = start + tl.arange(0, CONFIG.C)
    held = position < request.computed
    fresh = (position >= request.computed) & (position < request.end)
    token = (request.first + position - request.computed).to(tl.int64)
    return Rows(position, held, fresh, (position % CONFIG.RING).to(tl.int64), token)


@triton.jit
def _load_both(rows, old, new, columns, SIZE: tl.constexpr, OLD: tl.constexpr, NEW: tl.constexpr):
    """Return [C, columns] of the tail and of the step; OLD and NEW are the strides of rows."""
    inside = (columns < SIZE)[None, :]
    place = old + rows.ring[:, None] * OLD + columns[None, :]
    a = tl.load(place, mask=rows.held[:, None] & inside, other=0.0)
    place = new + rows.token[:, None] * NEW + columns[None, :]
    b = tl.load(place, mask=rows.fresh[:, None] & inside, other=0.0)
    return a, b


@triton.jit
def choose(rows, pair):
    """Return the rows of the tail and of the step from what `_load_both` returns, [C, columns].

    The compiler puts the copy of a tensor to shared memory, and its barrier, behind the operation
    that makes the tensor. So all loads of a chunk come first, and all choices after them.
    """
    return tl.where(rows.held[:, None], pair[0], pair[1])


@triton.jit
def _load(rows, old, new, columns, SIZE: tl.constexpr, OLD: tl.constexpr, NEW: tl.constexpr):
    """The same in one step."""
    return choose(rows, _load_both(rows, old, new, columns, SIZE, OLD, NEW))


@triton.jit
def _load_numbers(rows, old, new, OLD: tl.constexpr, NEW: tl.constexpr):
    """The same of one number for each row, [C]."""
    a = tl.load(old + rows.ring * OLD, mask=rows.held, other=0.0)
    b = tl.load(new + rows.token * NEW, mask=rows.fresh, other=0.0)
    return tl.where(rows.held, a, b)


@triton.jit
def part_columns(part: tl.constexpr, CONFIG: tl.constexpr):
    """Return the channels of a part of the keys, [PART]."""
    return part * CONFIG.PART + tl.arange(0, CONFIG.PART)


@triton.jit
def _load_decay(rows, tokens, tail, CONFIG: tl.constexpr):
    """Return the decays; 0 in rows without a token."""
    PARTS: tl.constexpr = CONFIG.PARTS
    if CONFIG.DECAY == DECAY_CHANNEL:
        decay = ()
        STRIDE: tl.constexpr = CONFIG.HV * CONFIG.DK
        for part in tl.static_range(PARTS):
            columns = part_columns(part, CONFIG)
            x = _load(rows, tail.decay, tokens.decay, columns, CONFIG.DK, STRIDE, CONFIG.G_T)
            decay = decay + (x,)
    elif CONFIG.DECAY == DECAY_CONSTANT:
        decay = tl.where(rows.held | rows.fresh, tl.load(tokens.decay), 0.0)
    else:
        decay = _load_numbers(rows, tail.decay, tokens.decay, CONFIG.HV, CONFIG.G_T)
    return decay


@triton.jit
def _load_queries(rows, tokens, part: tl.constexpr, CONFIG: tl.constexpr):
    columns = part_columns(part, CONFIG)
    inside = rows.fresh[:, None] & (columns < CONFIG.DK)[None, :]
    place = tokens.q + rows.token[:, None] * CONFIG.Q_T + columns[None, :]
    return tl.load(place, mask=inside, other=0.0)


@triton.jit
def _load_keys(rows, tokens, tail, part: tl.constexpr, CONFIG: tl.constexpr):
    STRIDE: tl.constexpr = CONFIG.HK * CONFIG.DK
    columns = part_columns(part, CONFIG)
    return _load_both(rows, tail.k, tokens.k, columns, CONFIG.DK, STRIDE, CONFIG.K_T)


@triton.jit
def query_part(chunk, part: tl.constexpr, CONFIG: tl.constexpr):
    """Return a part of the queries of a chunk, [C, PART] as stored."""
    if CONFIG.RELOAD:
        x = _load_queries(chunk.rows, chunk.tokens, part, CONFIG)
    else:
        x = chunk.q[part]
    return x


@triton.jit
def key_part(chunk, part: tl.constexpr, CONFIG: tl.constexpr):
    """Return a part of the keys of a chunk, [C, PART] as stored."""
    if CONFIG.RELOAD:
        pair = _load_keys(chunk.rows, chunk.tokens, chunk.tail, part, CONFIG)
        x = choose(chunk.rows, pair)
    else:
        x = chunk.k[part]
    return x


@triton.jit
def load_chunk(rows, tokens, tail, CONFIG: tl.constexpr):
    """Return the `Chunk` of one head, before `choose_rows`."""
    PARTS: tl.constexpr = CONFIG.PARTS
    q = ()
    k = ()
    if not CONFIG.RELOAD:
        for part in tl.static_range(PARTS):
            q = q + (_load_queries(rows, tokens, part, CONFIG),)
            k = k + (_load_keys(rows, tokens, tail, part, CONFIG),)
    C: tl.constexpr = CONFIG.C
    beta = tl.full([C], 1.0, tl.float32)
    if CONFIG.HAS_BETA:
        beta = _load_numbers(rows, tail.beta, tokens.beta, CONFIG.HV, CONFIG.B_T)
    return Chunk(q, k, _load_decay(rows, tokens, tail, CONFIG), beta, rows, tokens, tail)


@triton.jit
def choose_rows(chunk, CONFIG: tl.constexpr):
    """Return the `Chunk` that `load_chunk` has loaded, with the rows of the tail or of the step."""
    PARTS: tl.constexpr = CONFIG.PARTS
    rows = chunk.rows
    q = ()
    k = ()
    if not CONFIG.RELOAD:
        for part in tl.static_range(PARTS):
            q = q + (tl.where(rows.fresh[:, None], chunk.q[part], 0.0),)
            k = k + (choose(rows, chunk.k[part]),)
    return Chunk(q, k, chunk.decay, chunk.beta, rows, chunk.tokens, chunk.tail)


@triton.jit
def load_values(rows, tokens, tail, columns, CONFIG: tl.constexpr):
    """Return the values of a chunk in the tail and in the step, see `choose`."""
    STRIDE: tl.constexpr = CONFIG.HV * CONFIG.DV
    return _load_both(rows, tail.v, tokens.v, columns, CONFIG.DV, STRIDE, CONFIG.V_T)


@triton.jit
def _store_part(
    rows, wanted, x, part: tl.constexpr, base, STRIDE: tl.constexpr, CONFIG: tl.constexpr
):
    """Store the wanted rows of a part of keys or decays."""
    columns = part_columns(part, CONFIG)
    inside = wanted[:, None] & (columns < CONFIG.DK)[None, :]
    tl.store(base + rows.ring[:, None] * STRIDE + columns[None, :], x, mask=inside)


@triton.jit
def store_chunk(rows, wanted, chunk, values, tail, columns, head, block, CONFIG: tl.constexpr):
    """Store the wanted rows [C] of a chunk in a tail. One program stores what several share."""
    VALUES: tl.constexpr = CONFIG.HV * CONFIG.DV
    KEYS: tl.constexpr = CONFIG.HK * CONFIG.DK
    CHANNELS: tl.constexpr = CONFIG.HV * CONFIG.DK
    PARTS: tl.constexpr = CONFIG.PARTS
    place = tail.v + rows.ring[:, None] * VALUES + columns[None, :]
    tl.store(place, values, mask=wanted[:, None] & (columns < CONFIG.DV)[None, :])
    if block == 0:
        if CONFIG.HAS_BETA:
            tl.store(tail.beta + rows.ring * CONFIG.HV, chunk.beta, mask=wanted)
        if CONFIG.DECAY == DECAY_HEAD:
            tl.store(tail.decay + rows.ring * CONFIG.HV, chunk.decay, mask=wanted)
        if CONFIG.DECAY == DECAY_CHANNEL:
            for part in tl.static_range(PARTS):
                _store_part(rows, wanted, chunk.decay[part], part, tail.decay, CHANNELS, CONFIG)
        if head % (CONFIG.HV // CONFIG.HK) == 0:
            for part in tl.static_range(PARTS):
                x = key_part(chunk, part, CONFIG)
                _store_part(rows, wanted, x, part, tail.k, KEYS, CONFIG)


@triton.jit
def clear_tokens(out, first, end, head, columns, CONFIG: tl.constexpr):
    """Write 0 to the outputs of tokens [first, end) of one head."""
    C: tl.constexpr = CONFIG.C
    ROWS: tl.constexpr = CONFIG.ROWS
    zeros = tl.zeros([C, ROWS], tl.float32).to(out.dtype.element_ty)
    for start in range(first, end, CONFIG.C):
        token = start + tl.arange(0, CONFIG.C)
        inside = (token < end)[:, None] & (columns < CONFIG.DV)[None, :]
        place = token.to(tl.int64)[:, None] * CONFIG.O_T + head * CONFIG.O_H + columns[None, :]
        tl.store(out + place, zeros, mask=inside)
