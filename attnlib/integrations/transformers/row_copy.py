"""Append one token to dense keys and values, where `ops.triton.append_rows` has no kernel."""

from __future__ import annotations

import torch

__all__ = ["RowCopy"]


class RowCopy:
    """Writes a token by copies of torch.

    Args:
        keys, values: `[B, H, capacity, D]` and `[B, H, capacity, Dv]`.
    """

    __slots__ = ("_keys", "_layouts", "_values")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._keys, self._values = keys, values
        self._layouts = tuple(
            ((*x.shape[:2], 1, x.shape[3]), x.stride(), x.stride(2)) for x in (keys, values)
        )

    def run(self, key: torch.Tensor, value: torch.Tensor, position: int) -> None:
        """Write the token at a position below the capacity."""
        (size, strides, row), (size_v, strides_v, row_v) = self._layouts
        self._keys.as_strided(size, strides, position * row).copy_(key)
        self._values.as_strided(size_v, strides_v, position * row_v).copy_(value)
