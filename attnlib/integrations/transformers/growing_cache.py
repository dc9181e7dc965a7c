"""Layers of a `DynamicCache` that append new keys and values in place.

transformers concatenates: every token copies all keys and values of a layer, and their strides are
other ones at every token. A layer whose keys attnlib has served in a decode keeps them in buffers
with room for more tokens. It still hands out `[B, H, S, D]`, as views of the buffers. Layers of
models with other attention implementations, and sliding windows, concatenate as before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

__all__ = ["adopt", "capacity_of", "growing_update"]

_LEAST_ROOM = 128
"""Tokens that a new buffer has room for beyond those it holds, at least."""
_ROOM = 8
"""A new buffer has room for 1 / _ROOM of its tokens more."""
_ROUND = 64
"""Buffers have a multiple of these tokens, so that few strides occur."""
_ATTRIBUTE = "_attnlib_capacity"

_local = threading.local()


@dataclass(eq=False)
class _Buffers:
    """Keys and values of a layer, `[B, H, capacity, D]` and `[B, H, capacity, Dv]`.

    Only rows behind everything that was handed out are written, so that tensors which others have
    kept never change.

    Attributes:
        keys, values: the memory.
        views: what the layer handed out last.
        shapes: of keys and values that were appended last, which need no other check.
    """

    keys: torch.Tensor
    values: torch.Tensor
    views: tuple[Any, Any] = (None, None)
    shapes: tuple[Any, Any] = (None, None)

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> _Buffers:
        """Buffers that hold these keys and values and have room for `tokens` and more."""
        capacity = tokens + max(_LEAST_ROOM, tokens // _ROOM)
        capacity = -(-capacity // _ROUND) * _ROUND
        with torch.inference_mode(False):  # writable in and outside of inference mode
            made = [
                torch.empty((*x.shape[:2], capacity, x.shape[3]), dtype=x.dtype, device=x.device)
                for x in (keys, values)
            ]
        for buffer, given in zip(made, (keys, values), strict=True):
            used = given.shape[2]
            buffer.narrow(2, 0, used).copy_(given)
            buffer.narrow(2, used, capacity - used).zero_()  # a pickled view contains it
        return cls(made[0], made[1])

    def hold(self, layer: Any) -> bool:
        """Whether the layer has what it handed out last: the same tensors, over the same memory.
        Not after a crop or a restored copy, behind which others may have kept longer views."""
        return all(
            own is view and own.data_ptr() == buffer.data_ptr() and own.stride() == buffer.stride()
            for own, view, buffer in zip(
                (layer.keys, layer.values), self.views, (self.keys, self.values), strict=True
            )
        )

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Write states behind the views of the layer."""
        begin, added = self.views[0].shape[2], key_states.shape[2]
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            # `data` has a version counter of its own: views that autograd has saved do not change.
            buffer.data.narrow(2, begin, added).copy_(new)

    def take(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Whether these states can be appended."""
        news, buffers = (key_states, value_states), (self.keys, self.values)
        shapes = (key_states.shape, value_states.shape)
        for new, buffer in zip(news, buffers, strict=True):
            if new.dtype != buffer.dtype or new.device != buffer.device:
                return False
        if shapes == self.shapes:
            return True
        if any(new.dim() != 4 for new in news) or shapes[0][2] != shapes[1][2]:
            return False
        for new, buffer in zip(news, buffers, strict=True):
            if new.shape[:2] != buffer.shape[:2] or new.shape[3] != buffer.shape[3]:
                return False
        self.shapes = shapes
        return True

    def show(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first tokens of the buffers, as views."""
        keys, values = self.keys.narrow(2, 0, tokens), self.values.narrow(2, 0, tokens)
        capacity = self.keys.shape[2]
        setattr(keys, _ATTRIBUTE, capacity)
        setattr(values, _ATTRIBUTE, capacity)
        self.views = keys, values
        return keys, values


_buffers: WeakKeyDictionary[Any, _Buffers | None] = WeakKeyDictionary()
"""None for layers whose tensors were replaced or cropped: those of beams are, at every token."""


def capacity_of(key: torch.Tensor, value: torch.Tensor) -> int | None:
    """Tokens of the buffers that two tensors of a growing layer are views of; None for others."""
    capacity: int | None = getattr(key, _ATTRIBUTE, None)
    return capacity if capacity == getattr(value, _ATTRIBUTE, None) else None


def growing_update(update: Callable[..., Any]) -> Callable[..., Any]:
    """`DynamicLayer.update` that appends in place where `adopt` has made buffers."""
    from transformers.cache_utils import DynamicLayer

    def append_or_update(
        self: Any, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if torch.compiler.is_compiling() or type(self) is not DynamicLayer:
            return update(self, key_states, value_states, *args, **kwargs)
        buffers = _buffers.get(self)
        if (
            buffers is None
            or torch.is_grad_enabled()
            or not (buffers.hold(self) and buffers.take(key_states, value_states))
        ):
            if not self.is_initialized:
                _buffers.pop(self, None)
            elif buffers is not None:
                _buffers[self] = None
            _local.updated = ref(self)
            return update(self, key_states, value_states, *args, **kwargs)
        tokens = self.keys.shape[2] + key_states.shape[2]
        if tokens > buffers.keys.shape[2]:
            buffers = _buffers[self] = _Buffers.of(self.keys, self.values, tokens)
            buffers.show(self.keys.shape[2])
        buffers.append(key_states, value_states)
        self.keys, self.values = buffers.show(tokens)
        return self.keys, self.values

    return append_or_update


def adopt(key: torch.Tensor, value: torch.Tensor) -> None:
    """Move the keys and values that a layer has just handed out to buffers with room for more. The
    next tokens are appended there. Nothing happens to tensors of another origin, or of a layer
    whose tensors have been replaced before.

    Args:
        key, value: `[B, H, S, D]` and `[B, H, S, Dv]` of an attention call.
    """
    last = getattr(_local, "updated", None)
    if last is None:
        return
    layer = last()
    if layer is None or layer.keys is not key or layer.values is not value:
        return
    _local.updated = None
    if layer in _buffers or key.dim() != 4 or value.dim() != 4 or torch.is_grad_enabled():
        return
    buffers = _buffers[layer] = _Buffers.of(key, value, key.shape[2])
    layer.keys, layer.values = buffers.show(key.shape[2])
