"""Calls of operations that no attention layer runs, and comparisons of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnlib.errors import UnsupportedConfigError
from attnlib.ops.params import AttentionParams
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import compare
from attnlib.testing.case import Case
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.oracle import OracleParams, unpaged_attention
from attnlib.testing.outcome import UnsupportedCase
from attnlib.testing.runner import find_operation

__all__ = [
    "call_operation",
    "compare_results",
    "compare_sequence",
    "operation_case",
    "operation_params",
]


def call_operation(target: BackendUnderTest, name: str, *arguments: Any, **options: Any) -> Any:
    """Call an operation of the backend.

    Raises:
        UnsupportedCase: the backend does not have it, or refuses these arguments.
    """
    try:
        return find_operation(target.backend, name)(*arguments, **options)
    except UnsupportedConfigError as error:
        raise UnsupportedCase([str(error)]) from error


def operation_case(target: BackendUnderTest, **fields: object) -> Case:
    """A case of a layer without latents, for operations that do not serve them."""
    sizes = {"head_size": target.base_case.head_size, "layout": "NHD", "needs_lse": False}
    return target.case(**{**sizes, **fields})


def operation_params(step: MaterializedCase) -> AttentionParams:
    """The parameters of a step."""
    params = step.params
    return AttentionParams(
        scale=params.scale,
        causal=params.causal,
        window=params.window,
        attention_chunk_size=params.attention_chunk_size,
        logits_soft_cap=params.logits_soft_cap,
        alibi_slopes=params.alibi_slopes,
        sinks=params.sinks,
        query_bias=params.query_bias,
        score_function=step.spec.score_function,
        score_tensors={**step.score_tensors(), **step.score_tensors("batch_tensors")},
        k_scale=params.k_scale,
        v_scale=params.v_scale,
    )


def compare_results(
    found: torch.Tensor, oracle: Callable[[torch.dtype], torch.Tensor], case: Case, quantity: str
) -> str:
    """The error of a result; "" if it is within the budget.

    Args:
        found: the result.
        oracle: function of a dtype that computes the result in this precision.
        case: the case that produced the result.
        quantity: as in `compare`.
    """
    expected, plain = oracle(torch.float64), oracle(case.torch_dtype)
    compared = compare(found, expected, plain, case.torch_dtype, quantity)
    return "" if compared.passed else f"{compared} | case: {case}"


def compare_sequence(
    found: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    params: OracleParams,
    case: Case,
) -> str:
    """The error of one sequence's output; "" if it is within the budget.

    Args:
        found: `[L, Hq, Dv]`, the output.
        query: `[L, Hq, D]`, the last L positions.
        key: `[S, Hkv, D]`, the keys of all positions.
        value: `[S, Hkv, Dv]`, likewise.
        params: the parameters of the oracle, for this request.
        case: the case that produced the output.
    """
    starts, key_starts = (torch.tensor([0, len(x)]) for x in (query, key))

    def oracle(precision: torch.dtype) -> torch.Tensor:
        return unpaged_attention(query, key, value, starts, key_starts, params, precision).out

    return compare_results(found, oracle, case, "out")
