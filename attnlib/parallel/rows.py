"""The keys that each token of a batch sees on a rank (X4).

Every token becomes a request of one token, with a block table of its own that begins at the block
of the first key that it sees.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnlib.parallel.addresses import TokenPositions
from attnlib.parallel.divisions import Division
from attnlib.parallel.local_spec import Edge, LocalForm
from attnlib.workspace import BatchLimits

__all__ = ["ROWS_UP_TO", "LocalRows", "limits_of_rows", "local_rows", "row_lengths"]


ROWS_UP_TO = 8
"""Longest new part of a request whose tokens are requests of their own: decodes and
verifications. The new tokens of longer ones are attended once, without reading the cache."""


def limits_of_rows(limits: BatchLimits | None, *, by_row: bool) -> BatchLimits | None:
    """Those of batches whose tokens are requests of their own."""
    if not isinstance(limits, BatchLimits):
        return limits  # None, or what builders refuse
    tokens = limits.max_num_tokens
    reqs = tokens if by_row else min(tokens, limits.max_num_reqs * ROWS_UP_TO)
    return replace(limits, max_num_reqs=max(reqs, limits.max_num_reqs))


class LocalRows(NamedTuple):
    """The tokens of a batch on one rank.

    Attributes:
        seq_lens: `[T]` int32, keys from the first one of the table to the last visible one.
        block_table: `[T, columns]` int32.
        empty: `[T]` bool under `LocalForm.is_decoder`, tokens without keys here, which see one that
            they must not; else None.
        row: `[T, 3]` int32 under `Edge.FUNCTION`, else None: keys of the table before the first
            visible one; local index of the first key of the table; position of the token.
    """

    seq_lens: Tensor
    block_table: Tensor
    empty: Tensor | None
    row: Tensor | None


class _Ranges(NamedTuple):
    """Local indices `[T]` of the first key of a row's table, its first visible key, and its end."""

    table: Tensor
    first: Tensor
    end: Tensor

    def lengths(self, form: LocalForm) -> Tensor:
        """Keys of each row from the first one of its table on, int32."""
        return (self.end - self.table).clamp(min=int(form.is_decoder)).to(torch.int32)


def _ranges(
    form: LocalForm, division: Division, rank: int, tokens: TokenPositions, seq_lens: Tensor
) -> _Ranges:
    position, (before, after) = tokens.position, form.reach
    length = seq_lens[tokens.request] if seq_lens.shape[0] else torch.zeros_like(position)
    end = length if after is None else torch.minimum(length, position + (after + 1))
    end = torch.where(position < 0, 0, end)
    first = torch.zeros_like(position)
    if before is not None:
        first = (position - before).clamp(min=0)
    if form.chunk:
        begin = position.clamp(min=0) // form.chunk * form.chunk
        first, end = torch.maximum(first, begin), torch.minimum(end, begin + form.chunk)
    first, end = division.count(first, rank), division.count(end, rank)
    return _Ranges(first // form.spec.block_size * form.spec.block_size, first, end)


def row_lengths(
    form: LocalForm, division: Division, rank: int, tokens: TokenPositions, seq_lens: Tensor
) -> Tensor:
    """`LocalRows.seq_lens`, `[T]` int32; arguments as in `local_rows`."""
    return _ranges(form, division, rank, tokens, seq_lens).lengths(form)


def local_rows(
    form: LocalForm,
    division: Division,
    rank: int,
    tokens: TokenPositions,
    seq_lens: Tensor,
    block_table: Tensor,
) -> LocalRows:
    """The rows of a batch. Runs on the device without a sync.

    Args:
        form, division, rank: of the layer.
        tokens: of the batch.
        seq_lens: `[R]` int32, context and new tokens on all ranks.
        block_table: `[R, columns]` int32, blocks of the local indices of each request.
    """
    found, block_size = _ranges(form, division, rank, tokens, seq_lens), form.spec.block_size
    request = tokens.request[:, None]
    columns = torch.arange(table_columns(form, division, block_table), device=seq_lens.device)
    if form.cuts:
        columns = columns + (found.table // block_size)[:, None]
        columns = columns.clamp(max=max(block_table.shape[1] - 1, 0))
    table = block_table[request, columns] if block_table.shape[0] else block_table
    empty = row = None
    if form.is_decoder:
        empty = found.end <= found.first
        table = table.masked_fill((found.end <= found.table)[:, None], 0)
    if form.edge is Edge.FUNCTION:
        hidden = found.first - found.table
        row = torch.stack((hidden, found.table, tokens.position), 1).to(torch.int32)
    return LocalRows(found.lengths(form), table, empty, row)


def table_columns(form: LocalForm, division: Division, block_table: Tensor) -> int:
    """Columns of the table of a row: those of a request, or of the longest range."""
    columns = block_table.shape[1]
    if not form.cuts:
        return columns
    return min(columns, form.longest_range(division) // form.spec.block_size + 2)
