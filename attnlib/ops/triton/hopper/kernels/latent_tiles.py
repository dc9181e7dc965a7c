"""Attention of 64 query rows over gathered latents: the partitions of a CTA (P10, M12).

A CTA has two consumer warpgroups and one or more loader warps. A latent is loaded once and used as
key and as value. Latents are processed in tiles A, B, A, B, ... of 64:

- Consumer 0 computes the scores and weights of tiles A, consumer 1 those of tiles B.
- Each consumer accumulates one half of the value elements, 64 rows of 256, over all tiles. It
  multiplies its own weights from registers and the other consumer's from shared memory.
- The running maximum goes from tile to tile.
- A step of a consumer issues the scores of its own tile and the product with the weights of the
  tile before, which is the other consumer's, and computes its softmax while they run. So the
  consumers are half a step apart, and one tile is loaded while the other one is used.

The division of the values between two warpgroups that exchange their weights is that of FlashMLA's
"seesaw" schedule (DeepSeek, FlashMLA, 2025); the order of the products is different here.

Barriers, by tile and part (the rotary part, the lower and the upper half of the value elements):

- k_full: the copies of a part are complete. One arrival per copying thread, or of TMA.
- k_empty: one arrival, of the consumer that uses a part last: the owner of the tile after its
  scores for the rotary part, and for a half the consumer that multiplies by it.
- p_ready[tile]: the weights of a tile, their maximum and the factor of earlier results are in
  shared memory. One arrival, of the consumer that computed them.
- summed[consumer]: the row sums of a consumer are in shared memory.

There is one buffer for the weights of both tiles: each consumer writes to it after its product with
the weights of the other one.

Addresses of tiles contain a zero that the compiler does not see (`opaque_zero`). It would compute
the descriptors of all products before the loop, for which there are not enough registers: they went
to local memory and back before each product.
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
    opaque_zero,
    partition_barrier,
)
from attnlib.ops.triton.hopper.kernels.softmax import rescale, transform_scores

__all__ = [
    "HIGH", "LOADS", "LOW", "PARTS", "ROTARY_PART", "TILE", "attend_both", "attend_other",
    "attend_own", "entry_positions", "gather_part", "half_load", "listed_positions", "load_entries",
    "store_partial", "store_rows", "total_sum",
]  # fmt: skip

TILE: gl.constexpr = gl.constexpr(64)
"""Latents of a tile."""
PARTS: gl.constexpr = gl.constexpr(3)
ROTARY_PART: gl.constexpr = gl.constexpr(0)
LOW: gl.constexpr = gl.constexpr(1)
HIGH: gl.constexpr = gl.constexpr(2)
"""Parts of a tile. The barriers of tile t begin at PARTS * t. The rotary part is loaded first, then
the half that the owner of the tile accumulates: it releases that one before the other consumer
releases the other one."""
LOADS: gl.constexpr = gl.constexpr(5)
"""Loads of a tile by TMA: the rotary part, then the quarters of the value elements (`half_load`).
The scores of a quarter are issued once it is loaded. The barriers of tile t begin at LOADS * t."""

_RESCALE_THRESHOLD = gl.constexpr(8)
"""How far a base-2 logit may exceed the running maximum before that follows it, so that
accumulators are rarely rescaled (FlashAttention-4). Weights are at most 2 to this power."""


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


@gluon.constexpr_function
def half_load(part, quarter):
    """Return the number of the load of quarter 0 or 1 of half LOW or HIGH."""
    return 2 * part - 1 + quarter


@gluon.jit
def _issue_part(
    scores, queries, latents, k_full, parity, PART: gl.constexpr, CONSUMER: gl.constexpr,
    SELECT: gl.constexpr,
):  # fmt: skip
    """Issue the product of the queries with part PART of the consumer's tile once it is loaded."""
    if SELECT > 0 or PART == ROTARY_PART:
        loads: gl.constexpr = PARTS if SELECT > 0 else LOADS
        mbarrier.wait(k_full.index(CONSUMER * loads + PART), parity)
        if SELECT > 0:
            # Written by `cp.async`; WGMMA reads shared memory through the async proxy.
            fence_async_shared()
        zero = opaque_zero()
        scores = warpgroup_mma(
            queries.index(zero), latents.index(CONSUMER + zero).permute((1, 0)), scores,
            use_acc=PART != ROTARY_PART, is_async=True,
        )  # fmt: skip
    else:
        QUARTER: gl.constexpr = latents.shape[2] // 2
        for quarter in gl.static_range(2):
            mbarrier.wait(k_full.index(CONSUMER * LOADS + half_load(PART, quarter)), parity)
            zero = opaque_zero()
            scores = warpgroup_mma(
                queries.index(zero).slice(quarter * QUARTER, QUARTER, 1),
                latents.index(CONSUMER + zero).slice(quarter * QUARTER, QUARTER, 1).permute((1, 0)),
                scores, is_async=True,
            )  # fmt: skip
    return scores


