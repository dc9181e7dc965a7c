"""The questions of the exam, one family a file. Ids are those of the requirements they check.

`PROBES` is in order of asking: cheap and telling first, so that a backend that is wrong in the plainest way is told so
in the plainest words.
"""

from __future__ import annotations

from attnlib.testing.probe import Probe
from attnlib.testing.probes import (
    accuracy,
    bounds,
    determinism,
    empties,
    graphs,
    hygiene,
    interleaved,
    interop,
    launches,
    lse,
    poison,
    refusals,
    sensitivity,
    sharing,
    slots,
    strides,
    visibility,
)

__all__ = ["PROBES"]

PROBES: tuple[Probe, ...] = (
    *visibility.PROBES,
    *sensitivity.PROBES,
    *interleaved.PROBES,
    *accuracy.PROBES,
    *poison.PROBES,
    *empties.PROBES,
    *slots.PROBES,
    *strides.PROBES,
    *interop.PROBES,
    *sharing.PROBES,
    *lse.PROBES,
    *bounds.PROBES,
    *determinism.PROBES,
    *refusals.PROBES,
    *graphs.PROBES,
    *launches.PROBES,
    *hygiene.PROBES,
)
