"""Error budgets for comparisons with the oracle.

The allowed error is `factor` times the error of a plain torch computation in the same precision on
the same case, plus rounding terms. The maximum and the mean error have separate limits; the mean
detects small errors in many elements. In 16 bits, rounding hides a factor such as 1.004 from both,
so the bias of all elements together has a third limit: rounding errors cancel, a wrong factor or a
truncation does not. All limits are in `BUDGETS`; checks define no tolerances.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = [
    "BUDGETS",
    "FLOAT8_QUERY_ERROR",
    "FLOAT8_QUERY_STEP",
    "Budget",
    "Comparison",
    "compare",
    "compare_bits",
    "relative_error",
]


@dataclass(frozen=True)
class Budget:
    """The limits of one quantity in one dtype.

    Attributes:
        factor: multiple of the error of the same-precision computation.
        max_ulps: rounding term of the maximum, in units of eps * max(|expected|).
        mean_ulps: rounding term of the mean, in units of eps * mean(|expected|).
        bias_ulps: rounding term of the bias, in units of eps; None for no limit.
    """

    factor: float
    max_ulps: float
    mean_ulps: float
    bias_ulps: float | None = None


BUDGETS: dict[tuple[torch.dtype, str], Budget] = {
    # For float64 the same-precision computation is the oracle: only the rounding term remains.
    (torch.float64, "out"): Budget(factor=2.0, max_ulps=64.0, mean_ulps=32.0),
    (torch.float64, "merged_out"): Budget(factor=2.0, max_ulps=64.0, mean_ulps=32.0),
    (torch.float64, "lse"): Budget(factor=2.0, max_ulps=16.0, mean_ulps=8.0),
    (torch.float32, "out"): Budget(factor=2.0, max_ulps=16.0, mean_ulps=8.0),
    (torch.float16, "out"): Budget(factor=2.0, max_ulps=1.0, mean_ulps=1.0, bias_ulps=0.0625),
    (torch.bfloat16, "out"): Budget(factor=2.0, max_ulps=1.0, mean_ulps=1.0, bias_ulps=0.0625),
    # Partial results of one row: the backend rounds each to the dtype, the check merges in float64.
    (torch.float32, "merged_out"): Budget(factor=2.0, max_ulps=16.0, mean_ulps=8.0),
    (torch.float16, "merged_out"): Budget(factor=2.0, max_ulps=2.0, mean_ulps=2.0),
    (torch.bfloat16, "merged_out"): Budget(factor=2.0, max_ulps=2.0, mean_ulps=2.0),
    # The LSE is always stored in float32; the dtype is that of the q . k product.
    (torch.float32, "lse"): Budget(factor=2.0, max_ulps=16.0, mean_ulps=8.0),
    (torch.float16, "lse"): Budget(factor=2.0, max_ulps=16.0, mean_ulps=8.0),
    (torch.bfloat16, "lse"): Budget(factor=2.0, max_ulps=16.0, mean_ulps=8.0),
}
"""(dtype of q, k and v; quantity) -> limits."""

_STORED_AS_FLOAT32 = {"lse"}


@dataclass(frozen=True)
class Comparison:
    """The result of comparing one quantity.

    Attributes:
        quantity: name of the compared tensor.
        passed: True if all errors are within their limits.
        max_error, max_allowed: largest absolute error and its limit.
        mean_error, mean_allowed: mean absolute error and its limit.
        bias, bias_allowed: error of all elements in the direction of their signs, relative to their
            sum, and its limit; 0 where there is none.
        mismatch: error that has no magnitude (shape, NaN, infinity, changed bits), or "".
    """

    quantity: str
    passed: bool
    max_error: float = 0.0
    max_allowed: float = 0.0
    mean_error: float = 0.0
    mean_allowed: float = 0.0
    bias: float = 0.0
    bias_allowed: float = 0.0
    mismatch: str = ""

    def __str__(self) -> str:
        """The errors and their limits in one line."""
        if self.mismatch:
            return f"{self.quantity}: {self.mismatch}"
        outcome = "within budget" if self.passed else "over budget"
        biased = (
            f", bias {self.bias:+.3g} of the sum (allowed {self.bias_allowed:.3g})"
            if abs(self.bias) > self.bias_allowed
            else ""
        )
        return (
            f"{self.quantity} {outcome}: max error {self.max_error:.3g} "
            f"(allowed {self.max_allowed:.3g}), mean error {self.mean_error:.3g} "
            f"(allowed {self.mean_allowed:.3g}){biased}"
        )


def compare(
    actual: torch.Tensor,
    expected: torch.Tensor,
    same_precision: torch.Tensor,
    dtype: torch.dtype,
    quantity: str = "out",
    rounding: torch.Tensor | None = None,
) -> Comparison:
    """Compare a result with the float64 oracle.

    Args:
        actual: the backend's result, any float dtype.
        expected: the oracle's result in float64.
        same_precision: the oracle's computation in `dtype`; same shape.
        dtype: dtype of the query.
        quantity: "out", "merged_out" or "lse".
        rounding: further errors of each element, float64 (`attnlib.testing.score_rounding`).

    Returns:
        A comparison that fails for a wrong shape, for NaN, for an infinity at a position where the
        oracle has none, and for errors above the limits.
    """
    if actual.shape != expected.shape:
        text = f"shape is {tuple(actual.shape)} where {tuple(expected.shape)} was expected"
        return Comparison(quantity, False, mismatch=text)
    actual, same_precision = actual.detach().double(), same_precision.detach().double()
    error, same_precision_error = actual - expected, same_precision - expected
    magnitude, sign = expected.abs(), expected.sign()
    extra = torch.zeros_like(magnitude) if rounding is None else rounding.nan_to_num(0.0, 0.0, 0.0)
    budget, rows = BUDGETS[dtype, quantity], _rows(magnitude)
    eps = torch.finfo(torch.float32 if quantity in _STORED_AS_FLOAT32 else dtype).eps
    if not torch.isfinite(error.sum()):  # one pass, where nearly all results are finite
        if mismatch := _nonfinite_mismatch(actual, expected):
            return Comparison(quantity, False, mismatch=mismatch)
        finite = torch.isfinite(expected)
        parts = (error, same_precision_error, magnitude, sign, extra)
        error, same_precision_error, magnitude, sign, extra = (part[finite] for part in parts)
    if not error.numel():
        return Comparison(quantity, True)
    bias, bias_allowed = 0.0, 0.0
    if budget.bias_ulps is not None:
        bias = _bias(error, sign, magnitude)
        bias_allowed = eps * (budget.bias_ulps + rows**-0.5)
        bias_allowed += budget.factor * abs(_bias(same_precision_error, sign, magnitude))
    error, allowed = error.abs_(), budget.factor * same_precision_error.abs_()
    max_allowed = allowed.max() + budget.max_ulps * eps * magnitude.max() + extra.max()
    mean_allowed = allowed.mean() + budget.mean_ulps * eps * magnitude.mean() + extra.mean()
    return Comparison(
        quantity,
        bool(error.max() <= max_allowed)
        and bool(error.mean() <= mean_allowed)
        and abs(bias) <= bias_allowed,
        float(error.max()),
        float(max_allowed),
        float(error.mean()),
        float(mean_allowed),
        bias,
        bias_allowed,
    )


def _bias(error: torch.Tensor, sign: torch.Tensor, magnitude: torch.Tensor) -> float:
    """Error in the direction of the sign of each element, relative to the sum of all."""
    size = magnitude.sum()
    return float((error * sign).sum() / size) if size > 0 else 0.0


def _rows(magnitude: torch.Tensor) -> float:
    """Number of rows of the last dimension, weighted by magnitude: the errors of the elements of a
    row come from the same weights, so that they do not cancel."""
    sizes = magnitude.sum(dim=-1)
    if not torch.isfinite(sizes.sum()):
        sizes = magnitude.nan_to_num(0.0, 0.0, 0.0).sum(dim=-1)
    return max(float(sizes.sum() ** 2 / (sizes**2).sum().clamp(min=1e-300)), 1.0)


def _nonfinite_mismatch(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Describe NaN elements and infinities that only one of the two tensors has; "" if none."""
    wrong = torch.isnan(actual) | (
        (torch.isinf(actual) | torch.isinf(expected)) & (actual != expected)
    )
    if not wrong.any():
        return ""
    where = tuple(int(i) for i in torch.nonzero(wrong)[0])
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements are NaN or have a wrong "
        f"infinity, first at {where}: {float(actual[where])} where "
        f"{float(expected[where])} was expected"
    )


