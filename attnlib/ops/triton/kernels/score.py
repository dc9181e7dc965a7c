"""Device code around a score function (M10): its operators, its auxiliary tensors and its calls.

`launch.score_compile` compiles copies of these functions in which the global names refer to the
user's function and to the language of the kernel: `tl` is `triton.language` or Gluon's language.
Nothing here may use what one of the two lacks.

A kernel has three parameters for each of up to four tensors: pointer, rows, columns. They are None
without a function, so that the kernel is the same as one without these parameters.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

__all__ = [
    "absolute", "apply_mask_mod", "apply_raw_mask_mod", "apply_raw_score", "apply_raw_score_mod",
    "apply_score", "apply_score_mod", "bound_head_ranges", "bound_keys", "bound_keys_of_ranges",
    "bound_ranges", "distance", "exp", "exp2", "floor", "log", "log2", "lookup", "maximum",
    "minimum", "named_values", "sqrt", "where",
]  # fmt: skip

FIELDS: tl.constexpr = tl.constexpr(())
FUNCTION: Any = None


def named_values(aux: Any, fields: Any, _semantic: Any = None) -> Any:
    """The argument `aux` of a score function: tensors and constants as attributes.

    Runs in the compiler, where `_semantic` is given, and in the interpreter.

    Args:
        aux: the kernel's parameters, three for each tensor.
        fields: (name, number of the tensor, None) or (name, None, constant).
    """
    fields = getattr(fields, "value", fields)
    values: dict[str, Any] = {}
    for name, number, constant in fields:
        parts = None if number is None else [aux[3 * number + part] for part in range(3)]
        if _semantic is None:
            values[name] = constant if parts is None else parts
        else:
            values[name] = tl.constexpr(constant) if parts is None else tl.tuple(parts)
    if _semantic is None:
        return SimpleNamespace(**values)
    types = [value.type for value in values.values()]
    return tl.tuple(list(values.values()), tl.tuple_type(types, list(values)))


named_values.__triton_builtin__ = True  # type: ignore[attr-defined]  # how the compiler finds it


@triton.jit
def where(condition, value, other):
    """Select element by element."""
    return tl.where(condition, value, other)


@triton.jit
def minimum(a, b):
    """Return the smaller value, element by element."""
    return tl.minimum(a, b)


@triton.jit
def maximum(a, b):
    """Return the larger value, element by element."""
    return tl.maximum(a, b)


@triton.jit
def absolute(x):
    """Return the absolute value."""
    return tl.abs(x)


@triton.jit
def exp(x):
    """Return e ** x."""
    return tl.exp(x.to(tl.float32))


@triton.jit
def exp2(x):
    """Return 2 ** x."""
    return tl.exp2(x.to(tl.float32))


@triton.jit
def log(x):
    """Return the natural logarithm."""
    return tl.log(x.to(tl.float32))


@triton.jit
def log2(x):
    """Return the base-2 logarithm."""
    return tl.log2(x.to(tl.float32))


@triton.jit
def sqrt(x):
    """Return the square root."""
    return tl.sqrt(x.to(tl.float32))


@triton.jit
def floor(x):
    """Return the largest integer that is not larger."""
    return tl.floor(x.to(tl.float32))


@triton.jit
def lookup(table, row, column=None):
    """Load from an auxiliary tensor; indices past an edge read the element at the edge."""
    # Rows of a tile that do not exist and keys past the end have indices outside of the tensor.
    offset = tl.minimum(tl.maximum(row, 0), table[1] - 1)
    if column is not None:
        offset = offset * table[2] + tl.minimum(tl.maximum(column, 0), table[2] - 1)
    value = tl.load(table[0] + offset)
    if value.dtype != tl.int32:
        value = value.to(tl.float32)
    return value


@triton.jit
def distance(q_pos, k_pos):
    """Return q_pos - k_pos in float32, exact up to 2^24; called by `launch.score_arithmetic`.

    Args:
        q_pos, k_pos: positions that broadcast to [M, N].
    """
    # In WGMMA accumulators a thread has columns 8 * i + 2 * (lane % 4) and the next. The bits of i
    # and the lowest one are constants of each register, so their conversion is done at compile
    # time, and the sum of the other bits is the same for all registers of a row.
    CONSTANT_BITS: tl.constexpr = (k_pos.shape[1] - 1) & ~6
    columns = k_pos & CONSTANT_BITS
    return (q_pos - (k_pos - columns)).to(tl.float32) - columns.to(tl.float32)


@triton.jit
def apply_score(score, q_pos, k_pos, head, request, aux):
    """Call a score function with its named tensors and constants."""
    return FUNCTION(score, q_pos, k_pos, head, request, named_values(aux, FIELDS))


@triton.jit
def apply_score_mod(score, q_pos, k_pos, head, request, aux):
    """Call a score_mod of `flex_attention`."""
    return FUNCTION(score, request, head, q_pos, k_pos)


@triton.jit
def apply_mask_mod(score, q_pos, k_pos, head, request, aux):
    """Call a mask_mod of `flex_attention`."""
    return tl.where(FUNCTION(request, head, q_pos, k_pos), score, float("-inf"))


@triton.jit
def apply_raw_score(product, q_pos, k_pos, head, request, aux, inverse_scale):
    """`apply_score` for a function that takes raw products (`launch.score_arithmetic`)."""
    return FUNCTION(product, q_pos, k_pos, head, request, named_values(aux, FIELDS), inverse_scale)


@triton.jit
def apply_raw_score_mod(product, q_pos, k_pos, head, request, aux, inverse_scale):
    """`apply_score_mod` for a function that takes raw products."""
    return FUNCTION(product, request, head, q_pos, k_pos, inverse_scale)


@triton.jit
def apply_raw_mask_mod(product, q_pos, k_pos, head, request, aux, inverse_scale):
    """`apply_mask_mod`, whose function does not see the product."""
    return tl.where(FUNCTION(request, head, q_pos, k_pos), product, float("-inf"))


@triton.jit
def bound_keys(q_first, q_last, seq_len, request, aux):
    """Call the bounds of a score function, which return one range of keys.

    Returns:
        (first, last, same_first, same_last).
    """
    return FUNCTION(q_first, q_last, seq_len, request, named_values(aux, FIELDS))


@triton.jit
def bound_keys_of_ranges(q_first, q_last, seq_len, request, aux):
    """Call bounds that return two ranges; returns one that contains both, as `bound_keys`."""
    first, last, same_first, same_last, first_b, last_b, _, _ = FUNCTION(
        q_first, q_last, seq_len, request, named_values(aux, FIELDS)
    )
    return tl.minimum(first, first_b), tl.maximum(last, last_b), same_first, same_last


@triton.jit
def bound_ranges(q_first, q_last, seq_len, head, request, aux):
    """Call the bounds of a score function; returns the four values of each range."""
    return FUNCTION(q_first, q_last, seq_len, request, named_values(aux, FIELDS))


@triton.jit
def bound_head_ranges(q_first, q_last, seq_len, head, request, aux):
    """`bound_ranges` for bounds of one query head."""
    return FUNCTION(q_first, q_last, seq_len, head, request, named_values(aux, FIELDS))
