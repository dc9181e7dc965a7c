"""Score transforms and the online softmax, in base 2.

log2(e) is folded into the scale, because the hardware has a base-2 exponential. Only an LSE that
leaves a kernel is a natural logarithm again (M5).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LN2", "LOG2E", "finish_rows", "of_rows", "online_softmax", "transform_scores"]

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def of_rows(x):
    """Return a factor of each row, [M], as [M, 1]. A number stays as it is."""
    if isinstance(x, tl.tensor):
        if len(x.shape) == 1:
            x = x[:, None]
    return x


@triton.jit
def transform_scores(
    qk,
    logits,
    positions,
    keys,
    bias,
    heads,
    request,
    SCORE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Turn raw products [M, N] into base-2 logits: scale, soft cap, biases, score function (M3).

    Args:
        logits: `arguments.Logits`.
        positions: of the rows, [M].
        keys: positions of the keys, [N].
        bias: the query bias [M, N]; read with HAS_BIAS.
        heads: query head of each row, [M].
        request: number of the request.
        CONFIG: any configuration with HAS_CAP and HAS_ALIBI.
    """
    if CONFIG.HAS_CAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which is exact at both infinities.
        exp_2x = tl.exp2(qk * of_rows(logits.scale * (2.0 * LOG2E) / logits.soft_cap))
        scores = logits.soft_cap - (2.0 * logits.soft_cap) / (exp_2x + 1.0)
    else:
        scores = qk * of_rows(logits.scale)
    if CONFIG.HAS_ALIBI:
        distance = tl.abs(positions[:, None] - keys[None, :]).to(tl.float32)
        scores -= logits.slopes[:, None] * distance
    if HAS_BIAS:
        scores += bias
    if SCORE is not None:
        scores = SCORE(
            scores, positions[:, None], keys[None, :], heads[:, None], request, logits.aux
        ).to(tl.float32)
        if HAS_BIAS:
            # A key that the bias hides stays hidden (M10).
            scores = tl.where(bias == float("-inf"), float("-inf"), scores)
    return scores * LOG2E


@triton.jit
def online_softmax(
    scores, factor, row_max, row_sum, MASKED: tl.constexpr, SCALE_LATE: tl.constexpr
):
    """Add one tile of scores [M, N] to the running softmax.

    Args:
        scores: base-2 logits, or raw products with SCALE_LATE.
        factor: with SCALE_LATE, the positive factor that turns raw products into base-2 logits. It
            is applied in the multiply-add of the exponent, which saves a multiplication per score.
            A number, or one for each row [M].
        row_max: [M], largest logit so far; -inf before the first visible key.
        row_sum: [M], sum of weights relative to `row_max`.
        MASKED: rows may still have no visible key.

    Returns:
        (weights [M, N], factor [M] of what was accumulated before, new row_max, new row_sum).
    """
    tile_max = tl.max(scores, 1)
    if SCALE_LATE:
        tile_max = tile_max * factor
    new_max = tl.maximum(row_max, tile_max)
    if MASKED:
        # -inf - -inf is NaN: rows without a visible key are measured from 0.
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        finite_max = new_max
    if SCALE_LATE:
        weights = tl.exp2(scores * of_rows(factor) - finite_max[:, None])
    else:
        weights = tl.exp2(scores - finite_max[:, None])
    acc_scale = tl.exp2(row_max - finite_max)
    return weights, acc_scale, new_max, row_sum * acc_scale + tl.sum(weights, 1)


@triton.jit
def finish_rows(row_max, row_sum, sinks, HAS_SINK: tl.constexpr):
    """Return (factor [M] that turns accumulated values into outputs, base-2 LSE [M]).

    The sink counts here, once (M4). A row without a visible key gets the factor of an empty sum
    (its accumulator is 0) and the LSE -inf, or the sink's logit.
    """
    if HAS_SINK:
        sinks = sinks * LOG2E
        new_max = tl.maximum(row_max, sinks)
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        acc_scale = tl.exp2(row_max - finite_max)
        row_sum = row_sum * acc_scale + tl.exp2(sinks - finite_max)
    else:
        finite_max = tl.where(row_max == float("-inf"), 0.0, row_max)
        acc_scale = tl.full(row_max.shape, 1.0, tl.float32)
    empty = row_sum == 0.0
    safe_sum = tl.where(empty, 1.0, row_sum)
    return acc_scale / safe_sum, tl.where(empty, float("-inf"), finite_max + tl.log2(safe_sum))
