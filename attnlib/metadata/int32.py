"""Integers of callers as int32 tensors."""

from __future__ import annotations

from reprlib import repr
from typing import Any

import torch

from attnlib.errors import ContractError

__all__ = ["INT32", "int32_values"]

INT32 = torch.iinfo(torch.int32)


def int32_values(name: str, values: Any, rule: str) -> torch.Tensor:
    """Integers as an int32 tensor on the CPU; refuses what the conversion would change."""
    try:
        given = torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ContractError(
            f"{name}={repr(values)} must hold integers: {error}", rule=rule
        ) from None
    if given.numel() == 0 or given.dtype == torch.int32:
        return given.to(torch.int32)
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise ContractError(f"{name} is {given.dtype}; it must hold integers", rule=rule)
    if given.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch compares none of them
        given = torch.tensor(given.tolist(), dtype=torch.int64, device="cpu")
    least, largest = given.aminmax()
    if int(least) < INT32.min or int(largest) > INT32.max:
        wrong = (given < INT32.min) | (given > INT32.max)
        place = "".join(f"[{index}]" for index in wrong.nonzero()[0].tolist())
        raise ContractError(
            f"{name}{place}={int(given[wrong][0])} does not fit int32 (at most {INT32.max})",
            rule=rule,
        )
    return given.to(torch.int32)
