"""Load a backend class: import it, and bind its configuration."""

from __future__ import annotations

import copyreg
import threading
from abc import ABCMeta
from collections.abc import Mapping
from enum import Enum
from typing import Any, cast
from weakref import WeakValueDictionary

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.backends.interface import check_backend_class
from attnlib.errors import RegistrationError
from attnlib.object_path import load_object

__all__ = ["configured", "import_backend"]

Backend = type[AttentionBackend]


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
