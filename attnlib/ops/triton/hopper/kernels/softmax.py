"""Online softmax on WGMMA accumulators, in base 2.

Scores stay raw products q . k until they are exponentiated, so that the scale and the change of
base cost one multiplication together. Only a soft cap turns them into logits earlier.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import exp2

__all__ = [
    "LN2", "LOG2E", "add_sink", "apply_function", "mask_scores", "online_softmax",
    "online_softmax_by_row", "score_factor", "transform_scores",
]  # fmt: skip

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
LN2: gl.constexpr = gl.constexpr(0.6931471805599453)


@gluon.jit
def score_factor(scale, soft_cap, HAS_CAP: gl.constexpr):
    """Return the factor of raw products: in the tanh of the soft cap, else in the softmax."""
    factor = scale * LOG2E
    if HAS_CAP:
        factor = scale * (2.0 * LOG2E) / soft_cap
    return factor


@gluon.jit
def transform_scores(scores, factor, soft_cap, HAS_CAP: gl.constexpr):
    """Return base-2 logits if there is a soft cap, and the raw products unchanged if not."""
    if HAS_CAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which is exact at both infinities.
        exp_2x = exp2(scores * factor)
        scores = (soft_cap - (2.0 * soft_cap) / (exp_2x + 1.0)) * LOG2E
    return scores


@gluon.jit
def apply_function(
    scores, scale, factor, soft_cap, positions, keys, heads, request, aux, SCORE: gl.constexpr,
    HAS_CAP: gl.constexpr,
):  # fmt: skip
    """Return the scores after scale, soft cap and score function (M3), in natural units.

    `positions`, `keys` and `heads` broadcast with the scores; `factor` is that of `score_factor`.
    """
    if HAS_CAP:
        logits = soft_cap - (2.0 * soft_cap) / (exp2(scores * factor) + 1.0)
    else:
        logits = scores * scale
    return SCORE(logits, positions, keys, heads, request, aux).to(gl.float32)


@gluon.jit
def mask_scores(scores, row_first, row_last, tile_start, CHECK_FIRST: gl.constexpr):
    """Set the scores [M, N] of keys outside [row_first, row_last) to -inf."""
    BLOCK_N: gl.constexpr = scores.shape[1]
    keys = tile_start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores.type.layout))
    visible = keys[None, :] < row_last[:, None]
    if CHECK_FIRST:
        visible = visible & (keys[None, :] >= row_first[:, None])
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def online_softmax(
    scores, factor, row_max, row_sum, MASKED: gl.constexpr, HAS_CAP: gl.constexpr
):  # fmt: skip
    """Add one tile of scores [M, N] to the running softmax.

    Args:
        scores: raw products, or base-2 logits with HAS_CAP.
        factor: as returned by `score_factor`.
        row_max: [M], largest base-2 logit so far; -inf before the first visible key.
        row_sum: [M], sum of weights relative to `row_max`.
        MASKED: rows may still have no visible key.

    Returns:
        (weights [M, N], factor [M] of what was accumulated before, new row_max, new row_sum).
    """
    if HAS_CAP:
        weight_factor = 1.0
    else:
        weight_factor = factor
    new_max = gl.maximum(row_max, gl.max(scores, 1) * weight_factor)
    finite_max = new_max
    if MASKED:
        # -inf - -inf is NaN: rows without a visible key are measured from 0.
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = exp2(scores * weight_factor - finite_max[:, None])
    acc_scale = exp2(row_max - finite_max)
    return weights, acc_scale, new_max, row_sum * acc_scale + gl.sum(weights, 1)


@gluon.jit
def online_softmax_by_row(
    scores, row_factor, row_max, row_sum, exponent, MASKED: gl.constexpr
):  # fmt: skip
    """Add one tile of scores [M, N] to the running softmax, as `online_softmax`.

    Args:
        row_factor: [M], factor of the scores of each row to base-2 logits.
        exponent: weights and `row_sum` are relative to 2 ** (row_max - exponent).
    """
    new_max = gl.maximum(row_max, gl.max(scores, 1) * row_factor)
    finite_max = new_max
    if MASKED:
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = exp2(scores * row_factor[:, None] - (finite_max - exponent)[:, None])
    acc_scale = exp2(row_max - finite_max)
    return weights, acc_scale, new_max, row_sum * acc_scale + gl.sum(weights, 1)


@gluon.jit
def add_sink(row_max, row_sum, sink):
    """Add the sink's logit to the denominator of each row, once per row (M4).

    Returns:
        (finite row maximum, factor of the accumulated values, new row_sum).
    """
    sink = sink.to(gl.float32) * LOG2E
    new_max = gl.maximum(row_max, sink)
    finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    acc_scale = exp2(row_max - finite_max)
    return finite_max, acc_scale, row_sum * acc_scale + exp2(sink - finite_max)
