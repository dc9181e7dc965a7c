"""What a launch depends on besides addresses: dtypes, shapes, strides and devices of tensors."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["tensor_signature"]


def tensor_signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Dtype, shape, strides and device: equal signatures differ in addresses and values."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device
