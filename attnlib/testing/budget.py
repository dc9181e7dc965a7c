"""How close is close enough: error budgets instead of magic tolerances.

A backend may err `factor` times as much as an same_precision torch computation of the same precision errs on the same case,
plus what rounding the result takes; and its mean error has a budget of its own, which catches what is a little wrong
everywhere. Every number of the whole kit stands in `BUDGETS`, and no probe may bring its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["BUDGETS", "Budget", "Comparison", "compare", "compare_bits"]


@dataclass(frozen=True)
class Budget:
    """Limits of one quantity in one dtype.

    Attributes:
        factor: times the error of the same-precision computation; for the maximum and for the mean.
        max_ulps: rounding term of the maximum, in units of eps * max(|expected|).
        mean_ulps: rounding term of the mean, in units of eps * mean(|expected|).
    """

    factor: float
    max_ulps: float
    mean_ulps: float


BUDGETS: dict[tuple[torch.dtype, str], Budget] = {
    # The yardstick of float64 is the oracle itself, so rounding is all there is.
    (torch.float64, "out"): Budget(factor=2.0, max_ulps=64.0, mean_ulps=32.0),
    (torch.float64, "merged_out"): Budget(factor=2.0, max_ulps=64.0, mean_ulps=32.0),
    (torch.float64, "lse"): Budget(factor=2.0, max_ulps=16.0, mean_ulps=8.0),
    (torch.float32, "out"): Budget(factor=2.0, max_ulps=16.0, mean_ulps=8.0),
    (torch.float16, "out"): Budget(factor=2.0, max_ulps=1.0, mean_ulps=1.0),
    (torch.bfloat16, "out"): Budget(factor=2.0, max_ulps=1.0, mean_ulps=1.0),
    # Parts of one row, each rounded to the dtype by the backend and merged in float64 by the kit.
    (torch.float32, "merged_out"): Budget(factor=2.0, max_ulps=16.0, mean_ulps=8.0),
    (torch.float16, "merged_out"): Budget(factor=2.0, max_ulps=2.0, mean_ulps=2.0),
    (torch.bfloat16, "merged_out"): Budget(factor=2.0, max_ulps=2.0, mean_ulps=2.0),
    # Log-sum-exp is always stored in float32; the dtype is the one that q . k was computed in.
    (torch.float32, "lse"): Budget(factor=2.0, max_ulps=16.0, mean_ulps=8.0),
    (torch.float16, "lse"): Budget(factor=2.0, max_ulps=16.0, mean_ulps=8.0),
    (torch.bfloat16, "lse"): Budget(factor=2.0, max_ulps=16.0, mean_ulps=8.0),
}
"""(dtype of the computation, quantity) -> limits."""

_STORED_AS_FLOAT32 = {"lse"}


@dataclass(frozen=True)
class Comparison:
    """The outcome on one quantity, with all the numbers it rests on."""

    quantity: str
    passed: bool
    max_error: float = 0.0
    max_allowed: float = 0.0
    mean_error: float = 0.0
    mean_allowed: float = 0.0
    note: str = ""

    def __str__(self) -> str:
        """Both errors and both limits, in one line."""
        if self.note:
            return f"{self.quantity}: {self.note}"
        outcome = "within budget" if self.passed else "over budget"
        return (
            f"{self.quantity} {outcome}: max error {self.max_error:.3g} (allowed {self.max_allowed:.3g}), "
            f"mean error {self.mean_error:.3g} (allowed {self.mean_allowed:.3g})"
        )


def compare(
    actual: torch.Tensor,
    expected: torch.Tensor,
    same_precision: torch.Tensor,
    dtype: torch.dtype,
    quantity: str = "out",
) -> Comparison:
    """Hold a result against the float64 oracle within its budget.

    Args:
        actual: what the backend gave, any float dtype.
        expected: float64, from the oracle.
        same_precision: the oracle's text computed in `dtype`; same shape.
        dtype: of the computation (the query's).
        quantity: out or lse.

    Returns:
        A comparison that fails on another shape, on any NaN, and on an infinity that is not in the same place.
    """
    if actual.shape != expected.shape:
        return Comparison(
            quantity,
            False,
            note=f"shape is {tuple(actual.shape)} where {tuple(expected.shape)} was expected",
        )
    actual, same_precision = (
        actual.detach().to(torch.float64),
        same_precision.detach().to(torch.float64),
    )
    if misplaced := _misplaced(actual, expected):
        return Comparison(quantity, False, note=misplaced)
    finite = torch.isfinite(expected)
    if not finite.any():
        return Comparison(quantity, True)
    actual, same_precision, expected = actual[finite], same_precision[finite], expected[finite]
    budget = BUDGETS[dtype, quantity]
    eps = torch.finfo(torch.float32 if quantity in _STORED_AS_FLOAT32 else dtype).eps
    error, same_precision_error = (actual - expected).abs(), (same_precision - expected).abs()
    magnitude = expected.abs()
    max_allowed = (
        budget.factor * same_precision_error.max() + budget.max_ulps * eps * magnitude.max()
    )
    mean_allowed = (
        budget.factor * same_precision_error.mean() + budget.mean_ulps * eps * magnitude.mean()
    )
    return Comparison(
        quantity,
        bool(error.max() <= max_allowed) and bool(error.mean() <= mean_allowed),
        float(error.max()),
        float(max_allowed),
        float(error.mean()),
        float(mean_allowed),
    )


def _misplaced(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """The first element that is NaN, or infinite where it should not be, or finite where it should not be."""
    wrong = torch.isnan(actual) | (
        (torch.isinf(actual) | torch.isinf(expected)) & (actual != expected)
    )
    if not wrong.any():
        return ""
    where = tuple(int(i) for i in torch.nonzero(wrong)[0])
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements are not where they should be, the first at {where}: "
        f"{float(actual[where])} where {float(expected[where])} was expected"
    )


def compare_bits(actual: torch.Tensor, expected: torch.Tensor, quantity: str = "out") -> Comparison:
    """Hold a result against another one bit by bit; NaN equals NaN, and 0.0 equals -0.0."""
    if actual.shape != expected.shape:
        return Comparison(
            quantity,
            False,
            note=f"shape is {tuple(actual.shape)} where {tuple(expected.shape)} was expected",
        )
    differs = ~((actual == expected) | (torch.isnan(actual) & torch.isnan(expected)))
    if not differs.any():
        return Comparison(quantity, True)
    where = tuple(int(i) for i in torch.nonzero(differs)[0])
    note = (
        f"{int(differs.sum())} of {differs.numel()} elements changed, the first at {where}: "
        f"{float(actual[where])} where {float(expected[where])} was expected"
    )
    return Comparison(quantity, False, note=note)
