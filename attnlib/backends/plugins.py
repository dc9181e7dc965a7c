"""Backends that installed packages provide through the entry-point group `attnlib.backends`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib.metadata import entry_points

__all__ = ["ENTRY_POINT_GROUP", "PluginBackend", "find_plugins"]

ENTRY_POINT_GROUP = "attnlib.backends"


@dataclass(frozen=True)
class PluginBackend:
    """One entry point.

    Attributes:
        name: name of the backend, in lower case; not validated.
        path: its value, "module:Class"; nothing is imported yet.
        package: the distribution that provides it.
    """

    name: str
    path: str
    package: str


def find_plugins() -> list[PluginBackend]:
    """All entry points of the group. Warns if the metadata of installed packages is damaged."""
    try:
        points = list(entry_points(group=ENTRY_POINT_GROUP))
    except Exception as error:  # the metadata of any installed package may be damaged
        warnings.warn(
            f"backends of installed packages cannot be listed: {type(error).__name__}: {error}",
            stacklevel=2,
        )
        return []
    return [
        PluginBackend(
            point.name.strip().lower(),
            point.value,
            point.dist.name if point.dist else "an unknown package",
        )
        for point in points
    ]
