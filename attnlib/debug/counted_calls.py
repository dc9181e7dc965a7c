"""Calls of layers, counted, and files for them."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from attnlib.layer import Attention
    from attnlib.layer.state import StateLayer

    Layer = Attention | StateLayer

__all__ = ["CountedCalls", "StateSampler", "new_path"]


class CountedCalls:
    """Names and counts the calls of layers. Layers of one prefix have different names, and a new
    layer is not taken for one that is gone."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: WeakKeyDictionary[Layer, tuple[str, int]] = WeakKeyDictionary()
        self._names: set[str] = set()

    def next(self, layer: Layer) -> tuple[str, int]:
        """The name of the layer, and the number of this call of it, from 0."""
        with self._lock:
            name, number = self._known.get(layer) or (self._new_name(layer), 0)
            self._known[layer] = name, number + 1
            return name, number

    def _new_name(self, layer: Layer) -> str:
        prefix = layer.prefix or f"layer{len(self._names)}"
        name, more = prefix, 0
        while name in self._names:
            more += 1
            name = f"{prefix}.{more}"
        self._names.add(name)
        return name


class StateSampler:
    """Samples the calls of state layers; the parts of a layer are counted one by one.

    Args:
        every: the first call and then every `every`-th call of each part.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._counted = {part: CountedCalls() for part in ("convolution", "recurrence")}

    def sampled(self, layer: StateLayer, part: str) -> tuple[str, int] | None:
        """The name of the part and the number of this call, or None for a call to leave out."""
        name, number = self._counted[part].next(layer)
        return (f"{name}.{part}", number) if number % self._every == 0 else None


def new_path(folder: str | Path, name: str, number: int) -> Path:
    """A path for the recording of a call at which there is no file yet."""
    stem = f"{name.replace('/', '_')}-{number}"
    path, more = Path(folder) / f"{stem}.pt", 0
    while path.exists():
        more += 1
        path = Path(folder) / f"{stem}.{more}.pt"
    return path
