"""The key tiles of a work tile of the batch-invariant Hopper prefill."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from attnlib.ops.triton.hopper.kernels.compat import exp2
from attnlib.ops.triton.hopper.kernels.instruction_order import before_wait
from attnlib.ops.triton.hopper.kernels.prefill_products import pack_weights, unpack_weights
from attnlib.ops.triton.hopper.kernels.prefill_rows import clear_values
from attnlib.ops.triton.hopper.kernels.segment_totals import add_segment
from attnlib.ops.triton.hopper.kernels.segments import (
    add_row_sums,
    cap_scores,
    row_sums,
    softmax_factor,
)
from attnlib.ops.triton.hopper.kernels.softmax import mask_scores

__all__ = ["first_tile", "last_segment", "main_loop"]


@gluon.jit
def _weigh(rows, scores, tile, row_max, MASKED: gl.constexpr):
    """Return (weights [M, N], factor [M] of what was added before, row_max) of raw products."""
    BLOCK_N: gl.constexpr = scores.shape[1]
    scores = cap_scores(scores, rows.factor, rows.soft_cap, rows.HAS_CAP)
    if MASKED:
        scores = mask_scores(scores, rows.first, rows.last, tile * BLOCK_N, rows.CHECK_FIRST)
    weight_factor = softmax_factor(rows.factor, rows.HAS_CAP)
    new_max = gl.maximum(row_max, gl.max(scores, 1) * weight_factor)
    finite_max = new_max
    if MASKED:
        # -inf - -inf is NaN: rows without a visible key are measured from 0.
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = exp2(scores * weight_factor - finite_max[:, None])
    return weights, exp2(row_max - finite_max), new_max


@gluon.jit
def _step(
    storage,
    rows,
    totals,
    step,
    total_max,
    total_sum,
    acc,
    row_max,
    sums,
    weights,
    tile,
    MASKED: gl.constexpr,
):
    """Multiply by the keys of `tile` and by the values of the tile before it, then do the softmax.

    Where `tile` begins a segment, the complete one is added to those before it.

    Returns:
        (total_max, total_sum, acc, row_max, sums, packed weights of `tile`).
    """
    keys = storage.keys
    values = storage.values
    segment = rows.segment
    DTYPE: gl.constexpr = keys.memory.dtype
    S_LAYOUT: gl.constexpr = rows.last.type.layout.parent
    O_LAYOUT: gl.constexpr = acc.type.layout
    ORDERED: gl.constexpr = acc.shape[1] == 128
    key = keys.at(step)
    value = values.at(step - 1)
    key.wait_full()
    BLOCK_N: gl.constexpr = keys.memory.shape[1]
    zeros = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(
        rows.tile, key.tile().permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    value.wait_full()
    # The first product of a segment begins from 0.
    acc = warpgroup_mma(
        unpack_weights(weights, DTYPE, gl.DotOperandLayout(0, O_LAYOUT, 2)),
        value.tile(),
        acc,
        use_acc=((tile + 2) & (segment - 1)) != 0,
        is_async=True,
    )
    # One group may stay in flight: Q @ K^T is complete, P @ V overlaps with the softmax.
    scores = warpgroup_mma_wait(1, deps=[scores])
    if not ORDERED:
        key.release()
    begins = ((tile + 1) & (segment - 1)) == 0
    before = gl.where(begins, float("-inf"), row_max)
    probs, acc_scale, next_max = _weigh(rows, scores, tile, before, MASKED)
    # All arithmetic of the softmax comes before the branch, over which ptxas moves nothing.
    if ORDERED:
        probs = before_wait(probs)
    more = row_sums(probs)
    # P @ V is complete: its stage is free, and the accumulator may be rescaled.
    acc = warpgroup_mma_wait(0, deps=[acc])
    if ORDERED:
        # An arrival synchronizes the warps, which would delay the softmax.
        key.release()
    value.release()
    packed = pack_weights(probs, DTYPE)
    # A complete segment is left as it is, and the next product overwrites it.
    kept = gl.where(begins, 1.0, acc_scale)
    acc = acc * gl.convert_layout(kept, gl.SliceLayout(1, O_LAYOUT))[:, None]
    if begins:
        acc, total_max, total_sum = add_segment(
            totals.memory,
            acc,
            total_max,
            total_sum,
            row_max,
            sums,
            tile + 1 + segment >= rows.end,
            False,
            O_LAYOUT,
            totals.GLOBAL,
        )
    sums = add_row_sums(sums, acc_scale, more)
    return total_max, total_sum, acc, next_max, sums, packed


@gluon.jit
def first_tile(call, storage, rows, work, step, row_max, WARPGROUP: gl.constexpr):
    """Weigh the last tile, the first one visited, which has no values of an earlier one to multiply
    by; clear its values past the end of the request.

    Returns:
        (row_max, sums, packed weights).
    """
    keys = storage.keys
    values = storage.values
    S_LAYOUT: gl.constexpr = rows.last.type.layout.parent
    key = keys.at(step)
    key.wait_full()
    BLOCK_N: gl.constexpr = keys.memory.shape[1]
    zeros = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(
        rows.tile, key.tile().permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    scores = warpgroup_mma_wait(0, deps=[scores])
    key.release()
    probs, _, row_max = _weigh(rows, scores, rows.end - 1, row_max, True)
    sums = row_sums(probs)
    weights = pack_weights(probs, keys.memory.dtype)
    past_end = work.seq_len - (rows.end - 1) * call.config.BLOCK_N
    # TMA fills whole pages past the end with zeros, but not the rest of the last page.
    if (past_end < call.config.BLOCK_N) & (work.seq_len % call.config.BLOCK_SIZE != 0):
        value = values.at(step)
        value.wait_full()
        clear_values(value.tile(), past_end, WARPGROUP, call.config.CONSUMERS)
    return row_max, sums, weights


@gluon.jit
def main_loop(
    storage, rows, totals, tiles, step, total_max, total_sum, acc, row_max, sums, weights
):
    """Visit all tiles but the last one: masked ones at the diagonal, unmasked ones, masked ones at
    the left. Returns (step, total_max, total_sum, acc, row_max, sums, weights)."""
    end = tiles.end
    full_end = gl.minimum(tiles.right_begin, end - 1)
    full_begin = gl.minimum(tiles.left_end, full_end)
    for back in range(0, end - 1 - full_end):
        total_max, total_sum, acc, row_max, sums, weights = _step(
            storage,
            rows,
            totals,
            step,
            total_max,
            total_sum,
            acc,
            row_max,
            sums,
            weights,
            end - 2 - back,
            True,
        )
        step += 1
    for back in range(0, full_end - full_begin):
        total_max, total_sum, acc, row_max, sums, weights = _step(
            storage,
            rows,
            totals,
            step,
            total_max,
            total_sum,
            acc,
            row_max,
            sums,
            weights,
            full_end - 1 - back,
            False,
        )
        step += 1
    if rows.CHECK_FIRST:
        for back in range(0, full_begin - tiles.begin):
            total_max, total_sum, acc, row_max, sums, weights = _step(
                storage,
                rows,
                totals,
                step,
                total_max,
                total_sum,
                acc,
                row_max,
                sums,
                weights,
                full_begin - 1 - back,
                True,
            )
            step += 1
    return step, total_max, total_sum, acc, row_max, sums, weights


@gluon.jit
def last_segment(
    storage, rows, totals, begin, step, total_max, total_sum, acc, row_max, sums, weights
):
    """Multiply by the values of the first tile, the last one visited, and add its segment to those
    before it. Returns (total_max, total_sum, acc)."""
    segment = rows.segment
    O_LAYOUT: gl.constexpr = acc.type.layout
    value = storage.values.at(step - 1)
    value.wait_full()
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    acc = warpgroup_mma(
        unpack_weights(weights, storage.keys.memory.dtype, OPERAND),
        value.tile(),
        acc,
        use_acc=((begin + 1) & (segment - 1)) != 0,
        is_async=True,
    )
    acc = warpgroup_mma_wait(0, deps=[acc])
    value.release()
    first = (rows.end - 1) // segment * segment <= begin
    acc, total_max, total_sum = add_segment(
        totals.memory,
        acc,
        total_max,
        total_sum,
        row_max,
        sums,
        first,
        True,
        O_LAYOUT,
        totals.GLOBAL,
    )
    return total_max, total_sum, acc
