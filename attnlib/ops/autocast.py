"""Operations compute in the dtypes that they choose, also under `torch.autocast`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["without_autocast"]

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(operation: Callable[P, R]) -> Callable[P, R]:
    """An operation whose matrix products autocast does not round to 16 bits.

    Args:
        operation: a function of tensors, of which the first tells the device, or a method of such a
            function.
    """

    @functools.wraps(operation)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        kind = first.device.type
        # torch 2.10 traces `is_autocast_enabled` only, which asks for a device that has autocast.
        has_autocast = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
        if not (has_autocast and torch.is_autocast_enabled(kind)):
            return operation(*args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return operation(*args, **kwargs)

    return run
