"""Write one token of dense keys and values: by `ops.triton.append_rows`, or by copies of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from attnlib.ops.signature import tensor_check

if TYPE_CHECKING:
    from attnlib.ops.triton.append_rows import RowAppend

__all__ = ["RowCopy", "Token", "token_of"]

_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_MAX_TOKENS = 16
"""Layouts whose `Token` is kept: the layers of a model have one or two."""


class Token(NamedTuple):
    """How a token of one layout is appended to buffers of one layout.

    Attributes:
        fits: whether (key, value) have the layout.
        belongs: whether (key, value, keys, values), with the buffers, have it.
        row: writes the token.
    """

    fits: Callable[..., bool]
    belongs: Callable[..., bool]
    row: RowAppend | RowCopy


_tokens: list[Token] = []


class RowCopy:
    """Writes tokens to keys and values of one layout by copies of torch.

    Args:
        keys, values: `[B, H, capacity, D]` and `[B, H, capacity, Dv]`, of which only the layout is
            read.
    """

    __slots__ = ("_layouts",)

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._layouts = tuple(
            ((*x.shape[:2], 1, x.shape[3]), x.stride(), x.stride(2)) for x in (keys, values)
        )

    def prepare(self, *token: torch.Tensor | int) -> None:
        """Nothing is compiled."""

    def run(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        position: int,
    ) -> None:
        """Write a token at a position below the capacity."""
        (size, strides, row), (size_v, strides_v, row_v) = self._layouts
        keys.as_strided(size, strides, position * row).copy_(key)
        values.as_strided(size_v, strides_v, position * row_v).copy_(value)


def token_of(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> Token | None:
    """How a token is appended to buffers, found once per layout; None where torch cannot compare
    layouts quickly."""
    for known in _tokens:
        if known.belongs(key, value, keys, values):
            return known
    fits, belongs = tensor_check(key, value), tensor_check(key, value, keys, values)
    if fits is None or belongs is None:
        return None
    dense = all(new.stride(3) == 1 or new.shape[3] == 1 for new in (key, value))
    row: RowAppend | RowCopy = RowCopy(keys, values)
    if key.is_cuda and dense and key.dtype in _KERNEL_DTYPES:
        from attnlib.ops.triton.append_rows import RowAppend

        row = RowAppend(key, value, keys, values)
    if len(_tokens) >= _MAX_TOKENS:
        _tokens.clear()
    found = Token(fits, belongs, row)
    _tokens.append(found)
    return found
