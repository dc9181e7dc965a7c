"""Biases that are linear in the key's position, added by the tensor cores.

One more product of depth 16 after Q @ K^T adds the slope of each row times the column. Its operands
are the slope as a sum of three bfloat16 numbers, and the numbers of the columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.compat import exp2
from attnlib.ops.triton.hopper.kernels.softmax import mask_scores

__all__ = ["column_numbers", "slope_operand", "softmax_with_slope"]


@gluon.jit
def column_numbers(BLOCK_N: gl.constexpr):
    """Return the numbers of the BLOCK_N columns in shared memory, as an operand of WGMMA."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, 16], gl.bfloat16)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))[:, None]
    # Integers up to 256 are exact in bfloat16.
    numbers = (gl.zeros([BLOCK_N, 16], gl.int32, LAYOUT) + columns).to(gl.bfloat16)
    tile = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, 16], SHARED)
    tile.store(numbers)
    # WGMMA reads shared memory through the async proxy.
    fence_async_shared()
    return tile


@gluon.jit
def slope_operand(slope):
    """Return float32 slopes [M, 1] as an operand of WGMMA [M, 16], the sum of three bfloat16.

    Its product with `column_numbers` is the slope times the column, with the precision of float32.
    """
    LAYOUT: gl.constexpr = slope.type.layout
    part = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    high = slope.to(gl.bfloat16)
    rest = slope - high.to(gl.float32)
    middle = rest.to(gl.bfloat16)
    low = (rest - middle.to(gl.float32)).to(gl.bfloat16)
    M: gl.constexpr = slope.shape[0]
    zeros = gl.zeros([M, 16], gl.bfloat16, LAYOUT)
    parts = gl.where(part == 2, low, zeros)
    parts = gl.where(part == 1, middle, parts)
    return gl.where(part == 0, high, parts)


@gluon.jit
def softmax_with_slope(
    scores,
    scale,
    factor,
    positions,
    tile_start,
    heads,
    request,
    aux,
    row_first,
    row_last,
    row_max,
    row_sum,
    SCORE: gl.constexpr,
    MASKED: gl.constexpr,
    CHECK_FIRST: gl.constexpr,
):
    """Mask and softmax of a tile whose score function adds a slope times the key's position.

    The slope times the column is part of the products already (`slope_operand`), and SCORE is
    called once per row, for the first key of the tile.

    Returns:
        (weights [M, N], factor [M] of what was accumulated before, new row_max, new row_sum).
    """
    LAYOUT: gl.constexpr = scores.type.layout
    if MASKED:
        scores = mask_scores(scores, row_first, row_last, tile_start, CHECK_FIRST)
    first_key = (tile_start + gl.arange(0, 1, gl.SliceLayout(0, LAYOUT)))[None, :]
    M: gl.constexpr = scores.shape[0]
    zeros = gl.zeros([M, 1], gl.float32, LAYOUT)
    first = SCORE(zeros, positions[:, None], first_key, heads[:, None], request, aux, 1.0 / scale)
    offset = gl.max(first.to(gl.float32), 1) * factor
    new_max = gl.maximum(row_max, gl.max(scores, 1) * factor + offset)
    # -inf - -inf is NaN: rows without a visible key are measured from 0.
    finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = exp2(scores * factor + (offset - finite_max)[:, None])
    acc_scale = exp2(row_max - finite_max)
    return weights, acc_scale, new_max, row_sum * acc_scale + gl.sum(weights, 1)
