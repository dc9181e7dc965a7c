"""Call an operation with keyword options instead of an `AttentionParams`."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from attnlib.ops.params import AttentionParams

__all__ = ["call_operation", "split_options"]

_FIELDS = {field.name for field in dataclasses.fields(AttentionParams)}


def split_options(options: dict[str, Any]) -> tuple[AttentionParams, dict[str, Any]]:
    """(the parameters, the other keyword arguments) of `options`."""
    params = {name: value for name, value in options.items() if name in _FIELDS}
    others = {name: value for name, value in options.items() if name not in _FIELDS}
    return AttentionParams(**params), others


def call_operation(operation: Any, *tensors: Tensor, **options: Any) -> Any:
    """`operation(*tensors, params, **others)`, with `params` and `others` from `options`."""
    params, others = split_options(options)
    return operation(*tensors, params, **others)
