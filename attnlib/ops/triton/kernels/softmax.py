"""From products of queries and keys to weights: the score's transforms and the running softmax.

Everything exponential is base 2, because that is what the hardware has; log2(e) is folded into the scale. Only what
leaves a kernel as an LSE is a natural logarithm again (M5).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LN2", "LOG2E", "finish_rows", "online_softmax", "transform_scores"]

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def transform_scores(products, qk_scale, soft_cap, slopes, positions, keys, bias, HAS_CAP: tl.constexpr,
                     HAS_ALIBI: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    """Raw products [M, N] as base-2 logits: scale, then soft cap, then biases (M3)."""
    if HAS_CAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which is exact at both infinities.
        grown = tl.exp2(products * (2.0 * LOG2E * qk_scale / soft_cap))
        scores = soft_cap - (2.0 * soft_cap) / (grown + 1.0)
    else:
        scores = products * qk_scale
    if HAS_ALIBI:
        distance = tl.abs(positions[:, None] - keys[None, :]).to(tl.float32)
        scores -= slopes[:, None] * distance
    if HAS_BIAS:
        scores += bias
    return scores * LOG2E


@triton.jit
def online_softmax(scores, factor, peak, total, MASKED: tl.constexpr, SCALE_LATE: tl.constexpr):
    """One step of the running softmax: (weights [M, N], decay of what came before [M], new peak, new total).

    `scores` are base-2 logits, or raw products with a positive `factor` to go when SCALE_LATE (the factor then rides
    on the exponent's multiply-add). `peak` is the largest logit so far and `total` the sum of weights relative to it. A
    row that has seen no key keeps peak = -inf, and is measured from 0 so that -inf is never subtracted from -inf.
    """
    tile_max = tl.max(scores, 1)
    if SCALE_LATE:
        tile_max = tile_max * factor
    new_peak = tl.maximum(peak, tile_max)
    if MASKED:
        anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    else:
        anchor = new_peak
    if SCALE_LATE:
        weights = tl.exp2(scores * factor - anchor[:, None])
    else:
        weights = tl.exp2(scores - anchor[:, None])
    decay = tl.exp2(peak - anchor)
    return weights, decay, new_peak, total * decay + tl.sum(weights, 1)


@triton.jit
def finish_rows(peak, total, sinks, HAS_SINK: tl.constexpr):
    """(factor that turns accumulated values into outputs [M], base-2 LSE [M]); the sink counts here, once (M4).

    A row that saw no key gets the factor of an empty sum (its accumulator is 0) and the LSE -inf, or its sink's.
    """
    if HAS_SINK:
        sinks = sinks * LOG2E
        top = tl.maximum(peak, sinks)
        anchor = tl.where(top == float("-inf"), 0.0, top)
        decay = tl.exp2(peak - anchor)
        total = total * decay + tl.exp2(sinks - anchor)
    else:
        anchor = tl.where(peak == float("-inf"), 0.0, peak)
        decay = tl.full(peak.shape, 1.0, tl.float32)
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    return decay / safe, tl.where(empty, float("-inf"), anchor + tl.log2(safe))
