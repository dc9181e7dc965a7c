"""The request that holds now: an argument, `use_backend`, ATTNLIB_BACKEND, or none.

Caches that depend on a selection hold `selection_state()` in their keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from attnlib import env, tuning
from attnlib.backends.base import AttentionBackend
from attnlib.backends.interface import check_backend_interface
from attnlib.backends.loading import import_backend
from attnlib.cache.layout import kv_cache_layout_override
from attnlib.errors import (
    BackendUnavailableError,
    ContractError,
    RegistrationError,
    UnknownBackendError,
)
from attnlib.object_path import is_absent
from attnlib.selection.registry import generation, registrations
from attnlib.selection.request import AUTO, PAIR_SYNTAX, Request, is_path, parse_request

__all__ = ["current_request", "parsed", "selection_state", "use_backend"]

Backend = type[AttentionBackend]

_context: ContextVar[str | Backend | None] = ContextVar("attnlib_use_backend", default=None)
_environment = env.raw_reader(
    "ATTNLIB_BACKEND",
    "ATTNLIB_KV_CACHE_LAYOUT",
    "ATTNLIB_TUNING",
    "ATTNLIB_PLUGINS",
    "TRITON_INTERPRET",
)


@contextmanager
def use_backend(backend: str | Backend | None) -> Iterator[None]:
    """Within the block, select this backend unless an argument names another one.

    The request is a context variable: tasks of asyncio inherit it, new threads do not. A thread
    pool runs its work in the context of the caller with
    `pool.submit(contextvars.copy_context().run, function, ...)`; `ATTNLIB_BACKEND` holds for all
    threads. A layer selects once, when it is made, and keeps its backend in every thread.

    Args:
        backend: a class, or a string in the syntax of ATTNLIB_BACKEND.

    Raises:
        UnknownBackendError: a name that is not registered, or a path without a class; raised when
            the block is entered.
        BackendUnavailableError: the module of a path cannot be imported.
    """
    parsed(backend, "use_backend")
    token = _context.set(backend)
    try:
        yield
    finally:
        _context.reset(token)


def selection_state() -> tuple[Any, ...]:
    """Everything that a selection depends on besides the spec, the argument and the device: what
    `use_backend` asks for, the environment, the registry and the tuning tables."""
    return (
        _context.get(),
        _environment(),
        kv_cache_layout_override(),
        generation(),
        tuning.generation(),
    )


def current_request(backend: Any) -> tuple[Request, Mapping[str, Backend]]:
    """The request with the highest precedence, and its class if it was given as one."""
    for value, source in (
        (backend, "argument"),
        (_context.get(), "use_backend"),
        (env.read("ATTNLIB_BACKEND"), "ATTNLIB_BACKEND"),
    ):
        request, given = parsed(value, source)
        if request is not AUTO or (isinstance(value, str) and value.strip()):
            return request, given
    return AUTO, {}


def parsed(value: Any, source: str) -> tuple[Request, Mapping[str, Backend]]:
    """(a request in any form, the classes that it gives by name); `AUTO` for None and "auto".

    Raises:
        UnknownBackendError: a name that is not registered, a path without a class, or, unless the
            source is ATTNLIB_BACKEND, another syntax.
        EnvironmentVariableError: another syntax in ATTNLIB_BACKEND.
        BackendUnavailableError: the module of a path cannot be imported.
        RegistrationError: a class, or the object of a path, does not fit the interface.
    """
    if isinstance(value, type):
        check_backend_interface(value, value.__qualname__)
        name = value.get_name()  # type: ignore[attr-defined]  # the check made sure of it
        return Request(source, name, name), {name: value}
    if value is not None and not isinstance(value, str):
        raise UnknownBackendError(
            f"{source}={value!r} is a {type(value).__name__}: give a backend's name, "
            f"{PAIR_SYNTAX}, or a class"
        )
    request = parse_request(value or "", source, registrations())
    if request.is_auto:
        return (request if request.excluded else AUTO), {}
    return _with_classes(request, f"{source}={value!r}")


def _with_classes(request: Request, origin: str) -> tuple[Request, Mapping[str, Backend]]:
    """The request with the names of its paths' classes, and these classes by name."""
    given: dict[str, Backend] = {}
    names = []
    for part in (str(request.first), str(request.second)):
        if is_path(part):
            backend = _class_at(part, origin)
            part = backend.get_name()
            given.setdefault(part, backend)
        names.append(part)
    same_name = names[0] == names[1] and request.first != request.second
    if same_name:
        raise UnknownBackendError(
            f"{origin}: two backends of one name, {names[0]!r}: let get_name() of one return "
            "another name"
        )
    return replace(request, first=names[0], second=names[1]), given


def _class_at(path: str, origin: str) -> Backend:
    """The class at a path."""
    try:
        backend = import_backend(path)
        check_backend_interface(backend, path)
        return backend
    except (KeyboardInterrupt, RegistrationError):
        raise
    except ContractError as error:
        raise UnknownBackendError(f"{origin}: {error}") from None
    except BaseException as error:  # importing a module may raise anything, also SystemExit
        if is_absent(path, error):
            raise UnknownBackendError(
                f"{origin}: {error}: install it, or add its folder to PYTHONPATH"
            ) from None
        raise BackendUnavailableError(
            f"{origin}: {path.rpartition(':')[0]} cannot be imported: {type(error).__name__}: "
            f"{error}"
        ) from error
