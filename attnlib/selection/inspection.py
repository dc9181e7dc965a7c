"""Does a class fit the interface it registers for? Asked at registration, where the author is looking, not in the middle of a model."""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass
from typing import Any

from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.capabilities import Capabilities
from attnlib.errors import RegistrationError

__all__ = ["check_backend_class", "check_backend_parts"]

_REQUIRED = ("get_name", "get_impl_cls", "get_builder_cls")
_FORWARD_PARAMETERS = ("self", "query", "cache", "metadata", "output", "lse")


def check_backend_class(backend: Any, label: str) -> None:
    """Raise when `backend` cannot be a backend; nothing that its methods would import is imported.

    Raises:
        RegistrationError: the message names what is missing, and shows both signatures where one differs.
    """
    if not isinstance(backend, type) or not issubclass(backend, AttentionBackend):
        raise RegistrationError(
            f"backend {label!r} is {backend!r}; it must be a subclass of attnlib.AttentionBackend"
        )
    missing = [
        name for name in _REQUIRED if getattr(getattr(backend, name), "__isabstractmethod__", False)
    ]
    if missing:
        raise RegistrationError(
            f"backend {label!r} ({backend.__qualname__}) lacks {', '.join(missing)}: all three are required class or static methods"
        )
    if not isinstance(backend.capabilities, Capabilities):
        raise RegistrationError(
            f"backend {label!r}: capabilities is {backend.capabilities!r}; it must be an attnlib.Capabilities(...)"
        )


def check_backend_parts(backend: type[AttentionBackend], label: str) -> None:
    """`check_backend_class`, and its impl and metadata too. Parts whose own imports fail are left to selection, which reports that as a reason.

    Raises:
        RegistrationError: as above; both signatures are shown where `forward` differs.
    """
    check_backend_class(backend, label)
    try:
        impl, metadata = backend.get_impl_cls(), backend.get_metadata_cls()
    except Exception:
        return
    _check_impl(impl, label)
    if not is_dataclass(metadata):
        raise RegistrationError(
            f"backend {label!r}: get_metadata_cls() returned {metadata!r}; it must be a dataclass"
        )


def _check_impl(impl: Any, label: str) -> None:
    if not isinstance(impl, type) or not issubclass(impl, AttentionImpl):
        raise RegistrationError(
            f"backend {label!r}: get_impl_cls() returned {impl!r}; it must return a subclass of attnlib.AttentionImpl"
        )
    if getattr(impl.forward, "__isabstractmethod__", False):
        raise RegistrationError(
            f"backend {label!r}: {impl.__qualname__} does not implement forward"
        )
    signature = inspect.signature(impl.forward)
    names = tuple(signature.parameters)[: len(_FORWARD_PARAMETERS)]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    if names != _FORWARD_PARAMETERS and not takes_any:
        wanted = inspect.signature(AttentionImpl.forward)
        raise RegistrationError(
            f"backend {label!r}: {impl.__qualname__}.forward{signature} does not fit; the layer calls forward{wanted}: keep names and order"
        )
