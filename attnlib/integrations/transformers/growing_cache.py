"""Layers of a `DynamicCache` that append new keys and values in place.

transformers concatenates: every token copies all keys and values of a layer, and their strides are
other ones at every token. A layer whose keys attnlib has served moves them to buffers with room for
more tokens when it gets the next one. It still hands out `[B, H, S, D]`, as views of the buffers.
Layers of models with other attention implementations, and sliding windows, concatenate as before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch.compiler import is_dynamo_compiling

from attnlib.integrations.transformers.row_copy import RowCopy
from attnlib.ops.signature import tensor_check

if TYPE_CHECKING:
    from attnlib.ops.triton.append_rows import RowAppend

__all__ = ["LAST_UPDATE", "capacity_of", "growing_update", "note_served"]

_LEAST_ROOM = 128
"""Tokens that a new buffer has room for beyond those it holds, at least."""
_ROOM = 8
"""A new buffer has room for 1 / _ROOM of its tokens more."""
_ROUND = 64
"""Buffers have a multiple of these tokens, so that few strides occur."""

LAST_UPDATE = threading.local()
"""In `layer` the one that has concatenated last, by weak reference, until `note_served` saw it."""

_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(eq=False)
class _Buffers:
    """Keys and values of a layer, `[B, H, capacity, D]` and `[B, H, capacity, Dv]`.

    Only rows behind everything that was handed out are written, so that tensors which others have
    kept never change.

    Attributes:
        keys, values: the memory.
        targets: the same memory, with version counters of its own: views that autograd has saved do
            not change with a write.
        places: (address, strides) of keys and values.
        capacity: tokens.
        sizes: (B, H, D, Dv).
        views: what the layer handed out last.
        fits: whether states have the layout of those that were appended last.
        append_row: writes one token of this layout; None for several tokens.
    """

    keys: torch.Tensor
    values: torch.Tensor
    targets: tuple[torch.Tensor, torch.Tensor]
    places: tuple[Any, Any]
    capacity: int
    sizes: tuple[int, int, int, int]
    views: tuple[Any, Any] = (None, None)
    fits: Callable[..., bool] | None = None
    append_row: RowAppend | RowCopy | None = None

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
        keys, values = made
        places = (keys.data_ptr(), keys.stride()), (values.data_ptr(), values.stride())
        sizes = (*keys.shape[:2], keys.shape[3], values.shape[3])
        return cls(keys, values, (keys.data, values.data), places, capacity, sizes)

    def hold(self, layer: Any) -> bool:
        """Whether the layer has what it handed out last: the same tensors, over the same memory.
        Not after a crop or a restored copy, behind which others may have kept longer views."""
        keys, values = self.views
        if layer.keys is not keys or layer.values is not values:
            return False
        places = (keys.data_ptr(), keys.stride()), (values.data_ptr(), values.stride())
        return places == self.places

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Write states behind the views of the layer."""
        begin, added = self.views[0].shape[2], key_states.shape[2]
        if self.append_row is not None:
            self.append_row.run(key_states, value_states, begin)
            return
        keys, values = self.targets
        keys.narrow(2, begin, added).copy_(key_states)
        values.narrow(2, begin, added).copy_(value_states)

    def extend(
        self, layer: Any, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Append states behind what the layer has, and show all tokens; None where they cannot be
        appended. A token of the layout of the last one takes the fewest calls."""
        row, fits, tokens = self.append_row, self.fits, self.views[0].shape[2]
        if row is None or fits is None or tokens >= self.capacity:
            return self._extend(layer, key_states, value_states)
        if not (self.hold(layer) and fits(key_states, value_states)):
            return self._extend(layer, key_states, value_states)
        row.run(key_states, value_states, tokens)
        return self.show(tokens + 1)

    def _extend(
        self, layer: Any, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not (self.hold(layer) and self.take(key_states, value_states)):
            return None
        buffers, (keys, values) = self, self.views
        tokens = keys.shape[2] + key_states.shape[2]
        if tokens > self.capacity:
            buffers = _buffers[layer] = _Buffers.of(keys, values, tokens)
            buffers.show(keys.shape[2])
            buffers.take(key_states, value_states)
        buffers.append(key_states, value_states)
        return buffers.show(tokens)

    def take(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Whether these states can be appended."""
        if self.fits is not None and self.fits(key_states, value_states):
            return True
        news, buffers = (key_states, value_states), (self.keys, self.values)
        for new, buffer in zip(news, buffers, strict=True):
            if new.dtype != buffer.dtype or new.device != buffer.device or new.dim() != 4:
                return False
            if new.shape[:2] != buffer.shape[:2] or new.shape[3] != buffer.shape[3]:
                return False
        if key_states.shape[2] != value_states.shape[2]:
            return False
        self.fits = tensor_check(key_states, value_states)
        self.append_row = None
        dense = all(new.stride(3) == 1 or new.shape[3] == 1 for new in news)
        if key_states.shape[2] == 1:
            self.append_row = RowCopy(*self.targets)
            if self.fits is not None and key_states.is_cuda and dense:
                if key_states.dtype in _KERNEL_DTYPES:
                    self.append_row = _row_append(key_states, value_states, *buffers)
        return True

    def show(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first tokens of the buffers, as views."""
        (_, strides), (_, strides_v) = self.places
        batch, heads, size, size_v = self.sizes
        # What `narrow` returns, in half of its time.
        keys: Any = self.keys.as_strided((batch, heads, tokens, size), strides)
        values: Any = self.values.as_strided((batch, heads, tokens, size_v), strides_v)
        keys._attnlib_capacity = values._attnlib_capacity = self.capacity
        self.views = keys, values
        return keys, values


def _row_append(*tensors: torch.Tensor) -> RowAppend:
    from attnlib.ops.triton.append_rows import RowAppend

    return RowAppend(*tensors)


class _Served(NamedTuple):
    """What a layer without buffers has handed out to an attention call of attnlib."""

    keys: ref[torch.Tensor]
    values: ref[torch.Tensor]

    def extend(
        self, layer: Any, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Move the layer to buffers with its next token; None where it must concatenate."""
        keys, values = self.keys(), self.values()
        if keys is None or values is None or key_states.shape[2] != 1:
            return None
        if layer.keys is not keys or layer.values is not values:
            return None
        buffers = _buffers[layer] = _Buffers.of(keys, values, keys.shape[2] + 1)
        layer.keys, layer.values = buffers.show(keys.shape[2])
        return buffers.extend(layer, key_states, value_states)


_buffers: WeakKeyDictionary[Any, _Buffers | _Served | None] = WeakKeyDictionary()
"""None for layers whose tensors were replaced or cropped: those of beams are, at every token."""
_referenced: dict[Any, _Buffers | _Served | None] = vars(_buffers)["data"]
"""The same by weak references: found without a Python function."""


def capacity_of(key: torch.Tensor, value: torch.Tensor) -> int | None:
    """Tokens of the buffers that two tensors of a growing layer are views of; None for others."""
    capacity: int | None = getattr(key, "_attnlib_capacity", None)
    return capacity if capacity == getattr(value, "_attnlib_capacity", None) else None


def growing_update(update: Callable[..., Any]) -> Callable[..., Any]:
    """`DynamicLayer.update` that appends in place where attnlib has served the layer."""
    from transformers.cache_utils import DynamicLayer

    def append_or_update(
        self: Any, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if is_dynamo_compiling() or type(self) is not DynamicLayer:
            return update(self, key_states, value_states, *args, **kwargs)
        known = _referenced.get(ref(self))
        if known is not None and not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
            shown = known.extend(self, key_states, value_states)
            if shown is not None:
                self.keys, self.values = shown
                return shown
        if not self.is_initialized:
            _buffers.pop(self, None)
        elif isinstance(known, _Buffers) or (known is not None and key_states.shape[2] == 1):
            _buffers[self] = None
        LAST_UPDATE.layer = ref(self)
        return update(self, key_states, value_states, *args, **kwargs)

    return append_or_update


def note_served(key: torch.Tensor, value: torch.Tensor) -> None:
    """Note that attnlib serves keys and values. If a layer has just handed them out, it moves them
    to buffers when it gets its next token. Nothing happens for tensors of another origin, or of a
    layer whose tensors have been replaced before.

    Args:
        key, value: `[B, H, S, D]` and `[B, H, S, Dv]` of an attention call.
    """
    last = getattr(LAST_UPDATE, "layer", None)
    if last is None:
        return
    layer = last()
    if layer is None or layer.keys is not key or layer.values is not value:
        return
    LAST_UPDATE.layer = None
    if key.dim() != 4 or value.dim() != 4 or torch.is_grad_enabled():
        return
    if layer not in _buffers or isinstance(_buffers[layer], _Served):
        _buffers[layer] = _Served(ref(key), ref(value))
