"""Integer ids for Python objects used inside a torch.library operator.

An operator takes tensors and numbers only, but attention also needs its layer, its cache and the
metadata of the batch. Each of them has an id, and the operator looks the object up by it. The
registry holds objects weakly, and uses an id again only if nobody can know it.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from sys import getrefcount
from typing import Any, TypeVar
from weakref import ref

import torch

from attnlib.errors import ContractError

__all__ = ["lookup", "register", "register_tensor_id"]

_objects: dict[int, ref[Any]] = {}
_ids = count(1)
_unused: list[tuple[int, torch.Tensor]] = []
"""Ids of objects that are gone, with their tensors."""
_MAX_UNUSED = 256

T = TypeVar("T")


def register(thing: Any) -> int:
    """A new id for `thing`. A copy of an object registers itself again (`__setstate__`)."""
    number = next(_ids)
    # Every batch registers itself: a `WeakValueDictionary` would take three times as long. The
    # callback is `_objects.pop(number, reference)`.
    _objects[number] = ref(thing, partial(_objects.pop, number))
    return number


def register_tensor_id(thing: Any) -> torch.Tensor:
    """An id for `thing` as a 0-d int64 CPU tensor: another value does not recompile a graph.

    Every batch has one. Making the tensor takes longer than all else here, so the tensor and the id
    of an object that is gone are used again if nothing else refers to the tensor.
    """
    while _unused:
        number, tensor = _unused.pop()
        if getrefcount(tensor) == _ONLY_HERE:
            break
    else:
        number = next(_ids)
        # The guards of a graph distinguish inference tensors.
        with torch.inference_mode(False):
            tensor = torch.scalar_tensor(number, dtype=torch.int64, device="cpu")
    _objects[number] = ref(thing, partial(_forget, number, tensor))
    return tensor


def _forget(number: int, tensor: torch.Tensor, reference: ref[Any]) -> None:
    """Remove an object that is being deallocated."""
    if _objects is None:  # at the end of the interpreter, which clears modules before objects
        return
    del _objects[number]
    if len(_unused) < _MAX_UNUSED and type(tensor) is torch.Tensor:  # no `FakeTensor`
        _unused.append((number, tensor))


def _references_to_a_local() -> int:
    """What `getrefcount` returns in `register_tensor_id`; it depends on the version of Python."""
    pairs = [(0, object())]
    _, thing = pairs.pop()
    return getrefcount(thing)


_ONLY_HERE = _references_to_a_local()


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
