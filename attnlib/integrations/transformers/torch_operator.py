"""Attention by one call of torch's operator."""

from __future__ import annotations

import torch

__all__ = ["attend_fused"]

_attend = torch.nn.functional.scaled_dot_product_attention


def attend_fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    causal: bool = False,
) -> torch.Tensor:
    """The attention, `[B, T, Hq, D]`.

    Args:
        query, key, value: `[B, Hq, T, D]`, `[B, Hkv, S, D]`, `[B, Hkv, S, D]`.
        bias: `[T, S]` or `[B, 1, 1, S]`, added to the scores.
        scale: softmax scale.
        soft_cap, sinks: None; the operator has none.
        causal: queries see no later keys. T is S, and there is no bias.
    """
    given, grouped = (query, key, value, bias), key.shape[1] != query.shape[1]
    return _attend(*given, is_causal=causal, scale=scale, enable_gqa=grouped).transpose(1, 2)
