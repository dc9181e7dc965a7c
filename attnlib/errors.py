"""The exceptions that attnlib raises.

    AttnlibError
    |- UnknownBackendError        the name is not registered (also a ValueError)
    |- BackendUnavailableError    its package, compiler or device is missing (also an ImportError)
    |- UnsupportedConfigError     the backend does not support the spec (also a ValueError)
    |- LayoutMismatchError        no common cache layout or block size (also a ValueError)
    |- ContractError              a tensor or number violates a rule (also a ValueError)
    |  `- AssertedContractError   one that vLLM's interface asserts (also an AssertionError)
    |- CacheExhaustedError        no free block is left (also a RuntimeError)
    |- RankLostError              a rank does not answer the others (also a RuntimeError)
    |- RegistrationError          a class does not fit the backend interface (also a TypeError)
    `- EnvironmentVariableError   an ATTNLIB_* variable does not parse (also a ValueError)

Each message names the value, the limit and the next action; `tests/test_errors.py` checks this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "AssertedContractError",
    "AttnlibError",
    "BackendUnavailableError",
    "CacheExhaustedError",
    "ContractError",
    "EnvironmentVariableError",
    "LayoutMismatchError",
    "RankLostError",
    "RegistrationError",
    "Rejection",
    "UnknownBackendError",
    "UnsupportedConfigError",
]


class AttnlibError(Exception):
    """Base class of all exceptions that attnlib raises itself."""


@dataclass(frozen=True)
class Rejection:
    """One reason why selection did not choose a backend; prints as `backend: reason`.

    Attributes:
        backend: name of the backend.
        status: "unsupported", "unavailable" or "excluded".
        field: the field of `AttentionSpec` that the backend does not support; None for other
            reasons, such as the device or a combination of fields.
        reason: the reason in words.
    """

    backend: str
    status: str
    field: str | None
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


class UnknownBackendError(AttnlibError, ValueError):
    """No backend of this name is registered."""


class BackendUnavailableError(AttnlibError, ImportError):
    """The backend is registered, but its package, compiler or device is missing or broken.

    Attributes:
        rejections: all reasons, as data; empty if the error does not come from selection.
    """

    def __init__(self, message: str, *, rejections: Sequence[Rejection] = ()) -> None:
        super().__init__(message)
        self.rejections = tuple(rejections)


class UnsupportedConfigError(AttnlibError, ValueError):
    """A backend does not support a spec.

    Attributes:
        backend: name of the backend, or "auto" if no backend supports the spec.
        reasons: all reasons.
        rejections: the same as data, one by one with backend and spec field; empty if the error
            does not come from selection.
    """

    def __init__(
        self,
        message: str,
        *,
        backend: str = "",
        reasons: Sequence[str] = (),
        rejections: Sequence[Rejection] = (),
    ) -> None:
        super().__init__(message)
        self.backend = backend
        self.reasons = tuple(reasons)
        self.rejections = tuple(rejections)


class LayoutMismatchError(AttnlibError, ValueError):
    """Layers or backends that share a cache have no common layout or block size."""


class ContractError(AttnlibError, ValueError):
    """A tensor or number violates a rule of the paged cache (P) or of attention semantics (M).

    Attributes:
        rule: number of the rule, such as "P3"; "" if none applies.
    """

    def __init__(self, message: str, *, rule: str = "") -> None:
        super().__init__(f"{message} [{rule}]" if rule else message)
        self.rule = rule


class AssertedContractError(ContractError, AssertionError):
    """A violation for which the original of an interface, such as vLLM's, has an assertion."""


class CacheExhaustedError(AttnlibError, RuntimeError):
    """More blocks were requested than are free; none was allocated."""


class RankLostError(AttnlibError, RuntimeError):
    """A rank of a group has ended, or is later than the timeout; the group cannot be used again."""


class RegistrationError(AttnlibError, TypeError):
    """A class or path that is not a valid backend."""


class EnvironmentVariableError(AttnlibError, ValueError):
    """An ATTNLIB_* environment variable has a value that does not parse."""
