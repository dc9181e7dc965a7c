"""Outputs whose gradient is refused, so that no gradient silently omits attention, and tensors that
kernels would not read as eager attention does."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.layer.tensor_checks import has_tangent

__all__ = ["InferenceOnly", "check_states", "refuse_backward", "refuse_transforms"]


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
    elif any(state.is_meta for state in states):
        found = "on the device 'meta'"
    elif has_tangent(*states):
        found = "with a tangent of forward-mode gradients"
    else:
        return
    raise UnsupportedConfigError(
        f"{name}: query, key or value is {found}, and attnlib computes from memory alone: run this "
        f"model with attn_implementation='eager'"
    )


def check_states(name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Check that query, key and value belong together: torch's operator for a CPU and views as
    pages read as many values as there are keys, also behind the end of a tensor.

    Args:
        name: of the attention module.
        query, key, value: `[B, Hq, T, D]`, `[B, Hkv, S, D]`, `[B, Hkv, S, Dv]`. Query and key may
            differ in their dtype, which `StepMask.check` explains.

    Raises:
        ContractError: other sizes, or values of another dtype or device.
    """
    if query.dim() == key.dim() == value.dim() == 4 and key.device == query.device:
        batch, heads, keys, _ = key.shape
        if value.shape[:3] == (batch, heads, keys) and query.shape[0] == batch:
            if value.dtype == key.dtype and value.device == key.device:
                return
    found = ", ".join(f"{x.dtype} {tuple(x.shape)} on {x.device}" for x in (query, key, value))
    raise ContractError(
        f"{name}: query, key and value are {found}; they must be query [B, Hq, T, D], key "
        "[B, Hkv, S, D] and value [B, Hkv, S, Dv] of one dtype and device: pass such tensors, or "
        "run this model with attn_implementation='eager'"
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
