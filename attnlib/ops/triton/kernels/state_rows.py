"""Rows of the chunks of a step of a state layer: from the tail and the step.

Row p % RING of a tail belongs to position p.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels import state_arguments as arguments
from attnlib.ops.triton.kernels.state_requests import part_columns, value_columns

__all__ = [
    "choose",
    "choose_rows",
    "chunk_rows",
    "clear_tokens",
    "key_part",
    "load_chunk",
    "load_values",
    "query_part",
    "store_chunk",
    "store_values",
]


@triton.jit
def chunk_rows(request, start, CONFIG: tl.constexpr):
    """Return the `Rows` of the chunk that begins at position `start`."""
    position = start + tl.arange(0, CONFIG.C)
    held = position < request.computed
    fresh = (position >= request.computed) & (position < request.end)
    token = (request.first + position - request.computed).to(tl.int64)
    return arguments.Rows(position, held, fresh, (position % CONFIG.RING).to(tl.int64), token)


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
def _load_numbers(rows, old, new, OLD: tl.constexpr, NEW: tl.constexpr):
    """The same of one number for each row, [C]."""
    a = tl.load(old + rows.ring * OLD, mask=rows.held, other=0.0)
    b = tl.load(new + rows.token * NEW, mask=rows.fresh, other=0.0)
    return tl.where(rows.held, a, b)


@triton.jit
def _load_decays(rows, tokens, tail, part: tl.constexpr, CONFIG: tl.constexpr):
    STRIDE: tl.constexpr = CONFIG.HV * CONFIG.DK
    columns = part_columns(part, CONFIG)
    pair = _load_both(rows, tail.decay, tokens.decay, columns, CONFIG.DK, STRIDE, CONFIG.G_T)
    return choose(rows, pair)


@triton.jit
def _load_decay(rows, tokens, tail, CONFIG: tl.constexpr):
    """Return the decays; 0 in rows without a token."""
    if CONFIG.DECAY == "channel":
        decay = [
            _load_decays(rows, tokens, tail, part, CONFIG)
            for part in arguments.numbers(CONFIG.PARTS)
        ]
    elif CONFIG.DECAY == "constant":
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
        x = chunk.parts[part][0]
    return x


@triton.jit
def key_part(chunk, part: tl.constexpr, CONFIG: tl.constexpr):
    """Return a part of the keys of a chunk, [C, PART] as stored."""
    if CONFIG.RELOAD:
        pair = _load_keys(chunk.rows, chunk.tokens, chunk.tail, part, CONFIG)
        x = choose(chunk.rows, pair)
    else:
        x = chunk.parts[part][1]
    return x


@triton.jit
def load_chunk(rows, tokens, tail, CONFIG: tl.constexpr):
    """Return the `Chunk` of one head, before `choose_rows`."""
    parts = [
        (_load_queries(rows, tokens, part, CONFIG), _load_keys(rows, tokens, tail, part, CONFIG))
        for part in arguments.numbers(0 if CONFIG.RELOAD else CONFIG.PARTS)
    ]
    beta = tl.full([CONFIG.C], 1.0, tl.float32)
    if CONFIG.HAS_BETA:
        beta = _load_numbers(rows, tail.beta, tokens.beta, CONFIG.HV, CONFIG.B_T)
    return arguments.Chunk(parts, _load_decay(rows, tokens, tail, CONFIG), beta, rows, tokens, tail)


@triton.jit
def choose_rows(chunk, CONFIG: tl.constexpr):
    """Return the `Chunk` that `load_chunk` has loaded, with the rows of the tail or of the step."""
    rows = chunk.rows
    parts = [
        (tl.where(rows.fresh[:, None], part[0], 0.0), choose(rows, part[1])) for part in chunk.parts
    ]
    return arguments.Chunk(parts, chunk.decay, chunk.beta, rows, chunk.tokens, chunk.tail)


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
def store_values(rows, wanted, values, tail, columns, CONFIG: tl.constexpr):
    """Store the wanted rows [C] of values in a tail."""
    STRIDE: tl.constexpr = CONFIG.HV * CONFIG.DV
    place = tail.v + rows.ring[:, None] * STRIDE + columns[None, :]
    tl.store(place, values, mask=wanted[:, None] & (columns < CONFIG.DV)[None, :])


@triton.jit
def store_chunk(rows, wanted, chunk, tail, head, CONFIG: tl.constexpr):
    """Store the wanted rows [C] of a chunk in a tail, without values. One program of a head stores
    what its programs share, and one head what the heads of a group share."""
    KEYS: tl.constexpr = CONFIG.HK * CONFIG.DK
    CHANNELS: tl.constexpr = CONFIG.HV * CONFIG.DK
    PARTS: tl.constexpr = CONFIG.PARTS
    if CONFIG.HAS_BETA:
        tl.store(tail.beta + rows.ring * CONFIG.HV, chunk.beta, mask=wanted)
    if CONFIG.DECAY == "head":
        tl.store(tail.decay + rows.ring * CONFIG.HV, chunk.decay, mask=wanted)
    if CONFIG.DECAY == "channel":
        for part in tl.static_range(PARTS):
            _store_part(rows, wanted, chunk.decay[part], part, tail.decay, CHANNELS, CONFIG)
    if head % (CONFIG.HV // CONFIG.HK) == 0:
        for part in tl.static_range(PARTS):
            x = key_part(chunk, part, CONFIG)
            _store_part(rows, wanted, x, part, tail.k, KEYS, CONFIG)


@triton.jit
def clear_tokens(out, first, end, head, block, CONFIG: tl.constexpr):
    """Write 0 to the outputs of tokens [first, end) of one head: the value rows of a program."""
    columns = value_columns(block, CONFIG)
    zeros = tl.full([CONFIG.C, CONFIG.ROWS * CONFIG.PASSES], 0.0, out.dtype.element_ty)
    for start in range(first, end, CONFIG.C):
        token = start + tl.arange(0, CONFIG.C)
        inside = (token < end)[:, None] & (columns < CONFIG.DV)[None, :]
        place = token.to(tl.int64)[:, None] * CONFIG.O_T + head * CONFIG.O_H + columns[None, :]
        tl.store(out + place, zeros, mask=inside)
