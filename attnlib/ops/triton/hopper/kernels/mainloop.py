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

from attnlib.ops.triton.hopper.kernels.consumer_state import BOUNDED
from attnlib.ops.triton.hopper.kernels.instruction_order import before_wait
from attnlib.ops.triton.hopper.kernels.lanes import rescale
from attnlib.ops.triton.hopper.kernels.prefill_products import (
    hidden_zero,
    multiply_keys,
    multiply_parts,
    multiply_pieces,
    multiply_values,
    pack_weights,
    unpack_weights,
    wait_for_tile,
)
from attnlib.ops.triton.hopper.kernels.tile_weights import weigh_tile
from attnlib.ops.triton.hopper.kernels.two_accumulators import (
    multiply_both,
    rescale_both,
    wait_for_both,
)
from attnlib.ops.triton.hopper.kernels.value_columns import multiply_value_parts

__all__ = ["key_product", "overlapped_step", "value_product"]


@gluon.jit
def key_product(
    scoring, consumer, rows, keys, stage, operand, KEY_PARTS: gl.constexpr, HAS_SLOPE: gl.constexpr
):
    """Issue Q @ K^T with the keys of a stage, plus the slopes of a score function."""
    BLOCK_N: gl.constexpr = keys.memory.shape[1]
    zeros = gl.zeros([64, BLOCK_N], gl.float32, consumer.S_LAYOUT)
    if KEY_PARTS == 1:
        scores = multiply_keys(operand, keys.memory.index(stage), zeros, consumer.ELEMENTS)
    elif consumer.REST_COLUMNS > 0:
        scores = multiply_pieces(operand, keys.memory, stage, zeros)
    else:
        scores = multiply_parts(operand, keys.memory, stage, zeros, KEY_PARTS)
    if HAS_SLOPE:
        column_tile = scoring.column_tile.permute((1, 0))
        scores = warpgroup_mma(rows.slopes, column_tile, scores, is_async=True)
    return scores


@gluon.jit
def value_product(consumer, values, stage, weights, acc, DTYPE: gl.constexpr):
    """Issue P @ V + acc with the values of a stage and packed weights."""
    if consumer.REST_COLUMNS > 0:
        return multiply_both(consumer, values, stage, weights, acc, DTYPE)
    elif consumer.V_COLUMNS > 0:
        return multiply_value_parts(
            weights,
            values.memory,
            stage,
            acc,
            consumer.V_COLUMNS,
            values.STAGES,
            consumer.V_OFFSET,
        )
    else:
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, consumer.O_LAYOUT, 2)
        operand = unpack_weights(weights, DTYPE, OPERAND)
        return multiply_values(operand, values.memory.index(stage), acc, consumer.PART)


@gluon.jit
def overlapped_step(
    call,
    scoring,
    consumer,
    rows,
    storage,
    step,
    row_max,
    row_sum,
    acc,
    weights,
    tile,
    MASKED: gl.constexpr,
    UNCHANGED: gl.constexpr = False,
):
    """Multiply by the keys of `tile` and by the values of the tile before it, then do the softmax.

    Args:
        step: number of the tile in the rings.
        weights: packed weights of the tile before it.
        MASKED: some row does not see some key of `tile`.
        UNCHANGED: the score function changes no score of `tile`.

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
    ORDERED: gl.constexpr = (
        (SIGNS and call.config.KEY_PARTS == 1)
        or (consumer.V_COLUMNS > 0 and THRESHOLD == 0 and not BOUNDED_CAP)
        or (consumer.REST_COLUMNS > 0 and not BOUNDED_CAP)
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
    # P @ V may stay in flight: Q @ K^T is complete, P @ V overlaps with the softmax.
    VALUE_GROUPS: gl.constexpr = 2 if consumer.REST_COLUMNS > 0 else 1
    scores = warpgroup_mma_wait(VALUE_GROUPS, deps=[scores])
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
    if consumer.REST_COLUMNS > 0:
        acc = wait_for_both(acc)
    else:
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
        if consumer.REST_COLUMNS > 0:
            acc = rescale_both(acc, acc_scale, THRESHOLD > 0)
        elif THRESHOLD > 0:
            acc = rescale(acc, acc_scale)
        else:
            acc = acc * gl.convert_layout(acc_scale, gl.SliceLayout(1, acc.type.layout))[:, None]
    if not PACKED_EARLY:
        packed = pack_weights(probs, DTYPE)
    return row_max, row_sum, acc, packed
