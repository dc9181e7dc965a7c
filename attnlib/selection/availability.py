"""Can a backend run here at all? Asked apart from the decision, because the answer takes imports and a look at the machine.

Importing somebody else's code may fail in every way. Whatever it raises is a reason with the original error, never a crash; for a backend that an
installed package offers it is one warning too, with the package's name, because nobody may ever ask for the reasons.
"""

from __future__ import annotations

import warnings

from attnlib.backends._foreign.imports import environment_facts
from attnlib.backends.base import AttentionBackend
from attnlib.device import DeviceInfo
from attnlib.selection.registry import OWN_ORIGINS, Registration

__all__ = ["availability", "facts_about", "told"]

_warned: set[tuple[str, str]] = set()


def availability(
    entry: Registration, device: DeviceInfo
) -> tuple[type[AttentionBackend] | None, list[str]]:
    """(its class, or None where it cannot be imported; why it cannot run on `device`, empty when it can). Never raises."""
    backend = None
    try:
        backend = entry.load()
        return backend, [*device.unavailable_reasons, *backend.unavailable(device)]
    except Exception as error:  # a hollow package, an ABI clash or a RuntimeError at import is a reason, never a crash
        _warn_about_plugin(entry, error)
        return backend, [told(error, entry)]


def told(error: Exception, entry: Registration) -> str:
    """The original error as a reason, with the command that may help."""
    text = f"{type(error).__name__}: {error}"
    return f"{text}; try: {entry.install_hint}" if entry.install_hint else text


def facts_about(entry: Registration, device: DeviceInfo) -> str:
    """What a failing import depends on, in one line (I3): versions of its package and of torch, the C++ ABI, CUDA and the device."""
    package = (
        entry.target.partition(":")[0].partition(".")[0] if isinstance(entry.target, str) else ""
    )
    return environment_facts(
        device,
        [
            name
            for name in dict.fromkeys((entry.origin, package))
            if name and name not in (*OWN_ORIGINS, "attnlib")
        ],
    )


def _warn_about_plugin(entry: Registration, error: Exception) -> None:
    known = (entry.name, entry.origin)
    if entry.origin in OWN_ORIGINS or known in _warned:
        return
    _warned.add(known)
    warnings.warn(
        f"backend {entry.name!r} offered by {entry.origin} is broken and left out: {told(error, entry)}",
        stacklevel=2,
    )
