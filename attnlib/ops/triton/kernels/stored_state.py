"""Stored states, as parts [PART, ROWS]: keys are the rows."""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.state_rows import part_columns

__all__ = ["load_state", "round_state", "store_state"]


@triton.jit
def state_places(state, slot, head, columns, part: tl.constexpr, CONFIG: tl.constexpr):
    """Return (pointers, mask) of a part of a stored state, [PART, ROWS]."""
    keys = part_columns(part, CONFIG)
    base = state + slot * CONFIG.STATE + head * (CONFIG.DV * CONFIG.DK)
    inside = (keys < CONFIG.DK)[:, None] & (columns < CONFIG.DV)[None, :]
    return base + keys[:, None] + columns[None, :] * CONFIG.DK, inside


@triton.jit
def load_state(state, slot, head, columns, base, CONFIG: tl.constexpr):
    """Return the stored state, parts [PART, ROWS] float32; that of position 0 is 0 and not read."""
    PARTS: tl.constexpr = CONFIG.PARTS
    PART: tl.constexpr = CONFIG.PART
    ROWS: tl.constexpr = CONFIG.ROWS
    s = ()
    for part in tl.static_range(PARTS):
        place, inside = state_places(state, slot, head, columns, part, CONFIG)
        x = tl.zeros([PART, ROWS], tl.float32)
        if base > 0:
            x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        s = s + (x,)
    return s


@triton.jit
def store_state(state, slot, head, columns, s, CONFIG: tl.constexpr):
    """Store a state."""
    PARTS: tl.constexpr = CONFIG.PARTS
    for part in tl.static_range(PARTS):
        place, inside = state_places(state, slot, head, columns, part, CONFIG)
        tl.store(place, s[part].to(state.dtype.element_ty), mask=inside)


@triton.jit
def round_state(s, state, CONFIG: tl.constexpr):
    """Return the state as it is stored."""
    PARTS: tl.constexpr = CONFIG.PARTS
    rounded = ()
    for part in tl.static_range(PARTS):
        rounded = rounded + (s[part].to(state.dtype.element_ty).to(tl.float32),)
    return rounded
