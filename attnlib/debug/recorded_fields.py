"""The fields of a spec as the plain values of a recording, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from types import FunctionType
from typing import Any

import torch

from attnlib.errors import ContractError
from attnlib.kv_rotation import KVRotation
from attnlib.object_path import load_object
from attnlib.score_functions import ScoreFunction
from attnlib.spec import Window
from attnlib.spec.layer_spec import LayerSpec

__all__ = ["plain_fields", "plain_value", "score_fields", "spec_fields"]


def score_fields(function: ScoreFunction) -> dict[str, Any]:
    """A score function as plain values; functions as "module:name".

    Raises:
        ContractError: a function is defined in `__main__`.
    """
    values = {field.name: getattr(function, field.name) for field in fields(ScoreFunction)}
    for name, value in values.items():
        if isinstance(value, FunctionType):
            if value.__module__ == "__main__":
                raise ContractError(
                    f"a call with score function {function} cannot be recorded: {name} is defined "
                    "in __main__, which a replay cannot import; define it in another module"
                )
            values[name] = f"{value.__module__}:{value.__qualname__}"
    return values


def _score_function(values: Mapping[str, Any]) -> ScoreFunction:
    """The score function of `score_fields`.

    Raises:
        ContractError: a function cannot be imported.
    """
    made = dict(values)
    for name in ("function", "bounds", "head_bounds", "examples"):
        if made.get(name) is None:  # recordings of earlier versions have no head_bounds
            continue
        try:
            made[name] = load_object(made[name])
        except (ImportError, ContractError) as error:
            raise ContractError(
                f"the recorded call has the score function {values['function']}, and {made[name]} "
                f"cannot be imported ({error}): make the module importable, for example by "
                "PYTHONPATH, and replay again"
            ) from None
    return ScoreFunction(**made)


def plain_value(value: Any) -> Any:
    if isinstance(value, ScoreFunction):
        return score_fields(value)
    if isinstance(value, torch.dtype | KVRotation):
        return str(value)
    value = value.value if isinstance(value, Enum) else value
    return tuple(value) if isinstance(value, tuple) else value


def plain_fields(spec: LayerSpec) -> dict[str, Any]:
    """The fields of a spec as plain values."""
    return {field.name: plain_value(getattr(spec, field.name)) for field in fields(spec)}


def spec_fields(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a spec from plain values."""
    found = dict(plain)
    for name in ("dtype", "kv_cache_dtype", "value_cache_dtype", "state_dtype"):
        if str(found.get(name)).startswith("torch."):
            found[name] = getattr(torch, found[name].removeprefix("torch."))
    if found.get("window") is not None:
        found["window"] = Window(*found["window"])
    if found.get("score_function") is not None:
        found["score_function"] = _score_function(found["score_function"])
    return found
