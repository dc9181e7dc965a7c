"""From raw products with a tile of keys to weights: the softmax of a step of the Hopper prefill."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.consumer_state import BOUNDED
from attnlib.ops.triton.hopper.kernels.quantized import WEIGHT_EXPONENT
from attnlib.ops.triton.hopper.kernels.sign_softmax import softmax_by_sign
from attnlib.ops.triton.hopper.kernels.slopes import softmax_with_slope
from attnlib.ops.triton.hopper.kernels.softmax import (
    LOG2E,
    apply_function,
    bounded_softmax,
    mask_scores,
    online_softmax,
    online_softmax_by_row,
    transform_scores,
)
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["weigh_tile"]


@gluon.jit
def weigh_tile(
    call,
    scoring,
    consumer,
    rows,
    scores,
    tile,
    row_max,
    row_sum,
    MASKED: gl.constexpr,
    UNCHANGED: gl.constexpr = False,
    FIRST: gl.constexpr = False,
):
    """Turn raw products with the keys of `tile` into weights.

    With KEY_SLOPE, products contain the slope of the score function times the column. Over a float8
    cache, the weights and `row_sum` are relative to 2 ** (row_max - WEIGHT_EXPONENT). With
    SIGN_SOFTMAX, `row_max` and the returned factor of unmasked tiles are those of
    `softmax_by_sign`, which have other shapes.

    Args:
        MASKED: some row does not see some key.
        UNCHANGED: the score function changes no score of the tile.
        FIRST: the tile is the first one of its rows.

    Returns:
        (weights [M, N], factor [M] of what was accumulated before, row_max, row_sum).
    """
    SCORE: gl.constexpr = None if UNCHANGED else scoring.SCORE
    KEY_SLOPE: gl.constexpr = None if UNCHANGED else scoring.KEY_SLOPE
    HAS_CAP: gl.constexpr = call.config.HAS_CAP
    CHECK_FIRST: gl.constexpr = consumer.CHECK_FIRST
    SIGNS: gl.constexpr = call.config.SIGN_SOFTMAX
    BLOCK_N: gl.constexpr = scores.shape[1]
    if KEY_SLOPE is not None:
        return softmax_with_slope(
            scores,
            scoring.scale,
            rows.factor,
            rows.positions,
            tile * BLOCK_N,
            rows.heads,
            rows.request,
            call.aux,
            rows.first,
            rows.last,
            row_max,
            row_sum,
            SCORE,
            MASKED,
            CHECK_FIRST,
        )
    elif HAS_CAP == BOUNDED:
        weights, row_max, row_sum = bounded_softmax(
            scores,
            rows.factor,
            scoring.soft_cap,
            rows.first,
            rows.last,
            tile * BLOCK_N,
            row_max,
            row_sum,
            MASKED,
            CHECK_FIRST,
            FIRST,
        )
        return weights, 1.0, row_max, row_sum
    else:
        QUANTIZED: gl.constexpr = call.config.KV_KIND != KV_PLAIN
        if QUANTIZED:
            if SCORE is not None or HAS_CAP:
                scores = scores * rows.k_factor[:, None]
        if SCORE is not None:
            keys = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores.type.layout))
            scores = apply_function(
                scores,
                scoring.scale,
                rows.factor,
                scoring.soft_cap,
                rows.positions[:, None],
                keys[None, :],
                rows.heads[:, None],
                rows.request,
                call.aux,
                SCORE,
                HAS_CAP,
                call.config.RAW_SCORE,
            )
        else:
            scores = transform_scores(scores, rows.factor, scoring.soft_cap, HAS_CAP)
        if MASKED:
            scores = mask_scores(scores, rows.first, rows.last, tile * BLOCK_N, CHECK_FIRST)
        # A score function may hide keys of any tile.
        CAN_HIDE: gl.constexpr = MASKED or SCORE is not None
        if QUANTIZED:
            return online_softmax_by_row(
                scores,
                _row_factor(rows, SCORE is not None, HAS_CAP),
                row_max,
                row_sum,
                WEIGHT_EXPONENT,
                CAN_HIDE,
            )
        elif SCORE is not None and not call.config.RAW_SCORE:
            return online_softmax(scores, LOG2E, row_max, row_sum, CAN_HIDE, False)
        elif SIGNS and not CAN_HIDE:
            return softmax_by_sign(
                scores, 1.0 if HAS_CAP else rows.factor, row_max, row_sum, consumer.THRESHOLD
            )
        else:
            return online_softmax(
                scores, rows.factor, row_max, row_sum, CAN_HIDE, HAS_CAP, consumer.THRESHOLD, SIGNS
            )


@gluon.jit
def _row_factor(rows, HAS_SCORE: gl.constexpr, HAS_CAP: gl.constexpr):
    """Return the factor [M] of the scores of each row over a float8 cache to base-2 logits."""
    M: gl.constexpr = rows.k_factor.shape[0]
    LAYOUT: gl.constexpr = rows.k_factor.type.layout
    if HAS_SCORE:
        factor = gl.full([M], LOG2E, gl.float32, LAYOUT)
    elif HAS_CAP:
        factor = gl.full([M], 1.0, gl.float32, LAYOUT)
    else:
        factor = rows.k_factor * rows.factor
    return factor
