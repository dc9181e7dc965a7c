"""Checks of the Python functions of a `ScoreFunction`, and of `KVFormat.number`: kernels must be
able to compile them."""

from __future__ import annotations

import builtins
import dis
import inspect
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from attnlib.errors import ContractError
from attnlib.score_functions.operators import OPERATORS, TORCH_OPERATORS

__all__ = ["CheckedKind", "check_function", "check_top_level", "loaded_globals"]


class CheckedKind(NamedTuple):
    """What a function is for.

    Attributes:
        name: in messages.
        rule: which it breaks.
        of_values: what to do with a value that kernels have not.
        of_captured: what to do with a variable of a closure.
    """

    name: str
    rule: str
    of_values: str
    of_captured: str


_TENSORS = "tensors as layer_tensors or batch_tensors"
_SCORE = CheckedKind(
    "score function", "M10", f"pass {_TENSORS}", f"pass numbers as constants and {_TENSORS}"
)

_ALLOWED_BUILTINS = {"abs", "float"}


def check_function(function: Any, parameters: tuple[str, ...], kind: CheckedKind = _SCORE) -> None:
    """Check a function and the functions that it calls.

    Raises:
        ContractError: it is not a top-level function, has other parameters, or uses a value that
            kernels have not.
    """
    check_top_level(function, kind)
    found = list(inspect.signature(function).parameters.values())
    if len(found) != len(parameters) or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in found):
        raise ContractError(
            f"{function.__qualname__} has the parameters ({', '.join(p.name for p in found)}); it "
            f"must take {len(parameters)}: ({', '.join(parameters)})",
            rule=kind.rule,
        )
    _check_values(function, set(), kind)


def _check_values(function: Callable[..., Any], seen: set[Any], kind: CheckedKind) -> None:
    if function in seen:
        return
    seen.add(function)
    where = f"{function.__module__}.{function.__qualname__}"
    used = loaded_globals(function)
    for name in _loaded_names(function):
        if name not in used and hasattr(builtins, name) and name not in _ALLOWED_BUILTINS:
            advice = {"min": "minimum", "max": "maximum"}.get(name)
            raise ContractError(
                f"{where} calls {name}, which kernels cannot: use "
                + (f"attnlib.score_functions.{advice}" if advice else "operators only"),
                rule=kind.rule,
            )
    for name, value in used.items():
        if isinstance(value, bool | int | float) or value in (None,):
            continue
        if isinstance(value, ModuleType):
            if value is torch or value.__name__.startswith("attnlib.score_functions"):
                continue
        elif callable(value) and (value in OPERATORS or value in TORCH_OPERATORS):
            continue
        elif isinstance(value, FunctionType):
            check_top_level(value, kind)
            _check_values(value, seen, kind)
            continue
        raise ContractError(
            f"{where} uses {name}, a {type(value).__name__}; a {kind.name} may use numbers, "
            f"functions of attnlib.score_functions and other such functions: {kind.of_values}",
            rule=kind.rule,
        )


def loaded_globals(function: Callable[..., Any]) -> dict[str, Any]:
    """The globals that the code of a function loads, by name. An attribute, such as `aux.bias`, may
    have the name of another global."""
    known = function.__globals__
    return {name: known[name] for name in _loaded_names(function) if name in known}


def _loaded_names(function: Callable[..., Any]) -> list[str]:
    """Names of globals and builtins."""
    code = dis.get_instructions(function)
    return [one.argval for one in code if one.opname == "LOAD_GLOBAL"]


def check_top_level(function: Any, kind: CheckedKind = _SCORE) -> None:
    if not isinstance(function, FunctionType):
        raise ContractError(
            f"{function!r} is a {type(function).__name__}; a {kind.name} is made from a "
            "Python function: write it with def at the top level of a module",
            rule=kind.rule,
        )
    if function.__closure__:
        raise ContractError(
            f"{function.__qualname__} captures "
            f"{', '.join(function.__code__.co_freevars)}: {kind.of_captured}",
            rule=kind.rule,
        )
    module = sys.modules.get(function.__module__)
    if getattr(module, function.__qualname__, None) is not function:
        raise ContractError(
            f"{function.__qualname__} is not found under this name in {function.__module__}, so it "
            "cannot be pickled: define it with def at the top level of a module",
            rule=kind.rule,
        )
