"""Functions that a score function may call, on torch tensors.

Kernels replace them by functions of the same names (`attnlib.ops.triton.kernels.score`). Python's
operators, `abs` and `float` need no counterpart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "OPERATORS",
    "TORCH_OPERATORS",
    "absolute",
    "exp",
    "exp2",
    "floor",
    "log",
    "log2",
    "lookup",
    "maximum",
    "minimum",
    "observed_lookups",
    "sqrt",
    "where",
]

_observed = threading.local()


def where(condition: Any, value: Any, other: Any) -> Any:
    """`value` where the condition holds, else `other`; any of them may be a number."""
    return torch.where(_tensor(condition), value, other)


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two values, element by element."""
    return torch.minimum(*_tensors(a, b))


def maximum(a: Any, b: Any) -> Any:
    """The larger of two values, element by element."""
    return torch.maximum(*_tensors(a, b))


def absolute(x: Any) -> Any:
    """The absolute value, like `abs`."""
    return abs(x)


def exp(x: Any) -> Any:
    """e ** x; integers become float32."""
    return torch.exp(_tensor(x))


def exp2(x: Any) -> Any:
    """2 ** x; integers become float32."""
    return torch.exp2(_tensor(x))


def log(x: Any) -> Any:
    """The natural logarithm; integers become float32."""
    return torch.log(_tensor(x))


def log2(x: Any) -> Any:
    """The base-2 logarithm; integers become float32."""
    return torch.log2(_tensor(x))


def sqrt(x: Any) -> Any:
    """The square root; integers become float32."""
    return torch.sqrt(_tensor(x))


def floor(x: Any) -> Any:
    """The largest integer that is not larger, as a floating-point number."""
    return torch.floor(_tensor(x))


def lookup(table: Tensor, row: Any, column: Any = None) -> Tensor:
    """The element of an auxiliary tensor; an index past an edge gives the element at the edge.

    Args:
        table: `[n]`, or `[n, m]` with a column.
        row: integers that broadcast with the column.
        column: integers; None for a table of one dimension.
    """
    shapes: list[torch.Size] | None = getattr(_observed, "shapes", None)
    if shapes is not None:
        found = _tensor(row) + _tensor(0 if column is None else column)
        shapes.append(found.shape)
        return torch.zeros(found.shape, dtype=torch.float32, device="cpu")
    first = torch.as_tensor(row, device=table.device).long().clamp(0, table.shape[0] - 1)
    if column is None:
        return table[first]
    second = torch.as_tensor(column, device=table.device).long().clamp(0, table.shape[1] - 1)
    return table[first, second]


@contextmanager
def observed_lookups() -> Iterator[list[torch.Size]]:
    """Within the block, `lookup` reads no table: it adds the shape of its result to the list and
    returns zeros."""
    shapes: list[torch.Size] = []
    _observed.shapes = shapes
    try:
        yield shapes
    finally:
        _observed.shapes = None


def _tensor(x: Any) -> Tensor:
    """A tensor as it is, and a number as one on the CPU."""
    return x if isinstance(x, Tensor) else torch.as_tensor(x, device="cpu")


def _tensors(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Both as tensors of one dtype; a number takes the dtype of the other."""
    if not isinstance(a, Tensor):
        a = torch.as_tensor(a, dtype=_dtype_beside(a, b), device=getattr(b, "device", "cpu"))
    if not isinstance(b, Tensor):
        b = torch.as_tensor(b, dtype=_dtype_beside(b, a), device=a.device)
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def _dtype_beside(number: Any, other: Any) -> torch.dtype | None:
    """The dtype of a number next to a tensor: the tensor's, or float32 for a float next to ints."""
    if not isinstance(other, Tensor):
        return None
    if isinstance(number, float) and not other.is_floating_point():
        return torch.float32
    return other.dtype


OPERATORS: dict[Callable[..., Any], str] = {
    function: function.__name__
    for function in (
        where,
        minimum,
        maximum,
        absolute,
        exp,
        exp2,
        log,
        log2,
        sqrt,
        floor,
        lookup,
    )
}
"""Function -> the name of its counterpart in the kernels."""

TORCH_OPERATORS: dict[Callable[..., Any], str] = {
    torch.where: "where",
    torch.minimum: "minimum",
    torch.maximum: "maximum",
    torch.abs: "absolute",
    torch.exp: "exp",
    torch.exp2: "exp2",
    torch.log: "log",
    torch.log2: "log2",
    torch.sqrt: "sqrt",
    torch.floor: "floor",
}
"""The same for functions of torch, which functions written for flex_attention call."""
