"""The two products of the Hopper decode, K @ Q^T and V^T @ P^T, over each kind of cache."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from attnlib.ops.triton.hopper.kernels.cache_tiles import load_packed_keys, value_operand
from attnlib.ops.triton.hopper.kernels.compat import rounded_product
from attnlib.ops.triton.hopper.kernels.int4 import (
    float32_scale,
    int4_key_products,
    int4_result,
    int4_value_products,
    int4_value_rows,
    join_halves,
    repeat_columns,
)
from attnlib.ops.triton.hopper.kernels.nvfp4 import nvfp4_value_products, nvfp4_value_rows
from attnlib.ops.triton.hopper.kernels.quantized import float16_keys, float16_values, value_rows
from attnlib.ops.triton.hopper.kernels.token_scales import TileScales
from attnlib.ops.triton.kernels.quant import KV_INT4, KV_NVFP4, KV_PLAIN

__all__ = [
    "finish_scores",
    "finish_values",
    "joined_values",
    "multiply_keys",
    "multiply_values",
    "num_value_products",
    "rescale_values",
    "score_layout",
    "tile_scales",
    "value_lanes",
    "zero_values",
]


@gluon.constexpr_function
def score_layout(rows):
    """Return the layout of [keys, rows] and [elements of a value, rows]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])


@gluon.constexpr_function
def num_value_products(kind):
    """Return the number of products of a tile of values, each with an accumulator."""
    return 2 if kind == KV_INT4 or kind == KV_NVFP4 else 1


@gluon.jit
def tile_scales(worker, stage, LAYOUT: gl.constexpr):
    """Return the `TileScales` of a stage, along the keys of scores in LAYOUT."""
    if worker.scales is not None:
        return worker.scales.load(stage, gl.SliceLayout(1, LAYOUT))
    else:
        return TileScales(None, None)


@gluon.jit
def multiply_keys(worker, stage, zeros, PACKED: gl.constexpr, K_KIND: gl.constexpr):
    """Issue K @ Q^T, [keys, rows]; four products over 4-bit integers."""
    LAYOUT: gl.constexpr = zeros.type.layout
    tiles = worker.keys.memory
    if K_KIND == KV_INT4:
        return int4_key_products(tiles.index(stage), worker.q_tile, zeros)
    elif K_KIND != KV_PLAIN:
        keys = float16_keys(tiles.index(stage), K_KIND, gl.DotOperandLayout(0, LAYOUT, 2))
    elif PACKED:
        keys = load_packed_keys(tiles, worker.keys.empty, stage, LAYOUT)
    else:
        keys = tiles.index(stage)
    if K_KIND != KV_INT4:
        queries = worker.q_tile.permute((1, 0))
        return warpgroup_mma(keys, queries, zeros, use_acc=False, is_async=True)


@gluon.jit
def finish_scores(scores, k_factor, k_scales, LATER: gl.constexpr, K_KIND: gl.constexpr):
    """Wait for K @ Q^T, with LATER groups of products in flight behind it; return it in units of
    the keys and queries."""
    if K_KIND == KV_INT4:
        s0, s1, s2, s3 = warpgroup_mma_wait(
            LATER, deps=[scores[0], scores[1], scores[2], scores[3]]
        )
        finished = rounded_product(s0, float32_scale(k_scales, 0)[:, None])
        finished = gl.fma(s1, float32_scale(k_scales, 1)[:, None], finished)
        finished = gl.fma(s2, float32_scale(k_scales, 2)[:, None], finished)
        finished = gl.fma(s3, float32_scale(k_scales, 3)[:, None], finished)
        finished = finished * k_factor[None, :]
    else:
        finished = warpgroup_mma_wait(LATER, deps=[scores])
        if K_KIND != KV_PLAIN:
            finished = finished * k_factor[None, :]
            if k_scales is not None:
                finished = finished * k_scales[:, None]
    return finished


