"""Signatures of tensors: dtype, shape, strides and device, but not address and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["scale_signature", "tensor_check", "tensor_signature"]

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_TensorGuards = getattr(_guards, "TensorGuards", None)
"""Private to torch; without it, signatures are compared in Python."""


def tensor_signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Dtype, shape, strides and device: equal signatures differ in addresses and values."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def scale_signature(scale: float | torch.Tensor, elements: torch.Tensor) -> tuple[Any, ...] | float:
    """What launches follow from in a scale of a cache: the value of a number, the signature of a
    tensor. Kernels load the scales of a head in a page, and two bytes of its elements, as one
    number each, so where both start counts, too.

    Args:
        scale: a number, or a tensor on the device; those of pages have four dimensions (M16).
        elements: the view of the keys or values that it belongs to.
    """
    if not isinstance(scale, torch.Tensor):
        return float(scale)
    if scale.dim() != 4 or scale.is_meta:
        return tensor_signature(scale)
    return (*tensor_signature(scale), scale.data_ptr() % 8, elements.data_ptr() % 2)


def tensor_check(
    *tensors: torch.Tensor,
    free: tuple[int | None, ...] | None = None,
    same_strides: bool = False,
) -> Callable[..., bool] | None:
    """`check(*others)`: True if the others have the signatures of these tensors, False if they have
    not or if it cannot tell. A C function of torch.compile's guards, several times faster than
    comparing signatures. None where torch has it not, and for tensors that require a gradient.

    Args:
        tensors: what the others are compared with.
        free: a dimension of each tensor whose size may be another one, and with it the strides of
            the dimensions before it; None for a tensor without, and for all.
        same_strides: these strides must be equal, too.
    """
    if _TensorGuards is None:
        return None
    for tensor in tensors:  # each step asks for several: a loop costs less than a generator
        if tensor.requires_grad:
            return None
    sizes: list[list[int | None]] | None = None
    strides: list[list[int | None]] | None = None
    if free is not None:
        sizes, strides = [], []
        for tensor, dim in zip(tensors, free, strict=True):
            first = 0 if dim is None or same_strides else dim
            sizes.append([None if i == dim else n for i, n in enumerate(tensor.shape)])
            strides.append([None if i < first else n for i, n in enumerate(tensor.stride())])
    guards = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = guards.check
    return check
