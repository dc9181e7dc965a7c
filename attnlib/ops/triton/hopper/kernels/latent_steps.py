"""The steps of two consumer warpgroups over tiles of latents, 64 query rows each (P10, M12).

- Consumer 0 computes the scores and weights of tiles A, consumer 1 those of tiles B.
- Each consumer accumulates one half of the value elements, 64 rows of 256, over all tiles. It
  multiplies its own weights from registers and the other consumer's from shared memory.
- The running maximum goes from tile to tile.
- A step of a consumer issues the scores of its own tile and the product with the weights of the
  tile before, which is the other consumer's, and computes its softmax while they run. So the
  consumers are half a step apart, and one tile is loaded while the other one is used.

The division of the values between two warpgroups that exchange their weights is that of FlashMLA's
"seesaw" schedule (DeepSeek, FlashMLA, 2025); the order of the products is different here.

Addresses of tiles contain a zero that the compiler does not see (`opaque_zero`). It would compute
the descriptors of all products before the loop, for which there are not enough registers: they went
to local memory and back before each product.

Functions take the visible keys of a tile as a value whose method `hide` sets the scores of other
keys to -inf (`latent_splits.TileKeys`, `selected_lists.ListedKeys`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnlib.ops.triton.hopper.kernels.compat import exp2, opaque_zero, partition_barrier
from attnlib.ops.triton.hopper.kernels.lanes import rescale
from attnlib.ops.triton.hopper.kernels.latent_tiles import HIGH, LOW, ROTARY_PART, TILE, half_load

__all__ = ["attend_both", "attend_other", "attend_own"]

_RESCALE_THRESHOLD = gl.constexpr(8)
"""How far a base-2 logit may exceed the running maximum before that follows it, so that
accumulators are rarely rescaled (FlashAttention-4). Weights are at most 2 to this power."""
_HALVED_EXPONENT = gl.constexpr(6)
"""The base-2 logarithm of the largest weight of a row's first tile, in float16 (`HALVED`)."""


@gluon.jit
def _issue_part(scores, tiles, parity, PART: gl.constexpr, CONSUMER: gl.constexpr):
    """Issue the product of the queries with part PART of the consumer's tile once it is loaded."""
    queries = tiles.queries.part(PART)
    latents = tiles.latents.part(PART)
    if tiles.GATHERED or PART == ROTARY_PART:
        tiles.wait_loaded(PART, parity, CONSUMER)
        if tiles.GATHERED:
            # Written by `cp.async`; WGMMA reads shared memory through the async proxy.
            fence_async_shared()
        zero = opaque_zero()
        scores = warpgroup_mma(
            queries.index(zero),
            latents.index(CONSUMER + zero).permute((1, 0)),
            scores,
            use_acc=PART != ROTARY_PART,
            is_async=True,
        )
    else:
        QUARTER: gl.constexpr = latents.shape[2] // 2
        for quarter in gl.static_range(2):
            tiles.wait_loaded(half_load(PART, quarter), parity, CONSUMER)
            zero = opaque_zero()
            scores = warpgroup_mma(
                queries.index(zero).slice(quarter * QUARTER, QUARTER, 1),
                latents.index(CONSUMER + zero).slice(quarter * QUARTER, QUARTER, 1).permute((1, 0)),
                scores,
                is_async=True,
            )
    return scores


@gluon.jit
def _weigh(scores, keys, row_max, logits, HALVED: gl.constexpr):
    """Return (weights, factor of earlier results, new row maximum)."""
    scores = logits.transform(scores)
    scores = keys.hide(scores)
    weight_factor = logits.weight_factor()
    tile_max = gl.max(scores, 1) * weight_factor
    if HALVED:
        # Weights are at most 2 to the threshold, and small ones are normal numbers of float16.
        new_max = gl.where(
            tile_max > row_max + _RESCALE_THRESHOLD, tile_max - _HALVED_EXPONENT, row_max
        )
    else:
        new_max = gl.where(tile_max > row_max + _RESCALE_THRESHOLD, tile_max, row_max)
    # -inf - -inf is NaN: rows without a visible key are measured from 0.
    finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = exp2(scores * weight_factor - finite_max[:, None])
    return weights, exp2(row_max - finite_max), new_max


@gluon.jit
def _publish(tiles, weights, row_max, acc_scale, CONSUMER: gl.constexpr):
    """Hand weights, maximum and factor over to the other consumer."""
    maxima = tiles.maxima.index(CONSUMER)
    scales = tiles.scales.index(CONSUMER)
    weighed = tiles.weighed.index(CONSUMER)
    tiles.weights.store(weights)
    maxima.store(row_max)
    scales.store(acc_scale)
    # WGMMA reads shared memory through the async proxy: fence, then wait for all warps.
    fence_async_shared()
    partition_barrier()
    mbarrier.arrive(weighed, count=1)


