"""The registry of backends: built-in ones, registered ones, and those of installed packages.

A backend's module is imported when the backend is first probed or loaded, not when it is listed. A
broken plug-in causes one warning with its name and does not affect other backends.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from attnlib import env
from attnlib.backends.base import AttentionBackend
from attnlib.backends.builtin import BUILTIN_BACKENDS
from attnlib.backends.interface import check_backend_interface
from attnlib.backends.plugins import PluginBackend, find_plugins
from attnlib.errors import RegistrationError
from attnlib.selection.registration import Registration, availability, check_priority

__all__ = [
    "Registration",
    "availability",
    "generation",
    "list_backends",
    "lookup",
    "register_backend",
    "registrations",
    "unregister_backend",
]

Backend = type[AttentionBackend]
B = TypeVar("B", bound=Backend)


def _built_in(name: str) -> Registration:
    backend = BUILTIN_BACKENDS[name]
    return Registration(backend.name, backend.path, backend.priority, backend.install_hint)


# Guards the variables below: threads may select their first backend at the same time.
_lock = threading.RLock()
_registered: dict[str, Registration] = {name: _built_in(name) for name in BUILTIN_BACKENDS}
_generation = 0
_plugins_read = False


def generation() -> int:
    """A number that changes whenever the registry does; part of the key of selection caches."""
    return _generation


def registrations() -> dict[str, Registration]:
    """All backends by name, including plug-ins unless ATTNLIB_PLUGINS=0."""
    global _plugins_read
    with _lock:
        if not _plugins_read and env.read("ATTNLIB_PLUGINS"):
            try:
                for plugin in find_plugins():
                    _add_plugin(plugin)
            finally:
                _plugins_read = True
        if env.read("ATTNLIB_PLUGINS"):
            return dict(_registered)
        return {name: entry for name, entry in _registered.items() if not entry.is_plugin}


def list_backends() -> list[str]:
    """Names of all backends in order of priority, including those of installed packages."""
    entries = sorted(registrations().values(), key=lambda e: (-(e.priority or 0), e.name))
    return [entry.name for entry in entries]


def lookup(name: str) -> Registration | None:
    """The registration of a name in any case, or None."""
    return registrations().get(name.strip().lower())


@overload
def register_backend(
    name: str,
    backend: str | Backend,
    *,
    priority: int | None = None,
    config: Mapping[str, Any] | None = None,
    install_hint: str = "",
    override: bool = False,
) -> None: ...


@overload
def register_backend(
    name: str,
    backend: None = None,
    *,
    priority: int | None = None,
    config: Mapping[str, Any] | None = None,
    install_hint: str = "",
    override: bool = False,
) -> Callable[[B], B]: ...


def register_backend(
    name: str,
    backend: str | Backend | None = None,
    *,
    priority: int | None = None,
    config: Mapping[str, Any] | None = None,
    install_hint: str = "",
    override: bool = False,
) -> Callable[[B], B] | None:
    """Make a backend available by name.

    Args:
        name: letters, digits, `_`, `-` and `.`, in any case.
        backend: a class, a "module:Class" path (imported on first use), or None to use the call as
            a class decorator.
        priority: auto tries higher priorities first (triton has 300, torch 100). None: that of the
            class (`AttentionBackend.auto_priority`); without one, the backend is used only if it is
            selected by name.
        config: settings passed to its builder and every impl. One class may be registered under
            several names with different settings: selection returns a subclass, whose `get_name()`
            is the registered name, where class and name or settings differ.
        install_hint: the command to show if the backend cannot be imported.
        override: replace a registered backend of the same name.

    Raises:
        RegistrationError: the name is invalid or taken, the class does not fit the interface, or
            the priority or the settings have another type.
    """

    if not isinstance(name, str):
        raise RegistrationError(
            f"the first argument is {name!r}; it must be the name of the backend: "
            'register_backend("my_backend", MyBackend)'
        )
    if config is not None and not isinstance(config, Mapping):
        raise RegistrationError(f"config={config!r} of {name!r} must be a dictionary, or None")

    def register(target: str | Backend) -> None:
        entry = Registration(
            name.strip().lower(), target, priority, install_hint, dict(config or {}), "registered"
        )
        _add(entry, override)

    def decorate(cls: B) -> B:
        register(cls)
        return cls

    if backend is None:
        return decorate
    register(backend)
    return None


def unregister_backend(name: str) -> None:
    """Remove a registered backend. A built-in backend that it replaced becomes available again.

    Raises:
        RegistrationError: the name is not registered, or is a built-in backend.
    """
    global _generation
    key = name.strip().lower()
    with _lock:
        known = registrations().get(key)
        if known is None or known.origin == "built in":
            why = (
                "is built in; ATTNLIB_BACKEND=-NAME excludes a backend from auto"
                if known
                else "is not registered"
            )
            raise RegistrationError(f"cannot unregister {name!r}: it {why}")
        del _registered[key]
        if key in BUILTIN_BACKENDS:
            _registered[key] = _built_in(key)
        _generation += 1


def _add(entry: Registration, override: bool) -> None:
    global _generation
    if not _is_valid_name(entry.name):
        raise RegistrationError(
            f"{entry.name!r} is not a valid backend name: use letters, digits, '_', '-' and '.'; "
            f"'auto' is reserved"
        )
    check_priority(entry.priority, entry.name)
    if not isinstance(entry.target, str):
        check_backend_interface(entry.target, entry.name)
        check_priority(entry.target.auto_priority, entry.name)
    elif ":" not in entry.target:
        raise RegistrationError(
            f"{entry.target!r} is not a path to a backend; write it as 'package.module:Class'"
        )
    with _lock:
        known = registrations().get(entry.name)
        if known is not None and not override:
            raise RegistrationError(
                f"backend {entry.name!r} is already registered ({known.origin}): choose another "
                f"name, or pass override=True to replace it"
            )
        _registered[entry.name] = entry
        _generation += 1


def _is_valid_name(key: str) -> bool:
    letters = key.replace("_", "").replace("-", "").replace(".", "")
    return letters.isalnum() and key != "auto" and not key.startswith("-")


def _add_plugin(plugin: PluginBackend) -> None:
    """Add the backend of an entry point; warn if its name or path is invalid or taken."""
    global _generation
    known = _registered.get(plugin.name)
    if not _is_valid_name(plugin.name) or ":" not in plugin.path:
        warnings.warn(
            f"backend {plugin.name!r} = {plugin.path!r} of package {plugin.package} is ignored: "
            f"an entry point needs a valid name and a 'module:Class' path",
            stacklevel=4,
        )
    elif known is None:
        _registered[plugin.name] = Registration(plugin.name, plugin.path, origin=plugin.package)
        _generation += 1
    elif known.target != plugin.path:
        warnings.warn(
            f"backend {plugin.name!r} of package {plugin.package} is ignored: the name is already "
            f"registered ({known.origin})",
            stacklevel=4,
        )
