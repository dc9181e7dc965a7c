"""Products and softmax of the decode of one warp, all of whose operands are in registers.

Weights are the results of one product and the second operand of the other one
(`warp_operands.transposed_weights`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from attnlib.ops.triton.hopper.kernels.column_softmax import mask_columns
from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate, exp2, log2
from attnlib.ops.triton.hopper.kernels.int4 import float32_scale, largest_scale
from attnlib.ops.triton.hopper.kernels.mxfp4 import largest_power, power_of_group
from attnlib.ops.triton.hopper.kernels.nvfp4 import nvfp4_scales, scaled_nvfp4
from attnlib.ops.triton.hopper.kernels.quantized import WEIGHT_EXPONENT
from attnlib.ops.triton.hopper.kernels.softmax import transform_scores
from attnlib.ops.triton.hopper.kernels.warp_operands import (
    PRODUCTS,
    num_parts,
    transposed_weights,
    value_parts,
)
from attnlib.ops.triton.hopper.kernels.warp_scores import tile_scores
from attnlib.ops.triton.kernels.quant import KV_INT4, KV_INT8, KV_MXFP4, KV_NVFP4

__all__ = ["WarpRows", "WarpSums", "multiply_tile", "scale_parts", "zero_sums"]

_SUMS = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [], [], [8, 8])
)
"""Layout of [8, rows]: the sums over the keys that a thread holds."""


@aggregate
class WarpSums:
    """What a warp has accumulated of its query rows.

    Fields:
        row_max: base-2 maxima [rows].
        row_sum: sums of weights [8, rows], over the keys that a thread holds.
        acc: for each part of the values, [elements, rows].
    """

    row_max: Value
    row_sum: Value
    acc: Value


@aggregate
class WarpRows:
    """The query rows of a split: operands, factors of the scores, and visible keys.

    Fields:
        queries: `WarpQueries`.
        k_factor: [rows], factor of the products; `factor` is the softmax scale in base 2.
        first, last: [rows], the keys [first, last) that a row sees.
    """

    queries: Value
    k_factor: Value
    factor: Value
    soft_cap: Value
    first: Value
    last: Value


@gluon.jit
def zero_sums(config):
    """Return `WarpSums` of no keys."""
    PARTS: gl.constexpr = num_parts(config.V_KIND)
    ROWS: gl.constexpr = config.ROWS
    WORDS: gl.constexpr = config.WIDTH_V // PARTS
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, PRODUCTS))
    row_sum = gl.zeros([8, ROWS], gl.float32, _SUMS)
    none = gl.zeros([WORDS, ROWS], gl.float32, PRODUCTS)
    if PARTS == 4:
        acc = (none, none, none, none)
    else:
        acc = (none, none)
    return WarpSums(row_max, row_sum, acc)


@gluon.constexpr_function
def _scales_groups(kind):
    """Whether a tile has scales of four groups, each of which is a part."""
    return kind == KV_INT4 or kind == KV_MXFP4


@gluon.jit
def _group_scale(scales, GROUP: gl.constexpr, KIND: gl.constexpr):
    """Return the scales of a group in float32."""
    return float32_scale(scales, GROUP) if KIND == KV_INT4 else power_of_group(scales, GROUP)


@gluon.jit
def _largest_scale(scales, KIND: gl.constexpr):
    """Return the largest scales of values, within a range that float32 holds with the weights."""
    MOST: gl.constexpr = 2.0**127 if KIND == KV_MXFP4 else 2.0**100
    largest = scales
    if KIND == KV_INT4:
        largest = largest_scale(scales)
    elif KIND == KV_MXFP4:
        largest = largest_power(scales)
    return gl.minimum(gl.maximum(largest, 2.0**-100), MOST)


@gluon.jit
def _part_weights(
    weights, v_scales, part: gl.constexpr, MASKED: gl.constexpr, V_KIND: gl.constexpr
):
    """Return the weights of a part of the values as the second operand of a product."""
    if v_scales is not None:
        if _scales_groups(V_KIND):
            scaled = weights * _group_scale(v_scales, part, V_KIND)[:, None]
        else:
            scaled = weights * v_scales[:, None]
        if MASKED:
            # The scales of hidden keys may be NaN.
            scaled = gl.where(weights == 0.0, 0.0, scaled)
    else:
        scaled = weights
    return transposed_weights(scaled.to(gl.float16))


@gluon.jit
def _add_nvfp4(tiles, stage, acc, weights, first, valid, MASKED: gl.constexpr):
    """`_add_values` over 4-bit floats, whose elements have scales; 0 outside [first, valid)."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCTS, 2)
    slot = tiles.scales.values_slot(stage)
    scales = nvfp4_scales(slot, first, valid, MASKED, gl.SliceLayout(0, OPERAND))
    words = tiles.values.index(stage).permute((1, 0)).load(OPERAND)
    parts = scaled_nvfp4(words, scales, False)
    operand = transposed_weights(weights.to(gl.float16))
    return (
        mma_v2(parts[0], operand, acc[0]),
        mma_v2(parts[1], operand, acc[1]),
        mma_v2(parts[2], operand, acc[2]),
        mma_v2(parts[3], operand, acc[3]),
    )


