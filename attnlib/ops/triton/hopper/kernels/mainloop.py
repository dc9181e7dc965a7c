"""The main loop of the Hopper prefill: two WGMMAs in flight and the softmax between them.

The product with the keys of one tile is issued before the product with the values of the previous
tile is awaited (FlashAttention-3, Shah et al. 2024), so that the tensor cores work during the
softmax.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate
from attnlib.ops.triton.hopper.kernels.instruction_order import before_wait
from attnlib.ops.triton.hopper.kernels.lanes import rescale
from attnlib.ops.triton.hopper.kernels.prefill_products import (
    hidden_zero,
    multiply_keys,
    multiply_parts,
    multiply_values,
    pack_weights,
    unpack_weights,
    wait_for_tile,
)
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
from attnlib.ops.triton.hopper.kernels.value_columns import multiply_value_parts
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = [
    "BOUNDED",
    "Consumer",
    "RowState",
    "key_product",
    "overlapped_step",
    "value_product",
    "weigh_tile",
]

BOUNDED = gl.constexpr(2)
"""Value of HAS_CAP for `bounded_softmax`; True for `online_softmax`."""


@aggregate
class Consumer:
    """Constants of a consumer warpgroup.

    Fields:
        WARPGROUP: its number.
        ROW_BLOCK: its block of 64 rows.
        PART: its part of the value elements, if the consumers share the rows; -1 for all.
        WIDTH_V: value elements of a row, padded.
        COLUMNS: value elements of its accumulator.
        ELEMENTS: elements of a head that Q @ K^T reads.
        S_LAYOUT, O_LAYOUT: layouts of the scores and of the output.
        V_COLUMNS: columns of P @ V with values in parts (`value_columns`); 0 if they are undivided.
        V_OFFSET: of these values in shared memory, in bytes.
        SUMS: columns of the accumulator are sums of weights, and `row_sum` stays as it is.
        CHECK_FIRST: rows may see no key of the tiles at the left.
        THRESHOLD: that of `softmax.online_softmax`, or the lead of `softmax_by_sign`.
        EARLY_SINK: the sum of weights begins with that of the sink (M4).
    """

    WARPGROUP: gl.constexpr
    ROW_BLOCK: gl.constexpr
    PART: gl.constexpr
    WIDTH_V: gl.constexpr
    COLUMNS: gl.constexpr
    ELEMENTS: gl.constexpr
    S_LAYOUT: gl.constexpr
    O_LAYOUT: gl.constexpr
    V_COLUMNS: gl.constexpr
    V_OFFSET: gl.constexpr
    SUMS: gl.constexpr
    CHECK_FIRST: gl.constexpr
    THRESHOLD: gl.constexpr
    EARLY_SINK: gl.constexpr


@aggregate
class RowState:
    """The query rows of a consumer during a work tile.

    Fields:
        tile: the queries in shared memory, or their first part.
        operand: the queries as operand of WGMMA, or a tuple of their parts.
        slopes: `slopes.slope_operand`; read with a KEY_SLOPE.
        first, last: [64], the keys that a row sees.
        tokens, positions, heads: [64], token in the request, position and query head of a row.
        valid: [64], whether the row exists.
        request: number of the request.
        factor: of raw products (`softmax.score_factor`).
        k_factor: [64], factor of the products of a row over a float8 cache.
    """

    tile: Value
    operand: Value
    slopes: Value
    first: Value
    last: Value
    tokens: Value
    positions: Value
    heads: Value
    valid: Value
    request: Value
    factor: Value
    k_factor: Value


@gluon.jit
def weigh_tile(
    call, scoring, consumer, rows, scores, tile, row_max, row_sum, MASKED: gl.constexpr,
    UNCHANGED: gl.constexpr = False, FIRST: gl.constexpr = False,
):  # fmt: skip
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
            scores, scoring.scale, rows.factor, rows.positions, tile * BLOCK_N, rows.heads,
            rows.request, call.aux, rows.first, rows.last, row_max, row_sum, SCORE, MASKED,
            CHECK_FIRST,
        )  # fmt: skip
    elif HAS_CAP == BOUNDED:
        weights, row_max, row_sum = bounded_softmax(
            scores, rows.factor, scoring.soft_cap, rows.first, rows.last, tile * BLOCK_N, row_max,
            row_sum, MASKED, CHECK_FIRST, FIRST,
        )  # fmt: skip
        return weights, 1.0, row_max, row_sum
    else:
        QUANTIZED: gl.constexpr = call.config.KV_KIND != KV_PLAIN
        if QUANTIZED:
            if SCORE is not None or HAS_CAP:
                scores = scores * rows.k_factor[:, None]
        if SCORE is not None:
            keys = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores.type.layout))
            scores = apply_function(
                scores, scoring.scale, rows.factor, scoring.soft_cap, rows.positions[:, None],
                keys[None, :], rows.heads[:, None], rows.request, call.aux, SCORE, HAS_CAP,
                call.config.RAW_SCORE,
            )  # fmt: skip
        else:
            scores = transform_scores(scores, rows.factor, scoring.soft_cap, HAS_CAP)
        if MASKED:
            scores = mask_scores(scores, rows.first, rows.last, tile * BLOCK_N, CHECK_FIRST)
        # A score function may hide keys of any tile.
        CAN_HIDE: gl.constexpr = MASKED or SCORE is not None
        if QUANTIZED:
            return online_softmax_by_row(
                scores, _row_factor(rows, SCORE is not None, HAS_CAP), row_max, row_sum,
                WEIGHT_EXPONENT, CAN_HIDE,
            )  # fmt: skip
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


@gluon.jit
def key_product(scoring, consumer, rows, keys, stage, operand, KEY_PARTS: gl.constexpr,
                HAS_SLOPE: gl.constexpr):  # fmt: skip
    """Issue Q @ K^T with the keys of a stage, plus the slopes of a score function."""
    BLOCK_N: gl.constexpr = keys.memory.shape[1]
    zeros = gl.zeros([64, BLOCK_N], gl.float32, consumer.S_LAYOUT)
    if KEY_PARTS == 1:
        scores = multiply_keys(operand, keys.memory.index(stage), zeros, consumer.ELEMENTS)
    else:
        scores = multiply_parts(operand, keys.memory, stage, zeros, KEY_PARTS)
    if HAS_SLOPE:
        column_tile = scoring.column_tile.permute((1, 0))
        scores = warpgroup_mma(rows.slopes, column_tile, scores, is_async=True)
    return scores


@gluon.jit
def value_product(consumer, values, stage, weights, acc, DTYPE: gl.constexpr):
    """Issue P @ V + acc with the values of a stage and packed weights."""
    if consumer.V_COLUMNS > 0:
        return multiply_value_parts(
            weights, values.memory, stage, acc, consumer.V_COLUMNS, values.STAGES,
            consumer.V_OFFSET,
        )  # fmt: skip
    else:
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, consumer.O_LAYOUT, 2)
        operand = unpack_weights(weights, DTYPE, OPERAND)
        return multiply_values(operand, values.memory.index(stage), acc, consumer.PART)


@gluon.jit
def overlapped_step(
    call, scoring, consumer, rows, storage, step, row_max, row_sum, acc, weights, tile,
    MASKED: gl.constexpr, UNCHANGED: gl.constexpr = False,
):  # fmt: skip
    """Multiply by the keys of `tile` and by the values of the tile before it, then do the softmax.

    Args:
        step: number of the tile in the rings.
        weights: packed weights of the tile before it.
        MASKED, UNCHANGED: as in `weigh_tile`.

    Returns:
        (row_max, row_sum, acc, packed weights of `tile`).
    """
    keys = storage.keys
    values = storage.values
    DTYPE: gl.constexpr = keys.memory.dtype
    STAGES: gl.constexpr = keys.STAGES
    THRESHOLD: gl.constexpr = consumer.THRESHOLD
    BOUNDED_CAP: gl.constexpr = call.config.HAS_CAP == BOUNDED
    COPIED: gl.constexpr = call.config.GATHERS
    SIGNS: gl.constexpr = call.config.SIGN_SOFTMAX
    HAS_SLOPE: gl.constexpr = scoring.KEY_SLOPE is not None and not UNCHANGED
    # Three consumers overlap with each other. With two, the softmax overlaps with P @ V, where it
    # is short enough for that.
    ORDERED: gl.constexpr = (SIGNS and call.config.KEY_PARTS == 1) or (
        consumer.V_COLUMNS > 0 and THRESHOLD == 0 and not BOUNDED_CAP
    )
    stage = step % STAGES
    parity = (step // STAGES) & 1
    v_stage = (step - 1) % STAGES
    operand = rows.operand
    if consumer.PART >= 0:
        hidden = hidden_zero(step)
        operand = operand.index(hidden)
        if STAGES == 1:
            stage = hidden
            v_stage = hidden
    v_parity = ((step - 1) // STAGES) & 1
    # Wait for the TMA loads of this tile's keys, then issue Q @ K^T.
    wait_for_tile(keys.full, stage, parity, COPIED)
    scores = key_product(
        scoring, consumer, rows, keys, stage, operand, call.config.KEY_PARTS, HAS_SLOPE
    )
    # Wait for the TMA loads of the previous tile's values, then issue P @ V behind it.
    wait_for_tile(values.full, v_stage, v_parity, COPIED)
    acc = value_product(consumer, values, v_stage, weights, acc, DTYPE)
    # One group may stay in flight: Q @ K^T is complete, P @ V overlaps with the softmax.
    scores = warpgroup_mma_wait(1, deps=[scores])
    if not ORDERED:
        mbarrier.arrive(keys.empty.index(stage), count=1)
    probs, acc_scale, row_max, new_sum = weigh_tile(
        call, scoring, consumer, rows, scores, tile, row_max, row_sum, MASKED, UNCHANGED
    )
    if not consumer.SUMS:
        row_sum = new_sum
    if ORDERED:
        probs = before_wait(probs)
    # P @ V is complete: its stage is free, and the accumulator may be rescaled.
    acc = warpgroup_mma_wait(0, deps=[acc])
    if ORDERED:
        # An arrival synchronizes the warps, which would delay the softmax.
        mbarrier.arrive(keys.empty.index(stage), count=1)
    mbarrier.arrive(values.empty.index(v_stage), count=1)
    PACKED_EARLY: gl.constexpr = SIGNS or (consumer.V_COLUMNS > 0 and THRESHOLD > 0)
    if PACKED_EARLY:
        # Before the branch of `rescale`, ptxas packs weights between the exponentials.
        packed = pack_weights(probs, DTYPE)
    if not BOUNDED_CAP:
        if THRESHOLD > 0:
            acc = rescale(acc, acc_scale)
        else:
            acc = acc * gl.convert_layout(acc_scale, gl.SliceLayout(1, acc.type.layout))[:, None]
    if not PACKED_EARLY:
        packed = pack_weights(probs, DTYPE)
    return row_max, row_sum, acc, packed
