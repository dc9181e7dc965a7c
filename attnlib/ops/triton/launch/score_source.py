"""The source of score functions as kernels are compiled from it."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from attnlib.errors import UnsupportedConfigError
from attnlib.ops.triton.launch.score_arithmetic import simplify_arithmetic
from attnlib.ops.triton.launch.score_products import (
    INVERSE_SCALE,
    differentiate,
    take_raw_products,
)
from attnlib.score_functions.operators import OPERATORS, TORCH_OPERATORS

__all__ = ["device_source"]

_RESERVED = frozenset({"distance", INVERSE_SCALE})
"""Globals with these names are left alone: functions that have one are compiled as they are."""


def device_source(
    function: Callable[..., Any],
    used: Mapping[str, Any],
    form: str | None,
    variant: str = "scores",
) -> Any:
    """A copy of a function whose source has no type annotations.

    Args:
        function: the function.
        used: the globals that it uses.
        form: `ScoreFunction.form`, to simplify the arithmetic too; None to leave it.
        variant: "scores"; with a form also "products" for a function that takes raw products
            (`take_raw_products`), and "slope" for its derivative (`differentiate`).

    Returns:
        The copy; None if the function has no such variant.

    Raises:
        UnsupportedConfigError: the source of the function is not available.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        raise UnsupportedConfigError(
            f"the source of score function {name} is not available, and kernels are compiled from "
            "it: define it with def in a file",
            backend="triton",
        ) from None
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)  # `ScoreFunction` has checked it
    for argument in definition.args.args:
        argument.annotation = None
    definition.returns, definition.decorator_list = None, []
    operator_of = functools.partial(_operator_of, used=used)
    exists = variant == "scores"
    if form is not None and not _RESERVED & used.keys():
        simplify_arithmetic(definition, form, operator_of)
        exists = exists or take_raw_products(definition, form, operator_of)
        if variant == "slope":
            exists = exists and differentiate(definition, form, operator_of)
    if not exists:
        return None
    source = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    # Triton reads the source of a function through `inspect`, which asks `linecache`.
    file = f"<attnlib score function {name}{'' if form is None else f', {variant}'}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {}
    exec(compile(source, file, "exec"), namespace)
    copy = namespace[definition.name]
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return copy


def _operator_of(called: ast.expr, used: Mapping[str, Any]) -> str | None:
    """The name of the operator that an expression denotes in a function; None if it is another."""
    value: Any = None
    if isinstance(called, ast.Name):
        value = abs if called.id == "abs" else used.get(called.id)
    elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
        value = getattr(used.get(called.value.id), called.attr, None)
    if value is abs:
        return "absolute"
    if not callable(value):
        return None
    return OPERATORS.get(value) or TORCH_OPERATORS.get(value)
