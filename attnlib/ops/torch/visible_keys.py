"""The batch of single queries whose visible keys a mask shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlib.ops.checks import check_visible_keys

__all__ = ["KeyLister", "list_visible_keys"]


@torch.no_grad()
def list_visible_keys(
    visible: Tensor, row_distance: int, *, table: Tensor, lengths: Tensor, starts: Tensor
) -> None:
    """Write the block table, the lengths and the query starts of one query per row.

    A block is one key: key s of row r is block r * row_distance + s. Nothing is read on the host.

    Args:
        visible: `[R, S]` bool, last stride 1.
        row_distance: between two rows, in blocks.
        table: `[R, M]` int32, written: the ids of the visible keys in order, up to M, then -1.
        lengths: `[R]` int32, written: visible keys of each row, up to M.
        starts: `[R + 1]` int32, written: 0 to R.

    Raises:
        ContractError: tensors of other shapes, dtypes or strides.
    """
    check_visible_keys(visible, table, lengths, starts)
    (rows, keys), width = visible.shape, table.shape[1]
    options: Any = {"dtype": torch.int32, "device": visible.device}
    rank = visible.cumsum(1) - 1
    ids = torch.arange(rows, **options)[:, None] * row_distance + torch.arange(keys, **options)
    # Hidden keys go to a column of their own.
    order = torch.where(visible, rank, keys)
    wide = torch.full((rows, keys + 1), -1, **options).scatter_(1, order, ids)
    listed = min(keys, width)
    table[:, :listed].copy_(wide[:, :listed])
    table[:, listed:].fill_(-1)
    torch.clamp(visible.sum(1, dtype=torch.int32), max=width, out=lengths)
    torch.arange(rows + 1, out=starts)


class KeyLister:
    """Lists the keys of one mask after another in the same tensors: `run(visible)`.

    Args:
        row_distance, table, lengths, starts: as in `list_visible_keys`.
    """

    def __init__(
        self, row_distance: int, *, table: Tensor, lengths: Tensor, starts: Tensor
    ) -> None:
        self._distance, self._tensors = row_distance, (table, lengths, starts)

    def run(self, visible: Tensor) -> None:
        """Write the tensors for a mask, see `list_visible_keys`."""
        table, lengths, starts = self._tensors
        list_visible_keys(visible, self._distance, table=table, lengths=lengths, starts=starts)
