"""Buffers with room for more tokens, which take the place of the tensors of a cache layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnlib.integrations.transformers.row_copy import Token, token_of

__all__ = ["CAPACITY", "Buffers", "capacity_of", "may_append"]

CAPACITY = "_attnlib_capacity"
"""Attribute of tensors that begin with the buffers of a growing layer: tokens of the buffers."""

_LEAST_ROOM = 128
"""Tokens that a new buffer has room for beyond those it holds, at least."""
_ROOM = 8
"""A new buffer has room for 1 / _ROOM of its tokens more."""
_ROUND = 64
"""Buffers have a multiple of these tokens, so that few strides occur."""


@dataclass(eq=False)
class Buffers:
    """Keys and values of a layer, `[B, H, capacity, D]` and `[B, H, capacity, Dv]`.

    Only rows behind everything that was handed out are written, so that tensors which others have
    kept never change.

    Attributes:
        keys, values: the memory.
        targets: the same memory, with version counters of its own: views that autograd has saved do
            not change with a write.
        places: (address, strides) of what the layer has of keys and values.
        capacity: tokens.
        sizes: (B, H, D, Dv).
        window: tokens that are shown to a query, one more than the layer keeps; None for all.
        begin, end: the tokens that the layer keeps.
        views: these tokens.
        token: how tokens like the last one are appended; None after several tokens.
    """

    keys: torch.Tensor
    values: torch.Tensor
    targets: tuple[torch.Tensor, torch.Tensor]
    places: tuple[Any, Any]
    capacity: int
    sizes: tuple[int, int, int, int]
    window: int | None
    begin: int = 0
    end: int = 0
    views: tuple[Any, Any] = (None, None)
    token: Token | None = None

    @classmethod
    def of(
        cls,
        kept: tuple[torch.Tensor, torch.Tensor],
        states: tuple[torch.Tensor, torch.Tensor],
        window: int | None,
    ) -> Buffers:
        """Buffers that hold keys and values of a layer and then `states`, which may be appended to
        them (`may_append`), and have room for more."""
        tokens = kept[0].shape[2] + states[0].shape[2]
        capacity = _with_room(tokens)
        if window is not None and capacity > window:
            capacity = _with_room(window)  # as when the window is full, so that strides stay
        # Writable in and outside of inference mode, whose end alone would record gradients.
        with torch.inference_mode(False), torch.no_grad():
            keys, values = (
                torch.cat((old, new, _first_repeated(old, capacity - tokens)), 2)
                for old, new in zip(kept, states, strict=True)
            )
        places = (keys.data_ptr(), keys.stride()), (values.data_ptr(), values.stride())
        sizes = (*keys.shape[:2], keys.shape[3], values.shape[3])
        return cls(keys, values, (keys.data, values.data), places, capacity, sizes, window)

    def hold(self, layer: Any) -> bool:
        """Whether the layer has what it got last: the same tensors, over the same memory. Not after
        a crop or a restored copy, behind which others may have kept longer views."""
        keys, values = self.views
        if layer.keys is not keys or layer.values is not values:
            return False
        places = (keys.data_ptr(), keys.stride()), (values.data_ptr(), values.stride())
        return places == self.places

    def append_token(
        self, layer: Any, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Append a token of the layout of the last one, and show what the next query sees; None
        where it is another one, or where there is no room."""
        token, end = self.token, self.end
        kept, kept_v = self.views
        if token is None or end >= self.capacity:
            return None
        if layer.keys is not kept or layer.values is not kept_v:
            return None
        places = (kept.data_ptr(), kept.stride()), (kept_v.data_ptr(), kept_v.stride())
        if places != self.places or not token.fits(key_states, value_states):
            return None  # `hold`, without its call
        token.row.run(key_states, value_states, *self.targets, end)
        tokens, (batch, heads, size, size_v) = end + 1 - self.begin, self.sizes
        if self.window is not None and tokens >= self.window:
            return self.show(layer, end + 1)
        # `show`, without its call.
        keys: Any = self.keys.as_strided((batch, heads, tokens, size), places[0][1])
        values: Any = self.values.as_strided((batch, heads, tokens, size_v), places[1][1])
        keys._attnlib_capacity = values._attnlib_capacity = self.capacity
        self.views, self.end = (keys, values), end + 1
        layer.keys, layer.values = keys, values
        return self.views

    def append(
        self, layer: Any, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states that `take` accepted, and show all tokens."""
        end, added = self.end, key_states.shape[2]
        if self.token is not None:
            self.token.row.run(key_states, value_states, *self.targets, end)
        else:
            keys, values = self.targets
            keys.narrow(2, end, added).copy_(key_states)
            values.narrow(2, end, added).copy_(value_states)
        return self.show(layer, end + added)

    def take(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Whether these states can be appended."""
        if self.token is not None and self.token.fits(key_states, value_states):
            return True
        news, buffers = (key_states, value_states), (self.keys, self.values)
        if not may_append(news, buffers, self.window):
            return False
        self.token = token_of(*news, *buffers) if key_states.shape[2] == 1 else None
        return True

    def prepare_next(
        self, key_states: torch.Tensor, value_states: torch.Tensor, place: int
    ) -> None:
        """Find, and compile where it was never launched, what appends a token like this one.

        Args:
            key_states, value_states: the states that the buffers have at `place`.
        """
        if self.take(key_states, value_states) and self.token is not None:
            self.token.row.prepare(key_states, value_states, *self.targets, place)

    def show(self, layer: Any, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the layer the tokens before `end`, or those that its window keeps.

        Returns:
            Views of the tokens that the next query sees, with that of its own at the end.
        """
        (address, strides), (address_v, strides_v) = self.places
        batch, heads, size, size_v = self.sizes
        begin, window, self.end = self.begin, self.window, end
        # What `narrow` returns, in half of its time.
        if window is None or end - begin < window:
            tokens = end - begin  # no window has moved yet: they begin with the buffers
            keys: Any = self.keys.as_strided((batch, heads, tokens, size), strides)
            values: Any = self.values.as_strided((batch, heads, tokens, size_v), strides_v)
            keys._attnlib_capacity = values._attnlib_capacity = self.capacity
            self.views = layer.keys, layer.values = keys, values
            return self.views
        shape, shape_v = (batch, heads, window, size), (batch, heads, window, size_v)
        row, row_v, first = strides[2], strides_v[2], end - window
        shown = (
            self.keys.as_strided(shape, strides, first * row),
            self.values.as_strided(shape_v, strides_v, first * row_v),
        )
        kept, kept_v = (batch, heads, window - 1, size), (batch, heads, window - 1, size_v)
        keys = self.keys.as_strided(kept, strides, (first + 1) * row)
        values = self.values.as_strided(kept_v, strides_v, (first + 1) * row_v)
        moved = (first + 1 - begin) * keys.element_size()
        self.places = (address + moved * row, strides), (address_v + moved * row_v, strides_v)
        self.begin = first + 1
        self.views = layer.keys, layer.values = keys, values
        return shown


def _with_room(tokens: int) -> int:
    capacity = tokens + max(_LEAST_ROOM, tokens // _ROOM)
    return -(-capacity // _ROUND) * _ROUND


def capacity_of(key: torch.Tensor, value: torch.Tensor) -> int | None:
    """Tokens of the buffers that two tensors of a growing layer begin with; None for others."""
    capacity: int | None = getattr(key, CAPACITY, None)
    return capacity if capacity == getattr(value, CAPACITY, None) else None


def may_append(
    states: tuple[torch.Tensor, torch.Tensor],
    kept: tuple[torch.Tensor, torch.Tensor],
    window: int | None,
) -> bool:
    """Whether new keys and values can be appended to those of a layer, or to its buffers.

    Args:
        states: new keys and values.
        kept: what the layer has.
        window: as in `Buffers`.
    """
    for new, old in zip(states, kept, strict=True):
        if new.dtype != old.dtype or new.device != old.device or new.dim() != 4:
            return False
        if type(new) is not torch.Tensor:  # such as those of torch.export
            return False
        if new.shape[:2] != old.shape[:2] or new.shape[3] != old.shape[3]:
            return False
    tokens = states[0].shape[2]
    return tokens == states[1].shape[2] and (tokens == 1 or window is None)


def _first_repeated(states: torch.Tensor, tokens: int) -> torch.Tensor:
    """The first token several times: what is in the room of a buffer, which a pickled view
    contains. Memory that is written at once needs no other launch."""
    (batch, heads, _, size), (row, head, _, element) = states.shape, states.stride()
    return states.as_strided((batch, heads, tokens, size), (row, head, 0, element))