@gluon.jit
def _add_values(tile, acc, weights, v_scales, valid, MASKED: gl.constexpr, V_KIND: gl.constexpr):
    """Add the products of a tile of values with the weights [keys, rows] to `acc`.

    With MASKED, float8 values of keys from `valid` on are 0: a page may hold anything past the
    sequence's end, and 0 * NaN is NaN (P5).
    """
    KEYS: gl.constexpr = tile.shape[0]
    WORDS: gl.constexpr = tile.shape[1]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCTS, 2)
    words = tile.permute((1, 0)).load(OPERAND)
    if MASKED:
        if (not _scales_groups(V_KIND)) and (V_KIND != KV_INT8):
            keys = gl.arange(0, KEYS, gl.SliceLayout(0, OPERAND))
            words = gl.where(
                keys[None, :] < valid, words, gl.zeros([WORDS, KEYS], gl.int16, OPERAND)
            )
    parts = value_parts(words, V_KIND)
    if _scales_groups(V_KIND):
        return (
            mma_v2(parts[0], _part_weights(weights, v_scales, 0, MASKED, V_KIND), acc[0]),
            mma_v2(parts[1], _part_weights(weights, v_scales, 1, MASKED, V_KIND), acc[1]),
            mma_v2(parts[2], _part_weights(weights, v_scales, 2, MASKED, V_KIND), acc[2]),
            mma_v2(parts[3], _part_weights(weights, v_scales, 3, MASKED, V_KIND), acc[3]),
        )
    else:
        operand = _part_weights(weights, v_scales, 0, MASKED, V_KIND)
        return mma_v2(parts[0], operand, acc[0]), mma_v2(parts[1], operand, acc[1])


@gluon.jit
def scale_parts(acc, factor):
    """Return the tensors [elements, rows] times factors [rows]."""
    scaled = ()
    for part in gl.static_range(len(acc)):
        scaled = scaled + (acc[part] * factor[None, :],)
    return scaled


@gluon.jit
def _fold(weights):
    """Sum weights [keys, rows] over the keys that a thread holds, [8, rows]."""
    KEYS: gl.constexpr = weights.shape[0]
    ROWS: gl.constexpr = weights.shape[1]
    folded = gl.sum(gl.reshape(weights, [KEYS // 8, 8, ROWS]), 0)
    return gl.convert_layout(folded, _SUMS, assert_trivial=True)


@gluon.jit
def multiply_tile(tiles, stage, scales, rows, sums, tile, seq_len, MASKED: gl.constexpr, config):
    """Multiply by the keys and the values of a tile.

    Args:
        tiles: `WarpTiles`, in whose stage the tile is.
        scales: its `TileScales`.
        rows: `WarpRows`.
        sums: `WarpSums` of the tiles before.
        tile: number of the tile in the request.
        seq_len: keys of the request.
        MASKED: some rows do not see some keys.

    Returns:
        `WarpSums`.
    """
    K_KIND: gl.constexpr = config.K_KIND
    V_KIND: gl.constexpr = config.V_KIND
    CHECK_FIRST: gl.constexpr = config.HAS_LEFT or config.HAS_CHUNK
    v_scales = scales.values
    keys = tiles.keys.index(stage)
    values = tiles.values.index(stage)
    start = tile * config.BLOCK_N
    valid = seq_len - start if MASKED else 0
    scores = tile_scores(tiles, stage, keys, rows.queries, scales.keys, K_KIND)
    if config.HAS_CAP:
        scores = transform_scores(scores * rows.k_factor[None, :], rows.factor, rows.soft_cap, True)
    else:
        scores = scores * (rows.k_factor * rows.factor)[None, :]
    if MASKED:
        scores = mask_columns(scores, rows.first, rows.last, start, CHECK_FIRST)
    bounds = scores
    if v_scales is not None:
        # Weights times scales are at most 1. Scales of hidden keys may be anything.
        bounds = scores + log2(_largest_scale(v_scales, V_KIND))[:, None]
    new_max = gl.maximum(sums.row_max, gl.max(bounds, 0))
    finite_max = new_max
    if MASKED:
        # -inf - -inf is NaN: rows without a visible key are measured from 0.
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = exp2(scores - (finite_max - WEIGHT_EXPONENT)[None, :])
    acc_scale = exp2(sums.row_max - finite_max)
    # Sums over the keys that a thread holds.
    sum_scale = gl.convert_layout(acc_scale, gl.SliceLayout(0, _SUMS), assert_trivial=True)
    row_sum = sums.row_sum * sum_scale[None, :] + _fold(weights)
    acc = scale_parts(sums.acc, acc_scale)
    if V_KIND == KV_NVFP4:
        # Keys that no row sees: before the first row's, and past the end.
        first = gl.min(rows.first, 0) - start if MASKED else 0
        acc = _add_nvfp4(tiles, stage, acc, weights, first, valid, MASKED)
    else:
        acc = _add_values(values, acc, weights, v_scales, valid, MASKED, V_KIND)
    return WarpSums(new_max, row_sum, acc)
