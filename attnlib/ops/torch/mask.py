"""Who sees whom, and with what bias.

The rule lives here once: as a range of keys that any row of a block can see (so that work follows the window), as a
test whether such a range needs a mask at all, and as an additive tensor for the cases where it does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.params import AttentionParams

__all__ = ["is_fully_visible", "key_range", "score_bias", "visible_keys"]


def key_range(
    first: int, last: int, seq_len: int, causal: bool | Tensor, params: AttentionParams
) -> tuple[int, int]:
    """Half-open range of the keys that at least one of the positions `first..last` may see; empty when start >= end.

    A `causal` tensor (a flag that only the device knows) counts as not causal here, and is settled in the mask.
    """
    left, right = params.window
    start, end = 0, seq_len
    if causal is True:
        end = min(end, last + 1)
    if left >= 0:
        start = max(start, first - left)
    if right >= 0:
        end = min(end, last + right + 1)
    if params.attention_chunk_size > 0:
        start = max(start, first // params.attention_chunk_size * params.attention_chunk_size)
        end = min(end, (last // params.attention_chunk_size + 1) * params.attention_chunk_size)
    return start, end


def is_fully_visible(
    first: int, last: int, start: int, end: int, causal: bool | Tensor, params: AttentionParams
) -> bool:
    """Whether every position in `first..last` sees every key in `[start, end)`, so that no mask is needed."""
    left, right = params.window
    if isinstance(causal, Tensor) or (causal and end - 1 > first):
        return False
    if (left >= 0 and start < last - left) or (right >= 0 and end - 1 > first + right):
        return False
    chunk = params.attention_chunk_size
    return chunk <= 0 or {first // chunk, last // chunk, start // chunk, (end - 1) // chunk} == {
        first // chunk
    }


def visible_keys(
    positions: Tensor, keys: Tensor, causal: bool | Tensor, params: AttentionParams
) -> Tensor:
    """The rule as a boolean tensor `[..., L, S]`: positions `[..., L]` against key positions `[..., S]`, both integers.

    `causal` is a bool or a boolean tensor that broadcasts over the result.
    """
    left, right = params.window
    queries, others = positions.unsqueeze(-1), keys.unsqueeze(-2)
    visible = (queries == queries) & (others == others)
    if isinstance(causal, Tensor):
        visible = visible & (~causal | (others <= queries))
    elif causal:
        visible = visible & (others <= queries)
    if left >= 0:
        visible = visible & (others >= queries - left)
    if right >= 0:
        visible = visible & (others <= queries + right)
    if params.attention_chunk_size > 0:
        visible = visible & (
            others // params.attention_chunk_size == queries // params.attention_chunk_size
        )
    return visible


def score_bias(
    positions: Tensor,
    keys: Tensor,
    visible: Tensor | None,
    params: AttentionParams,
    span_bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """What is added to the (capped) scores, -inf where a key is hidden: `[..., 1 or Hq, L, S]`, or None for nothing.

    Args:
        positions: `[..., L]`, keys: `[..., S]`.
        visible: `[..., L, S]`, or None when everything is visible.
        span_bias: the explicit bias laid out over these keys, `[..., L, S]`, or None.
        dtype: of the result.
    """
    bias: Tensor | None = None
    if params.alibi_slopes is not None:
        distance = (positions.unsqueeze(-1) - keys.unsqueeze(-2)).abs().to(dtype).unsqueeze(-3)
        bias = -params.alibi_slopes.to(dtype)[:, None, None] * distance
    if span_bias is not None:
        span_bias = span_bias.to(dtype).unsqueeze(-3)
        bias = span_bias if bias is None else bias + span_bias
    if visible is None:
        return bias
    hidden = ~visible.unsqueeze(-3)
    if bias is None:
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
            hidden, -torch.inf
        )
    return bias.masked_fill(hidden, -torch.inf)
