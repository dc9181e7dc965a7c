"""Which implementation of an operation serves a tensor: Triton on a GPU, plain torch elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

__all__ = ["operation"]

_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def operation(module: str, name: str, rows: Tensor) -> Callable[..., Any]:
    """The operation `name` of `ops.triton` or `ops.torch`, whose signatures are equal.

    Args:
        module: the module that both packages have.
        name: the operation.
        rows: the queries or new keys of the call. Triton serves float16, bfloat16 and float32 on a
            GPU, torch everything else.
    """
    served = rows.is_cuda and rows.dtype in _KERNEL_DTYPES
    return _load("triton" if served else "torch", module, name)


@functools.lru_cache(maxsize=64)
def _load(package: str, module: str, name: str) -> Callable[..., Any]:
    # Imported on first use: a process without a GPU may have no triton.
    found: Callable[..., Any] = getattr(import_module(f"attnlib.ops.{package}.{module}"), name)
    return found
