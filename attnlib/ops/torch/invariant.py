"""Attention whose bits per row depend on nothing but that row and its keys (M8, `batch_invariant=True`).

A matrix product may sum in another order when its shape or strides change. So rows are computed in tiles that are cut
at fixed positions of the request, multiples of `TILE` whatever the chunking, against copies of the keys that are cut
at fixed positions too; rows and keys that do not exist are masked zeros. The shapes that a row is computed with then
follow from its position (for a layer that looks ahead, from the sequence length too), and so do its bits: decoded or
prefilled, alone or in a batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.general import general_attention
from attnlib.ops.torch.mask import key_range
from attnlib.ops.torch.request import KeySpan, QueryRows, fill_blind, rows_bias, score_dtype

__all__ = ["TILE", "attend_rows_invariant"]

TILE = 16


def attend_rows_invariant(
    rows: QueryRows, span: KeySpan, params: AttentionParams, out: Tensor, lse: Tensor | None
) -> None:
    """As `request.attend_rows`, by tiles of fixed shape."""
    padded_len = -(-rows.seq_len // TILE) * TILE
    for first in range(rows.first // TILE * TILE, rows.last + 1, TILE):
        begin, end = max(first, rows.first), min(first + TILE, rows.last + 1)
        target = slice(begin - rows.first, end - rows.first)
        tile_out, tile_lse = out[target], None if lse is None else lse[target]
        key_start, key_end = key_range(first, first + TILE - 1, padded_len, rows.causal, params)
        if key_end <= key_start:
            fill_blind(tile_out, tile_lse, params.sinks)
            continue
        tile = _tile(rows, first, begin, end)
        keys = _padded(span, key_start, key_end, score_dtype(rows.query))
        bias = rows_bias(tile, key_start, key_end, params)
        result, logs = general_attention(
            tile.query, keys.key, keys.value, bias, params, span.k_factor, span.v_factor
        )
        tile_out.copy_(result[begin - first : end - first])
        if tile_lse is not None:
            tile_lse.copy_(logs[begin - first : end - first])


def _tile(rows: QueryRows, first: int, begin: int, end: int) -> QueryRows:
    part = rows.part(begin - rows.first, end - rows.first)
    missing = (begin - first, first + TILE - end)
    bias = None if part.bias is None else torch.nn.functional.pad(part.bias, (0, 0, *missing))
    return replace(
        part,
        first=first,
        query=torch.nn.functional.pad(part.query, (0, 0, 0, 0, *missing)),
        bias=bias,
    )


def _padded(span: KeySpan, start: int, end: int, dtype: torch.dtype) -> KeySpan:
    """Positions `[start, end)` in memory of one order, zeros where the span holds none."""
    held_start, held_end = max(start, span.start), min(end, span.start + span.key.shape[0])

    def padded(values: Tensor) -> Tensor:
        num_heads, size = values.shape[1:]
        rows = torch.zeros(
            num_heads, end - start, size, dtype=dtype, device=values.device
        ).transpose(0, 1)
        if held_start < held_end:
            held = values[held_start - span.start : held_end - span.start]
            rows[held_start - start : held_end - start] = held.to(dtype)
        return rows

    return replace(span, key=padded(span.key), value=padded(span.value), start=start)
