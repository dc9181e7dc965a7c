"""What is added to the scores of rows of queries: biases, masks and score functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.mask import is_fully_visible, score_bias, visible_keys

if TYPE_CHECKING:
    from attnlib.ops.torch.request import QueryRows

__all__ = ["bias_over_keys", "rows_bias", "rows_score", "score_dtype"]


def rows_bias(rows: QueryRows, start: int, end: int, params: AttentionParams) -> Tensor | None:
    """Mask and biases of `rows` over the keys `[start, end)`.

    Keys at or past `rows.seq_len` are hidden; they exist only where a caller pads the keys.

    Returns:
        `[1 or Hq, L, S]` in `score_dtype`, or None if there is nothing to add.
    """
    dense = end <= rows.seq_len and is_fully_visible(
        rows.first, rows.last, start, end, rows.causal, params
    )
    if dense and params.alibi_slopes is None and rows.bias is None:
        return None
    device = rows.query.device
    positions = torch.arange(rows.first, rows.last + 1, device=device)
    keys = torch.arange(start, end, device=device)
    visible = None
    if not dense:
        visible = visible_keys(positions, keys, rows.causal, params) & (keys < rows.seq_len)
    bias = None if rows.bias is None else bias_over_keys(rows.bias, start, end, rows.span_start)
    return score_bias(positions, keys, visible, params, bias, score_dtype(rows.query))


def rows_score(
    rows: QueryRows, start: int, end: int, params: AttentionParams
) -> Callable[[Tensor], Tensor] | None:
    """The score function of `rows` over the keys `[start, end)`, or None.

    It takes and returns scores `[Hq, L, S]`.
    """
    function = params.score_function
    if function is None:
        return None
    device = rows.query.device
    heads = torch.arange(rows.query.shape[1], device=device)[:, None, None]
    positions = torch.arange(rows.first, rows.last + 1, device=device)[:, None]
    keys = torch.arange(start, end, device=device)

    def score(scores: Tensor) -> Tensor:
        return function.evaluate(scores, positions, keys, heads, rows.request, params.score_tensors)

    return score


def bias_over_keys(bias: Tensor, start: int, end: int, span_start: int) -> Tensor:
    """An explicit bias over the keys `[start, end)`, 0 outside the query span.

    Args:
        bias: `[L, C]`, for the keys from position `span_start` on.

    Returns:
        `[L, end - start]`.
    """
    result = bias.new_zeros(bias.shape[0], end - start)
    begin, end = max(start, span_start), min(end, span_start + bias.shape[1])
    if begin < end:
        result[:, begin - start : end - start] = bias[:, begin - span_start : end - span_start]
    return result


def score_dtype(query: Tensor) -> torch.dtype:
    """The dtype of scores and statistics: float32, or float64 for a float64 query (M8)."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32