@gluon.jit
def _attend_to_tile(
    scores,
    acc,
    row_max,
    row_sum,
    scale_before,
    keys,
    tiles,
    logits,
    CONSUMER: gl.constexpr,
    FIRST: gl.constexpr,
):
    """Turn the scores of the own tile into weights, publish them and multiply by the own half.

    Args:
        scale_before: factor of `row_sum` from the tile before.
        FIRST: `acc` is 0. ptxas 13.4 would wait for the scores before the branch of `rescale`.
    """
    VALUES: gl.constexpr = acc.type.layout
    half = tiles.latents.part(LOW + CONSUMER)
    weights, scale, row_max = _weigh(scores, keys, row_max, logits, tiles.HALVED)
    row_sum = row_sum * (scale_before * scale) + gl.sum(weights, 1)
    operand = weights.to(half.dtype)
    # All warps have read the weights of the other tile.
    partition_barrier()
    _publish(tiles, operand, row_max, scale, CONSUMER)
    if not FIRST:
        acc = rescale(acc, scale)
    operand = gl.convert_layout(operand, gl.DotOperandLayout(0, VALUES, 2))
    acc = warpgroup_mma(operand, half.index(CONSUMER), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    tiles.release(LOW + CONSUMER, CONSUMER)
    return acc, row_max, row_sum


@gluon.jit
def attend_own(acc, row_max, row_sum, keys, parity, tiles, logits, CONSUMER: gl.constexpr):
    """Attend to the first tile of the consumer, without a tile before it.

    Args:
        keys: the visible keys of the tile.
        parity: of the number of tiles of the consumer before this one.

    Returns:
        (acc, row_max, row_sum); `row_sum` sums the weights of the consumer's tiles.
    """
    SCORES: gl.constexpr = row_max.type.layout.parent
    scores = gl.zeros([64, TILE], gl.float32, SCORES)
    if tiles.ROTARY > 0:
        scores = _issue_part(scores, tiles, parity, ROTARY_PART, CONSUMER)
    scores = _issue_part(scores, tiles, parity, LOW, CONSUMER)
    scores = _issue_part(scores, tiles, parity, HIGH, CONSUMER)
    scores = warpgroup_mma_wait(0, deps=[scores])
    if tiles.ROTARY > 0:
        tiles.release(ROTARY_PART, CONSUMER)
    return _attend_to_tile(
        scores, acc, row_max, row_sum, 1.0, keys, tiles, logits, CONSUMER, FIRST=True
    )


@gluon.jit
def attend_other(acc, row_max, row_sum, parity, tiles, CONSUMER: gl.constexpr):
    """Multiply the weights of the other consumer's last tile, after which there is no own tile.

    Args:
        parity: of the number of tiles of the other consumer before that one.

    Returns:
        (acc, row_max, row_sum).
    """
    ROW: gl.constexpr = row_max.type.layout
    OTHER: gl.constexpr = 1 - CONSUMER
    mbarrier.wait(tiles.weighed.index(OTHER), parity)
    if tiles.GATHERED:
        fence_async_shared()
    scale = tiles.scales.index(OTHER).load(ROW)
    row_max = tiles.maxima.index(OTHER).load(ROW)
    row_sum = row_sum * scale
    acc = rescale(acc, scale)
    half = tiles.latents.part(LOW + CONSUMER)
    acc = warpgroup_mma(tiles.weights, half.index(OTHER), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    tiles.release(LOW + CONSUMER, OTHER)
    return acc, row_max, row_sum


@gluon.jit
def attend_both(
    acc, row_max, row_sum, keys, parity, other_parity, tiles, logits, CONSUMER: gl.constexpr
):
    """Multiply the weights of the tile before, the other consumer's, and attend to the own tile.

    All scores are issued before the product with the weights of the tile before. The tensor cores
    then work while the other consumer computes its softmax.

    Args:
        keys: the visible keys of the own tile.
        parity: of the number of tiles of the consumer before its own one.
        other_parity: of the number of tiles of the other consumer before that one.

    Returns:
        (acc, row_max, row_sum).
    """
    SCORES: gl.constexpr = row_max.type.layout.parent
    ROW: gl.constexpr = row_max.type.layout
    OTHER: gl.constexpr = 1 - CONSUMER
    half = tiles.latents.part(LOW + CONSUMER)
    scores = gl.zeros([64, TILE], gl.float32, SCORES)
    if tiles.ROTARY > 0:
        scores = _issue_part(scores, tiles, parity, ROTARY_PART, CONSUMER)
    scores = _issue_part(scores, tiles, parity, LOW + CONSUMER, CONSUMER)
    scores = _issue_part(scores, tiles, parity, LOW + OTHER, CONSUMER)
    mbarrier.wait(tiles.weighed.index(OTHER), other_parity)
    if tiles.GATHERED:
        fence_async_shared()
    scale = tiles.scales.index(OTHER).load(ROW)
    row_max = tiles.maxima.index(OTHER).load(ROW)
    # Complete since the step before: only the products of the scores, one for each load, are
    # pending. ptxas 12.8 does not see that and would wait for them.
    PENDING: gl.constexpr = (2 if tiles.GATHERED else 4) + (tiles.ROTARY > 0)
    acc = warpgroup_mma_wait(PENDING, deps=[acc])
    acc = rescale(acc, scale)
    acc = warpgroup_mma(tiles.weights, half.index(OTHER), acc, is_async=True)
    # Groups complete in the order in which they were issued.
    scores = warpgroup_mma_wait(1, deps=[scores])
    if tiles.ROTARY > 0:
        tiles.release(ROTARY_PART, CONSUMER)
    acc = warpgroup_mma_wait(0, deps=[acc])
    tiles.release(LOW + CONSUMER, OTHER)
    return _attend_to_tile(
        scores, acc, row_max, row_sum, scale, keys, tiles, logits, CONSUMER, FIRST=False
    )
