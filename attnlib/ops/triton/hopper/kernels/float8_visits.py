"""The key tiles of a work tile of the Hopper prefill with float8 products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate
from attnlib.ops.triton.hopper.kernels.float8_operands import float8_tile, pack_float8_weights
from attnlib.ops.triton.hopper.kernels.softmax import mask_scores, online_softmax_by_row

__all__ = ["WEIGHT_EXPONENT", "Float8Rows", "attend"]

WEIGHT_EXPONENT = gl.constexpr(8.0)
"""Weights are at most 2^8; the largest e4m3 number is 448, and the least normal one 2^-6."""


@aggregate
class Float8Rows:
    """The query rows of a consumer during a work tile.

    Fields:
        queries: [64, W] float8 elements in shared memory.
        factor: [64], factor of the products of a row to base-2 logits.
        first, last: [64], the keys that a row sees.
        CHECK_FIRST: rows may see no key of the tiles at the left.
    """

    queries: Value
    factor: Value
    first: Value
    last: Value
    CHECK_FIRST: gl.constexpr


@gluon.jit
def _weigh(rows, scores, tile, row_max, row_sum, MASKED: gl.constexpr):
    """Turn raw products with the keys of `tile` into weights, relative to 2 ** (row_max - 8).

    Returns:
        (weights [M, N], factor [M] of what was accumulated before, row_max, row_sum by thread).
    """
    if MASKED:
        start = tile * scores.shape[1]
        scores = mask_scores(scores, rows.first, rows.last, start, rows.CHECK_FIRST)
    return online_softmax_by_row(
        scores, rows.factor, row_max, row_sum, WEIGHT_EXPONENT, MASKED, True
    )


@gluon.jit
def _multiply_keys(rows, key, S_LAYOUT: gl.constexpr):
    """Wait for the keys of a stage and return their product with the queries."""
    key.wait_full()
    BLOCK_N: gl.constexpr = key.ring.memory.shape[1]
    zeros = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    tile = float8_tile(key.tile()).permute((1, 0))
    scores = warpgroup_mma(rows.queries, tile, zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    key.release()
    return scores


@gluon.jit
def _multiply_values(value, weights, O_LAYOUT: gl.constexpr):
    """Wait for the values of a stage and return their product with the weights."""
    value.wait_full()
    WIDTH_V: gl.constexpr = value.ring.memory.shape[1]
    zeros = gl.zeros([64, WIDTH_V], gl.float32, O_LAYOUT)
    tile = float8_tile(value.tile()).permute((1, 0))
    added = warpgroup_mma(weights, tile, zeros, use_acc=False, is_async=True)
    added = warpgroup_mma_wait(0, deps=[added])
    value.release()
    return added


@gluon.jit
def _step(storage, rows, step, row_max, row_sum, acc, scores, tile, MASKED: gl.constexpr):
    """Weigh the values of `tile`, number `step`, then multiply by the keys of the next one.

    Returns:
        (row_max, row_sum, acc, scores of the next tile).
    """
    O_LAYOUT: gl.constexpr = acc.type.layout
    S_LAYOUT: gl.constexpr = scores.type.layout
    value = storage.values.at(step)
    next_key = storage.keys.at(step + 1)
    probs, acc_scale, row_max, row_sum = _weigh(rows, scores, tile, row_max, row_sum, MASKED)
    weights = pack_float8_weights(probs, gl.DotOperandLayout(0, O_LAYOUT, 4))
    added = _multiply_values(value, weights, O_LAYOUT)
    acc = acc * gl.convert_layout(acc_scale, gl.SliceLayout(1, O_LAYOUT))[:, None] + added
    return row_max, row_sum, acc, _multiply_keys(rows, next_key, S_LAYOUT)


@gluon.jit
def attend(storage, rows, tiles, step, row_max, row_sum, acc, S_LAYOUT: gl.constexpr):
    """Visit the tiles of a work tile: masked ones at the diagonal, unmasked ones, masked ones at
    the left, and the first one. Returns (step, row_max, row_sum, acc)."""
    O_LAYOUT: gl.constexpr = acc.type.layout
    begin = tiles.begin
    scores = _multiply_keys(rows, storage.keys.at(step), S_LAYOUT)
    full_end = gl.minimum(gl.maximum(tiles.right_begin, begin + 1), tiles.end)
    full_begin = gl.minimum(gl.maximum(tiles.left_end, begin + 1), full_end)
    for back in range(0, tiles.end - full_end):
        row_max, row_sum, acc, scores = _step(
            storage, rows, step, row_max, row_sum, acc, scores, tiles.end - 1 - back, True
        )
        step += 1
    for back in range(0, full_end - full_begin):
        row_max, row_sum, acc, scores = _step(
            storage, rows, step, row_max, row_sum, acc, scores, full_end - 1 - back, False
        )
        step += 1
    if rows.CHECK_FIRST:
        for back in range(0, full_begin - begin - 1):
            row_max, row_sum, acc, scores = _step(
                storage, rows, step, row_max, row_sum, acc, scores, full_begin - 1 - back, True
            )
            step += 1
    probs, acc_scale, row_max, row_sum = _weigh(rows, scores, begin, row_max, row_sum, True)
    weights = pack_float8_weights(probs, gl.DotOperandLayout(0, O_LAYOUT, 4))
    added = _multiply_values(storage.values.at(step), weights, O_LAYOUT)
    acc = acc * gl.convert_layout(acc_scale, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return step + 1, row_max, row_sum, acc + added
