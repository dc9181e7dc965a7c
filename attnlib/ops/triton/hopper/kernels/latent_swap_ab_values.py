"""The product of the weights of a tile with its latents in quarters, [elements, rows].

Over 8-bit caches the latents are converted as for the scores (`latent_swap_ab_scores`). With
GROUP_SCALES, the weights of a quarter are multiplied by its scales.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from attnlib.ops.triton.hopper.kernels.column_softmax import store_weights
from attnlib.ops.triton.hopper.kernels.compat import opaque_zero, partition_barrier
from attnlib.ops.triton.hopper.kernels.decode_worker import release_by_thread
from attnlib.ops.triton.hopper.kernels.latent_bytes import (
    HALVES,
    convert_values,
    load_value_halves,
)
from attnlib.ops.triton.hopper.kernels.latent_columns import (
    LATENTS,
    multiply_loaded_values,
    multiply_values,
)
from attnlib.ops.triton.hopper.kernels.latent_group_scales import quarter_scale
from attnlib.ops.triton.hopper.kernels.latent_swap_ab_memory import QUARTERS
from attnlib.ops.triton.hopper.kernels.quantized import WEIGHT_SCALE
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["add_values", "clear_latents", "share_weights"]


@gluon.jit
def clear_latents(tile, valid):
    """Set the latents of a quarter from `valid` on to 0: a page may hold anything past the end of
    the sequence, and 0 * NaN is NaN (P5). A barrier must follow."""
    LANES: gl.constexpr = min(32, tile.shape[1] // 8)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    latents = gl.arange(0, LATENTS, gl.SliceLayout(1, layout))
    words = tile.load(layout)
    tile.store(gl.where(latents[:, None] < valid, words, gl.zeros_like(words)))


@gluon.jit
def share_weights(memory, weights, step, CONFIG: gl.constexpr):
    """Store the weights [latents, rows] of tile number `step` for the products with its values."""
    if CONFIG.GROUP_SCALES:
        LAYOUT: gl.constexpr = weights.type.layout
        weights = weights * WEIGHT_SCALE
        for quarter in gl.static_range(QUARTERS):
            scaled = weights * quarter_scale(memory, step, quarter, LAYOUT)[:, None]
            # The scales of hidden latents may be NaN.
            scaled = gl.where(weights == 0.0, 0.0, scaled)
            target = memory.weights[quarter].index(0)
            target.store(gl.permute(scaled, (1, 0)).to(target.dtype))
        # WGMMA reads shared memory through the async proxy: fence, then wait for all warps.
        fence_async_shared()
        partition_barrier()
    else:
        store_weights(memory.weights[0].index(0), weights, None, True, CONFIG.KV_KIND)


@gluon.jit
def _add_plain_values(acc, stages, weights):
    issued = ()
    for quarter in gl.static_range(QUARTERS):
        issued = issued + (multiply_values(acc[quarter], stages[quarter].tile(), weights),)
    complete = ()
    for quarter in gl.static_range(QUARTERS):
        result = warpgroup_mma_wait(QUARTERS - 1 - quarter, deps=[issued[quarter]])
        stages[quarter].release()
        complete = complete + (result,)
    return complete


@gluon.jit
def _add_bytes(acc, stages, memory, CONFIG: gl.constexpr):
    """`add_values` of an 8-bit cache: accumulators of halves of quarters."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
    complete = ()
    pending = acc[0]
    for quarter in gl.static_range(QUARTERS):
        halves = load_value_halves(stages[quarter].tile())
        weights = memory.weights[quarter if CONFIG.GROUP_SCALES else 0].index(opaque_zero())
        for half in gl.static_range(HALVES):
            values = convert_values(halves[half], CONFIG.KV_KIND, OPERAND)
            part = acc[HALVES * quarter + half]
            issued = multiply_loaded_values(part, values, weights)
            if half + 1 == HALVES:
                # The thread's values are in registers.
                release_by_thread(memory.quarters.empty, stages[quarter].index)
            if quarter + half > 0:
                complete = complete + (warpgroup_mma_wait(1, deps=[pending]),)
            pending = issued
    return complete + (warpgroup_mma_wait(0, deps=[pending]),)


@gluon.jit
def add_values(acc, stages, memory, CONFIG: gl.constexpr):
    """Add the products of the weights with a tile and release its quarters.

    Args:
        acc: accumulators [elements, rows] of the quarters, or of their halves over an 8-bit cache.
        stages: of the quarters of the tile.
    """
    if CONFIG.KV_KIND == KV_PLAIN:
        return _add_plain_values(acc, stages, memory.weights[0].index(opaque_zero()))
    else:
        return _add_bytes(acc, stages, memory, CONFIG)