FLOAT8_QUERY_ERROR = 0.05
"""Largest `relative_error` of outputs whose queries and weights are rounded to e4m3 (M19). A number
with 4 significant bits has a relative error of at most 2^-4, and 0.026 on average."""

FLOAT8_QUERY_STEP = 2.0**-4
"""Largest relative error of one number that is rounded to e4m3."""


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference divided by the norm of `expected`, over all elements."""
    return float((actual.double() - expected).norm() / expected.norm())


def compare_bits(actual: torch.Tensor, expected: torch.Tensor, quantity: str = "out") -> Comparison:
    """Compare two results for bitwise equality; NaN equals NaN and 0.0 equals -0.0."""
    if actual.shape != expected.shape:
        return Comparison(
            quantity,
            False,
            mismatch=f"shape is {tuple(actual.shape)} where {tuple(expected.shape)} was expected",
        )
    differs = ~((actual == expected) | (torch.isnan(actual) & torch.isnan(expected)))
    if not differs.any():
        return Comparison(quantity, True)
    where = tuple(int(i) for i in torch.nonzero(differs)[0])
    mismatch = (
        f"{int(differs.sum())} of {differs.numel()} elements changed, first at {where}: "
        f"{float(actual[where])} where {float(expected[where])} was expected"
    )
    return Comparison(quantity, False, mismatch=mismatch)
