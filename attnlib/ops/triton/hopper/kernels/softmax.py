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
    "online_softmax_by_row", "score_factor", "softmax_with_slope", "transform_scores",
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
    HAS_CAP: gl.constexpr, RAW_SCORE: gl.constexpr = False,
):  # fmt: skip
    """Return the scores after scale, soft cap and score function (M3).

    They are raw products as before with RAW_SCORE, otherwise in natural units. `positions`, `keys`
    and `heads` broadcast with the scores; `factor` is that of `score_factor`.
    """
    if RAW_SCORE:
        changed = SCORE(scores, positions, keys, heads, request, aux, 1.0 / scale)
    else:
        if HAS_CAP:
            logits = soft_cap - (2.0 * soft_cap) / (exp2(scores * factor) + 1.0)
        else:
            logits = scores * scale
        changed = SCORE(logits, positions, keys, heads, request, aux)
    return changed.to(gl.float32)


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
def softmax_with_slope(
    scores, scale, factor, positions, tile_start, heads, request, aux, row_first, row_last, row_max,
    row_sum, SCORE: gl.constexpr, KEY_SLOPE: gl.constexpr, MASKED: gl.constexpr,
    CHECK_FIRST: gl.constexpr,
):  # fmt: skip
    """Mask and softmax of a tile whose score function adds KEY_SLOPE times the key's position.

    As `apply_function` with RAW_SCORE, `mask_scores` and `online_softmax`, but SCORE is called for
    one key of each thread. A thread has columns 8 * i + 2 * (lane % 4) and the next: the others
    differ from its first one by constants, so each takes one multiply-add.
    """
    M: gl.constexpr = scores.shape[0]
    N: gl.constexpr = scores.shape[1]
    LAYOUT: gl.constexpr = scores.type.layout
    slope = KEY_SLOPE(0.0, positions[:, None], 0, heads[:, None], request, aux, 1.0 / scale)
    columns = gl.arange(0, N, gl.SliceLayout(0, LAYOUT)) & ~6
    scores += slope * columns.to(gl.float32)[None, :]
    if MASKED:
        scores = mask_scores(scores, row_first, row_last, tile_start, CHECK_FIRST)
    # [M, columns of a thread apart by 8, lane % 4, the column and the next]
    parts = gl.reshape(scores, [M, N // 8, 4, 2])
    largest = gl.max(gl.max(parts, 3), 1)
    LANES: gl.constexpr = largest.type.layout
    rows = gl.convert_layout(positions, gl.SliceLayout(1, LANES))
    row_heads = gl.convert_layout(heads, gl.SliceLayout(1, LANES))
    first_keys = tile_start + 2 * gl.arange(0, 4, gl.SliceLayout(0, LANES))
    zeros = gl.zeros([M, 4], gl.float32, LANES)
    first = SCORE(
        zeros, rows[:, None], first_keys[None, :], row_heads[:, None], request, aux, 1.0 / scale
    ).to(gl.float32)
    ROW: gl.constexpr = row_max.type.layout
    tile_max = gl.convert_layout(gl.max(largest + first, 1), ROW)
    new_max = gl.maximum(row_max, tile_max * factor)
    # -inf - -inf is NaN: rows without a visible key are measured from 0.
    finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    shift = first * factor - gl.convert_layout(finite_max, gl.SliceLayout(1, LANES))[:, None]
    shift = gl.expand_dims(gl.expand_dims(shift, 1), 3)
    shift = gl.convert_layout(shift, parts.type.layout)
    weights = gl.convert_layout(gl.reshape(exp2(parts * factor + shift), [M, N]), LAYOUT)
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
