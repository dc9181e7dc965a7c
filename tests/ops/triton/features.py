"""Every optional feature of attention once, for the parity and sensitivity tests of the kernels."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["FEATURES", "feature_options"]

FEATURES = [
    "plain", "bidirectional", "window", "window_zero", "window_both", "window_right", "chunk",
    "chunk_bidirectional", "cap", "alibi", "sinks", "half_precision", "bias", "causal_each",
    "negative_scale", "all",
]  # fmt: skip


def feature_options(
    name: str, *, requests: int, tokens: int, heads: int, max_query_len: int, device: torch.device
) -> dict[str, Any]:
    """Return the keyword arguments that enable a feature, with random tensors."""
    generator = torch.Generator().manual_seed(7)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    bias = rand(tokens, max_query_len + 3)
    bias[torch.rand(bias.shape, generator=generator).to(device) < 0.3] = float("-inf")
    causal_each = torch.arange(requests) % 2 == 0
    slopes, sinks = rand(heads).abs() * 0.3, rand(heads)
    table: dict[str, dict[str, Any]] = {
        "plain": {"causal": True},
        "bidirectional": {"causal": False},
        "window": {"causal": True, "window": (11, -1)},
        "window_zero": {"causal": True, "window": (0, 0)},
        "window_both": {"causal": False, "window": (9, 4)},
        "window_right": {"causal": False, "window": (-1, 2)},
        "chunk": {"causal": True, "attention_chunk_size": 24},
        "chunk_bidirectional": {"causal": False, "attention_chunk_size": 10},
        "cap": {"causal": True, "logits_soft_cap": 0.7},
        "alibi": {"causal": False, "alibi_slopes": slopes},
        "sinks": {"causal": True, "sinks": sinks},
        "half_precision": {
            "causal": True,
            "alibi_slopes": slopes.half(),
            "sinks": sinks.half(),
        },
        "bias": {"causal": True, "query_bias": bias},
        "causal_each": {"causal": causal_each.to(device)},
        "negative_scale": {"causal": True, "scale": -0.2},
        "all": {
            "causal": causal_each.to(device),
            "window": (19, 6),
            "attention_chunk_size": 40,
            "logits_soft_cap": 1.5,
            "alibi_slopes": slopes,
            "sinks": sinks,
            "query_bias": bias,
        },  # fmt: skip
    }
    return table[name]
