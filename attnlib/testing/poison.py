"""Fill uninitialized tensors with NaN to detect reads of uninitialized memory.

`torch.empty` often returns zeros in a test and old data in production. Inside
`poisoned_allocations`, tensors from `torch.empty` and related functions (workspaces, partial
results) hold NaN for floating-point dtypes and the largest value for integer dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["poisoned_allocations"]

_EMPTY_FUNCTIONS: tuple[tuple[Any, str], ...] = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


def _poisoning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if tensor.numel() and tensor.device.type != "meta":
            if tensor.dtype.is_floating_point and tensor.element_size() > 1:
                tensor.fill_(float("nan"))
            elif tensor.element_size() == 1 and tensor.dtype is not torch.bool:
                tensor.view(torch.uint8).fill_(0xFF)
            elif tensor.dtype in (torch.int16, torch.int32, torch.int64):
                tensor.fill_(torch.iinfo(tensor.dtype).max)
        return tensor

    return poisoned


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Patch torch's `empty` functions to return poisoned tensors inside the `with` block."""
    originals = [(owner, name, getattr(owner, name)) for owner, name in _EMPTY_FUNCTIONS]
    try:
        for owner, name, make in originals:
            setattr(owner, name, _poisoning(make))
        yield
    finally:
        for owner, name, make in originals:
            setattr(owner, name, make)
