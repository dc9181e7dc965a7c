"""Chunks of a long step of a state layer (`state_long`): their tokens and the rows of those, and
products with two numbers of bfloat16 for one of float32."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.state_chunk import cut, dot
from attnlib.ops.triton.kernels.state_requests import kept_state
from attnlib.ops.triton.kernels.state_sums import joins

__all__ = [
    "Part",
    "count_chunks",
    "invert",
    "load_decays",
    "load_keys",
    "load_numbers",
    "load_queries",
    "load_values",
    "multiply",
    "open_part",
    "parts_of",
    "places_of",
    "rows_place",
    "store_parts",
    "tile",
]


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
def count_chunks(request, base, CONFIG: tl.constexpr):
    """Return the number of chunks of a request whose state is at `base`, and of those in the
    tail."""
    low, high = _divide(request, base, CONFIG)
    one, two = tl.cdiv(low - base, CONFIG.C), tl.cdiv(high - low, CONFIG.C)
    held = one + tl.where(high == request.computed, two, 0)
    return one + two + tl.cdiv(request.end - high, CONFIG.C), held


@triton.jit
def open_part(request, base, number, CONFIG: tl.constexpr):
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
def places_of(
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
    OLD: tl.constexpr,
    NEW: tl.constexpr,
    FRESH: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Return columns of SIZE in the rows of a chunk, [C, columns], 0 where there is no token."""
    place, exists = places_of(part, old, new, OLD, NEW, FRESH, CONFIG)
    inside = exists[:, None]
    if ((columns.shape[0] - 1) | (SIZE - 1)) & SIZE:  # other columns of a power of two all exist
        inside = inside & (columns < SIZE)[None, :]
    return tl.load(place[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit
def load_keys(part, tokens, tail, columns, FRESH: tl.constexpr, CONFIG: tl.constexpr):
    OLD: tl.constexpr = CONFIG.HK * CONFIG.DK
    return _load(part, tail.k, tokens.k, columns, CONFIG.DK, OLD, CONFIG.K_T, FRESH, CONFIG)


@triton.jit
def load_decays(part, tokens, tail, columns, CONFIG: tl.constexpr):
    """Return the decays of channels."""
    OLD: tl.constexpr = CONFIG.HV * CONFIG.DK
    place = (tail.decay, tokens.decay)
    return _load(part, *place, columns, CONFIG.DK, OLD, CONFIG.G_T, False, CONFIG)


@triton.jit
def load_queries(part, tokens, columns, CONFIG: tl.constexpr):
    """Return the queries of a chunk, 0 for tokens in the tail."""
    fresh = Part(part.start, tl.where(part.is_old, part.start, part.stop), part.token, False)
    return _load(fresh, tokens.q, tokens.q, columns, CONFIG.DK, 0, CONFIG.Q_T, True, CONFIG)


@triton.jit
def load_values(part, tokens, tail, columns, FRESH: tl.constexpr, CONFIG: tl.constexpr):
    OLD: tl.constexpr = CONFIG.HV * CONFIG.DV
    x = _load(part, tail.v, tokens.v, columns, CONFIG.DV, OLD, CONFIG.V_T, FRESH, CONFIG)
    return x.to(tl.float32)


@triton.jit
def load_numbers(part, old, new, OLD: tl.constexpr, NEW: tl.constexpr, CONFIG: tl.constexpr):
    place, exists = places_of(part, old, new, OLD, NEW, False, CONFIG)
    return tl.load(place, mask=exists, other=0.0)


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
def invert(a, CONFIG: tl.constexpr):
    """Return (I + a)^-1 of the part of `a` [C, C] below the diagonal, as `state_matrices`."""
    C: tl.constexpr = CONFIG.C
    LEVELS: tl.constexpr = CONFIG.LEVELS
    index = tl.arange(0, C)
    inverse = (index[:, None] == index[None, :]).to(tl.float32)
    zeros = tl.zeros([C, C], tl.float32)
    for level in tl.static_range(LEVELS):
        part = tl.where(joins(level, C), a, 0.0)
        if level > 0:
            part = multiply(parts_of(inverse), parts_of(tl.trans(part)), zeros, CONFIG)
            part = multiply(parts_of(part), parts_of(tl.trans(inverse)), zeros, CONFIG)
        inverse -= part
    return inverse


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
def store_parts(place, columns, x, COLUMNS: tl.constexpr, CONFIG: tl.constexpr):
    """Store columns of such rows in two parts, one after the other."""
    high, low = parts_of(x)
    tl.store(tile(place, columns, COLUMNS, CONFIG), high)
    tl.store(tile(place + CONFIG.C * COLUMNS, columns, COLUMNS, CONFIG), low)
