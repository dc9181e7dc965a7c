"""Attention with explicit scores, in float32 or float64, for every feature of the M-rules.

It is slower than fused attention because it stores the scores. It is used where fused attention
does not support the call, and where the weights themselves are requested.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.quant import may_be_nan
from attnlib.ops.torch.softmax import softmax_with_sink

__all__ = ["attention_weights", "general_attention"]


def general_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    params: AttentionParams,
    k_factor: float | Tensor,
    v_factor: float | Tensor,
    score: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one request's rows.

    Args:
        query: `[L, Hq, D]`.
        key: `[S, Hkv, D]` as stored, S >= 0.
        value: `[S, Hkv, Dv]`, likewise.
        bias: `[1 or Hq, L, S]`, -inf where hidden, or None (`request.rows_bias`).
        params: only `scale`, `logits_soft_cap` and `sinks` are applied here; `bias` holds the rest.
        k_factor: factor of stored keys, a float or `[1]` or `[Hkv]`.
        v_factor: factor of stored values, likewise.
        score: the score function of these rows and keys (`request.rows_score`), or None.

    Returns:
        Output `[L, Hq, Dv]` and LSE `[L, Hq]`, float32 (float64 for a float64 query).
    """
    num_rows, num_heads, _ = query.shape
    num_keys, num_kv_heads, head_size_v = value.shape
    weights, lse, empty = attention_weights(query, key, bias, params, k_factor, score)
    grouped = weights.reshape(num_kv_heads, num_heads // num_kv_heads * num_rows, num_keys)
    out = torch.bmm(grouped, value.to(weights.dtype).transpose(0, 1))
    out = (out * _per_head(v_factor)).view(num_heads, num_rows, head_size_v)
    if may_be_nan(v_factor):
        out = out.masked_fill(empty.unsqueeze(-1), 0.0)  # M5
    return out.transpose(0, 1), lse.transpose(0, 1)


def attention_weights(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    params: AttentionParams,
    k_factor: float | Tensor,
    score: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The weights after the softmax `[Hq, L, S]`, the LSE `[Hq, L]`, and the rows without a visible
    key, a bool `[Hq, L]`; see `general_attention`."""
    num_rows, num_heads, head_size = query.shape
    num_keys, num_kv_heads, _ = key.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    grouped_shape = (num_kv_heads, num_heads // num_kv_heads * num_rows, head_size)
    cap = params.logits_soft_cap
    # Factors of the scores are factors of the rows, of which there are fewer; the scores are
    # computed in place.
    factor = _per_head(k_factor)
    factor = factor.to(dtype) if isinstance(factor, Tensor) else factor
    factor = factor * (params.scale / cap if cap > 0 else params.scale)
    rows = query.to(dtype).transpose(0, 1).reshape(grouped_shape) * factor
    logits = torch.bmm(rows, key.to(dtype).permute(1, 2, 0)).view(num_heads, num_rows, num_keys)
    if cap > 0:
        logits.tanh_()
    if cap > 0 and (score is not None or bias is None):
        logits.mul_(cap)
    if score is not None:
        # The function sees scores with their biases; the mask is applied after it (M3).
        hidden = None if bias is None else bias == -torch.inf
        if bias is not None and hidden is not None:
            logits = logits + bias.masked_fill(hidden, 0.0)
        logits = score(logits)
        if hidden is not None:
            logits = logits.masked_fill(hidden, -torch.inf)
    elif bias is not None:
        torch.add(bias, logits, alpha=cap if cap > 0 else 1.0, out=logits)
        if may_be_nan(k_factor):
            logits.masked_fill_(bias == -torch.inf, -torch.inf)
    return softmax_with_sink(logits, params.sinks)


def _per_head(factor: float | Tensor) -> float | Tensor:
    return factor.view(-1, 1, 1) if isinstance(factor, Tensor) else factor
