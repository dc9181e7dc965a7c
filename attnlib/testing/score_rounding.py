"""Errors of the LSE and the output that follow from roundings of the scores (M8).

The error of a plain computation in the same precision is one draw: of a batch with few rows it may
be far below the errors of other right computations. An LSE near 0 has no magnitude either, although
the scores that it is made of have. These limits come from the magnitudes that are rounded.
"""

from __future__ import annotations

import torch

from attnlib.testing.oracle import OracleResult

__all__ = ["COARSE_EXPONENTIAL", "rounding_limits"]

COARSE_EXPONENTIAL = 2.0**-13
"""Largest relative error of the exponential in torch's fused attention for 16-bit inputs on a CPU:
a polynomial of degree 3, whose error depends on the fractional part of the base-2 exponent alone
(1.07e-4; `tests/testing/test_score_rounding.py` measures it over all fractions). It is below the
rounding of the weights to 16 bits, so that only an LSE shows it."""

_LSE_ULPS = 16.0
"""A float32 sum of D products has the error sqrt(D) u |q| |k|, u = eps / 2, for roundings of random
sign: 24 u for D = 576. Scale, cap, biases, base of the exponential, maximum, logarithm and the sum
add one u each: 32 u, or 16 eps, of the sizes that the oracle adds up."""

_TANH_ULPS = 2.0
"""tanh(x) = 1 - 2 / (1 + exp(2 x)) has an absolute error of at most 4 u near 0: half of the 3 u of
the exponential, and one u each of the sum, the quotient and x."""


def rounding_limits(
    expected: OracleResult, quantity: str, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor | None:
    """Largest errors of each element by roundings of the scores, float64; None where there are none
    beyond those of `attnlib.testing.budget.BUDGETS`.

    The error of score k moves the output by its weight times (v[k] - out). With errors up to e the
    sum is at most e times the mean of |v[k] - out|, which is at most the standard deviation.

    Args:
        expected: the oracle's result in float64.
        quantity: "out" or "lse".
        dtype: of q, k and v. For float64 the statistics are float64, too.
        device: of the computation.
    """
    if dtype == torch.float64:
        return None
    eps = torch.finfo(torch.float32).eps
    if quantity == "out":
        return None if expected.spread is None else _TANH_ULPS * eps * expected.spread
    coarse = torch.device(device).type == "cpu" and dtype != torch.float32
    return _LSE_ULPS * eps * expected.sizes + (COARSE_EXPONENTIAL if coarse else 0.0)
