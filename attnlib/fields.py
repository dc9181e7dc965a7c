"""Dataclasses from the objects of a JSON file: every field, of its type."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from attnlib.errors import ContractError

__all__ = ["check_types", "from_fields"]

T = TypeVar("T")


def from_fields(kind: type[T], data: Any, where: str) -> T:
    """An instance of a dataclass from a JSON object.

    Args:
        kind: the dataclass.
        data: field -> value.
        where: file and place, for messages.

    Raises:
        ContractError: a field is missing, unknown, or of another type.
    """
    names = {item.name for item in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    if not isinstance(data, Mapping) or set(data) != names:
        given = set(data) if isinstance(data, Mapping) else set()
        raise ContractError(
            f"{where} is not a {kind.__name__} of this version: missing "
            f"{sorted(names - given)}, unknown {sorted(given - names)}; measure again"
        )
    check_types(kind, data, where)
    return kind(**data)


def check_types(kind: type, data: Mapping[str, Any], where: str) -> None:
    """Check the types of fields of a dataclass.

    Raises:
        ContractError: a value has another type than its field.
    """
    hints = get_type_hints(kind)
    for name, value in data.items():
        if name in hints and not _fits(value, hints[name]):
            raise ContractError(f"{where}: {name}={value!r} must be of type {_text(hints[name])}")


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if isinstance(value, bool):
        return hint is bool
    if hint is float:
        return isinstance(value, int | float)
    return isinstance(value, get_origin(hint) or hint)


def _text(hint: Any) -> str:
    return str(getattr(hint, "__name__", hint))
