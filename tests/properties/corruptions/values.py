"""Random changes of argument values, as users make them by mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

Tensor = torch.Tensor

_NUMBERS = (-1, 0, 1, 2, 3, 5, 7, 8, 16, 33, 100, 10**6, 2**31 - 1, -7)


@dataclass
class Change:
    """A change of a value; the same for every copy of it.

    Attributes:
        text: what it does, for messages.
        apply: value -> changed value.
    """

    text: str
    apply: Callable[[Any], Any]


def change_of(rng: Random, value: Any, is_memory: bool = False) -> Change:
    """A random change of a value."""
    if isinstance(value, Tensor):
        if is_memory:
            return _view(rng, value)
        return _integers(rng, value) if not value.is_floating_point() else _floats(rng, value)
    if isinstance(value, list):
        return _list(rng, value)
    if isinstance(value, int) and not isinstance(value, bool):
        new = rng.choice([value + 1, value - 1, 0, -1, value + 0.5, 2 * value, str(value)])
        return Change(f"{value} -> {new!r}", lambda _: new)
    return Change("unchanged", lambda same: same)


def _integers(rng: Random, value: Tensor) -> Change:
    """Another element, order, length, dtype or shape."""
    size, kind = value.numel(), rng.randrange(11)
    place = rng.randrange(size) if size else 0
    if kind < 5 and size:
        old = int(value.flatten()[place])
        new = rng.choice([old + 1, old - 1, rng.choice(_NUMBERS), old * 2])
        limit = torch.iinfo(value.dtype)
        new = max(min(new, limit.max), limit.min)
        return Change(f"[{place}] {old} -> {new}", lambda x: _with_element(x, place, new))
    if kind == 5 and value.dim():
        return Change("without its last row", lambda x: x[:-1])
    if kind == 6 and value.dim():
        return Change("with a row more", lambda x: torch.cat([x, x[-1:] if len(x) else x]))
    if kind == 7:
        dtype = rng.choice([torch.int32, torch.int64, torch.float32, torch.int16, torch.bool])
        return Change(f"as {dtype}", lambda x: x.to(dtype))
    if kind == 8:
        return Change("with a dimension more", lambda x: x[None])
    if kind == 9 and value.dim():
        return Change("reversed", lambda x: x.flip(0))
    spaced = value.dim() == 1 and size
    if spaced:
        return Change("with stride 2", lambda x: torch.stack([x, x], 1).flatten()[::2])
    return Change("unchanged", lambda x: x)


def _with_element(value: Tensor, place: int, new: int) -> Tensor:
    changed = value.clone()
    changed.view(-1)[place] = new
    return changed


def _floats(rng: Random, value: Tensor) -> Change:
    """Another size, dtype, order of dimensions or stride."""
    dims, kind = value.dim(), rng.randrange(7)
    axis = rng.randrange(dims) if dims else 0
    if kind == 0 and dims and value.shape[axis] > 1:
        return Change(f"shorter along {axis}", lambda x: x.narrow(axis, 0, x.shape[axis] - 1))
    if kind == 1 and dims and value.shape[axis]:
        return Change(f"longer along {axis}", lambda x: torch.cat([x, x.narrow(axis, 0, 1)], axis))
    if kind == 2:
        dtype = rng.choice([torch.float16, torch.float64, torch.int32, torch.bfloat16])
        return Change(f"as {dtype}", lambda x: x.to(dtype))
    if kind == 3 and dims > 1:
        return Change("with its last dimensions swapped", lambda x: x.transpose(-1, -2))
    if kind == 4:
        return Change("with a dimension more", lambda x: x[None])
    if kind == 5 and dims:
        return Change("of its first row", lambda x: x[0] if len(x) else x)
    return Change("not contiguous", lambda x: torch.stack([x, x], -1)[..., 0])


def _view(rng: Random, value: Tensor) -> Change:
    """Another view of memory, in which writes still reach the memory."""
    kind = rng.randrange(5)
    if kind == 0 and len(value) > 1:
        return Change("with a block less", lambda x: x[:-1])
    if kind == 1:
        return Change("of its first block", lambda x: x[0])
    if kind == 2:
        return Change("with shorter heads", lambda x: x[..., : x.shape[-1] // 2])
    if kind == 3 and value.dim() > 2:
        return Change("with dimensions swapped", lambda x: x.transpose(1, 2))
    return Change("unchanged", lambda x: x)


def _list(rng: Random, value: list[Any]) -> Change:
    """Another element or length."""
    kind = rng.randrange(4)
    place = rng.randrange(len(value)) if value else 0
    if kind < 2 and value:
        new = rng.choice([*_NUMBERS, 0.9, 1.7, "1", None, True, (1, 2), (0.5, 1)])
        return Change(f"[{place}] -> {new!r}", lambda x: [*x[:place], new, *x[place + 1 :]])
    if kind == 2 and value:
        return Change("with its first element twice", lambda x: [*x, x[0]])
    return Change("without its last element", lambda x: x[:-1])
