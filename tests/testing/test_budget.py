"""Budgets: correct results pass, common errors fail, messages show errors and limits."""

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
def test_the_rounded_oracle_is_within_budget(dtype: torch.dtype) -> None:
    """A perfect kernel only rounds its result and needs only the rounding term."""
    for seed in range(20):
        exact, same_precision = _case(dtype, seed)
        assert compare(exact.out.to(dtype), exact.out, exact.out.to(dtype), dtype).passed
        assert compare(exact.out.to(dtype), exact.out, same_precision.out, dtype).passed
        assert compare(exact.lse.float(), exact.lse, same_precision.lse, dtype, "lse").passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_small_error_in_all_elements_exceeds_the_mean_limit(dtype: torch.dtype) -> None:
    """The mean has its own limit: three times the mean error is below the maximum and fails."""
    exact, same_precision = _case(dtype)
    mean = (same_precision.out.double() - exact.out).abs().mean()
    slack = BUDGETS[dtype, "out"].mean_ulps * torch.finfo(dtype).eps * exact.out.abs().mean()
    comparison = compare(
        exact.out + 1.01 * (2 * mean + slack), exact.out, same_precision.out, dtype
    )
    assert not comparison.passed
    assert comparison.mean_error > comparison.mean_allowed


@pytest.mark.parametrize("dtype", DTYPES)
def test_base_two_is_over_budget(dtype: torch.dtype) -> None:
    """L1: a base-2 LSE is wrong by a factor of 1.44."""
    exact, same_precision = _case(dtype)
    assert not compare(exact.lse / math.log(2), exact.lse, same_precision.lse, dtype, "lse").passed


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_elements_that_are_not_finite_are_reported_with_their_index(poison: float) -> None:
    exact, same_precision = _case(torch.float32)
    broken = exact.out.clone()
    broken[3, 1, 5] = poison
    comparison = compare(broken, exact.out, same_precision.out, torch.float32)
    assert not comparison.passed
    assert "first at (3, 1, 5)" in str(comparison)


def test_minus_infinity_must_be_where_the_oracle_has_it() -> None:
    """M5: a row that sees no key has LSE -inf, not a large negative number."""
    exact, same_precision = _case(torch.float32)
    assert (exact.lse == -math.inf).any()
    finite = exact.lse.clamp(min=-1e30)
    assert "where -inf was expected" in str(
        compare(finite, exact.lse, same_precision.lse, torch.float32, "lse")
    )


def test_a_wrong_shape_fails_and_is_not_broadcast() -> None:
    exact, same_precision = _case(torch.float32)
    comparison = compare(exact.lse.T, exact.lse, same_precision.lse, torch.float32, "lse")
    assert not comparison.passed
    assert "shape is (4, 20) where (20, 4) was expected" in str(comparison)


def test_the_message_shows_both_errors_and_both_limits() -> None:
    exact, same_precision = _case(torch.bfloat16)
    text = str(compare(exact.out + 1.0, exact.out, same_precision.out, torch.bfloat16))
    assert "over budget: max error 1 (allowed 0.0" in text
    assert "mean error 1 (allowed 0.00" in text


def test_compare_bits_reports_changed_elements() -> None:
    a = torch.tensor([1.0, math.nan, 0.0, -math.inf])
    assert compare_bits(a, a.clone()).passed
    comparison = compare_bits(a, a + torch.tensor([1e-7, 0.0, 0.0, 0.0]))
    assert not comparison.passed
    assert "1 of 4 elements changed, first at (0,)" in str(comparison)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_factor_that_rounding_hides_is_a_bias(dtype: torch.dtype) -> None:
    """1.004 in bfloat16 is within the limits of the maximum and the mean, and so is a cast that
    drops bits. Rounding errors cancel."""
    dims = Dimensions(dtype=dtype, cache_dtype=dtype)
    batch = parse_batch("67q1s19_40q1s32_23q1s5")
    inputs = make_inputs(batch, dims, place_blocks(batch, 16))
    params = make_oracle_params(dims, batch, {})
    exact, same_precision = inputs.oracle(params), inputs.oracle(params, dtype)
    factor = 1 + torch.finfo(dtype).eps / 2
    for wrong in (factor, 1 / factor):
        found = compare((exact.out * wrong).to(dtype), exact.out, same_precision.out, dtype)
        assert not found.passed
        assert found.max_error <= found.max_allowed and found.mean_error <= found.mean_allowed
        assert abs(found.bias) > 2 * found.bias_allowed
        assert f"bias {found.bias:+.3g} of the sum" in str(found)
    rounded = compare(exact.out.to(dtype), exact.out, same_precision.out, dtype)
    assert abs(rounded.bias) < rounded.bias_allowed / 4
    assert "bias" not in str(rounded)
