"""The request that holds now: an argument, `use_backend`, ATTNLIB_BACKEND, or none.

Caches that depend on a selection hold `selection_state()` in their keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from attnlib import env, tuning
from attnlib.backends.base import AttentionBackend
from attnlib.backends.loading import check_backend_class
from attnlib.cache.layout import kv_cache_layout_override
from attnlib.errors import UnknownBackendError
from attnlib.selection.registry import generation, registrations
from attnlib.selection.request import AUTO, PAIR_SYNTAX, Request, parse_request

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
        UnknownBackendError: a name that is not registered; raised when the block is entered.
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
    """A request in any form; `AUTO` for None and for "auto"."""
    if isinstance(value, type):
        check_backend_class(value, value.__qualname__)
        name = value.get_name()  # type: ignore[attr-defined]  # check_backend_class made sure of it
        return Request(source, name, name), {name: value}
    if value is not None and not isinstance(value, str):
        raise UnknownBackendError(
            f"{source}={value!r} is a {type(value).__name__}: give a backend's name, "
            f"{PAIR_SYNTAX}, or a class"
        )
    request = parse_request(value or "", source, registrations())
    return (request if request.excluded or not request.is_auto else AUTO), {}
