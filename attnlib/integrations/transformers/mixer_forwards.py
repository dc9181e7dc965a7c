"""Which modules are mixers, and what replaces the forward of those that call no function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from attnlib.integrations.transformers.dynamic_convolution import dynamic_convolution_forward
from attnlib.integrations.transformers.lightning import lightning_forward

__all__ = ["forward_of", "is_mixer"]

_FORWARDS: dict[str, Callable[..., Any]] = {
    "Inkling2DynamicShortConvolution": dynamic_convolution_forward,
    "MiniMaxLightningAttention": lightning_forward,
}


def forward_of(module: nn.Module) -> Callable[..., Any] | None:
    """What replaces the forward of a mixer in a step; None for one that calls the functions."""
    return _FORWARDS.get(type(module).__name__)


def is_mixer(module: nn.Module) -> bool:
    """Whether a module of a served model has states."""
    convolutions = (getattr(module, name, None) for name in ("conv1d", "conv"))
    has_one = any(isinstance(one, nn.Conv1d) for one in convolutions)
    return has_one or forward_of(module) is not None
