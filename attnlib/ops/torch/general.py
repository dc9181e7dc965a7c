"""The general path: scores, weights and values written out, in float32 or better, with everything the rules can say.

Slower than fused attention because it stores the scores; it runs where no fused kernel says the same, and it can show
the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.params import AttentionParams
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
) -> tuple[Tensor, Tensor]:
    """Output `[L, Hq, Dv]` and LSE `[L, Hq]` of one request's rows, in float32 (float64 for a float64 query).

    Args:
        query: `[L, Hq, D]`.
        key: `[S, Hkv, D]`, value: `[S, Hkv, Dv]`, S >= 0, raw as stored.
        bias: `[1 or Hq, L, S]`, -inf where hidden, or None (see `mask.score_bias`).
        params: scale, soft cap and sinks are applied here; window, chunk and slopes are in the bias already.
        k_factor, v_factor: what a stored value is multiplied by, a float or `[1]` or `[Hkv]`.
    """
    num_rows, num_heads, _ = query.shape
    num_keys, num_kv_heads, head_size_v = value.shape
    weights, lse = attention_weights(query, key, bias, params, k_factor)
    grouped = weights.reshape(num_kv_heads, num_heads // num_kv_heads * num_rows, num_keys)
    out = torch.bmm(grouped, value.to(weights.dtype).transpose(0, 1))
    out = out * _over_heads(v_factor)
    return out.view(num_heads, num_rows, head_size_v).transpose(0, 1), lse.transpose(0, 1)


def attention_weights(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    params: AttentionParams,
    k_factor: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """The weights after the softmax, `[Hq, L, S]`, and the LSE `[Hq, L]`; arguments as in `general_attention`."""
    num_rows, num_heads, head_size = query.shape
    num_keys, num_kv_heads, _ = key.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = (
        query.to(dtype)
        .transpose(0, 1)
        .reshape(num_kv_heads, num_heads // num_kv_heads * num_rows, head_size)
    )
    logits = torch.bmm(rows, key.to(dtype).permute(1, 2, 0)) * params.scale * _over_heads(k_factor)
    if params.logits_soft_cap > 0:
        logits = torch.tanh(logits / params.logits_soft_cap) * params.logits_soft_cap
    logits = logits.view(num_heads, num_rows, num_keys)
    if bias is not None:
        logits = logits + bias
    return softmax_with_sink(logits, params.sinks)


def _over_heads(factor: float | Tensor) -> float | Tensor:
    return factor.view(-1, 1, 1) if isinstance(factor, Tensor) else factor
