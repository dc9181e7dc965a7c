"""Fakes that have the recorded signatures of real packages.

`signatures.json` has the signatures; `record_signatures.py` renews it.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["RECORDED", "like", "signature_of"]

RECORDED: dict[str, dict[str, list[list[Any]]]] = json.loads(
    Path(__file__).with_name("signatures.json").read_text()
)
"""Release ("name version") -> function -> parameters as (name, kind, text of the default)."""


@lru_cache
def signature_of(release: str, function: str) -> inspect.Signature:
    """The recorded signature of a function or "Class.method" of a release."""
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                inspect._ParameterKind[kind],
                default=inspect.Parameter.empty if text is None else _value(text),
            )
            for name, kind, text in RECORDED[release][function]
        ]
    )


def like(
    release: str, function: str, calls: list[dict[str, Any]] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a fake the signature of the real function.

    A call must fit the recorded signature. The fake gets those arguments that it names, and the
    defaults of the others; arguments that the real function does not have cannot be named. Of a
    function with `**kwargs` any argument can.

    Args:
        release: as in `RECORDED`.
        function: as in `signature_of`.
        calls: gets the arguments of each call, with defaults.
    """
    signature = signature_of(release, function)
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    is_open = inspect.Parameter.VAR_KEYWORD in kinds

    def decorate(fake: Callable[..., Any]) -> Callable[..., Any]:
        named = inspect.signature(fake).parameters
        unknown = [name for name in named if name not in signature.parameters]
        if unknown and not is_open:
            raise TypeError(f"{function} of {release} has no argument {', '.join(unknown)}")

        def checked(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            values = dict(bound.arguments)
            for parameter in signature.parameters.values():
                if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                    values |= values.pop(parameter.name)
            if calls is not None:
                calls.append({name: value for name, value in values.items() if name != "self"})
            return fake(**{name: values[name] for name in named if name in values})

        checked.__name__ = checked.__qualname__ = function.rpartition(".")[2]
        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked

    return decorate


def _value(text: str) -> Any:
    """The value of a default; the text itself if it is the name of something in the package."""
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."))
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text
