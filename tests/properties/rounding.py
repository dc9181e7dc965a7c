"""How far a correct result may be from the float64 reference, element by element.

The bound follows the rounding errors of a computation that obeys M8: products of inputs in the
input dtype (scores, dequantized keys and softmax weights may be rounded to it), everything else in
float32, or in float64 for float64 inputs. No part of it was fitted to results of a backend.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.properties.reference import HeadResult

__all__ = ["COARSE_EXPONENTIAL", "PRECISIONS", "Precision", "bounds"]

Array = np.ndarray


@dataclass(frozen=True)
class Precision:
    """Unit roundoffs.

    Attributes:
        inputs: of the dtype of q, k, v and the output.
        statistics: of softmax and accumulation.
        smallest: largest absolute error of a weight near zero (subnormal numbers).
    """

    inputs: float
    statistics: float
    smallest: float


PRECISIONS = {
    "float64": Precision(2.0**-53, 2.0**-53, 0.0),
    "float32": Precision(2.0**-24, 2.0**-24, 2.0**-126),
    "float16": Precision(2.0**-11, 2.0**-24, 2.0**-24),
    "bfloat16": Precision(2.0**-8, 2.0**-24, 2.0**-126),
}

COARSE_EXPONENTIAL = 2.0**-13
"""Relative error of the exponential in torch's fused attention for 16-bit inputs on a CPU. Measured
errors are up to 1.1e-4; outputs are rounded to 2^-11 or 2^-8, so only the LSE shows them."""

_INPUT_ROUNDINGS = 4  # of a score: scaled query, dequantized key, product, scaled product
_STATISTIC_ROUNDINGS = 8  # of a score: cap, biases, base of the exponential, maximum
_WEIGHT_ROUNDINGS = 3  # of a weighted value: weight, dequantized value, scaled value


def bounds(
    head: HeadResult,
    values: Array,
    soft_cap: float | None,
    sink: float | None,
    head_size: int,
    dtype: str,
    exponential: float = 0.0,
) -> tuple[Array, Array]:
    """Largest errors of the output [query_len, Dv] and of the LSE [query_len] of one head.

    Args:
        head: the reference.
        values: [seq_len, Dv].
        soft_cap, sink: of the head.
        head_size: D.
        dtype: of q, k, v and the output.
        exponential: relative error of the exponential beyond that of its dtype.
    """
    unit = PRECISIONS[dtype]
    seq_len = head.weights.shape[1]
    seen = head.weights > 0
    finite = np.where(np.isfinite(head.scores), np.abs(head.scores), 0.0)
    peak = np.where(seen, finite, 0.0).max(axis=1, initial=0.0)
    if sink is not None and np.isfinite(sink):
        peak = np.maximum(peak, abs(sink))
    of_score = (
        (_INPUT_ROUNDINGS * unit.inputs + head_size * unit.statistics) * head.products
        + _STATISTIC_ROUNDINGS
        * unit.statistics
        * (finite + peak[:, None] + head.added + (soft_cap or 0.0) + 2.0)
        + exponential
    )
    relative = np.expm1(np.where(seen, of_score, 0.0))
    of_sink = np.expm1(_STATISTIC_ROUNDINGS * unit.statistics * (peak + 2.0))
    accumulation = (seq_len + 16) * unit.statistics
    of_denominator = (
        (head.weights * relative).sum(axis=1) + head.sink_weight * of_sink + accumulation
    )
    of_weight = relative + of_denominator[:, None] + _WEIGHT_ROUNDINGS * unit.inputs + accumulation
    magnitudes = np.abs(values)
    out = (head.weights * of_weight) @ magnitudes
    out += 2 * unit.smallest * (seen.astype(np.float64) @ magnitudes + 1.0)
    out += 2 * unit.inputs * np.abs(head.out)
    stored = 2.0**-24  # the LSE is float32 (M5)
    level = np.where(np.isfinite(head.lse), np.abs(head.lse), 0.0)
    return out, of_denominator + 4 * stored * (level + peak + 1.0)
