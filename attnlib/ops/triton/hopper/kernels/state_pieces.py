"""Chunks of a long step of a state layer (`state_long`): their tokens and the rows of those, and
products with two numbers of bfloat16 for one of float32."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.state_chunk import cut, dot
from attnlib.ops.triton.kernels.state_requests import kept_state

__all__ = [
    "Part",
    "count_chunks",
    "load",
    "load_keys",
    "load_numbers",
    "load_queries",
    "multiply",
    "open_part",
    "product",
    "parts_of",
    "rows_place",
    "store_parts",
    "store_rows",
    "token_places",
    "wanted_rows",
]


class Part(NamedTuple):
    """The tokens of a chunk, all scalars.

    Attributes:
        start, stop: their positions, from the first one to behind the last.
        token: row of the first one in the batch, int64; before the request for one in the tail.
        held: how many of them are in the tail, if that is neither negative nor more than C.
    """

    start: Any
    stop: Any
    token: Any
    held: Any


@triton.jit
def count_chunks(request, base, CONFIG: tl.constexpr):
    """Return the number of chunks of a request whose state is at `base`. One ends at the state that
    the step stores."""
    keep = kept_state(request, CONFIG)
    return tl.cdiv(keep - base, CONFIG.C) + tl.cdiv(request.end - keep, CONFIG.C)


@triton.jit
def open_part(request, base, number, CONFIG: tl.constexpr):
    """Return a chunk of a request as a `Part`."""
    keep = kept_state(request, CONFIG)
    after = number - tl.cdiv(keep - base, CONFIG.C)
    start = tl.where(after < 0, base + number * CONFIG.C, keep + after * CONFIG.C)
    limit = tl.where(after < 0, keep, request.end)
    held = request.computed - start
    token = (request.first - held).to(tl.int64)
    return Part(start, tl.minimum(start + CONFIG.C, limit), token, held)


@triton.jit
def wanted_rows(part, which: tl.constexpr, CONFIG: tl.constexpr):
    """Return the first row and the one behind the last of those of `rows_place` that make a
    difference: in short steps, most do not."""
    first = part.held if which == 1 else 0
    last = part.stop - part.start
    if which == 2:
        last = tl.where(last < CONFIG.C, 0, CONFIG.C)
    return first, last


@triton.jit
def token_places(part, row, columns, old, new, OLD, NEW, CONFIG: tl.constexpr):
    """Return (pointers, mask) of columns of rows of a chunk in the tail or in the step. OLD and NEW
    are the strides of rows."""
    # Triton 3.9 does not know the alignment of rows of which each has its choice.
    ring = old + (((part.start + row) % CONFIG.RING) * OLD)[:, None] + columns[None, :]
    place = new + ((part.token + row) * NEW)[:, None] + columns[None, :]
    place = tl.where((row < part.held)[:, None], ring, place)
    return place, (row < part.stop - part.start)[:, None]


@triton.jit
def load(part, old, new, columns, OLD: tl.constexpr, NEW: tl.constexpr, CONFIG: tl.constexpr):
    """Return columns of the rows of a chunk, [C, columns], 0 where there is no token."""
    row = tl.arange(0, CONFIG.C)
    place, exists = token_places(part, row, columns, old, new, OLD, NEW, CONFIG)
    return tl.load(place, mask=exists, other=0.0)


@triton.jit
def load_keys(part, tokens, tail, columns, CONFIG: tl.constexpr):
    OLD: tl.constexpr = CONFIG.HK * CONFIG.DK
    return load(part, tail.k, tokens.k, columns, OLD, CONFIG.K_T, CONFIG)


@triton.jit
def load_queries(part, tokens, columns, CONFIG: tl.constexpr):
    """Return the queries of a chunk; any for tokens in the tail, whose outputs nobody stores."""
    return load(part, tokens.q, tokens.q, columns, 0, CONFIG.Q_T, CONFIG)


@triton.jit
def load_numbers(part, row, old, new, OLD: tl.constexpr, NEW: tl.constexpr, CONFIG: tl.constexpr):
    """Return one number of each row, [C]."""
    place = new + (part.token + row) * NEW
    place = tl.where(row < part.held, old + ((part.start + row) % CONFIG.RING) * OLD, place)
    return tl.load(place, mask=row < part.stop - part.start, other=0.0)


@triton.jit
def parts_of(x):
    """Return two numbers of bfloat16 whose sum is x to 16 bits, the larger first."""
    high, rest = cut(x)
    return high, rest.to(tl.bfloat16)


@triton.jit
def multiply(a, b, acc, CONFIG: tl.constexpr):
    """Return acc + a b^T, with a in two parts, and b in two or as it is; the product of the smaller
    parts is left out."""
    if len(b) == 2:
        acc = dot(a[0], b[1], acc, CONFIG)
    return dot(a[0], b[0], dot(a[1], b[0], acc, CONFIG), CONFIG)


@triton.jit
def product(a, b, CONFIG: tl.constexpr):
    """Return a b [C, C]."""
    zeros = tl.full([CONFIG.C, CONFIG.C], 0.0, tl.float32)
    return multiply(parts_of(a), parts_of(tl.trans(b)), zeros, CONFIG)


@triton.jit
def rows_place(plane, which: tl.constexpr, CONFIG: tl.constexpr):
    """Return the pointer to the rows [C, PART] of a chunk that states are multiplied by: those for
    what a state holds of the keys, for outputs, and for the next state."""
    MATRICES: tl.constexpr = 2 if CONFIG.DELTA else 1
    return plane + 2 * CONFIG.C * (MATRICES * CONFIG.C + which * CONFIG.PART)


@triton.jit
def tile(place, columns, COLUMNS: tl.constexpr, CONFIG: tl.constexpr):
    """Return pointers to columns of rows of COLUMNS numbers, [C, columns]."""
    return place + tl.arange(0, CONFIG.C)[:, None] * COLUMNS + columns[None, :]


@triton.jit
def store_parts(place, columns, x, COLUMNS: tl.constexpr, CONFIG: tl.constexpr, wanted=None):
    """Store columns of such rows in two parts, one after the other."""
    high, low = parts_of(x)
    tl.store(tile(place, columns, COLUMNS, CONFIG), high, wanted)
    tl.store(tile(place + CONFIG.C * COLUMNS, columns, COLUMNS, CONFIG), low, wanted)


@triton.jit
def store_rows(plane, which: tl.constexpr, columns, x, part, CONFIG: tl.constexpr):
    """Store columns of the rows of `rows_place`."""
    place = rows_place(plane, which, CONFIG)
    if CONFIG.CHUNKS:
        row = tl.arange(0, CONFIG.C)
        first, last = wanted_rows(part, which, CONFIG)
        wanted = ((row >= first) & (row < last))[:, None]
        store_parts(place, columns, x, CONFIG.PART, CONFIG, wanted)
    else:
        store_parts(place, columns, x, CONFIG.PART, CONFIG)
