"""Attention of one request's query rows, in blocks of rows.

Each block reads only the range of keys that its rows see, so the cost of a window layer follows the
window and not the sequence. On a CPU an explicit bias narrows the range, too. A block uses fused
attention where that computes the same result, and the general implementation otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.fused import can_fuse, fused_attention
from attnlib.ops.torch.general import general_attention
from attnlib.ops.torch.mask import key_range
from attnlib.ops.torch.quant import compute_dtype
from attnlib.ops.torch.row_terms import bias_over_keys, rows_bias, rows_score, score_dtype

__all__ = [
    "KeySpan",
    "QueryRows",
    "attend_rows",
    "bias_over_keys",
    "fill_empty_rows",
    "rows_bias",
    "rows_score",
    "score_dtype",
]

# Rows per fused block: enough to occupy the kernel, few enough to keep the mask of a block small.
_FUSED_ROWS = 512
# With an explicit bias, which may hide other keys from other rows, as for packed documents.
_BIASED_ROWS = 128
# Scores that the general implementation holds at a time: 64 MiB in float32, and on a CPU what fits
# a cache, because it passes over them several times. Blocks of few rows would read keys too often.
_GENERAL_SCORES = 1 << 24
_CPU_SCORES = 1 << 19
_LEAST_ROWS = 32


@dataclass(frozen=True)
class QueryRows:
    """Consecutive query rows of one request.

    Attributes:
        query: `[L, Hq, D]`.
        first: position of row 0; may be negative.
        seq_len: the request's length.
        span_start: position of the request's first query row, where the explicit bias begins.
        causal: the request's flag; a tensor if its value is only known on the device.
        bias: `[L, query_len]`, explicit bias of these rows over the request's query span, or None.
        request: the request's row in the batch tensors of a score function.
    """

    query: Tensor
    first: int
    seq_len: int
    span_start: int
    causal: bool | Tensor
    bias: Tensor | None = None
    request: int = 0

    @property
    def last(self) -> int:
        """Position of the last row."""
        return self.first + self.query.shape[0] - 1

    def select(self, begin: int, end: int) -> QueryRows:
        """Rows `[begin, end)` of these."""
        bias = None if self.bias is None else self.bias[begin:end]
        return replace(self, query=self.query[begin:end], first=self.first + begin, bias=bias)


@dataclass(frozen=True)
class KeySpan:
    """Keys and values of consecutive positions of one request, as stored.

    Attributes:
        key: `[S, Hkv, D]`.
        value: `[S, Hkv, Dv]`.
        start: position of row 0.
        k_factor: factor of stored keys: a float, or `[1]` or `[Hkv]` float32.
        v_factor: factor of stored values, likewise.
    """

    key: Tensor
    value: Tensor
    start: int = 0
    k_factor: float | Tensor = 1.0
    v_factor: float | Tensor = 1.0

    def select(self, start: int, end: int) -> KeySpan:
        """Positions `[start, end)` of these."""
        rows = slice(start - self.start, end - self.start)
        return replace(self, key=self.key[rows], value=self.value[rows], start=start)


def attend_rows(
    rows: QueryRows, span: KeySpan, params: AttentionParams, out: Tensor, lse: Tensor | None
) -> None:
    """Write the attention of `rows`.

    Args:
        rows: the query rows.
        span: holds at least the keys that some row sees (`mask.key_range`).
        params: how scores are computed and masked.
        out: `[L, Hq, Dv]`, written.
        lse: `[L, Hq]`, written when given.
    """
    num_rows, num_heads, _ = rows.query.shape
    dtype = compute_dtype(rows.query, span.key, span.k_factor, span.v_factor)
    fused = can_fuse(rows.query.device, dtype, params)
    step = _FUSED_ROWS if fused else _general_rows(rows)
    if fused and _is_square_causal(rows, 0, rows.seq_len, params):
        step = num_rows
    elif fused and _narrows(rows):
        step = _BIASED_ROWS
    for begin in range(0, num_rows, step):
        block = rows.select(begin, min(begin + step, num_rows))
        start, end = key_range(block.first, block.last, block.seq_len, block.causal, params)
        if _narrows(block):
            start, end = _range_of_bias(block, start, end)
        block_out = out[begin : begin + step]
        block_lse = None if lse is None else lse[begin : begin + step]
        if end <= start:
            fill_empty_rows(block_out, block_lse, params.sinks)
        else:
            attend = _attend_fused if fused else _attend_general
            result, logs = attend(block, span.select(start, end), params, dtype)
            block_out.copy_(result)
            if block_lse is not None:
                block_lse.copy_(logs)


def _narrows(rows: QueryRows) -> bool:
    """Whether the bias is searched for hidden keys: not for a few rows, and not on a GPU, where the
    host would wait."""
    on_cpu = rows.query.device.type == "cpu"
    return on_cpu and rows.bias is not None and rows.query.shape[0] >= _LEAST_ROWS


def _range_of_bias(rows: QueryRows, start: int, end: int) -> tuple[int, int]:
    """The part of `[start, end)` without the keys at its ends that the bias hides from all rows."""
    assert rows.bias is not None
    first, last = rows.span_start, min(rows.span_start + rows.bias.shape[1], rows.seq_len)
    seen = (rows.bias[:, : last - first] != -torch.inf).any(0).nonzero()
    if end <= last:
        end = min(end, first + int(seen[-1]) + 1 if len(seen) else first)
    if start >= first:
        start = max(start, first + int(seen[0]) if len(seen) else last)
    return start, end


def _general_rows(rows: QueryRows) -> int:
    """Rows of a block of the general implementation."""
    scores = max(1, rows.query.shape[1] * rows.seq_len)
    most = max(1, _GENERAL_SCORES // scores)
    if rows.query.device.type != "cpu":
        return most
    return min(most, max(_LEAST_ROWS, _CPU_SCORES // scores))


def fill_empty_rows(out: Tensor, lse: Tensor | None, sinks: Tensor | None) -> None:
    """Write the result of rows that see no key: output 0; LSE -inf, or the sink (M5)."""
    out.zero_()
    if lse is not None and sinks is not None:
        lse.copy_(sinks.expand(lse.shape))
    elif lse is not None:
        lse.fill_(-torch.inf)


def _attend_fused(
    rows: QueryRows, span: KeySpan, params: AttentionParams, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    end = span.start + span.key.shape[0]
    square = _is_square_causal(rows, span.start, end, params)
    bias = None if square else rows_bias(rows, span.start, end, params)
    query, key, value = (
        tensor.transpose(0, 1).unsqueeze(0) for tensor in (rows.query, span.key, span.value)
    )
    out, lse = fused_attention(
        query,
        key,
        value,
        None if bias is None else bias.unsqueeze(0),
        params,
        span.k_factor,
        span.v_factor,
        dtype=dtype,
        square_causal=square,
    )
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _attend_general(
    rows: QueryRows, span: KeySpan, params: AttentionParams, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    end = span.start + span.key.shape[0]
    return general_attention(
        rows.query,
        span.key,
        span.value,
        rows_bias(rows, span.start, end, params),
        params,
        span.k_factor,
        span.v_factor,
        rows_score(rows, span.start, end, params),
    )


def _is_square_causal(rows: QueryRows, start: int, end: int, params: AttentionParams) -> bool:
    """Whether the mask is plain causal over as many rows as keys: the fused operator's own mask."""
    return (
        rows.causal is True
        and params.scale > 0  # torch masks before it scales: -inf * scale must stay -inf
        and rows.bias is None
        and params.alibi_slopes is None
        and params.attention_chunk_size <= 0
        and rows.first == start
        and rows.last == end - 1
        and not 0 <= params.window[0] < end - start - 1
    )
