"""Small specs of the kinds of models with state layers."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.spec import StateSpec

__all__ = ["KINDS"]

_COMMON: dict[str, Any] = {"num_heads": 4, "num_key_heads": 2, "key_size": 16, "value_size": 16}
_CONVOLUTION: dict[str, Any] = {"conv_channels": 24, "conv_width": 4}

KINDS: dict[str, StateSpec] = {
    "gated delta": StateSpec(**_COMMON, **_CONVOLUTION, qk_norm=True, dtype=torch.float32),
    "kimi delta": StateSpec(
        num_heads=2,
        key_size=16,
        value_size=32,
        decay="channel",
        qk_norm=True,
        conv_channels=24,
        conv_width=3,
        dtype=torch.float32,
    ),
    "mamba2": StateSpec(
        num_heads=4,
        num_key_heads=1,
        key_size=32,
        value_size=16,
        update="add",
        has_skip=True,
        has_conv_bias=True,
        conv_channels=24,
        conv_width=4,
        dtype=torch.float32,
    ),
    "lightning": StateSpec(
        num_heads=2,
        key_size=16,
        value_size=16,
        update="add",
        decay="constant",
        has_beta=False,
        dtype=torch.float32,
    ),
    "gla": StateSpec(**_COMMON, update="add", decay="channel", has_beta=False, dtype=torch.float32),
    "short convolution": StateSpec(
        conv_channels=24, conv_width=3, conv_activation=None, dtype=torch.float32
    ),
}
"""Name of a kind -> a small spec of it, in float32 and without rollback."""
