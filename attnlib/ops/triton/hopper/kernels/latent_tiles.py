"""Attention of 64 query rows over gathered latents: the partitions of a CTA (P10, M12).

A CTA has two consumer warpgroups and one warpgroup that gathers latents. A latent is loaded once
and used as key and as value. Latents are processed in pairs of tiles A and B of 64:

- Consumer 0 computes the scores and weights of tile A, consumer 1 those of tile B.
- Each consumer accumulates one half of the value elements, 64 rows of 256, over both tiles. It
  multiplies its own weights from registers and the other consumer's from shared memory.
- The running maximum goes from tile to tile: A of this pair, B of this pair, A of the next pair.
  While consumer 1 computes its softmax, its product with the weights of tile A runs.

The division of the values between two warpgroups that exchange their weights is that of FlashMLA's
"seesaw" schedule (DeepSeek, FlashMLA, 2025); the order of the products is different here.

Barriers, by tile and part (`barrier_of`: the rotary part, the lower and the upper half of the value
elements):

- q_full, k_full: the copies of a part are complete. One arrival per copying thread, or of TMA.
- k_empty: one arrival, of the consumer that uses a part last: the owner of the tile after its
  scores for the rotary part, and for a half the consumer that multiplies by it.
- p_ready[tile]: the weights of a tile, their maximum and the factor of earlier results are in
  shared memory. One arrival, of the consumer that computed them.
- summed[consumer]: the row sums of a consumer are in shared memory.

There is one buffer for the weights of both tiles: each consumer writes to it after its product with
the weights of the other one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnlib.ops.triton.hopper.kernels.compat import (
    copy_to_shared,
    exp2,
    partition_barrier,
)
from attnlib.ops.triton.hopper.kernels.softmax import transform_scores

__all__ = [
    "HIGH", "LOW", "PARTS", "ROTARY_PART", "TILE", "attend_first", "attend_second", "gather_part",
    "store_partial", "store_rows", "total_sum",
]  # fmt: skip

TILE: gl.constexpr = gl.constexpr(64)
"""Latents of a tile."""
PARTS: gl.constexpr = gl.constexpr(3)
ROTARY_PART: gl.constexpr = gl.constexpr(0)
LOW: gl.constexpr = gl.constexpr(1)
HIGH: gl.constexpr = gl.constexpr(2)
"""Parts of a tile, in the order in which they are loaded. The barriers of tile t begin at
PARTS * t."""


@gluon.jit
def gather_part(base, offsets, exists, target, START: gl.constexpr):
    """Issue the copies of elements START and following of 64 rows; rows that do not exist become 0.

    Args:
        base: pointer to the elements.
        offsets: [64] element offsets of the rows, multiples of 8.
        exists: [64].
        target: [64, WIDTH] in shared memory.
    """
    LAYOUT: gl.constexpr = offsets.type.layout.parent
    # The shifts tell the compiler about the alignment, which the launcher checks.
    starts = base + ((offsets >> 3) << 3)
    lanes = START + gl.arange(0, target.shape[1], gl.SliceLayout(0, LAYOUT))
    copy_to_shared(
        target, starts[:, None] + lanes[None, :], mask=exists[:, None] & (lanes >= 0)[None, :]
    )


@gluon.jit
def _scores(
    q_low, q_high, q_rotary, low, high, rotary, k_full, parity, FIRST: gl.constexpr,
    COPIED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the products of the queries with one tile of latents, complete.

    Args:
        k_full: barriers of the parts, from FIRST on, which are awaited one by one.
        COPIED: the parts were written by `cp.async`, and not by TMA.
    """
    scores = gl.zeros([64, TILE], gl.float32, LAYOUT)
    mbarrier.wait(k_full.index(FIRST + ROTARY_PART), parity)
    if COPIED:
        # WGMMA reads shared memory through the async proxy.
        fence_async_shared()
    scores = warpgroup_mma(q_rotary, rotary.permute((1, 0)), scores, use_acc=False, is_async=True)
    mbarrier.wait(k_full.index(FIRST + LOW), parity)
    if COPIED:
        fence_async_shared()
    scores = warpgroup_mma(q_low, low.permute((1, 0)), scores, is_async=True)
    mbarrier.wait(k_full.index(FIRST + HIGH), parity)
    if COPIED:
        fence_async_shared()
    scores = warpgroup_mma(q_high, high.permute((1, 0)), scores, is_async=True)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def _weigh(scores, keys, low, high, row_max, factor, soft_cap, HAS_CAP: gl.constexpr):
    """Return (weights, factor of earlier results, new row maximum)."""
    scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
    visible = (keys[None, :] >= low) & (keys[None, :] < high)
    scores = gl.where(visible, scores, float("-inf"))
    weight_factor = factor
    if HAS_CAP:
        weight_factor = 1.0
    new_max = gl.maximum(row_max, gl.max(scores, 1) * weight_factor)
    # -inf - -inf is NaN: rows without a visible key are measured from 0.
    finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = exp2(scores * weight_factor - finite_max[:, None])
    return weights, exp2(row_max - finite_max), new_max


