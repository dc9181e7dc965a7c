"""Load a backend class: import it, check it against the interface, and bind its configuration."""

from __future__ import annotations

import copyreg
import inspect
import threading
from abc import ABCMeta
from collections.abc import Mapping
from enum import Enum
from typing import Any, cast
from weakref import WeakValueDictionary

import torch

from attnlib.backends.base import AttentionBackend, AttentionImpl, StateImpl
from attnlib.capabilities import NOT_STATED, Capabilities, StateCapabilities
from attnlib.errors import RegistrationError, UnsupportedConfigError
from attnlib.metadata.base import AttentionMetadata
from attnlib.object_path import load_object

__all__ = [
    "check_backend_class",
    "check_backend_interface",
    "configured",
    "import_backend",
    "serves_attention",
    "serves_states",
]

Backend = type[AttentionBackend]

_REQUIRED = ("get_name", "get_impl_cls")
_WITHOUT_ARGUMENTS = (*_REQUIRED, "get_builder_cls", "get_metadata_cls", "get_state_cls")
_FORWARD_PARAMETERS = ("self", "query", "cache", "metadata", "output", "lse")


def import_backend(path: str) -> Backend:
    """Import the class at `module:Class` or `path/to/file.py:Class`; dots after the colon reach
    nested classes.

    Raises:
        RegistrationError: the path has another form, or the object there is not a backend class.
        ContractError: there is no such file, module or class.
        Exception: whatever importing the module raises.
    """
    module, _, qualified = path.rpartition(":")
    if not module or not qualified:
        raise RegistrationError(
            f"{path!r} is not a path to a backend; write it as 'package.module:Class' or "
            "'path/to/file.py:Class'"
        )
    found: Any = load_object(path)
    check_backend_class(found, path)
    backend: Backend = found
    return backend


def check_backend_class(backend: Any, label: str) -> None:
    """Check the class itself, without calling its methods.

    Args:
        backend: the object to check.
        label: the name or path it was given by, for messages.

    Raises:
        RegistrationError: it is not a backend class; the message names what is missing.
    """
    if not isinstance(backend, type) or not issubclass(backend, AttentionBackend):
        raise RegistrationError(
            f"backend {label!r} is {backend!r}; it must be a subclass of attnlib.AttentionBackend"
        )
    if not isinstance(backend.state_capabilities, StateCapabilities):
        raise RegistrationError(
            f"backend {label!r}: state_capabilities is {backend.state_capabilities!r}; it must be "
            f"an attnlib.StateCapabilities(...)"
        )
    undefined = [name for name in _REQUIRED if _is_abstract(backend, name)]
    if "get_impl_cls" in undefined and serves_states(backend):
        undefined.remove("get_impl_cls")
    if undefined:
        raise RegistrationError(
            f"backend {label!r} ({backend.__qualname__}) lacks {', '.join(undefined)}: define "
            f"{'it' if len(undefined) == 1 else 'each'} as a class method or static method"
        )
    if bound := [name for name in _WITHOUT_ARGUMENTS if _takes_an_instance(backend, name)]:
        raise RegistrationError(
            f"backend {label!r} ({backend.__qualname__}): {bound[0]} takes an instance, and no "
            "instance is made: decorate it with @staticmethod or @classmethod"
        )
    if not isinstance(backend.capabilities, Capabilities):
        raise RegistrationError(
            f"backend {label!r}: capabilities is {backend.capabilities!r}; it must be an "
            f"attnlib.Capabilities(...)"
        )


def serves_states(backend: Backend) -> bool:
    """Whether a backend declares state layers."""
    declared = getattr(backend.state_capabilities, "devices", NOT_STATED)
    return declared is not NOT_STATED


def serves_attention(backend: Backend) -> bool:
    """Whether a backend has an impl of attention layers."""
    return not _is_abstract(backend, "get_impl_cls")


def _is_abstract(backend: Backend, name: str) -> bool:
    return getattr(getattr(backend, name), "__isabstractmethod__", False)


def _takes_an_instance(backend: Backend, name: str) -> bool:
    method = inspect.getattr_static(backend, name)
    return inspect.isfunction(method) and len(inspect.signature(method).parameters) > 0


def check_backend_interface(backend: Backend, label: str) -> None:
    """`check_backend_class`, then its impl and metadata classes.

    If importing those classes fails, they are not checked: selection reports the import error. The
    classes of attnlib itself are not imported.

    Raises:
        RegistrationError: a class does not fit; shows both signatures if `forward` differs.
    """
    check_backend_class(backend, label)
    if backend.__module__.startswith("attnlib.backends."):
        return
    if serves_states(backend):
        _check_state_impl(backend, label)
    if not serves_attention(backend):
        return
    try:
        impl, metadata = backend.get_impl_cls(), backend.get_metadata_cls()
    except Exception:
        return
    _check_impl(impl, label)
    if not isinstance(metadata, type) or not issubclass(metadata, AttentionMetadata):
        raise RegistrationError(
            f"backend {label!r}: get_metadata_cls() returned {metadata!r}; it must be a subclass "
            f"of attnlib.AttentionMetadata and a dataclass"
        )


