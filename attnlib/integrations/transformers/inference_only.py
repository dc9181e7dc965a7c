"""Outputs whose gradient is refused, so that no gradient silently omits attention."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.errors import UnsupportedConfigError

__all__ = ["InferenceOnly", "refuse_backward"]


def refuse_backward() -> None:
    """Raises:
    UnsupportedConfigError: always.
    """
    raise UnsupportedConfigError(
        "attnlib's attention has no gradient: it computes inference only; train with "
        "attn_implementation='eager'"
    )


class InferenceOnly(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        """The output unchanged."""
        return out.view(out.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Always raises."""
        refuse_backward()
