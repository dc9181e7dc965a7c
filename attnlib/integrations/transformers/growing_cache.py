"""Layers of a `DynamicCache` that append new keys and values in place.

transformers concatenates: every token copies all keys and values of a layer, and their strides are
other ones at every token. A layer whose keys attnlib has served moves them to buffers with room for
more tokens when it gets the next one. It still hands out `[B, H, S, D]`, as views of the buffers; a
sliding window moves through them. Layers of models with other attention implementations concatenate
as before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch.compiler import is_dynamo_compiling

from attnlib.integrations.transformers.cache_buffers import Buffers, may_append

__all__ = ["LAST_UPDATE", "growing_update", "note_served"]


class _LastUpdate(threading.local):
    """The layer that has concatenated last, until `note_served` saw it, and what it has handed out,
    by weak references."""

    layer: ref[Any] | None = None
    shown: tuple[ref[torch.Tensor], ref[torch.Tensor]]


LAST_UPDATE = _LastUpdate()

_ALIGNED = 16
"""Bytes between the tokens of a moving window: kernels read vectors from where it begins."""


class _Served(NamedTuple):
    """What a layer without buffers had when an attention call of attnlib got its tokens."""

    keys: ref[torch.Tensor]
    values: ref[torch.Tensor]

    def buffers(self, layer: Any, states: tuple[torch.Tensor, torch.Tensor]) -> Buffers | None:
        """Buffers for the layer with its next token; None where it must concatenate."""
        keys, values = self.keys(), self.values()
        if keys is None or values is None or states[0].shape[2] != 1:
            return None
        if layer.keys is not keys or layer.values is not values:
            return None
        window: int | None = getattr(layer, "sliding_window", None)
        if window is not None:
            rows = (x.shape[3] * x.element_size() for x in (keys, values))
            if window < 2 or any(row % _ALIGNED for row in rows):
                return None
        kept = keys, values
        return Buffers.of(kept, states, window) if may_append(states, kept, window) else None


_buffers: WeakKeyDictionary[Any, Buffers | _Served | None] = WeakKeyDictionary()
"""None for layers whose tensors were replaced or cropped: those of beams are, at every token."""
_referenced: dict[Any, Buffers | _Served | None] = vars(_buffers)["data"]
"""The same by weak references: found without a Python function."""


_GROWING = ("DynamicLayer", "LinearAttentionAndFullAttentionLayer")
_MOVING = ("DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
"""Classes of layers that may append in place, without and with windows; not those that extend them
in other ways."""


def growing_update(update: Callable[..., Any]) -> Callable[..., Any]:
    """`update` of a `DynamicLayer` or a `DynamicSlidingWindowLayer` that appends in place where
    attnlib has served the layer."""
    from transformers import cache_utils

    has_window = {
        getattr(cache_utils, name, None): name in _MOVING for name in (*_GROWING, *_MOVING)
    }

    def append_or_update(
        self: Any, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if is_dynamo_compiling() or (slides := has_window.get(type(self))) is None:
            return update(self, key_states, value_states, *args, **kwargs)
        known = _referenced.get(ref(self))
        # A layer that records its past keeps more than its window.
        in_place = not (slides and getattr(self, "record_past", True))
        if known is not None and in_place and not torch.is_grad_enabled():
            shown = None
            if type(known) is Buffers:
                shown = known.append_token(self, key_states, value_states)
            if shown is None:
                shown = _extended(self, known, key_states, value_states)
            if shown is not None:
                if slides:
                    self.cumulative_length += 1
                return shown
        several = key_states.shape[2] > 1
        if not self.is_initialized or (slides and several):
            _buffers.pop(self, None)
        elif isinstance(known, Buffers) or (known is not None and not several):
            _buffers[self] = None
        keys, values = update(self, key_states, value_states, *args, **kwargs)
        LAST_UPDATE.layer, LAST_UPDATE.shown = ref(self), (ref(keys), ref(values))
        return keys, values

    return append_or_update


def _extended(
    layer: Any, known: Buffers | _Served, key_states: torch.Tensor, value_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Append states of another layout than the last token's, or to new buffers; None where a layer
    must concatenate."""
    if isinstance(known, Buffers):
        if not (known.hold(layer) and known.take(key_states, value_states)):
            return None
        if known.end + key_states.shape[2] <= known.capacity:
            return known.append(layer, key_states, value_states)
        moved = Buffers.of(known.views, (key_states, value_states), known.window)
        tokens = known.views[0].shape[2]
    else:
        found = known.buffers(layer, (key_states, value_states))
        if found is None:
            return None
        moved, tokens = found, layer.keys.shape[2]
    _buffers[layer] = moved
    moved.prepare_next(key_states, value_states, tokens)
    return moved.show(layer, tokens + key_states.shape[2])


def note_served(key: torch.Tensor, value: torch.Tensor) -> None:
    """Note that attnlib serves keys and values. If a layer has just handed them out, it moves its
    own to buffers when it gets its next token. Nothing happens for tensors of another origin, or of
    a layer whose tensors have been replaced before.

    Args:
        key, value: `[B, H, S, D]` and `[B, H, S, Dv]` of an attention call.
    """
    last = LAST_UPDATE.layer
    if last is None:
        return
    layer, (keys, values) = last(), LAST_UPDATE.shown
    if layer is None or keys() is not key or values() is not value:
        return
    LAST_UPDATE.layer = None
    if key.dim() != 4 or value.dim() != 4 or torch.is_grad_enabled():
        return
    known = _referenced.get(last, layer)  # None is a value
    if known is layer or type(known) is _Served:
        _buffers[layer] = _Served(ref(layer.keys), ref(layer.values))
