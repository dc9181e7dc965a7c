"""The keys visible to a query, as one half-open interval.

Causality, both sides of a window, an attention chunk and the length of the request are intervals of
key positions, so their intersection is an interval, too. The loop over keys compares each key with
two numbers, whatever the features are. Both ends never decrease from one query to the next: the
first and last query of a tile bound the keys that the tile visits, and the last query's start and
the first query's end bound the keys that are visible to all of its rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["CAUSAL_ALWAYS", "CAUSAL_NEVER", "CAUSAL_PER_REQUEST", "visible_span"]

CAUSAL_NEVER: tl.constexpr = tl.constexpr(0)
CAUSAL_ALWAYS: tl.constexpr = tl.constexpr(1)
CAUSAL_PER_REQUEST: tl.constexpr = tl.constexpr(2)


@triton.jit
def visible_span(position, seq_len, causal, mask, CONFIG: tl.constexpr):
    """Return [first, last) of the keys visible to a query at `position` (M1, M2).

    The span is empty when last <= first. `causal` is read with CAUSAL_PER_REQUEST only. CONFIG is
    any configuration with the constants of a mask.
    """
    # Derived from `position`, so that both have its shape.
    first = position * 0
    last = first + seq_len
    if CONFIG.CAUSAL == CAUSAL_ALWAYS:
        last = tl.minimum(last, position + 1)
    elif CONFIG.CAUSAL == CAUSAL_PER_REQUEST:
        last = tl.where(causal != 0, tl.minimum(last, position + 1), last)
    if CONFIG.HAS_LEFT:
        first = tl.maximum(first, position - mask.left)
    if CONFIG.HAS_RIGHT:
        last = tl.minimum(last, position + mask.right + 1)
    if CONFIG.HAS_CHUNK:
        # Positions before 0 belong to padding rows, which see nothing.
        start = tl.maximum(position, 0) // mask.chunk * mask.chunk
        first = tl.maximum(first, start)
        last = tl.where(position < 0, 0, tl.minimum(last, start + mask.chunk))
    return first, last
