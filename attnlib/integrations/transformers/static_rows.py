"""Tokens of a static cache on a CPU are copied to their place.

transformers makes a tensor of positions for every layer and token, and copies by index: a third
more time, which small models notice. Layers of models with other attention implementations do so as
before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.compiler import is_dynamo_compiling

from attnlib.integrations.transformers.row_copy import RowCopy
from attnlib.integrations.transformers.static_memory import has_owner
from attnlib.ops.signature import tensor_check

__all__ = ["copied_tokens"]


class _Rows:
    """Writes single tokens to the keys and values of a layer.

    Args:
        layer: an initialized layer.
    """

    __slots__ = ("_address", "_count", "_fits", "_keys", "_row", "_values")

    def __init__(self, layer: Any) -> None:
        self._keys, self._values = layer.keys, layer.values
        self._row = RowCopy(self._keys, self._values)
        self._fits: Callable[..., bool] | None = None
        # The memory of the counter of tokens: operations of torch on it took 5 of 29 us.
        self._count: Any = None
        self._address = 0

    def append(self, layer: Any, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Write a token behind those of the layer; False for what `update` has to do, or refuse."""
        if layer.keys is not self._keys or layer.values is not self._values:
            return False
        fits = self._fits
        if (fits is None or not fits(key, value)) and not self._take(key, value):
            return False
        counter = layer.cumulative_length
        if counter.data_ptr() != self._address:
            self._count = memoryview(counter.detach().view(1).numpy())
            self._address = counter.data_ptr()
        count = self._count
        position = count[0]
        if not 0 <= position < self._keys.shape[2]:
            return False
        self._row.run(key, value, self._keys, self._values, position)
        count[0] = position + 1
        return True

    def _take(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether these states are a token of the layer; the next ones are compared with them."""
        for new, kept in ((key, self._keys), (value, self._values)):
            if type(new) is not torch.Tensor or new.dim() != 4 or new.shape[2] != 1:
                return False
            if new.dtype != kept.dtype or new.device != kept.device:
                return False
            if new.shape[:2] != kept.shape[:2] or new.shape[3] != kept.shape[3]:
                return False
        self._fits = tensor_check(key, value)
        return self._fits is not None


_rows: WeakKeyDictionary[Any, _Rows] = WeakKeyDictionary()
_referenced: dict[Any, _Rows] = vars(_rows)["data"]
"""The same by weak references: found without a Python function."""


def copied_tokens(update: Callable[..., Any]) -> Callable[..., Any]:
    """`update` of a `StaticLayer` that copies single tokens where attnlib serves the model."""
    from transformers import cache_utils

    static_layer = cache_utils.StaticLayer

    def copy_or_update(
        self: Any, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if is_dynamo_compiling():
            return update(self, key_states, value_states, *args, **kwargs)
        rows = _referenced.get(ref(self))
        if rows is not None and rows.append(self, key_states, value_states):
            return rows._keys, rows._values
        begins = not self.is_initialized
        shown = update(self, key_states, value_states, *args, **kwargs)
        if begins and type(self) is static_layer and has_owner(self) and self.keys.is_cpu:
            _rows[self] = _Rows(self)
        return shown

    return copy_or_update
