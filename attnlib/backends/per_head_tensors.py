"""Checks of tensors with a value for each query head: ALiBi slopes and sinks."""

from __future__ import annotations

import torch

from attnlib.errors import ContractError

__all__ = ["check_per_head"]


def check_per_head(
    name: str, values: torch.Tensor | None, declared: bool, flag: str, num_heads: int
) -> None:
    """Check slopes or sinks against the spec.

    Args:
        name: of the tensor, for messages.
        values: `[Hq]` of a floating-point dtype, or None.
        declared: whether the spec has them.
        flag: the field of the spec that says so.
        num_heads: Hq.

    Raises:
        ContractError: they contradict the spec, or have a wrong shape, dtype or stride.
    """
    if (values is not None) != declared:
        given = "given" if values is not None else "missing"
        raise ContractError(
            f"{name} {given}, but the spec says {flag}={declared}: the spec selects the backend, "
            "so both must agree"
        )
    if values is None:
        return
    if not isinstance(values, torch.Tensor):
        raise ContractError(
            f"{name} is a {type(values).__name__}; it must be a tensor [{num_heads}], one value "
            "per query head"
        )
    if values.shape != (num_heads,) or not values.is_floating_point():
        raise ContractError(
            f"{name} is {values.dtype} {tuple(values.shape)}; it must be floating-point "
            f"[{num_heads}], one value per query head"
        )
    if values.stride(0) != 1 and num_heads > 1:
        raise ContractError(f"{name} has stride {values.stride(0)}; call .contiguous() on it")
