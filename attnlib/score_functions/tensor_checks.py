"""Checks of the constants and tensors of a score function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlib.errors import ContractError

if TYPE_CHECKING:
    from attnlib.score_functions.function import ScoreFunction

__all__ = ["check_names", "check_score_tensors"]


def check_names(function: ScoreFunction, most_tensors: int) -> None:
    """Check the names of constants and tensors.

    Raises:
        ContractError: a name that is no identifier or occurs twice, a constant that is no number,
            or too many tensors.
    """
    names = [*function.tensor_names, *(name for name, _ in function.constants)]
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or names.count(name) > 1:
            raise ContractError(
                f"{name!r} must be an identifier and name one constant or tensor of the score "
                f"function: rename it",
                rule="M10",
            )
    for name, value in function.constants:
        if not isinstance(value, int | float):
            raise ContractError(
                f"constant {name}={value!r} of a score function must be a number; pass tensors "
                "as layer_tensors or batch_tensors",
                rule="M10",
            )
    if len(function.tensor_names) > most_tensors:
        raise ContractError(
            f"a score function has {len(function.tensor_names)} tensors, and kernels take at most "
            f"{most_tensors}: store several columns in one tensor",
            rule="M10",
        )
    if function.form != "score" and names:
        raise ContractError(
            f"form={function.form!r} has no parameter for {', '.join(names)}: write the function "
            "with the parameters of form='score'",
            rule="M10",
        )


def check_score_tensors(
    function: str, tensors: Mapping[str, Tensor] | None, names: Sequence[str], owner: str
) -> None:
    """See `ScoreFunction.check_tensors`; `function` is its name."""
    given = tensors or {}
    if missing := [name for name in names if name not in given]:
        raise ContractError(
            f"score function {function} needs the {owner} tensor {missing[0]!r}: pass "
            f"score_tensors={{{missing[0]!r}: ...}} with the {owner}",
            rule="M10",
        )
    for name in names:
        tensor = given[name]
        integer = tensor.dtype == torch.int32
        if not integer and (owner == "batch" or not tensor.is_floating_point()):
            allowed = "int32" if owner == "batch" else "int32 or floating point"
            raise ContractError(
                f"{owner} tensor {name!r} of score function {function} is {tensor.dtype}; it must "
                f"be {allowed}",
                rule="M10",
            )
        dims = (2,) if owner == "batch" else (1, 2)
        if tensor.dim() not in dims or not tensor.is_contiguous() or 0 in tensor.shape[1:]:
            raise ContractError(
                f"{owner} tensor {name!r} of score function {function} has shape "
                f"{tuple(tensor.shape)} and strides {tensor.stride()}; it must be contiguous, "
                + ("[requests, m]" if owner == "batch" else "[n] or [n, m]")
                + ", with at least one column: call .contiguous()",
                rule="M10",
            )
        if tensor.dtype.itemsize not in (2, 4) or tensor.numel() >= 1 << 31:
            raise ContractError(
                f"{owner} tensor {name!r} of score function {function} has {tensor.numel()} "
                f"elements of {tensor.dtype}; kernels index up to 2^31 - 1 elements of 16 or "
                "32 bits",
                rule="M10",
            )
