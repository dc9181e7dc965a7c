"""Stored states, as parts [PART, ROWS]: keys are the rows."""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.state_requests import part_columns

__all__ = ["load_state", "round_state", "settle_state", "store_state"]


@triton.jit
def state_places(state, slot, head, columns, part: tl.constexpr, CONFIG: tl.constexpr):
    """Return (pointers, mask) of a part of a stored state, [PART, ROWS]."""
    keys = part_columns(part, CONFIG)
    base = state + slot * CONFIG.STATE + head * (CONFIG.DV * CONFIG.DK)
    inside = (keys < CONFIG.DK)[:, None] & (columns < CONFIG.DV)[None, :]
    return base + keys[:, None] + columns[None, :] * CONFIG.DK, inside


@triton.jit
def _exists(base, CONFIG: tl.constexpr):
    """Return whether there is a state at position `base`, [1, ROWS]."""
    return tl.full([1, CONFIG.ROWS], 0, tl.int32) + base > 0


@triton.jit
def load_state(state, slot, head, columns, base, CONFIG: tl.constexpr):
    """Return the parts of a stored state, before `settle_state`; that of position 0 is not read."""
    PARTS: tl.constexpr = CONFIG.PARTS
    s = ()
    for part in tl.static_range(PARTS):
        place, inside = state_places(state, slot, head, columns, part, CONFIG)
        # A branch would wait for each part before the next one is loaded.
        s = s + (tl.load(place, mask=inside & _exists(base, CONFIG), other=0.0),)
    return s


@triton.jit
def settle_state(s, base, CONFIG: tl.constexpr):
    """Return a state that `load_state` has loaded, parts [PART, ROWS] float32, 0 at position 0."""
    PARTS: tl.constexpr = CONFIG.PARTS
    settled = ()
    for part in tl.static_range(PARTS):
        # The choice keeps copies to shared memory behind all loads, see `state_rows.choose`.
        x = tl.where(_exists(base, CONFIG), s[part].to(tl.float32), 0.0)
        settled = settled + (x,)
    return settled


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