@gluon.jit
def _publish(p_tile, maxima, scales, p_ready, weights, row_max, acc_scale):
    """Hand weights, maximum and factor over to the other consumer."""
    p_tile.store(weights)
    maxima.store(row_max)
    scales.store(acc_scale)
    # WGMMA reads shared memory through the async proxy: fence, then wait for all warps.
    fence_async_shared()
    partition_barrier()
    mbarrier.arrive(p_ready, count=1)


@gluon.jit
def attend_first(
    acc, row_max, row_sum, keys, low, high, parity, q_low, q_high, q_rotary, k_low, k_high,
    k_rotary, p_tile, maxima, scales, k_full, k_empty, p_ready, factor, soft_cap,
    HAS_CAP: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """Consumer 0 over one pair of tiles.

    Args:
        keys: [64], positions of the keys of tile A; visible are those in [low, high), which
            broadcast with the scores.
        parity: of the number of pairs before this one.
        COPIED: tiles were written by `cp.async`, and not by TMA.

    Returns:
        (acc, row_max, row_sum); `row_sum` sums the weights of the tiles A.
    """
    SCORES: gl.constexpr = row_max.type.layout.parent
    VALUES: gl.constexpr = acc.type.layout
    DTYPE: gl.constexpr = k_low.dtype
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, VALUES)
    scores = _scores(
        q_low, q_high, q_rotary, k_low.index(0), k_high.index(0), k_rotary.index(0), k_full, parity,
        0, COPIED, SCORES)  # fmt: skip
    mbarrier.arrive(k_empty.index(ROTARY_PART), count=1)
    weights, scale_a, row_max = _weigh(scores, keys, low, high, row_max, factor, soft_cap, HAS_CAP)
    row_sum = row_sum * scale_a + gl.sum(weights, 1)
    operand = weights.to(DTYPE)
    _publish(p_tile, maxima.index(0), scales.index(0), p_ready.index(0), operand, row_max, scale_a)
    acc = acc * gl.convert_layout(scale_a, OUT_ROW)[:, None]
    acc = warpgroup_mma(
        gl.convert_layout(operand, gl.DotOperandLayout(0, VALUES, 2)), k_low.index(0), acc,
        is_async=True,
    )  # fmt: skip
    mbarrier.wait(p_ready.index(1), parity)
    if COPIED:
        fence_async_shared()
    scale_b = scales.index(1).load(gl.SliceLayout(1, SCORES))
    row_max = maxima.index(1).load(gl.SliceLayout(1, SCORES))
    row_sum = row_sum * scale_b
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(k_empty.index(LOW), count=1)
    acc = acc * gl.convert_layout(scale_b, OUT_ROW)[:, None]
    acc = warpgroup_mma(p_tile, k_low.index(1), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(k_empty.index(PARTS + LOW), count=1)
    return acc, row_max, row_sum


@gluon.jit
def attend_second(
    acc, row_max, row_sum, keys, low, high, parity, q_low, q_high, q_rotary, k_low, k_high,
    k_rotary, p_tile, maxima, scales, k_full, k_empty, p_ready, factor, soft_cap,
    HAS_CAP: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """Consumer 1 over one pair of tiles. Arguments as in `attend_first`, for tile B.

    Returns:
        (acc, row_max, row_sum); `row_sum` sums the weights of the tiles B.
    """
    SCORES: gl.constexpr = row_max.type.layout.parent
    VALUES: gl.constexpr = acc.type.layout
    DTYPE: gl.constexpr = k_low.dtype
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, VALUES)
    scores = _scores(
        q_low, q_high, q_rotary, k_low.index(1), k_high.index(1), k_rotary.index(1), k_full, parity,
        PARTS, COPIED, SCORES)  # fmt: skip
    mbarrier.arrive(k_empty.index(PARTS + ROTARY_PART), count=1)
    mbarrier.wait(p_ready.index(0), parity)
    if COPIED:
        fence_async_shared()
    scale_a = scales.index(0).load(gl.SliceLayout(1, SCORES))
    row_max = maxima.index(0).load(gl.SliceLayout(1, SCORES))
    acc = acc * gl.convert_layout(scale_a, OUT_ROW)[:, None]
    acc = warpgroup_mma(p_tile, k_high.index(0), acc, is_async=True)
    # Runs while the product above does.
    weights, scale_b, row_max = _weigh(scores, keys, low, high, row_max, factor, soft_cap, HAS_CAP)
    row_sum = row_sum * (scale_a * scale_b) + gl.sum(weights, 1)
    operand = weights.to(DTYPE)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(k_empty.index(HIGH), count=1)
    # All warps have read the weights of tile A.
    partition_barrier()
    _publish(p_tile, maxima.index(1), scales.index(1), p_ready.index(1), operand, row_max, scale_b)
    acc = acc * gl.convert_layout(scale_b, OUT_ROW)[:, None]
    acc = warpgroup_mma(
        gl.convert_layout(operand, gl.DotOperandLayout(0, VALUES, 2)), k_high.index(1), acc,
        is_async=True,
    )  # fmt: skip
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(k_empty.index(PARTS + HIGH), count=1)
    return acc, row_max, row_sum


@gluon.jit
def total_sum(row_sum, sums, summed, parity, CONSUMER: gl.constexpr):
    """Add the row sums of both consumers."""
    sums.index(CONSUMER).store(row_sum)
    partition_barrier()
    mbarrier.arrive(summed.index(CONSUMER), count=1)
    mbarrier.wait(summed.index(1 - CONSUMER), parity)
    return row_sum + sums.index(1 - CONSUMER).load(row_sum.type.layout)


@gluon.jit
def store_rows(out, result, offset, stride, staging, ROWS: gl.constexpr, CONSUMER: gl.constexpr):
    """Write one half of the results to the output, through `staging` [64, HALF] in shared memory.

    Args:
        offset: element offset of the first row in `out`.
        stride: elements from row to row.
        ROWS: rows that exist.
    """
    HALF: gl.constexpr = result.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    partition_barrier()
    staging.store(result.to(staging.dtype))
    partition_barrier()
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    lanes = CONSUMER * HALF + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    # The launcher checks 16-byte alignment; the shifts tell the compiler.
    offsets = ((offset + row.to(gl.int64) * stride) >> 3) << 3
    gl.store(
        out + offsets[:, None] + lanes[None, :], staging.load(LAYOUT),
        mask=(row < ROWS)[:, None] & (lanes >= 0)[None, :],
    )  # fmt: skip


@gluon.jit
def store_partial(
    partials, result, place, stride, ROWS: gl.constexpr, DV: gl.constexpr, CONSUMER: gl.constexpr
):
    """Write one half of a partial result in float32.

    Args:
        partials: [places, DV].
        place: index of the first row.
        stride: places from row to row.
        ROWS: rows that exist.
    """
    HALF: gl.constexpr = result.shape[1]
    LAYOUT: gl.constexpr = result.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    lanes = CONSUMER * HALF + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    places = (place + row.to(gl.int64) * stride) * DV
    gl.store(
        partials + places[:, None] + lanes[None, :], result,
        mask=(row < ROWS)[:, None] & (lanes >= 0)[None, :],
    )  # fmt: skip
