"""Static caches stay where CUDA graphs read them.

A CUDA graph of torch.compile reads the addresses that it was recorded with. transformers makes a
new static cache for each `generate`, wherever the allocator finds memory, and for other addresses
torch records the graph again: the first token then takes as long as several. Once a graph was
recorded, the next cache of the same model and sizes gets the memory of the last one, if nothing
else refers to that any more. Caches of encoder-decoders get none: transformers copies their config
for each cache, so that nothing tells their model.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from sys import getrefcount
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.weak import WeakIdKeyDictionary

from attnlib.integrations.transformers.layers import current_stream

__all__ = [
    "forget_static_memory",
    "has_owner",
    "in_kept_memory",
    "keep_static_memory",
    "note_trace",
    "of_model",
]


class _Owner(NamedTuple):
    """Whose memory a layer of a static cache has.

    Attributes:
        config: of the decoder.
        layer: index of the layer.
        stream: on which the layer was made; 0 before, and on a CPU.
    """

    config: ref[Any]
    layer: int
    stream: int = 0


class _Kept(NamedTuple):
    """A tensor of a static cache, the layer that had it last, and the stream of that layer."""

    tensor: torch.Tensor
    layer: ref[Any]
    stream: int


_owners: WeakKeyDictionary[Any, _Owner] = WeakKeyDictionary()
"""Layers of static caches of models that attnlib serves."""
_kept: Any = WeakIdKeyDictionary()
"""Config -> {(index of the layer, path of the tensor in it): `_Kept`}, which end with the model."""
_traces: list[None] = []
"""Not empty after a trace, whose garbage refers to the cache that it was made with."""


def of_model(init: Callable[..., None]) -> Callable[..., None]:
    """`StaticCache.__init__` that notes the model of its layers."""

    def init_and_note(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        init(self, config, *args, **kwargs)
        if is_dynamo_compiling() or getattr(config, "_attn_implementation", None) != "attnlib":
            return
        if not self.offloading:  # else the layers move between devices
            for index, layer in enumerate(self.layers):
                _owners[layer] = _Owner(ref(config), index)

    return init_and_note


def has_owner(layer: Any) -> bool:
    """Whether a layer was made for a model that attnlib serves."""
    return layer in _owners


def in_kept_memory(initialize: Callable[..., None]) -> Callable[..., None]:
    """`lazy_initialization` of a layer that gets the memory which is kept for it."""

    def initialize_and_take(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if not is_dynamo_compiling() and (owner := _owners.get(self)) is not None:
            owner = _owners[self] = owner._replace(stream=current_stream(self.device))
            _take(self, owner)

    return initialize_and_take


def keep_static_memory(device: torch.device) -> None:
    """Keep the memory of the static caches in use: a graph that reads it is recorded.

    Args:
        device: of the graph.
    """
    for layer, owner in list(_owners.items()):
        config = owner.config()
        if config is None:
            continue
        for path, _, tensor in _static_tensors(layer):
            if tensor.device == device:
                kept = _kept.setdefault(config, {})
                kept[owner.layer, path] = _Kept(tensor, ref(layer), owner.stream)


def note_trace() -> None:
    """Note that torch.compile traces a model."""
    _traces[:] = [None]


def forget_static_memory() -> None:
    """Release the memory that no cache has."""
    _kept.clear()


def _take(layer: Any, owner: _Owner) -> None:
    """Replace new tensors of a layer by those that are kept for it."""
    config = owner.config()
    kept: dict[Any, _Kept] | None = None if config is None else _kept.get(config)
    if kept is None:
        return
    for path, holder, new in _static_tensors(layer):
        place = owner.layer, path
        found = kept.get(place)
        if found is None or found.tensor is new:
            continue
        if not _is_like(found.tensor, new):
            kept.clear()  # caches of other sizes have other graphs
            return
        if found.layer() is not None and _traces:
            _traces.clear()
            gc.collect()
        if found.layer() is not None or found.stream != owner.stream or _is_shared(found):
            continue
        if kept.pop(place, None) is found:  # no other thread has taken it
            holder[path[-1]] = found.tensor.copy_(new)
            kept[place] = found._replace(layer=ref(layer))


def _static_tensors(layer: Any) -> Iterator[tuple[tuple[Any, ...], dict[Any, Any], torch.Tensor]]:
    """The tensors of a layer whose addresses transformers declares to be static: (path, the
    dictionary that holds it, tensor)."""
    attributes = vars(layer)
    for name, value in list(attributes.items()):
        for key, each in value.items() if isinstance(value, dict) else ():  # states, by index
            if _is_static(each):
                yield (name, key), value, each
        if _is_static(value):
            yield (name,), attributes, value


def _is_static(value: Any) -> bool:
    return getattr(value, "_dynamo_static_input_type", None) is not None


def _is_like(kept: torch.Tensor, new: torch.Tensor) -> bool:
    return (
        kept.shape == new.shape
        and kept.dtype == new.dtype
        and kept.device == new.device
        and kept.is_inference() == new.is_inference()
    )


def _references(kept: _Kept) -> tuple[int, int]:
    """The number of references to a tensor, and to its memory."""
    storage = kept.tensor.untyped_storage()
    return getrefcount(kept.tensor), torch._C._storage_Use_Count(storage._cdata)


_UNSHARED = _references(_Kept(torch.empty(1, dtype=torch.float32, device="cpu"), ref(_Kept), 0))


def _is_shared(kept: _Kept) -> bool:
    """Whether something else refers to a tensor or to its memory, such as a view."""
    return _references(kept) != _UNSHARED
