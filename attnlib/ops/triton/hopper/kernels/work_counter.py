"""Counters in global memory that all CTAs of a kernel share; every kernel leaves them at zero, as it found them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["PREFILL_COUNTERS", "count_up"]

PREFILL_COUNTERS = 2
"""Counters of the prefill, the first ones; those of the decode, one for each CTA, come after them."""


@gluon.jit
def count_up(counter, ORDER: gl.constexpr):
    """Add one to a counter; what it was. ORDER is the atomic's memory order: "acq_rel" makes what the CTAs that came before
    wrote visible, if each of them synchronised its threads first."""
    LANES: gl.constexpr = 32 * gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lanes = gl.arange(0, LANES, layout)
    before = gl.atomic_add(
        counter + lanes * 0, gl.full([LANES], 1, gl.int32, layout), mask=lanes == 0, sem=ORDER
    )
    return gl.sum(gl.where(lanes == 0, before, 0), 0)
