"""The visibility rule (M2, M3) and the score bias.

The rule has three forms: the range of keys that a block of rows can see, so that work follows the
window; a test whether that range needs a mask; and the mask itself, as booleans or as an additive
bias.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.params import AttentionParams

__all__ = ["is_fully_visible", "key_range", "score_bias", "visible_keys"]


def key_range(
    first: int, last: int, seq_len: int, causal: bool | Tensor, params: AttentionParams
) -> tuple[int, int]:
    """Half-open range of the keys visible to at least one of the positions `first..last`.

    The range is empty if start >= end. A `causal` tensor, whose value is only known on the device,
    counts as not causal here; the mask applies it.
    """
    (left, right), chunk = params.window, params.attention_chunk_size
    start, end = 0, seq_len
    if causal is True:
        end = min(end, last + 1)
    if left >= 0:
        start = max(start, first - left)
    if right >= 0:
        end = min(end, last + right + 1)
    if chunk > 0:
        start = max(start, first // chunk * chunk)
        end = min(end, (last // chunk + 1) * chunk)
    return start, end


def is_fully_visible(
    first: int, last: int, start: int, end: int, causal: bool | Tensor, params: AttentionParams
) -> bool:
    """Whether every position in `first..last` sees every key in `[start, end)`."""
    left, right = params.window
    if isinstance(causal, Tensor) or (causal and end - 1 > first):
        return False
    if (left >= 0 and start < last - left) or (right >= 0 and end - 1 > first + right):
        return False
    chunk = params.attention_chunk_size
    return chunk <= 0 or len({p // chunk for p in (first, last, start, end - 1)}) == 1


def visible_keys(
    positions: Tensor, keys: Tensor, causal: bool | Tensor, params: AttentionParams
) -> Tensor:
    """Whether each position sees each key.

    Args:
        positions: `[..., L]`, integer positions of the query tokens.
        keys: `[..., S]`, integer positions of the keys.
        causal: a bool, or a bool tensor that broadcasts over the result.
        params: the window and the attention chunks.

    Returns:
        `[..., L, S]` bool.
    """
    left, right = params.window
    queries, others = positions.unsqueeze(-1), keys.unsqueeze(-2)
    chunk = params.attention_chunk_size
    visible = (queries == queries) & (others == others)
    if isinstance(causal, Tensor):
        visible = visible & (~causal | (others <= queries))
    elif causal:
        visible = visible & (others <= queries)
    if left >= 0:
        visible = visible & (others >= queries - left)
    if right >= 0:
        visible = visible & (others <= queries + right)
    if chunk > 0:
        visible = visible & (others // chunk == queries // chunk)
    return visible


def score_bias(
    positions: Tensor,
    keys: Tensor,
    visible: Tensor | None,
    params: AttentionParams,
    span_bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """What is added to the scores after the soft cap; -inf where a key is hidden.

    Args:
        positions: `[..., L]`, integer positions of the query tokens.
        keys: `[..., S]`, integer positions of the keys.
        visible: `[..., L, S]` bool, or None if everything is visible.
        params: the ALiBi slopes.
        span_bias: `[..., L, S]`, the explicit bias over these keys, or None.
        dtype: dtype of the result.

    Returns:
        `[..., 1 or Hq, L, S]`, or None if there is nothing to add.
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
        zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return zeros.masked_fill_(hidden, -torch.inf)
    return bias.masked_fill(hidden, -torch.inf)
