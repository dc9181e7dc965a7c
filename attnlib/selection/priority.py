"""The order in which auto tries backends: the highest number first. Pure, so that any machine can be imagined in a test."""

from __future__ import annotations

from collections.abc import Iterable

from attnlib.device import DeviceInfo
from attnlib.selection.registry import Registration

__all__ = ["by_priority"]

_INTERPRETED_ON_CPU = ("triton",)
"""Backends that a CPU can only interpret: right, but thousands of times slower, so auto never takes them there. Naming them works."""


def by_priority(entries: Iterable[Registration], device: DeviceInfo) -> list[Registration]:
    """Backends that auto may take on `device`, best first; equal priorities in order of their names."""
    able = [entry for entry in entries if entry.priority is not None and not (device.type == "cpu" and entry.name in _INTERPRETED_ON_CPU)]
    return sorted(able, key=lambda entry: (-(entry.priority or 0), entry.name))
