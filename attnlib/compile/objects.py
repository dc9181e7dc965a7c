"""Integer ids for Python objects used inside a torch.library operator.

An operator takes tensors and numbers only, but attention also needs its layer, its cache and the
metadata of the batch. Each of them has an id, and the operator looks the object up by it. The
registry holds objects weakly and never reuses an id.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any, TypeVar
from weakref import ref

import torch

from attnlib.errors import ContractError

__all__ = ["lookup", "register", "register_tensor_id"]

_objects: dict[int, ref[Any]] = {}
_ids = count(1)
_CPU = torch.device("cpu")

T = TypeVar("T")


def register(thing: Any) -> int:
    """A new id for `thing`. A copy of an object registers itself again (`__setstate__`)."""
    number = next(_ids)
    # Every batch registers itself: a `WeakValueDictionary` would take three times as long. The
    # callback is `_objects.pop(number, reference)`.
    _objects[number] = ref(thing, partial(_objects.pop, number))
    return number


def register_tensor_id(thing: Any) -> torch.Tensor:
    """A new id for `thing` as a 0-d int64 CPU tensor: another value does not recompile a graph."""
    # Every batch has one: `torch.tensor` takes four times as long, and parsing "cpu" a quarter.
    return torch.scalar_tensor(register(thing), dtype=torch.int64, device=_CPU)


def lookup(number: int | torch.Tensor, kind: type[T], what: str) -> T:
    """The object with this id.

    Raises:
        ContractError: the object is gone, or the id belongs to an object of another type.
    """
    reference = _objects.get(int(number))
    found = None if reference is None else reference()
    if found is None:
        raise ContractError(
            f"the {what} of this call no longer exists: keep a reference to it until the compiled "
            "call has run"
        )
    if not isinstance(found, kind):
        raise ContractError(
            f"the {what} of this call is a {type(found).__name__}; it must be a {kind.__name__}"
        )
    return found
