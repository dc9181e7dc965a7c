"""Budgets: same_precision work is within them, the classic mistakes are not, and the message says by how much."""

from __future__ import annotations

import math

import pytest
import torch

from attnlib.testing.batch_spec import parse_batch
from attnlib.testing.block_placement import place_blocks
from attnlib.testing.budget import BUDGETS, compare, compare_bits
from attnlib.testing.inputs import make_inputs, make_oracle_params
from attnlib.testing.layouts import Dimensions
from attnlib.testing.oracle import OracleResult

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _case(dtype: torch.dtype, seed: int = 0) -> tuple[OracleResult, OracleResult]:
    dims = Dimensions(dtype=dtype, cache_dtype=dtype)
    batch = parse_batch("q17s50_q1s90_q0s0_q2s0")
    inputs = make_inputs(batch, dims, place_blocks(batch, 16), seed=seed)
    params = make_oracle_params(dims, batch, {})
    return inputs.oracle(params), inputs.oracle(params, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rounded_truth_is_within_budget(dtype: torch.dtype) -> None:
    """A perfect kernel only rounds its result, and needs no more than the rounding term."""
    for seed in range(20):
        truth, same_precision = _case(dtype, seed)
        assert compare(truth.out.to(dtype), truth.out, truth.out.to(dtype), dtype).passed
        assert compare(truth.out.to(dtype), truth.out, same_precision.out, dtype).passed
        assert compare(truth.lse.float(), truth.lse, same_precision.lse, dtype, "lse").passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_small_error_everywhere_is_over_the_mean(dtype: torch.dtype) -> None:
    """The mean has a limit of its own: three same_precision mean errors on every element stay under the maximum, and fail."""
    truth, same_precision = _case(dtype)
    mean = (same_precision.out.double() - truth.out).abs().mean()
    slack = BUDGETS[dtype, "out"].mean_ulps * torch.finfo(dtype).eps * truth.out.abs().mean()
    comparison = compare(
        truth.out + 1.01 * (2 * mean + slack), truth.out, same_precision.out, dtype
    )
    assert not comparison.passed
    assert comparison.mean_error > comparison.mean_allowed


@pytest.mark.parametrize("dtype", DTYPES)
def test_base_two_is_over_budget(dtype: torch.dtype) -> None:
    """L1: a log2 that leaks is off by a factor of 1.44."""
    truth, same_precision = _case(dtype)
    assert not compare(truth.lse / math.log(2), truth.lse, same_precision.lse, dtype, "lse").passed


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named_with_its_place(poison: float) -> None:
    truth, same_precision = _case(torch.float32)
    broken = truth.out.clone()
    broken[3, 1, 5] = poison
    comparison = compare(broken, truth.out, same_precision.out, torch.float32)
    assert not comparison.passed
    assert "first at (3, 1, 5)" in str(comparison)


def test_minus_infinity_belongs_where_the_oracle_has_it() -> None:
    """M5: a row that sees nothing has LSE -inf; a large negative number is not that."""
    truth, same_precision = _case(torch.float32)
    assert (truth.lse == -math.inf).any()
    finite = truth.lse.clamp(min=-1e30)
    assert "where -inf was expected" in str(
        compare(finite, truth.lse, same_precision.lse, torch.float32, "lse")
    )


def test_another_shape_is_a_failure_and_not_a_broadcast() -> None:
    truth, same_precision = _case(torch.float32)
    comparison = compare(truth.lse.T, truth.lse, same_precision.lse, torch.float32, "lse")
    assert not comparison.passed
    assert "shape is (4, 20) where (20, 4) was expected" in str(comparison)


def test_the_message_holds_both_errors_and_both_limits() -> None:
    truth, same_precision = _case(torch.bfloat16)
    text = str(compare(truth.out + 1.0, truth.out, same_precision.out, torch.bfloat16))
    assert "over budget: max error 1 (allowed 0.0" in text
    assert "mean error 1 (allowed 0.00" in text


def test_bits_are_bits() -> None:
    a = torch.tensor([1.0, math.nan, 0.0, -math.inf])
    assert compare_bits(a, a.clone()).passed
    comparison = compare_bits(a, a + torch.tensor([1e-7, 0.0, 0.0, 0.0]))
    assert not comparison.passed
    assert "1 of 4 elements changed, first at (0,)" in str(comparison)