@gluon.jit
def zero_values(ROWS: gl.constexpr, WIDTH: gl.constexpr, V_KIND: gl.constexpr):
    """Return the accumulator of V^T @ P^T without values."""
    if V_KIND == KV_INT4:
        # Two groups of the values, with the weights of both.
        none = gl.zeros([WIDTH // 2, 2 * ROWS], gl.float32, score_layout(2 * ROWS))
        acc = (none, none)
    elif V_KIND == KV_NVFP4:
        none = gl.zeros([WIDTH // 2, ROWS], gl.float32, score_layout(ROWS))
        acc = (none, none)
    else:
        acc = gl.zeros([WIDTH, ROWS], gl.float32, score_layout(ROWS))
    return acc


@gluon.jit
def multiply_values(
    worker,
    stage,
    acc,
    first,
    valid,
    PACKED: gl.constexpr,
    MASKED: gl.constexpr,
    V_KIND: gl.constexpr,
):
    """Issue V^T @ P^T + acc, [elements of a value, rows].

    With MASKED, float8 values of keys from `valid` on are 0, and 4-bit floats of keys outside
    [first, valid).
    """
    tiles = worker.values.memory
    if V_KIND == KV_INT4:
        return int4_value_products(tiles.index(stage), worker.p_tile, acc[0], acc[1])
    elif V_KIND == KV_NVFP4:
        slot = worker.scales.values_slot(stage)
        return nvfp4_value_products(
            tiles.index(stage), slot, worker.p_tile, acc, first, valid, MASKED
        )
    elif V_KIND != KV_PLAIN:
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
        values = float16_values(tiles.index(stage), valid, MASKED, V_KIND, OPERAND)
    else:
        values = value_operand(tiles, stage, PACKED)
    if V_KIND != KV_INT4 and V_KIND != KV_NVFP4:
        return warpgroup_mma(values, worker.p_tile.permute((1, 0)), acc, is_async=True)


@gluon.jit
def finish_values(acc, V_KIND: gl.constexpr):
    """Wait for V^T @ P^T + acc."""
    if V_KIND == KV_INT4 or V_KIND == KV_NVFP4:
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc[0], acc[1]])
        return acc0, acc1
    else:
        return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def rescale_values(acc, factor, ROWS: gl.constexpr, V_KIND: gl.constexpr):
    """Return the accumulator of V^T @ P^T times factors [ROWS]."""
    if V_KIND == KV_INT4:
        TWICE: gl.constexpr = score_layout(2 * ROWS)
        factor = repeat_columns(factor, TWICE)
        return acc[0] * factor[None, :], acc[1] * factor[None, :]
    elif V_KIND == KV_NVFP4:
        return acc[0] * factor[None, :], acc[1] * factor[None, :]
    else:
        return acc * factor[None, :]


@gluon.jit
def joined_values(acc, LAYOUT: gl.constexpr, V_KIND: gl.constexpr):
    """Return the accumulator as one tensor [elements, rows], in the order of `value_lanes`."""
    if V_KIND == KV_INT4:
        return int4_result(acc[0], acc[1], LAYOUT)
    elif V_KIND == KV_NVFP4:
        return join_halves(acc[0], acc[1], LAYOUT)
    else:
        return acc


@gluon.jit
def value_lanes(WIDTH: gl.constexpr, LAYOUT: gl.constexpr, V_KIND: gl.constexpr):
    """Return the elements of a value in the order of `joined_values`."""
    if V_KIND == KV_INT4:
        return int4_value_rows(WIDTH, gl.SliceLayout(1, LAYOUT))
    elif V_KIND == KV_NVFP4:
        return nvfp4_value_rows(WIDTH, gl.SliceLayout(1, LAYOUT))
    elif V_KIND != KV_PLAIN:
        return value_rows(WIDTH, gl.SliceLayout(1, LAYOUT))
    else:
        return gl.arange(0, WIDTH, gl.SliceLayout(1, LAYOUT))
