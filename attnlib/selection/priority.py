"""The order in which auto tries backends: what was measured on this chip, else the highest number first. Pure, so that any machine can be imagined
in a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attnlib.device import DeviceInfo
from attnlib.selection.registry import Registration

__all__ = ["by_priority"]

_INTERPRETED_ON_CPU = ("triton",)
"""Backends that a CPU can only interpret: right, but thousands of times slower, so auto never takes them there. Naming them works."""


def by_priority(
    entries: Iterable[Registration], device: DeviceInfo, measured: Sequence[str] = ()
) -> list[Registration]:
    """Backends that auto may take on `device`, best first; equal priorities in order of their names.

    Args:
        entries: all known backends.
        device: facts about the device.
        measured: names in the order that a tuning table ranks them. They share out the places that they have by priority among themselves; a
            backend that was not measured, such as one registered since, keeps its own place.
    """
    able = [
        entry
        for entry in entries
        if entry.priority is not None
        and not (device.type == "cpu" and entry.name in _INTERPRETED_ON_CPU)
    ]
    ordered = sorted(able, key=lambda entry: (-(entry.priority or 0), entry.name))
    by_name = {entry.name: entry for entry in ordered}
    ranked = iter([by_name[name] for name in measured if name in by_name])
    return [next(ranked) if entry.name in measured else entry for entry in ordered]
