"""A backend class with settings bound to it: an ordinary backend, and picklable, so that worker processes get the same one."""

from __future__ import annotations

import copyreg
from abc import ABCMeta
from collections.abc import Mapping
from typing import Any

from attnlib.backends.base import AttentionBackend

__all__ = ["configured"]


class _ConfiguredMeta(ABCMeta):
    """Metaclass of configured classes: classes are pickled by name, and these have none that another process could import."""


_made: dict[tuple[type[AttentionBackend], str], type[AttentionBackend]] = {}


def configured(
    backend: type[AttentionBackend], config: Mapping[str, Any]
) -> type[AttentionBackend]:
    """`backend` itself without settings; else a subclass with `config`, the same one each time for the same settings."""
    if not config:
        return backend
    key = (backend, repr(sorted(config.items(), key=lambda item: item[0])))
    if key not in _made:
        body = {
            "config": dict(config),
            "__module__": backend.__module__,
            "__doc__": backend.__doc__,
            "_configured_from": backend,
        }
        _made[key] = _ConfiguredMeta(backend.__name__, (backend,), body)  # type: ignore[assignment]  # a metaclass call is a class
    return _made[key]


def _reduce(cls: Any) -> tuple[Any, ...]:
    return configured, (cls._configured_from, cls.config)


copyreg.pickle(_ConfiguredMeta, _reduce)
