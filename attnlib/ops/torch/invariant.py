"""Batch-invariant attention: the bits of a row depend on that row and its keys only (M8).

A matrix product may sum in another order when its shape or strides change. Query rows are therefore
computed in tiles that start at multiples of `TILE` in the request, independent of how the prompt is
chunked, and keys are copied to tiles that start at fixed positions too. Rows and keys outside the
request are zeros and masked. The shapes that a row is computed with then depend on its position
only (for a layer that is not causal, on the sequence length too), and so do its bits: decoded or
prefilled, alone or in a batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.general import general_attention
from attnlib.ops.torch.mask import key_range
from attnlib.ops.torch.request import KeySpan, QueryRows, fill_empty_rows
from attnlib.ops.torch.row_terms import rows_bias, rows_score, score_dtype

__all__ = ["TILE", "attend_rows_invariant"]

TILE = 16
"""Query rows per tile."""


def attend_rows_invariant(
    rows: QueryRows, span: KeySpan, params: AttentionParams, out: Tensor, lse: Tensor | None
) -> None:
    """`request.attend_rows` in tiles of fixed shapes; the same arguments."""
    padded_len = -(-rows.seq_len // TILE) * TILE
    for first in range(rows.first // TILE * TILE, rows.last + 1, TILE):
        begin, end = max(first, rows.first), min(first + TILE, rows.last + 1)
        target = slice(begin - rows.first, end - rows.first)
        tile_out, tile_lse = out[target], None if lse is None else lse[target]
        key_start, key_end = key_range(first, first + TILE - 1, padded_len, rows.causal, params)
        if key_end <= key_start:
            fill_empty_rows(tile_out, tile_lse, params.sinks)
            continue
        tile = _query_tile(rows, first, begin, end)
        keys = _padded_span(span, key_start, key_end, score_dtype(rows.query))
        bias = rows_bias(tile, key_start, key_end, params)
        result, logs = general_attention(
            tile.query,
            keys.key,
            keys.value,
            bias,
            params,
            span.k_factor,
            span.v_factor,
            rows_score(tile, key_start, key_end, params),
        )
        tile_out.copy_(result[begin - first : end - first])
        if tile_lse is not None:
            tile_lse.copy_(logs[begin - first : end - first])


def _query_tile(rows: QueryRows, first: int, begin: int, end: int) -> QueryRows:
    """Positions `[first, first + TILE)`: rows `[begin, end)`, and zeros before and after them."""
    selected = rows.select(begin - rows.first, end - rows.first)
    padding = (begin - first, first + TILE - end)
    bias = selected.bias
    if bias is not None:
        bias = torch.nn.functional.pad(bias, (0, 0, *padding))
    query = torch.nn.functional.pad(selected.query, (0, 0, 0, 0, *padding))
    return replace(selected, first=first, query=query, bias=bias)


def _padded_span(span: KeySpan, start: int, end: int, dtype: torch.dtype) -> KeySpan:
    """Positions `[start, end)` in one memory order, zeros where `span` has no position."""
    span_start, span_end = max(start, span.start), min(end, span.start + span.key.shape[0])

    def padded(values: Tensor) -> Tensor:
        num_heads, size = values.shape[1:]
        shape = num_heads, end - start, size
        rows = torch.zeros(shape, dtype=dtype, device=values.device).transpose(0, 1)
        if span_start < span_end:
            valid = values[span_start - span.start : span_end - span.start]
            rows[span_start - start : span_end - start] = valid.to(dtype)
        return rows

    return replace(span, key=padded(span.key), value=padded(span.value), start=start)
