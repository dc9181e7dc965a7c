"""Outputs whose gradient is refused, so that no gradient silently omits attention."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.errors import UnsupportedConfigError
from attnlib.layer.tensor_checks import has_tangent

__all__ = ["InferenceOnly", "refuse_backward", "refuse_transforms"]


def refuse_backward() -> None:
    """Raises:
    UnsupportedConfigError: always.
    """
    raise UnsupportedConfigError(
        "attnlib's attention has no gradient: it computes inference only; train with "
        "attn_implementation='eager'"
    )


def refuse_transforms(name: str, *states: torch.Tensor) -> None:
    """Refuse tensors that are not all in their memory, which kernels read: a tangent would silently
    omit attention.

    Args:
        name: of the attention module.
        states: query, key and value.

    Raises:
        UnsupportedConfigError: a tangent of forward-mode gradients, a transform of `torch.func`, or
            the device `meta`.
    """
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, states)):
        found = "in a transform of torch.func"
    elif states[0].is_meta:
        found = "on the device 'meta'"
    elif has_tangent(*states):
        found = "with a tangent of forward-mode gradients"
    else:
        return
    raise UnsupportedConfigError(
        f"{name}: query, key or value is {found}, and attnlib computes from memory alone: run this "
        f"model with attn_implementation='eager'"
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