def _check_state_impl(backend: Backend, label: str) -> None:
    try:
        impl: Any = backend.get_state_impl_cls()
    except UnsupportedConfigError as error:
        raise RegistrationError(f"backend {label!r}: {error}") from None
    except Exception:
        return
    if not isinstance(impl, type) or not issubclass(impl, StateImpl) or inspect.isabstract(impl):
        raise RegistrationError(
            f"backend {label!r}: get_state_impl_cls() returned {impl!r}; it must return a subclass "
            f"of attnlib.StateImpl that implements step and convolve"
        )


def _check_impl(impl: Any, label: str) -> None:
    if not isinstance(impl, type) or not issubclass(impl, AttentionImpl):
        raise RegistrationError(
            f"backend {label!r}: get_impl_cls() returned {impl!r}; it must return a subclass of "
            f"attnlib.AttentionImpl"
        )
    if getattr(impl.forward, "__isabstractmethod__", False):
        raise RegistrationError(
            f"backend {label!r}: {impl.__qualname__} does not implement forward"
        )
    signature = inspect.signature(impl.forward)
    names = tuple(signature.parameters)[: len(_FORWARD_PARAMETERS)]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    if names[1:2] == ("layer",) or "num_heads" in inspect.signature(impl).parameters:
        raise RegistrationError(
            f"backend {label!r}: {impl.__qualname__} has vLLM's constructor or forward; register "
            f"attnlib.compat.vllm.adapt_backend(...) of the class instead"
        )
    if names != _FORWARD_PARAMETERS and not takes_any:
        expected = inspect.signature(AttentionImpl.forward)
        raise RegistrationError(
            f"backend {label!r}: {impl.__qualname__}.forward{signature} does not fit; the layer "
            f"calls forward{expected}: keep names and order"
        )


class _ConfiguredMeta(ABCMeta):
    """Metaclass of configured classes: another process cannot import them by name to unpickle."""


# Weak values: a configured class lives as long as a registration's user, layer or cache holds it.
_configured: WeakValueDictionary[tuple[Any, ...], Backend] = WeakValueDictionary()
_configured_lock = threading.Lock()


def configured(backend: Backend, config: Mapping[str, Any], name: str | None = None) -> Backend:
    """`backend` with `config` and a name bound: an ordinary backend class that can be pickled.

    Without settings and with its own name this is `backend` itself. Otherwise it is a subclass, and
    equal settings and names give the same subclass while it is in use. Plain data (numbers,
    strings, bytes, None, enum members, dtypes, devices, and containers of these) are compared by
    type and value, and containers are copied. Any other object, such as a tensor, is compared by
    identity.
    """
    own_name = backend.get_name()
    name = own_name if name is None else name
    if not config and name == own_name:
        return backend
    config_key, settings = _freeze(dict(config))
    key = (backend, config_key, name)
    with _configured_lock:
        found = _configured.get(key)
        if found is None:
            body = {
                "config": settings,
                "__module__": backend.__module__,
                "__doc__": backend.__doc__,
                "_configured_from": backend,
            }
            if name != own_name:
                body["get_name"] = staticmethod(lambda: name)
            found = cast(Backend, _ConfiguredMeta(backend.__name__, (backend,), body))
            _configured[key] = found
    return found


_PLAIN = (int, float, complex, str, bytes, Enum, torch.dtype, torch.device)


def _freeze(value: Any) -> tuple[Any, Any]:
    """(key that identifies a setting, the setting with its containers copied)."""
    kind = type(value)
    if value is None or isinstance(value, _PLAIN):
        return (kind, value), value
    if kind is dict:
        items = {name: _freeze(item) for name, item in value.items()}
        key = frozenset((type(name), name, item[0]) for name, item in items.items())
        return (kind, key), {name: item[1] for name, item in items.items()}
    if kind in (list, tuple):
        parts = [_freeze(item) for item in value]
        return (kind, tuple(key for key, _ in parts)), kind(copy for _, copy in parts)
    if kind in (set, frozenset):
        return (kind, frozenset(_freeze(item)[0] for item in value)), kind(value)
    # The configured class holds the object, so the id stays unique while the key is in use.
    return (kind, id(value)), value


def _reduce(cls: Any) -> tuple[Any, ...]:
    return configured, (cls._configured_from, cls.config, cls.get_name())


copyreg.pickle(_ConfiguredMeta, _reduce)
