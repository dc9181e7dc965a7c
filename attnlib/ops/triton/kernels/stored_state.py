"""Stored states, as parts [PART, ROWS]: keys are the rows."""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.state_arguments import numbers
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
def _load_part(state, slot, head, columns, base, part: tl.constexpr, CONFIG: tl.constexpr):
    place, inside = state_places(state, slot, head, columns, part, CONFIG)
    # A branch would wait for each part before the next one is loaded.
    return tl.load(place, mask=inside & _exists(base, CONFIG), other=0.0)


@triton.jit
def load_state(state, slot, head, columns, base, CONFIG: tl.constexpr):
    """Return the parts of a stored state, before `settle_state`; that of position 0 is not read."""
    where = state, slot, head, columns
    return [_load_part(*where, base, part, CONFIG) for part in numbers(CONFIG.PARTS)]


@triton.jit
def settle_state(s, base, CONFIG: tl.constexpr):
    """Return a state that `load_state` has loaded, parts [PART, ROWS] float32, 0 at position 0."""
    # The choice keeps copies to shared memory behind all loads, see `state_rows.choose`.
    return [tl.where(_exists(base, CONFIG), x.to(tl.float32), 0.0) for x in s]


@triton.jit
def store_state(state, slot, head, columns, s, CONFIG: tl.constexpr):
    """Store a state."""
    for part in tl.static_range(len(s)):
        place, inside = state_places(state, slot, head, columns, part, CONFIG)
        tl.store(place, s[part].to(state.dtype.element_ty), mask=inside)


@triton.jit
def round_state(s, state):
    """Return the state as it is stored."""
    return [x.to(state.dtype.element_ty).to(tl.float32) for x in s]