@gluon.jit
def _issue_half(
    scores, q_low, q_high, k_low, k_high, k_full, parity, HALF: gl.constexpr,
    CONSUMER: gl.constexpr, SELECT: gl.constexpr,
):  # fmt: skip
    """`_issue_part` for half HALF of the value elements."""
    if HALF == 0:
        return _issue_part(scores, q_low, k_low, k_full, parity, LOW, CONSUMER, SELECT)
    else:
        return _issue_part(scores, q_high, k_high, k_full, parity, HIGH, CONSUMER, SELECT)


@gluon.jit
def load_entries(entries, slots, end, SELECT: gl.constexpr):
    """Return the entries of a list that belong to key slots; -1 from slot `end` on."""
    return gl.load(entries + slots // SELECT, mask=slots < end, other=-1)


@gluon.jit
def entry_positions(entry, slots, first, last, SELECT: gl.constexpr):
    """Return the positions of key slots; -1 where an entry selects nothing in [first, last)."""
    if SELECT == 1:
        position = entry
        exists = entry >= 0
    else:
        # Compared before a product that could overflow.
        exists = (entry >= 0) & (entry < (last + SELECT - 1) // SELECT)
        position = gl.where(exists, entry, 0) * SELECT + slots % SELECT
    return gl.where(exists & (position >= first) & (position < last), position, -1)


@gluon.jit
def listed_positions(entries, slots, end, first, last, SELECT: gl.constexpr):
    """`entry_positions` of entries that are loaded here."""
    entry = load_entries(entries, slots, end, SELECT)
    return entry_positions(entry, slots, first, last, SELECT)


@gluon.jit
def _mask(scores, keys, SELECT: gl.constexpr):
    """Return the scores, -inf for keys that are not visible. `keys` as in `attend_own`."""
    if SELECT == 0:
        positions, first, last = keys
        scores = gl.where(
            (positions[None, :] >= first) & (positions[None, :] < last), scores, float("-inf")
        )
    else:
        entries, first_slot, slots, end, first, last, has_holes = keys
        if has_holes:
            positions = listed_positions(entries, slots, end, first, last, SELECT)
            scores = gl.where((positions >= 0)[None, :], scores, float("-inf"))
        else:
            if first_slot + TILE > end:
                scores = gl.where((slots < end)[None, :], scores, float("-inf"))
    return scores


@gluon.jit
def _weigh(
    scores, keys, row_max, factor, soft_cap, HAS_CAP: gl.constexpr, SELECT: gl.constexpr
):  # fmt: skip
    """Return (weights, factor of earlier results, new row maximum)."""
    scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
    scores = _mask(scores, keys, SELECT)
    weight_factor = factor
    if HAS_CAP:
        weight_factor = 1.0
    tile_max = gl.max(scores, 1) * weight_factor
    new_max = gl.where(tile_max > row_max + _RESCALE_THRESHOLD, tile_max, row_max)
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
def _attend_to_tile(
    scores, acc, row_max, row_sum, scale_before, keys, half, p_tile, maxima, scales, p_ready,
    k_empty, factor, soft_cap, CONSUMER: gl.constexpr, HAS_CAP: gl.constexpr, SELECT: gl.constexpr,
    FIRST: gl.constexpr,
):  # fmt: skip
    """Turn the scores of the own tile into weights, publish them and multiply by the own half.

    Args:
        scale_before: factor of `row_sum` from the tile before.
        half: [2, 64, 256], the half of the value elements that the consumer accumulates.
        FIRST: `acc` is 0. ptxas 13.4 would wait for the scores before the branch of `rescale`.
    """
    VALUES: gl.constexpr = acc.type.layout
    weights, scale, row_max = _weigh(scores, keys, row_max, factor, soft_cap, HAS_CAP, SELECT)
    row_sum = row_sum * (scale_before * scale) + gl.sum(weights, 1)
    operand = weights.to(half.dtype)
    # All warps have read the weights of the other tile.
    partition_barrier()
    _publish(
        p_tile, maxima.index(CONSUMER), scales.index(CONSUMER), p_ready.index(CONSUMER), operand,
        row_max, scale)  # fmt: skip
    if not FIRST:
        acc = rescale(acc, scale)
    acc = warpgroup_mma(
        gl.convert_layout(operand, gl.DotOperandLayout(0, VALUES, 2)), half.index(CONSUMER), acc,
        is_async=True,
    )  # fmt: skip
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(k_empty.index(CONSUMER * PARTS + LOW + CONSUMER), count=1)
    return acc, row_max, row_sum


@gluon.jit
def attend_own(
    acc, row_max, row_sum, keys, parity, q_low, q_high, q_rotary, k_low, k_high, k_rotary, p_tile,
    maxima, scales, k_full, k_empty, p_ready, factor, soft_cap, CONSUMER: gl.constexpr,
    HAS_CAP: gl.constexpr, SELECT: gl.constexpr,
):  # fmt: skip
    """Attend to the first tile of the consumer, without a tile before it.

    Args:
        keys: which keys of the tile are visible. With SELECT 0 the tuple (positions [64], first,
            last): those in [first, last), which broadcast with the scores. Else (entries, first
            slot, slots [64], end, first, last, has_holes): those that the slots select, as in
            `listed_positions`; without holes all slots before `end` do.
        parity: of the number of tiles of the consumer before this one.
        q_low, q_high, q_rotary: queries, each with a leading dimension of 1.
        SELECT: positions of an entry of a list; 0 without a list, for tiles loaded by TMA.

    Returns:
        (acc, row_max, row_sum); `row_sum` sums the weights of the consumer's tiles.
    """
    SCORES: gl.constexpr = row_max.type.layout.parent
    scores = gl.zeros([64, TILE], gl.float32, SCORES)
    scores = _issue_part(scores, q_rotary, k_rotary, k_full, parity, ROTARY_PART, CONSUMER, SELECT)
    scores = _issue_part(scores, q_low, k_low, k_full, parity, LOW, CONSUMER, SELECT)
    scores = _issue_part(scores, q_high, k_high, k_full, parity, HIGH, CONSUMER, SELECT)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(CONSUMER * PARTS + ROTARY_PART), count=1)
    if CONSUMER == 0:
        half = k_low
    else:
        half = k_high
    return _attend_to_tile(
        scores, acc, row_max, row_sum, 1.0, keys, half, p_tile, maxima, scales, p_ready, k_empty,
        factor, soft_cap, CONSUMER, HAS_CAP, SELECT, True)  # fmt: skip


@gluon.jit
def attend_other(
    acc, row_max, row_sum, parity, k_low, k_high, p_tile, maxima, scales, k_empty, p_ready,
    CONSUMER: gl.constexpr, SELECT: gl.constexpr,
):  # fmt: skip
    """Multiply the weights of the other consumer's last tile, after which there is no own tile.

    Arguments and results as in `attend_both`, with the parity of the other tile.
    """
    ROW: gl.constexpr = row_max.type.layout
    OTHER: gl.constexpr = 1 - CONSUMER
    mbarrier.wait(p_ready.index(OTHER), parity)
    if SELECT > 0:
        fence_async_shared()
    scale = scales.index(OTHER).load(ROW)
    row_max = maxima.index(OTHER).load(ROW)
    row_sum = row_sum * scale
    acc = rescale(acc, scale)
    if CONSUMER == 0:
        half = k_low
    else:
        half = k_high
    acc = warpgroup_mma(p_tile, half.index(OTHER), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(k_empty.index(OTHER * PARTS + LOW + CONSUMER), count=1)
    return acc, row_max, row_sum


@gluon.jit
def attend_both(
    acc, row_max, row_sum, keys, parity, other_parity, q_low, q_high, q_rotary, k_low, k_high,
    k_rotary, p_tile, maxima, scales, k_full, k_empty, p_ready, factor, soft_cap,
    CONSUMER: gl.constexpr, HAS_CAP: gl.constexpr, SELECT: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Multiply the weights of the tile before, the other consumer's, and attend to the own tile.

    Arguments and results as in `attend_own`.

    Args:
        other_parity: of the number of tiles of the other consumer before that one.
        EARLY: issue all scores before the product with the weights of the tile before, and not only
            those of the parts that are loaded first. The tensor cores then work while the other
            consumer computes its softmax, but its tile is released later.
    """
    SCORES: gl.constexpr = row_max.type.layout.parent
    ROW: gl.constexpr = row_max.type.layout
    OTHER: gl.constexpr = 1 - CONSUMER
    if CONSUMER == 0:
        half = k_low
    else:
        half = k_high
    scores = gl.zeros([64, TILE], gl.float32, SCORES)
    scores = _issue_part(scores, q_rotary, k_rotary, k_full, parity, ROTARY_PART, CONSUMER, SELECT)
    scores = _issue_half(
        scores, q_low, q_high, k_low, k_high, k_full, parity, CONSUMER, CONSUMER, SELECT
    )
    if EARLY:
        scores = _issue_half(
            scores, q_low, q_high, k_low, k_high, k_full, parity, OTHER, CONSUMER, SELECT
        )
    mbarrier.wait(p_ready.index(OTHER), other_parity)
    if SELECT > 0:
        fence_async_shared()
    scale = scales.index(OTHER).load(ROW)
    row_max = maxima.index(OTHER).load(ROW)
    # Complete since the step before: only scores are pending. ptxas 12.8 does not see that and
    # would wait for them.
    if SELECT == 0:
        acc = warpgroup_mma_wait(5 if EARLY else 3, deps=[acc])
    else:
        acc = warpgroup_mma_wait(3 if EARLY else 2, deps=[acc])
    acc = rescale(acc, scale)
    acc = warpgroup_mma(p_tile, half.index(OTHER), acc, is_async=True)
    # Groups complete in the order in which they were issued.
    if EARLY:
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_empty.index(CONSUMER * PARTS + ROTARY_PART), count=1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(k_empty.index(OTHER * PARTS + LOW + CONSUMER), count=1)
    else:
        scores = _issue_half(
            scores, q_low, q_high, k_low, k_high, k_full, parity, OTHER, CONSUMER, SELECT
        )
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(k_empty.index(OTHER * PARTS + LOW + CONSUMER), count=1)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(CONSUMER * PARTS + ROTARY_PART), count=1)
    return _attend_to_tile(
        scores, acc, row_max, row_sum, scale, keys, half, p_tile, maxima, scales, p_ready, k_empty,
        factor, soft_cap, CONSUMER, HAS_CAP, SELECT, False)  # fmt: skip


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
