"""Softmax on the accumulators of asynchronous products, everything in base 2.

Scores stay raw products until they are weighed, so that scale and base change cost one multiplication each; only a soft
cap makes real scores of them first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import exp2

__all__ = ["LN2", "LOG2E", "hide_keys", "meet_sink", "score_factor", "transform_scores", "weigh"]

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
LN2: gl.constexpr = gl.constexpr(0.6931471805599453)


@gluon.jit
def score_factor(scale, soft_cap, HAS_CAP: gl.constexpr):
    """What raw products are multiplied by: for the exponent of the soft cap's tanh, or for that of the weights."""
    factor = scale * LOG2E
    if HAS_CAP:
        factor = scale * (2.0 * LOG2E) / soft_cap
    return factor


@gluon.jit
def transform_scores(scores, factor, soft_cap, HAS_CAP: gl.constexpr):
    """Raw products, or soft-capped scores in base 2."""
    if HAS_CAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), exact at both infinities.
        grown = exp2(scores * factor)
        scores = (soft_cap - (2.0 * soft_cap) / (grown + 1.0)) * LOG2E
    return scores


@gluon.jit
def hide_keys(scores, row_first, row_last, tile_start, CHECK_FIRST: gl.constexpr):
    """-inf for the keys that a row does not see."""
    BLOCK_N: gl.constexpr = scores.shape[1]
    keys = tile_start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores.type.layout))
    visible = keys[None, :] < row_last[:, None]
    if CHECK_FIRST:
        visible = visible & (keys[None, :] >= row_first[:, None])
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def weigh(scores, factor, peak, total, MASKED: gl.constexpr, HAS_CAP: gl.constexpr):
    """(weights, decay of what came before, new peak, new total). MASKED allows rows that have seen nothing yet."""
    if HAS_CAP:
        weight_factor = 1.0
    else:
        weight_factor = factor
    new_peak = gl.maximum(peak, gl.max(scores, 1) * weight_factor)
    anchor = new_peak
    if MASKED:
        anchor = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = exp2(scores * weight_factor - anchor[:, None])
    decay = exp2(peak - anchor)
    return weights, decay, new_peak, total * decay + gl.sum(weights, 1)


@gluon.jit
def meet_sink(peak, total, sink):
    """(anchor, decay of what was accumulated, sum of weights) of rows once their sink counts, which it does once (M4)."""
    sink = sink * LOG2E
    top = gl.maximum(peak, sink)
    anchor = gl.where(top == float("-inf"), 0.0, top)
    decay = exp2(peak - anchor)
    return anchor, decay, total * decay + exp2(sink - anchor)
