"""Classes of pairs: made at run time for two backends, and pickled by these."""

from __future__ import annotations

import copyreg
from abc import ABCMeta
from collections.abc import Callable
from typing import Any, cast

from attnlib.backends.base import AttentionBackend

__all__ = ["make_pair"]

Backend = type[AttentionBackend]


class _PairMeta(ABCMeta):
    """Metaclass of pairs. `origin` of a class is a function and the arguments that return it."""

    origin: tuple[Callable[..., Backend], tuple[Any, ...]]


class _PartMeta(_PairMeta):
    """Metaclass of the impl and builder classes of pairs; `part` is the attribute of the pair that
    has the class."""

    part: str


def make_pair(
    base: Backend,
    body: dict[str, Any],
    origin: tuple[Callable[..., Backend], tuple[Any, ...]],
    builder: tuple[type, dict[str, Any]],
    impl: tuple[type, dict[str, Any]],
) -> Backend:
    """A backend class with a builder class and an impl class of its own.

    Args:
        base: of the backend class, whose name it gets.
        body: attributes of the backend class.
        origin: the function that makes this class, and its arguments: how it is pickled.
        builder: base and attributes of the builder class.
        impl: base and attributes of the impl class.
    """
    parts = {
        part: _PartMeta(cls.__name__, (cls,), {**own, "origin": origin, "part": part})
        for part, (cls, own) in (("builder_cls", builder), ("impl_cls", impl))
    }
    pair = _PairMeta(base.__name__, (base,), {**body, **parts, "origin": origin})
    return cast(Backend, pair)


def _part_of(make: Callable[..., Backend], arguments: tuple[Any, ...], part: str) -> Any:
    return getattr(make(*arguments), part)


def _reduce(cls: _PairMeta) -> tuple[Any, ...]:
    return cls.origin


def _reduce_part(cls: _PartMeta) -> tuple[Any, ...]:
    return _part_of, (*cls.origin, cls.part)


copyreg.pickle(_PairMeta, _reduce)
copyreg.pickle(_PartMeta, _reduce_part)
