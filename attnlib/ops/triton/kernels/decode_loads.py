"""What a program of a row decode loads before it computes, see `state_decode`."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.state_arguments import numbers
from attnlib.ops.triton.kernels.state_requests import open_head, open_tail, part_columns
from attnlib.ops.triton.kernels.token_rows import channels_of, load_held, load_new

__all__ = ["Loaded", "load_decode", "load_group", "load_query", "state_row_places"]


@triton.jit
def state_row_places(state, slot, head, block, part: tl.constexpr, CONFIG: tl.constexpr):
    """Return (pointers, mask) of a part of the rows of a stored state, [SPAN, PART]."""
    SPAN: tl.constexpr = CONFIG.ROWS * CONFIG.PASSES
    row, key = block * SPAN + tl.arange(0, SPAN)[:, None], part_columns(part, CONFIG)[None, :]
    base = state + slot * CONFIG.STATE + head * (CONFIG.DV * CONFIG.DK)
    return base + row * CONFIG.DK + key, (row < CONFIG.DV) & (key < CONFIG.DK)


@triton.jit
def _load_rows(state, slot, head, block, part: tl.constexpr, CONFIG: tl.constexpr):
    """Return a part of the rows of a stored state, [SPAN, PART]; anything where there is none. A
    few lanes have a row, so that most sums over keys are inside a thread."""
    SPAN: tl.constexpr = CONFIG.ROWS * CONFIG.PASSES
    FILLS: tl.constexpr = (
        CONFIG.DV == SPAN * CONFIG.BLOCKS and CONFIG.DK == CONFIG.PART * CONFIG.PARTS
    )
    place, inside = state_row_places(state, slot, head, block, part, CONFIG)
    return tl.load(place) if FILLS else tl.load(place, mask=inside, other=0.0)


@triton.jit
def load_group(last, base, tokens, tail, block, COUNT: tl.constexpr, CONFIG: tl.constexpr):
    """Return the `Row`s of COUNT tokens from position `last` down; those before `base` are 0."""
    given = base, tokens, tail, block
    return [load_held(last - number, *given, CONFIG) for number in numbers(COUNT)]


@triton.jit
def load_query(request, tokens, CONFIG: tl.constexpr):
    """Return the query of the new token without its norm, [1, WARPS, WIDTH] float32."""
    channels = channels_of(CONFIG)
    place = tokens.q + request.first.to(tl.int64) * CONFIG.Q_T + channels
    return tl.load(place, mask=channels < CONFIG.DK, other=0.0).to(tl.float32)


class Loaded(NamedTuple):
    """What a program loads before all else.

    Attributes:
        rows: parts of the state, [SPAN, PART].
        group: `Row`s of the tail, the last GROUP - 1.
        new, query: of the new token; 0 where the program has to write them first.
    """

    rows: Any
    group: Any
    new: Any
    query: Any


@triton.jit
def load_decode(
    request, base, tokens, slots, head, block, FUSED: tl.constexpr, CONFIG: tl.constexpr
):
    """Return what is `Loaded` for `decode_request`. The state comes last: what is loaded behind it
    arrives behind it, and nothing can be computed until then."""
    tokens = open_head(tokens, head, CONFIG)
    tail = open_tail(slots.tail, request.source, head, CONFIG)
    new = 0
    query = 0
    if not FUSED:
        new = load_new(request, tokens, block, CONFIG)
        query = load_query(request, tokens, CONFIG)
    COUNT: tl.constexpr = CONFIG.GROUP - 1
    group = load_group(request.computed - 1, base, tokens, tail, block, COUNT, CONFIG)
    tl.debug_barrier()  # the compiler changes the order of loads otherwise
    where = slots.state, request.source, head, block
    rows = [_load_rows(*where, part, CONFIG) for part in numbers(CONFIG.PARTS)]
    tl.debug_barrier()
    return Loaded(rows, group, new, query)
