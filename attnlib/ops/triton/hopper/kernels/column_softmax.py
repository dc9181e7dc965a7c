"""The softmax of the Hopper decode, whose scores are [keys, rows], and its weights.

Over pages that hold their scales (M16) values have a scale per key, or four, which multiply the
weights.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.compat import exp2, log2, partition_barrier
from attnlib.ops.triton.hopper.kernels.int4 import float32_scale, largest_scale, store_pairs
from attnlib.ops.triton.hopper.kernels.quantized import WEIGHT_SCALE
from attnlib.ops.triton.hopper.kernels.softmax import LOG2E
from attnlib.ops.triton.kernels.quant import KV_INT4, KV_PLAIN

__all__ = [
    "add_weights",
    "column_sum",
    "load_columns",
    "mask_columns",
    "softmax_columns",
    "store_columns",
    "store_weights",
    "sum_of_warps",
]


@gluon.constexpr_function
def _column_layout(count, rows):
    """Layout of [count, rows] in which a thread has all `count` numbers of its columns, 1 or 4."""
    registers = [[0, 1], *([0, 8 << bit] for bit in range((rows // 8).bit_length() - 1))]
    registers += [[1 << bit, 0] for bit in range(count.bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0], [0, 0]], [], [count, rows])


@gluon.jit
def _column_max(scores, max_tile):
    """Return the maximum of each column of scores [keys, rows].

    Args:
        max_tile: shared memory [4, rows] for the exchange between the warps; None for that of
            `gl.max`, which takes two more barriers.
    """
    if max_tile is None:
        return gl.max(scores, 0)
    else:
        KEYS: gl.constexpr = scores.shape[0]
        ROWS: gl.constexpr = scores.shape[1]
        # A warp has 16 of each 64 keys.
        own = gl.max(gl.max(gl.reshape(scores, [KEYS // 64, 4, 16, ROWS]), 2), 0)
        max_tile.store(own)
        partition_barrier()
        found = gl.max(max_tile.load(_column_layout(4, ROWS)), 0)
        return gl.convert_layout(found, gl.SliceLayout(0, scores.type.layout))


@gluon.jit
def column_sum(sums, tile):
    """Return the sum of each column of sums [keys, rows].

    `tile` is shared memory [4, rows] for the exchange between the warps; None for that of `gl.sum`.
    """
    if tile is None:
        return gl.sum(sums, 0)
    else:
        KEYS: gl.constexpr = sums.shape[0]
        ROWS: gl.constexpr = sums.shape[1]
        LAYOUT: gl.constexpr = sums.type.layout
        own = gl.sum(gl.sum(gl.reshape(sums, [KEYS // 64, 4, 16, ROWS]), 2), 0)
        return sum_of_warps(own, tile, LAYOUT)


@gluon.jit
def sum_of_warps(own, tile, LAYOUT: gl.constexpr):
    """Return the sums [rows] of those of each of four warps, [4, rows], along the columns of
    LAYOUT; `tile` is shared memory of that shape."""
    ROWS: gl.constexpr = own.shape[1]
    tile.store(own)
    partition_barrier()
    found = gl.sum(tile.load(_column_layout(4, ROWS)), 0)
    return gl.convert_layout(found, gl.SliceLayout(0, LAYOUT))


@gluon.jit
def store_columns(tile, numbers):
    """Store numbers [rows] or [rows, 1] in shared memory [1, rows], for `load_columns` after a
    barrier."""
    if len(numbers.shape) == 1:
        numbers = numbers[:, None]
    tile.permute((1, 0)).store(numbers)


@gluon.jit
def load_columns(tile, LAYOUT: gl.constexpr):
    """Return the numbers [rows] of `store_columns` as those of the columns of LAYOUT."""
    found = gl.max(tile.load(_column_layout(1, tile.shape[1])), 0)
    return gl.convert_layout(found, gl.SliceLayout(0, LAYOUT))


@gluon.jit
def _online_softmax(scores, factor, row_max, max_tile, MASKED: gl.constexpr, HAS_CAP: gl.constexpr):
    """Return (weights, factor of what was accumulated before, new row_max) of scores [keys, rows].

    As `softmax.online_softmax`, along the other axis and without the sum.
    """
    if HAS_CAP:
        weight_factor = 1.0
    else:
        weight_factor = factor
    new_max = gl.maximum(row_max, _column_max(scores, max_tile) * weight_factor)
    finite_max = new_max
    if MASKED:
        # -inf - -inf is NaN: rows without a visible key are measured from 0.
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = exp2(scores * weight_factor - finite_max[None, :])
    return weights, exp2(row_max - finite_max), new_max


@gluon.jit
def _unit(v_scales):
    """Return the largest scale of each value."""
    if v_scales.dtype == gl.int64:
        return largest_scale(v_scales)
    else:
        return v_scales


@gluon.jit
def _scaled_softmax(
    scores, factor, row_max, v_scales, max_tile, MASKED: gl.constexpr, HAS_CAP: gl.constexpr
):
    """As `_online_softmax`, for values with a scale per key.

    `row_max` is that of the scores plus the base-2 logarithms of the scales of the values, so that
    weights times scales are at most 1.

    Returns:
        (weights, factor of what was accumulated before, new row_max).
    """
    if not HAS_CAP:
        scores = scores * factor
    # Scales of hidden keys may be anything, and those of zeros are 0.
    units = log2(gl.minimum(gl.maximum(_unit(v_scales), 2.0**-100), 2.0**100))
    new_max = gl.maximum(row_max, _column_max(scores + units[:, None], max_tile))
    finite_max = new_max
    if MASKED:
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    return exp2(scores - finite_max[None, :]), exp2(row_max - finite_max), new_max


@gluon.jit
def mask_columns(scores, row_first, row_last, tile_start, CHECK_FIRST: gl.constexpr):
    """Set the scores [keys, rows] of keys outside [row_first, row_last) to -inf."""
    KEYS: gl.constexpr = scores.shape[0]
    keys = tile_start + gl.arange(0, KEYS, gl.SliceLayout(1, scores.type.layout))
    visible = keys[:, None] < row_last[None, :]
    if CHECK_FIRST:
        visible = visible & (keys[:, None] >= row_first[None, :])
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def softmax_columns(
    scores,
    factor,
    row_max,
    v_scales,
    SCORE: gl.constexpr,
    MASKED: gl.constexpr,
    HAS_CAP: gl.constexpr,
    max_tile=None,
):
    """Return (weights, factor of what was accumulated before, new row_max) of scores [keys, rows];
    `v_scales` is None where all values have the same scale."""
    if v_scales is not None:
        if SCORE is not None:
            weights, acc_scale, row_max = _scaled_softmax(
                scores, LOG2E, row_max, v_scales, max_tile, True, False
            )
        else:
            weights, acc_scale, row_max = _scaled_softmax(
                scores, factor, row_max, v_scales, max_tile, MASKED, HAS_CAP
            )
    else:
        if SCORE is not None:
            # The function may hide keys of any tile.
            weights, acc_scale, row_max = _online_softmax(
                scores, LOG2E, row_max, max_tile, True, False
            )
        else:
            weights, acc_scale, row_max = _online_softmax(
                scores, factor, row_max, max_tile, MASKED, HAS_CAP
            )
    return weights, acc_scale, row_max


@gluon.jit
def add_weights(row_sum, acc_scale, weights):
    """Add a tile's weights to their running sum."""
    # Up to 16 rows the sums are kept per key, [keys, rows]: the registers suffice, and the
    # reduction across warps happens once per split instead of once per tile.
    if weights.shape[1] <= 16:
        return row_sum * acc_scale[None, :] + weights
    else:
        return row_sum * acc_scale + gl.sum(weights, 0)


