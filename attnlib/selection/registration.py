"""One name in the registry: how its class is found, and whether it can run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attnlib.backends.base import AttentionBackend
from attnlib.backends.loading import configured, import_backend
from attnlib.device import DeviceInfo
from attnlib.errors import RegistrationError

__all__ = ["Registration", "availability", "check_priority", "import_reason"]

Backend = type[AttentionBackend]

_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True, eq=False)
class Registration:
    """One name in the registry. Compared by identity, so that it can be the key of a cache.

    Attributes:
        name: in lower case.
        target: a class, or a "module:Class" path that is imported on first use.
        priority: auto tries higher ones first; None: as the class says.
        install_hint: the command that installs what it needs; "" if there is none.
        config: settings passed to its builder and every impl.
        origin: "built in", "registered", "argument", or the distribution that provides it.
    """

    name: str
    target: str | Backend
    priority: int | None = None
    install_hint: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    origin: str = "built in"

    @property
    def is_plugin(self) -> bool:
        """True if an installed package provides it through an entry point."""
        return self.origin not in ("built in", "registered", "argument")

    def auto_priority(self, backend: Backend | None) -> int | None:
        """The priority in auto: as registered, else as the class declares; None: by name only.

        Args:
            backend: its class; None if it cannot be imported.
        """
        if self.priority is not None or backend is None:
            return self.priority
        return backend.auto_priority

    def load(self) -> Backend:
        """The class with its name and config bound; imports it if necessary.

        Raises:
            BaseException: whatever importing the module raises.
        """
        found = import_backend(self.target) if isinstance(self.target, str) else self.target
        check_priority(found.auto_priority, self.name)
        return configured(found, self.config, self.name)


def check_priority(priority: Any, name: str) -> None:
    """Check a priority in auto.

    Raises:
        RegistrationError: it is neither an integer nor None.
    """
    if priority is not None and (isinstance(priority, bool) or not isinstance(priority, int)):
        raise RegistrationError(
            f"backend {name!r}: priority={priority!r} must be an integer (triton has 300), or None "
            "for a backend that is selected by name only"
        )


def availability(entry: Registration, device: DeviceInfo) -> tuple[Backend | None, list[str]]:
    """Import a backend and ask whether it can run on `device`. Never raises.

    Importing another package may raise anything, including SystemExit. It becomes a reason with the
    original error. For a plug-in it also causes one warning: users may never read the reasons.

    Returns:
        The class, or None if it cannot be imported, and all reasons why it cannot run here.
    """
    backend = None
    try:
        backend = entry.load()
        return backend, device.unavailable_reasons or list(backend.unavailable(device))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        reason = import_reason(error, entry)
        if entry.is_plugin and (entry.name, entry.origin) not in _warned:
            _warned.add((entry.name, entry.origin))
            warnings.warn(
                f"backend {entry.name!r} of package {entry.origin} is ignored: {reason}",
                stacklevel=2,
            )
        return backend, [reason]


def import_reason(error: BaseException, entry: Registration) -> str:
    """The original error as a reason, with the command that may help."""
    text = f"{type(error).__name__}: {error}"
    return f"{text}; try: {entry.install_hint}" if entry.install_hint else text
