"""Does a class fit the interface it registers for? Asked at registration, where the author is looking, not in the middle of a model."""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass
from typing import Any

from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.capabilities import Capabilities
from attnlib.errors import RegistrationError

__all__ = ["check_backend_class"]

_REQUIRED = ("get_name", "get_impl_cls", "get_metadata_cls", "get_builder_cls")
_FORWARD_PARAMETERS = ("self", "query", "cache", "metadata", "output", "lse")


def check_backend_class(backend: Any, label: str) -> None:
    """Raise when `backend` cannot serve as a backend; nothing that its methods would import is imported.

    Raises:
        RegistrationError: the message names what is missing, and shows both signatures where one differs.
    """
    if not isinstance(backend, type) or not issubclass(backend, AttentionBackend):
        raise RegistrationError(f"backend {label!r} is {backend!r}; it must be a subclass of attnlib.AttentionBackend")
    missing = [name for name in _REQUIRED if getattr(getattr(backend, name), "__isabstractmethod__", False)]
    if missing:
        raise RegistrationError(f"backend {label!r} ({backend.__qualname__}) lacks {', '.join(missing)}: all four are required class or static methods")
    if not isinstance(backend.capabilities, Capabilities):
        raise RegistrationError(f"backend {label!r}: capabilities is {backend.capabilities!r}; it must be an attnlib.Capabilities(...)")
    if backend.__module__ not in _lazy_modules(backend):
        return
    _check_forward(backend, label)


def _lazy_modules(backend: type[AttentionBackend]) -> set[str]:
    """Modules whose impl class can be looked at for free: those where the impl lives in the backend's own, already imported module."""
    module = inspect.getmodule(backend)
    own = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, AttentionImpl)] if module else []
    return {backend.__module__} if own and any(value is not AttentionImpl for value in own) else set()


def _check_forward(backend: type[AttentionBackend], label: str) -> None:
    impl = backend.get_impl_cls()
    if not isinstance(impl, type) or not issubclass(impl, AttentionImpl):
        raise RegistrationError(f"backend {label!r}: get_impl_cls() returned {impl!r}; it must return a subclass of attnlib.AttentionImpl")
    signature = inspect.signature(impl.forward)
    names = tuple(signature.parameters)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    if names[: len(_FORWARD_PARAMETERS)] != _FORWARD_PARAMETERS and not takes_any:
        wanted = inspect.signature(AttentionImpl.forward)
        raise RegistrationError(
            f"backend {label!r}: {impl.__qualname__}.forward{signature} does not fit; the layer calls forward{wanted}: keep these names and this order"
        )
    metadata = backend.get_metadata_cls()
    if not is_dataclass(metadata):
        raise RegistrationError(f"backend {label!r}: get_metadata_cls() returned {metadata!r}; metadata must be a dataclass, so that it can be replaced and recorded")
    if impl.forward is AttentionImpl.forward:
        raise RegistrationError(f"backend {label!r}: {impl.__qualname__} does not implement forward")