@gluon.jit
def _scale_weights(weights, v_scales, MASKED: gl.constexpr):
    """Return weights [keys, rows] times the scales of their values."""
    scaled = weights * v_scales[:, None]
    if MASKED:
        # The scales of hidden keys may be NaN.
        scaled = gl.where(weights == 0.0, 0.0, scaled)
    return scaled


@gluon.jit
def store_weights(p_tile, weights, v_scales, MASKED: gl.constexpr, V_KIND: gl.constexpr):
    """Store weights [keys, rows] in shared memory for the product with the values.

    The product that read the previous weights must be complete.
    """
    if V_KIND != KV_PLAIN:
        weights = weights * WEIGHT_SCALE
    if V_KIND == KV_INT4:
        p0 = _scale_weights(weights, float32_scale(v_scales, 0), MASKED).to(p_tile.dtype)
        p1 = _scale_weights(weights, float32_scale(v_scales, 1), MASKED).to(p_tile.dtype)
        p2 = _scale_weights(weights, float32_scale(v_scales, 2), MASKED).to(p_tile.dtype)
        p3 = _scale_weights(weights, float32_scale(v_scales, 3), MASKED).to(p_tile.dtype)
        store_pairs(p_tile, p0, p1, p2, p3)
    else:
        if v_scales is not None:
            weights = _scale_weights(weights, v_scales, MASKED)
        p_tile.store(gl.permute(weights, (1, 0)).to(p_tile.dtype))
    # WGMMA reads shared memory through the async proxy: fence, then wait for all four warps.
    fence_async_shared()
    partition_barrier()
