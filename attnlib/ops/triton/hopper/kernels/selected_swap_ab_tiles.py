"""How four warps attend to the tiles of a list with up to 16 query heads.

They load the first quarter of a tile into registers while they wait for the others: half of the
next tile can be gathered during the softmax and the products with the values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from attnlib.ops.triton.hopper.kernels.column_softmax import softmax_columns, store_weights
from attnlib.ops.triton.hopper.kernels.compat import exp2, opaque_zero
from attnlib.ops.triton.hopper.kernels.latent_columns import (
    COLUMNS,
    LATENTS,
    load_values,
    multiply_keys,
    multiply_loaded_values,
    multiply_values,
)
from attnlib.ops.triton.hopper.kernels.selected_swap_ab_memory import BACK, FRONT, QUARTERS
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["attend_to_tiles"]


@gluon.jit
def _multiply_keys(memory, slots, number):
    """Return the scores of a tile, [latents, heads], and its first quarter in registers.

    Args:
        slots: of the quarters of the tile.
        number: of the tile in the CTA.
    """
    queries = memory.queries
    scores = gl.zeros([LATENTS, 16], gl.float32, COLUMNS)
    memory.wait_loaded(FRONT, number)
    # Written by `cp.async`; WGMMA reads shared memory through the async proxy.
    fence_async_shared()
    zero = opaque_zero()
    scores = multiply_keys(scores, memory.ring.index(slots[0]), queries.index(0), False)
    rotary = memory.rotary.index(zero)
    scores = multiply_keys(scores, rotary, memory.query_rotary.index(zero), True)
    values = load_values(memory.ring.index(slots[0]))
    scores = multiply_keys(scores, memory.ring.index(slots[1]), queries.index(1), True)
    memory.wait_loaded(BACK, number)
    fence_async_shared()
    scores = multiply_keys(scores, memory.ring.index(slots[2]), queries.index(2), True)
    scores = multiply_keys(scores, memory.ring.index(slots[3]), queries.index(3), True)
    # The first quarter and the rotary part are free before the last two products complete.
    scores = warpgroup_mma_wait(2, deps=[scores])
    mbarrier.arrive(memory.empty.index(FRONT), count=1)
    return warpgroup_mma_wait(0, deps=[scores]), values


@gluon.jit
def _hide(scores, work, tile, rows, RUNNING: gl.constexpr):
    """Return scores [latents, heads], -inf for keys that are not visible."""
    first_slot = work.list.begin + tile * LATENTS
    if RUNNING and work.has_holes:
        positions = work.list.positions(first_slot + rows, work.visible)
        scores = gl.where((positions >= 0)[:, None], scores, float("-inf"))
    else:
        if first_slot + LATENTS > work.list.end:
            hidden = float("-inf")
            scores = gl.where((first_slot + rows < work.list.end)[:, None], scores, hidden)
    return scores


@gluon.jit
def _multiply_values(acc, memory, slots, values):
    """Add the products of the weights with a tile and release its slots.

    Args:
        acc: accumulators of the quarters.
        slots: of the quarters of the tile.
        values: the first quarter.
    """
    acc0, acc1, acc2, acc3 = acc
    weights = memory.weights.index(opaque_zero())
    # Products that free slots come first.
    acc1 = multiply_values(acc1, memory.ring.index(slots[1]), weights)
    acc2 = multiply_values(acc2, memory.ring.index(slots[2]), weights)
    acc3 = multiply_values(acc3, memory.ring.index(slots[3]), weights)
    acc0 = multiply_loaded_values(acc0, values, weights)
    acc1, acc2, acc3 = warpgroup_mma_wait(1, deps=[acc1, acc2, acc3])
    mbarrier.arrive(memory.empty.index(BACK), count=1)
    acc0 = warpgroup_mma_wait(0, deps=[acc0])
    return acc0, acc1, acc2, acc3


@gluon.jit
def attend_to_tiles(work, memory, logits, done, RUNNING: gl.constexpr, HAS_LSE: gl.constexpr):
    """Attend to all tiles of a list.

    Args:
        done: tiles of the lists before.

    Returns:
        (maxima [16], sums of the weights of each latent of a tile, accumulators of the quarters).
        Without RUNNING the sums are needed for the LSE only, and else 0.
    """
    WIDTH: gl.constexpr = memory.ring.shape[2]
    row_max = gl.full([16], float("-inf"), gl.float32, gl.SliceLayout(0, COLUMNS))
    # Added up at the end.
    sums = gl.zeros([LATENTS, 16], gl.float32, COLUMNS)
    acc = ()
    for _quarter in gl.static_range(QUARTERS):
        acc = acc + (gl.zeros([WIDTH, 16], gl.float32, COLUMNS),)
    rows = gl.arange(0, LATENTS, gl.SliceLayout(1, COLUMNS))
    for tile in range(work.tiles):
        slots = memory.slots(tile)
        scores, values = _multiply_keys(memory, slots, done + tile)
        scores = _hide(logits.transform(scores), work, tile, rows, RUNNING)
        if RUNNING:
            weights, acc_scale, row_max = softmax_columns(
                scores, logits.factor, row_max, None, None, True, logits.HAS_CAP, memory.maxima
            )
            sums = sums * acc_scale[None, :]
            scaled = ()
            for quarter in gl.static_range(QUARTERS):
                scaled = scaled + (acc[quarter] * acc_scale[None, :],)
            acc = scaled
        else:
            if tile == 0:
                weights, _, row_max = softmax_columns(
                    scores, logits.factor, row_max, None, None, True, logits.HAS_CAP, memory.maxima
                )
            else:
                weights = exp2(scores * logits.weight_factor() - row_max[None, :])
        if RUNNING or HAS_LSE:
            sums += weights
        store_weights(memory.weights.index(0), weights, None, True, KV_PLAIN)
        acc = _multiply_values(acc, memory, slots, values)
    return row_max, sums, acc
