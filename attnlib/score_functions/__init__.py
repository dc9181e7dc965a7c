"""Score functions: changes of attention scores and masks, written as plain Python functions (M10).

    from attnlib.score_functions import ScoreFunction, lookup, where

    def decay(score, q_pos, k_pos, head, request, aux):
        return score - 0.01 * (q_pos - k_pos)

    spec = AttentionSpec(..., score_function=ScoreFunction(decay))

The same function runs on torch tensors in the reference and is compiled into the kernels of the
`triton` backend. `operators` has the functions that it may call, `builtin` has functions for common
models.
"""

from __future__ import annotations

from attnlib.score_functions.function import ScoreFunction
from attnlib.score_functions.operators import (
    absolute,
    exp,
    exp2,
    floor,
    log,
    log2,
    lookup,
    maximum,
    minimum,
    sqrt,
    where,
)
from attnlib.score_functions.query_tensors import QueryTensors, query_row, query_row_tensor

__all__ = [
    "QueryTensors",
    "ScoreFunction",
    "absolute",
    "exp",
    "exp2",
    "floor",
    "log",
    "log2",
    "lookup",
    "maximum",
    "minimum",
    "query_row",
    "query_row_tensor",
    "sqrt",
    "where",
]
