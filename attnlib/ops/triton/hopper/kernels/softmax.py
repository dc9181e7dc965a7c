"""Online softmax on WGMMA accumulators, in base 2.

Scores stay raw products q . k until they are exponentiated, so that the scale and the change of
base cost one multiplication together. Only a soft cap turns them into logits earlier.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import exp2
from attnlib.ops.triton.hopper.kernels.lanes import add_lane_sums

__all__ = [
    "LN2",
    "LOG2E",
    "MOST_EXPONENT",
    "add_sink",
    "apply_function",
    "bounded_softmax",
    "mask_scores",
    "online_softmax",
    "online_softmax_by_row",
    "score_factor",
    "transform_scores",
]

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
MOST_EXPONENT: gl.constexpr = gl.constexpr(43.0)
"""Logarithm of the largest weight of `bounded_softmax`. With caps of at most 64, its least weight,
e ** (43 - 2 * 64), is a normal float32."""

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
    scores,
    scale,
    factor,
    soft_cap,
    positions,
    keys,
    heads,
    request,
    aux,
    SCORE: gl.constexpr,
    HAS_CAP: gl.constexpr,
    RAW_SCORE: gl.constexpr = False,
):
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
    # Column 8 i + 2 j + k of a result of WGMMA belongs to thread j of a row. Its limits minus 2 j
    # are compared with 8 i + k, which are constants: one instruction per score instead of four.
    M: gl.constexpr = scores.shape[0]
    N: gl.constexpr = scores.shape[1]
    LAYOUT: gl.constexpr = scores.type.layout
    parts = gl.reshape(scores, [M, N // 8, 4, 2])
    PARTS: gl.constexpr = parts.type.layout
    ROWS_PARTS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, PARTS))
    LANES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, PARTS)))
    PAIRS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, PARTS)))
    part = gl.arange(0, N // 8, gl.SliceLayout(0, ROWS_PARTS))
    keys = 8 * part[None, :, None, None] + gl.arange(0, 2, PAIRS)[None, None, None, :]
    start = tile_start + 2 * gl.arange(0, 4, LANES)[None, None, :, None]
    last = gl.convert_layout(row_last, gl.SliceLayout(1, ROWS_PARTS))
    visible = keys < last[:, None, None, None] - start
    if CHECK_FIRST:
        first = gl.convert_layout(row_first, gl.SliceLayout(1, ROWS_PARTS))
        visible = visible & (keys >= first[:, None, None, None] - start)
    parts = gl.where(visible, parts, float("-inf"))
    return gl.convert_layout(gl.reshape(parts, [M, N]), LAYOUT)


@gluon.jit
def online_softmax(
    scores,
    factor,
    row_max,
    row_sum,
    MASKED: gl.constexpr,
    HAS_CAP: gl.constexpr,
    THRESHOLD: gl.constexpr = 0,
    AHEAD: gl.constexpr = False,
):
    """Add one tile of scores [M, N] to the running softmax.

    Args:
        scores: raw products, or base-2 logits with HAS_CAP.
        factor: as returned by `score_factor`.
        row_max: [M], largest base-2 logit so far; -inf before the first visible key.
        row_sum: [M], sum of weights relative to `row_max`; with THRESHOLD their
            `lanes.lane_sums`.
        MASKED: rows may still have no visible key.
        THRESHOLD: `row_max` follows the largest logit once that exceeds it by more than this, so
            that sums are rarely rescaled (FlashAttention-4). Weights are at most 2 ** THRESHOLD.
        AHEAD: `row_max` is at least the largest logit, and where it changes, THRESHOLD more, as
            `sign_softmax.softmax_by_sign` needs it. Weights are at most 1.

    Returns:
        (weights [M, N], factor [M] of what was accumulated before, new row_max, new row_sum).
    """
    if HAS_CAP:
        weight_factor = 1.0
    else:
        weight_factor = factor
    if AHEAD:
        tile_max = gl.max(scores, 1) * weight_factor
        new_max = gl.where(tile_max > row_max, tile_max + THRESHOLD, row_max)
    elif THRESHOLD > 0:
        tile_max = gl.max(scores, 1) * weight_factor
        new_max = gl.where(tile_max > row_max + THRESHOLD, tile_max, row_max)
    else:
        new_max = gl.maximum(row_max, gl.max(scores, 1) * weight_factor)
    finite_max = new_max
    if MASKED:
        # -inf - -inf is NaN: rows without a visible key are measured from 0.
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = exp2(scores * weight_factor - finite_max[:, None])
    acc_scale = exp2(row_max - finite_max)
    if THRESHOLD > 0:
        row_sum = add_lane_sums(row_sum, acc_scale, weights)
    else:
        row_sum = row_sum * acc_scale + gl.sum(weights, 1)
    return weights, acc_scale, new_max, row_sum


@gluon.jit
def _tanh(x):
    """Return tanh(x) with a relative error of at most 2 ** -11."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def bounded_softmax(
    scores,
    factor,
    soft_cap,
    row_first,
    row_last,
    tile_start,
    row_max,
    row_sum,
    MASKED: gl.constexpr,
    CHECK_FIRST: gl.constexpr,
    FIRST: gl.constexpr,
):
    """Cap, mask and exponentiate one tile of raw products [M, N], without a running maximum.

    Logits are at most `soft_cap`, so that weights relative to the maximum of the first tile are
    finite, and nothing that was accumulated has to be rescaled. The reference of a row is at least
    MOST_EXPONENT below the cap, so that its weights and their sums fit in float32 and bfloat16.

    Args:
        factor: as returned by `score_factor`.
        row_max: [M], base-2 reference of the row; not used with FIRST.
        row_sum: [M], sum of weights relative to `row_max`.
        FIRST: the tile is the first one of its rows.

    Returns:
        (weights [M, N], row_max, new row_sum).
    """
    # `factor` is that of exp2(2 x); the scaled scores are the arguments of tanh.
    logits = _tanh(scores * (factor * (0.5 * LN2))) * (soft_cap * LOG2E)
    if MASKED:
        logits = mask_scores(logits, row_first, row_last, tile_start, CHECK_FIRST)
    if FIRST:
        row_max = gl.maximum(gl.max(logits, 1), (soft_cap - MOST_EXPONENT) * LOG2E)
    weights = exp2(logits - row_max[:, None])
    return weights, row_max, row_sum + gl.sum(weights, 1)


@gluon.jit
def online_softmax_by_row(
    scores,
    row_factor,
    row_max,
    row_sum,
    exponent,
    MASKED: gl.constexpr,
    BY_LANE: gl.constexpr = False,
):
    """Add one tile of scores [M, N] to the running softmax, as `online_softmax`.

    Args:
        row_factor: [M], factor of the scores of each row to base-2 logits.
        exponent: weights and `row_sum` are relative to 2 ** (row_max - exponent).
        BY_LANE: `row_sum` is that of `lane_sums`.
    """
    new_max = gl.maximum(row_max, gl.max(scores, 1) * row_factor)
    finite_max = new_max
    if MASKED:
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = exp2(scores * row_factor[:, None] - (finite_max - exponent)[:, None])
    acc_scale = exp2(row_max - finite_max)
    if BY_LANE:
        row_sum = add_lane_sums(row_sum, acc_scale, weights)
    else:
        row_sum = row_sum * acc_scale + gl.sum(weights, 1)
    return weights, acc_scale, new_max, row_sum


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
