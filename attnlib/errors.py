"""What can go wrong, as a small tree with one root.

    AttnlibError
    |- UnknownBackendError        a name that nobody registered (also a ValueError)
    |- BackendUnavailableError    registered, but its package or hardware is missing (also an ImportError)
    |- UnsupportedConfigError     the backend is there and refuses the spec; carries every reason (also a ValueError)
    |- LayoutMismatchError        two parties want the cache in different orders or block sizes (also a ValueError)
    |- ContractError              a tensor or number breaks a P- or M-rule (also a ValueError)
    |- CacheExhaustedError        no free block is left (also a RuntimeError)
    |- RegistrationError          a backend class does not fit the interface it registers for (also a TypeError)
    `- EnvironmentVariableError   an ATTNLIB_* variable holds a value that does not parse (also a ValueError)

Each text names the value, the limit and the next action; `tests/test_messages.py` holds them to it.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AttnlibError",
    "BackendUnavailableError",
    "CacheExhaustedError",
    "ContractError",
    "EnvironmentVariableError",
    "LayoutMismatchError",
    "RegistrationError",
    "UnknownBackendError",
    "UnsupportedConfigError",
]


class AttnlibError(Exception):
    """Root of every error that attnlib raises on purpose."""


class UnknownBackendError(AttnlibError, ValueError):
    """No backend of that name is registered."""


class BackendUnavailableError(AttnlibError, ImportError):
    """The backend is registered, but cannot run here: its package, compiler or device is missing."""


class UnsupportedConfigError(AttnlibError, ValueError):
    """A backend refuses a spec.

    Attributes:
        backend: name of the refusing backend, or "auto" when no candidate accepted.
        reasons: every reason, not just the first.
    """

    def __init__(self, message: str, *, backend: str = "", reasons: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.backend = backend
        self.reasons = tuple(reasons)


class LayoutMismatchError(AttnlibError, ValueError):
    """Layers or backends that share a cache have no order or block size in common."""


class ContractError(AttnlibError, ValueError):
    """A tensor or number breaks a rule of the cache (P) or of the meaning (M).

    Attributes:
        rule: the rule's number, such as "P3", where one applies.
    """

    def __init__(self, message: str, *, rule: str = "") -> None:
        super().__init__(f"{message} [{rule}]" if rule else message)
        self.rule = rule


class CacheExhaustedError(AttnlibError, RuntimeError):
    """More blocks were asked for than are free; nothing was handed out."""


class RegistrationError(AttnlibError, TypeError):
    """A class or path that cannot serve as a backend."""


class EnvironmentVariableError(AttnlibError, ValueError):
    """An environment variable of attnlib's holds a value that does not parse."""
