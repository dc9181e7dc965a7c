"""Who can be chosen: the built-in table, whatever is registered, and whatever installed packages offer. Open, keyed by name, imported late.

Nothing is imported until somebody asks for it. A plugin that is broken is one warning with its name; the others never notice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar, overload

from attnlib import env
from attnlib.backends.base import AttentionBackend
from attnlib.backends.builtin import BUILTIN_BACKENDS
from attnlib.errors import RegistrationError
from attnlib.selection.configured import configured
from attnlib.selection.inspection import check_backend_class, check_backend_parts

__all__ = [
    "ENTRY_POINT_GROUP",
    "OWN_ORIGINS",
    "Registration",
    "generation",
    "lookup",
    "register_backend",
    "registrations",
    "unregister_backend",
]

ENTRY_POINT_GROUP = "attnlib.backends"
OWN_ORIGINS = ("built in", "registered", "argument")
"""Origins of backends that this process named itself; any other origin is an installed package."""

Backend = type[AttentionBackend]
B = TypeVar("B", bound=Backend)


@dataclass(frozen=True)
class Registration:
    """One name and what stands behind it.

    Attributes:
        name: in lower case.
        target: a class, or a "module:Class" path that is imported when somebody asks.
        priority: higher is tried first by auto; None keeps it out of auto.
        install_hint: the command that brings what it needs.
        config: settings that reach builder and impl.
        origin: one of `OWN_ORIGINS`, or the distribution that offers it.
    """

    name: str
    target: str | Backend
    priority: int | None = None
    install_hint: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    origin: str = "built in"

    def load(self) -> Backend:
        """The class, imported now if need be, with its config bound.

        Raises:
            Exception: whatever importing it raises; selection turns that into a reason.
        """
        found = import_backend(self.target) if isinstance(self.target, str) else self.target
        return configured(found, self.config)


_registered: dict[str, Registration] = {
    line.name: Registration(line.name, line.path, line.priority, line.install_hint)
    for line in BUILTIN_BACKENDS.values()
}
_generation = 0
_plugins_read = False


def generation() -> int:
    """A number that changes whenever a name does: part of every selection cache's key."""
    return _generation


def registrations() -> dict[str, Registration]:
    """Every known backend by name, those of installed packages included."""
    if not _plugins_read and env.read("ATTNLIB_PLUGINS"):
        _read_plugins()
    return dict(_registered)


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
    """Make a backend available by name, beside the others.

    Args:
        name: letters, digits, `_`, `-` or `.`; the case does not matter.
        backend: a class, a "module:Class" path (imported when first asked for), or None to use the call as a class decorator.
        priority: where auto tries it (triton has 300, torch 100); None keeps it out of auto: it is used when it is named.
        config: settings of this backend; they reach its builder and every impl. To name one class twice with two configs is fine.
        install_hint: the command to show when it cannot be imported.
        override: replace a backend of that name.

    Raises:
        RegistrationError: a bad or taken name, or a class that does not fit the interface; the message shows what is missing.
    """
    if backend is None:

        def decorate(cls: B) -> B:
            _put(name, cls, priority, config, install_hint, override)
            return cls

        return decorate
    _put(name, backend, priority, config, install_hint, override)
    return None


def unregister_backend(name: str) -> None:
    """Forget a registered backend; a built-in one that it had replaced comes back.

    Raises:
        RegistrationError: nobody registered that name.
    """
    global _generation
    key = name.strip().lower()
    known = registrations().get(key)
    if known is None or known.origin == "built in":
        why = (
            "is built in; `-name` in ATTNLIB_BACKEND keeps it out of auto"
            if known
            else "is not registered"
        )
        raise RegistrationError(f"cannot unregister {name!r}: it {why}")
    del _registered[key]
    if key in BUILTIN_BACKENDS:
        line = BUILTIN_BACKENDS[key]
        _registered[key] = Registration(line.name, line.path, line.priority, line.install_hint)
    _generation += 1


def import_backend(path: str) -> Backend:
    """The class at "module:Class" (dots reach nested classes).

    Raises:
        RegistrationError: the path has another form, or leads to something that is no backend.
    """
    module, colon, qualified = path.partition(":")
    if not colon or not module or not qualified:
        raise RegistrationError(
            f"{path!r} is no path to a backend; write it as 'package.module:Class'"
        )
    found: Any = import_module(module)
    for part in qualified.split("."):
        found = getattr(found, part)
    check_backend_class(found, path)
    backend: Backend = found
    return backend


def _put(
    name: str,
    backend: str | Backend,
    priority: int | None,
    config: Mapping[str, Any] | None,
    install_hint: str,
    override: bool,
) -> None:
    global _generation
    key = name.strip().lower()
    if not _is_name(key):
        raise RegistrationError(
            f"{name!r} is no name for a backend: use letters, digits, '_', '-' and '.', and not 'auto'"
        )
    known = registrations().get(key)
    if known is not None and not override:
        raise RegistrationError(
            f"backend {key!r} is registered already ({known.origin}): choose another name, or pass override=True to replace it"
        )
    if isinstance(backend, str):
        if ":" not in backend:
            raise RegistrationError(
                f"{backend!r} is no path to a backend; write it as 'package.module:Class'"
            )
    else:
        check_backend_parts(backend, key)
    _registered[key] = Registration(
        key, backend, priority, install_hint, dict(config or {}), "registered"
    )
    _generation += 1


def _is_name(key: str) -> bool:
    return (
        key.replace("_", "").replace("-", "").replace(".", "").isalnum()
        and key != "auto"
        and not key.startswith("-")
    )


def _read_plugins() -> None:
    global _plugins_read
    _plugins_read = True
    try:
        points = list(entry_points(group=ENTRY_POINT_GROUP))
    except Exception as error:  # the metadata of any installed package may be damaged
        warnings.warn(
            f"backends of installed packages cannot be listed: {type(error).__name__}: {error}",
            stacklevel=2,
        )
        return
    for point in points:
        _add_plugin(point)


def _add_plugin(point: EntryPoint) -> None:
    """Take what a package offers; what cannot be taken is one warning with both names."""
    global _generation
    key, offered = (
        point.name.strip().lower(),
        point.dist.name if point.dist else "an unknown package",
    )
    known = _registered.get(key)
    if not _is_name(key) or ":" not in point.value:
        warnings.warn(
            f"backend {point.name!r} = {point.value!r} offered by {offered} is ignored: it needs a name and 'module:Class'",
            stacklevel=4,
        )
    elif known is None:
        _registered[key] = Registration(key, point.value, origin=offered)
        _generation += 1
    elif known.target != point.value:
        warnings.warn(
            f"backend {key!r} offered by {offered} is ignored: the name is taken ({known.origin})",
            stacklevel=4,
        )
