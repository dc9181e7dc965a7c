"""Checks of the Python functions of a `ScoreFunction`: kernels must be able to compile them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch

from attnlib.errors import ContractError
from attnlib.score_functions.operators import OPERATORS, TORCH_OPERATORS

__all__ = ["check_function", "check_top_level"]

_ALLOWED_BUILTINS = {"abs", "float"}


def check_function(function: Any, parameters: tuple[str, ...]) -> None:
    """Check a function and the functions that it calls.

    Raises:
        ContractError: it is not a top-level function, has other parameters, or uses a value that
            kernels have not.
    """
    check_top_level(function)
    found = list(inspect.signature(function).parameters.values())
    if len(found) != len(parameters) or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in found):
        raise ContractError(
            f"{function.__qualname__} has the parameters ({', '.join(p.name for p in found)}); it "
            f"must take {len(parameters)}: ({', '.join(parameters)})",
            rule="M10",
        )
    _check_values(function, set())


def _check_values(function: Callable[..., Any], seen: set[Any]) -> None:
    if function in seen:
        return
    seen.add(function)
    used = inspect.getclosurevars(function)
    where = f"{function.__module__}.{function.__qualname__}"
    for name in used.builtins:
        if name not in _ALLOWED_BUILTINS:
            advice = {"min": "minimum", "max": "maximum"}.get(name)
            raise ContractError(
                f"{where} calls {name}, which kernels cannot: use "
                + (f"attnlib.score_functions.{advice}" if advice else "operators only"),
                rule="M10",
            )
    for name, value in used.globals.items():
        if isinstance(value, bool | int | float) or value in (None,):
            continue
        if isinstance(value, ModuleType):
            if value is torch or value.__name__.startswith("attnlib.score_functions"):
                continue
        elif callable(value) and (value in OPERATORS or value in TORCH_OPERATORS):
            continue
        elif isinstance(value, FunctionType):
            check_top_level(value)
            _check_values(value, seen)
            continue
        raise ContractError(
            f"{where} uses {name}, a {type(value).__name__}; a score function may use numbers, "
            "functions of attnlib.score_functions and other such functions: pass tensors as "
            "layer_tensors or batch_tensors",
            rule="M10",
        )


def check_top_level(function: Any) -> None:
    if not isinstance(function, FunctionType):
        raise ContractError(
            f"{function!r} is a {type(function).__name__}; a score function is made from a Python "
            "function: write it with def at the top level of a module",
            rule="M10",
        )
    if function.__closure__:
        raise ContractError(
            f"{function.__qualname__} captures {', '.join(function.__code__.co_freevars)}: pass "
            "numbers as constants and tensors as layer_tensors or batch_tensors",
            rule="M10",
        )
    module = sys.modules.get(function.__module__)
    if getattr(module, function.__qualname__, None) is not function:
        raise ContractError(
            f"{function.__qualname__} is not found under this name in {function.__module__}, so it "
            "cannot be pickled: define it with def at the top level of a module",
            rule="M10",
        )
