"""Numbers for objects that cannot cross an operator's border.

A torch operator takes tensors and numbers only, but attention also needs its layer, its cache and the batch's metadata. Each of them gets a number
when it is made, and gives it along; the operator finds the object again here. The table holds objects weakly: it keeps nothing alive, and a number
is never given twice. This is the only state that torch.compile support needs, and nothing else reads it.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

from attnlib.errors import ContractError

__all__ = ["handle_of", "object_behind", "register"]

_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count(1)


def register(thing: Any) -> int:
    """A number of its own for `thing`."""
    number = next(_numbers)
    _objects[number] = thing
    return number


def handle_of(thing: Any) -> torch.Tensor:
    """A number of its own for `thing`, as a 0-d int64 CPU tensor: a compiled graph takes another value without compiling again."""
    return torch.tensor(register(thing), dtype=torch.int64, device="cpu")


def object_behind(number: int | torch.Tensor, what: str) -> Any:
    """The object that got this number.

    Raises:
        ContractError: it is gone; the message says what it was.
    """
    found = _objects.get(int(number))
    if found is None:
        raise ContractError(
            f"the {what} of this call does not exist any more: keep it alive until the compiled call has run, and copy none of them"
        )
    return found
