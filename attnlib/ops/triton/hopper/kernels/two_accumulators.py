"""P @ V for values of 129 to 192 elements: an accumulator of 128 columns and one of the rest.

Tiles of Gluon have powers of two as sizes, so undivided values of 192 elements take 256 columns of
products and registers. A stage of the ring of values has four parts [keys, 64] instead, of which
TMA writes three. The first two are adjacent, and together have the layout of a tile [keys, 128].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from attnlib.ops.triton.hopper.kernels.compat import reinterpret
from attnlib.ops.triton.hopper.kernels.lanes import rescale
from attnlib.ops.triton.hopper.kernels.prefill_products import unpack_weights

__all__ = [
    "FIRST_COLUMNS",
    "LOADED_PARTS",
    "PART_COLUMNS",
    "SPARE_PARTS",
    "multiply_both",
    "rescale_both",
    "wait_for_both",
    "zeros_of_both",
]

FIRST_COLUMNS = gl.constexpr(128)
"""Columns of the first accumulator."""

PART_COLUMNS = gl.constexpr(64)
"""Elements of a part: 128 bytes, the widest swizzle."""

LOADED_PARTS = gl.constexpr(3)
"""Parts of a stage that TMA writes."""

SPARE_PARTS = gl.constexpr(1)
"""Parts of a stage that are not written: each stage begins at a tile [keys, 128]."""


@gluon.jit
def zeros_of_both(consumer):
    """Return the accumulators [64, 128] and [64, REST_COLUMNS] of a work tile."""
    first = gl.zeros([64, FIRST_COLUMNS], gl.float32, consumer.O_LAYOUT)
    return first, gl.zeros([64, consumer.REST_COLUMNS], gl.float32, consumer.REST_LAYOUT)


@gluon.jit
def multiply_both(consumer, values, stage, weights, acc, DTYPE: gl.constexpr):
    """Issue P @ V + acc with the values of a stage and packed weights: two groups of WGMMA."""
    ROWS: gl.constexpr = values.memory.shape[1]
    PAIRS: gl.constexpr = (LOADED_PARTS + SPARE_PARTS) // 2
    SHAPE: gl.constexpr = [values.STAGES * PAIRS, ROWS, FIRST_COLUMNS]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [ROWS, FIRST_COLUMNS], values.memory.dtype
    )
    FIRST: gl.constexpr = gl.DotOperandLayout(0, consumer.O_LAYOUT, 2)
    REST: gl.constexpr = gl.DotOperandLayout(0, consumer.REST_LAYOUT, 2)
    pairs = reinterpret(values.memory, values.memory.dtype, SHAPE, LAYOUT)
    operand = unpack_weights(weights, DTYPE, FIRST)
    first = warpgroup_mma(operand, pairs.index(stage * PAIRS), acc[0], is_async=True)
    tile = values.memory.index(stage * (LOADED_PARTS + SPARE_PARTS) + 2)
    if consumer.REST_COLUMNS < PART_COLUMNS:
        tile = tile.slice(0, consumer.REST_COLUMNS, 1)
    operand = unpack_weights(weights, DTYPE, REST)
    rest = warpgroup_mma(operand, tile, acc[1], is_async=True)
    return first, rest


@gluon.jit
def wait_for_both(acc):
    """Wait until all products are complete."""
    first, rest = warpgroup_mma_wait(0, deps=[acc[0], acc[1]])
    return first, rest


@gluon.jit
def rescale_both(acc, acc_scale, RARELY: gl.constexpr):
    """Return the accumulators times acc_scale [64], or [64, 4] by thread; RARELY: by a branch."""
    if RARELY:
        first = rescale(acc[0], acc_scale)
        rest = rescale(acc[1], acc_scale)
    else:
        FIRST: gl.constexpr = gl.SliceLayout(1, acc[0].type.layout)
        REST: gl.constexpr = gl.SliceLayout(1, acc[1].type.layout)
        first = acc[0] * gl.convert_layout(acc_scale, FIRST)[:, None]
        rest = acc[1] * gl.convert_layout(acc_scale, REST)[:, None]
    return first, rest
