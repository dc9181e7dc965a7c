"""Checks of the constants and tensors of a score function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnlib.errors import ContractError

if TYPE_CHECKING:
    from attnlib.score_functions.function import ScoreFunction

__all__ = ["TAKEN_NAMES", "check_names", "check_score_tensors"]

TAKEN_NAMES = ("type", "values")
"""Attributes of the tuples of Triton, such as `aux` in kernels."""


def check_names(function: ScoreFunction, most_tensors: int) -> None:
    """Check the names of constants and tensors.

    Raises:
        ContractError: a name that is not an identifier, occurs twice or is taken, a constant that
            is not a number, or too many tensors.
    """
    names = [*function.tensor_names, *(name for name, _ in function.constants)]
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or names.count(name) > 1:
            raise ContractError(
                f"{name!r} must be an identifier and name one constant or tensor of the score "
                f"function: rename it",
                rule="M10",
            )
        if name in TAKEN_NAMES:
            raise ContractError(
                f"{name!r} cannot name a constant or tensor of a score function, because aux is a "
                "tuple in kernels, and Triton gives tuples an attribute of this name: rename it",
                rule="M10",
            )
    for name, value in function.constants:
        if not isinstance(value, int | float):
            raise ContractError(
                f"constant {name}={value!r} of a score function must be a number; pass tensors "
                "as layer_tensors, batch_tensors or query_tensors",
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


class _Form(NamedTuple):
    """What the tensors of an owner must be: numbers of dimensions, shape and way in which they are
    passed as text, whether they may be floating point, and the rule."""

    dims: tuple[int, ...]
    shape: str
    given: str
    is_floating: bool = True
    rule: str = "M10"


_FORMS = {
    "layer": _Form((1, 2), "[n] or [n, m]", "score_tensors={{{name!r}: ...}} with the layer"),
    "batch": _Form(
        (2,), "[requests, m]", "score_tensors={{{name!r}: ...}} with the batch", is_floating=False
    ),
    "query": _Form(
        (2,),
        "[tokens, m]",
        "query_tensors=QueryTensors({{{name!r}: ...}}) in each call",
        rule="M21",
    ),
}


def check_score_tensors(
    function: str, tensors: Mapping[str, Tensor] | None, names: Sequence[str], owner: str
) -> None:
    """See `ScoreFunction.check_tensors`; `function` is its name."""
    given, form = tensors or {}, _FORMS[owner]
    if missing := [name for name in names if name not in given]:
        raise ContractError(
            f"score function {function} needs the {owner} tensor {missing[0]!r}: pass "
            + form.given.format(name=missing[0]),
            rule=form.rule,
        )
    for name in names:
        tensor, what = given[name], f"{owner} tensor {name!r} of score function {function}"
        if tensor.dtype != torch.int32 and not (form.is_floating and tensor.is_floating_point()):
            allowed = "int32 or floating point" if form.is_floating else "int32"
            raise ContractError(f"{what} is {tensor.dtype}; it must be {allowed}", rule=form.rule)
        if tensor.dim() not in form.dims or not tensor.is_contiguous() or 0 in tensor.shape[1:]:
            raise ContractError(
                f"{what} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; it must be "
                f"contiguous, {form.shape}, with at least one column: call .contiguous()",
                rule=form.rule,
            )
        if tensor.dtype.itemsize not in (2, 4) or tensor.numel() >= 1 << 31:
            fewer = ": split the step into fewer tokens" if owner == "query" else ""
            raise ContractError(
                f"{what} has {tensor.numel()} elements of {tensor.dtype}; kernels index up to "
                f"2^31 - 1 elements of 16 or 32 bits{fewer}",
                rule=form.rule,
            )
