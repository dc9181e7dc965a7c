"""Counters in global memory that all CTAs of a kernel share.

Every kernel leaves its counters at zero, as it found them, so that launches need no memset.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["PREFILL_COUNTERS", "atomic_increment", "incremented", "issue_increment"]

PREFILL_COUNTERS = 2
"""Counters of the prefill: [0] next work item, [1] CTAs that are done. The decode's counters, one
for each CTA, follow them."""


@gluon.jit
def issue_increment(counter, ORDER: gl.constexpr):
    """Add one to a counter, without waiting for it; `incremented` returns the earlier value.

    Args:
        counter: pointer to int32.
        ORDER: memory order of the atomic.
    """
    LANES: gl.constexpr = 32 * gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lanes = gl.arange(0, LANES, layout)
    return gl.atomic_add(
        counter + lanes * 0, gl.full([LANES], 1, gl.int32, layout), mask=lanes == 0, sem=ORDER
    )


@gluon.jit
def incremented(before):
    """Return the earlier value of a counter, given the result of `issue_increment`."""
    lanes = gl.arange(0, before.shape[0], before.type.layout)
    return gl.sum(gl.where(lanes == 0, before, 0), 0)


@gluon.jit
def atomic_increment(counter, ORDER: gl.constexpr):
    """Add one to a counter and return its earlier value, in every thread of the partition.

    Args:
        counter: pointer to int32.
        ORDER: memory order of the atomic. "acq_rel" makes the writes of the CTAs that incremented
            earlier visible, provided that each of them synchronized its threads first.
    """
    LANES: gl.constexpr = 32 * gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lanes = gl.arange(0, LANES, layout)
    # One lane increments; the sum broadcasts its result, since the other lanes contribute 0.
    before = gl.atomic_add(
        counter + lanes * 0, gl.full([LANES], 1, gl.int32, layout), mask=lanes == 0, sem=ORDER
    )
    return gl.sum(gl.where(lanes == 0, before, 0), 0)
