"""Steps of the batch-invariant Hopper decodes (M15), which have query rows as the columns of their
products.

Two kernels share them, so that their bits are equal: `invariant_decode.py` divides requests over
CTAs, `invariant_window.py` does not.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnlib.ops.triton.hopper.kernels.cache_tiles import clear_tile
from attnlib.ops.triton.hopper.kernels.column_softmax import mask_columns
from attnlib.ops.triton.hopper.kernels.compat import (
    exp2,
    partition_barrier,
)
from attnlib.ops.triton.hopper.kernels.segment_rows import Segment, Totals, add_segment
from attnlib.ops.triton.hopper.kernels.segments import (
    add_column_sums,
    cap_scores,
    column_sums,
    softmax_factor,
)

__all__ = [
    "first_weights",
    "last_values",
    "segment_step",
]


@gluon.jit
def _weigh(scores, tile, rows, row_max, MASKED: gl.constexpr, config):
    """Return (weights [keys, rows], factor of what was added before, row_max) of raw products; the
    arithmetic of the prefill, along the other axis."""
    BLOCK_N: gl.constexpr = scores.shape[0]
    CHECK_FIRST: gl.constexpr = config.HAS_LEFT or config.HAS_CHUNK
    scores = cap_scores(scores, rows.factor, rows.soft_cap, config.HAS_CAP)
    if MASKED:
        scores = mask_columns(scores, rows.first, rows.last, tile * BLOCK_N, CHECK_FIRST)
    weight_factor = softmax_factor(rows.factor, config.HAS_CAP)
    new_max = gl.maximum(row_max, gl.max(scores, 0) * weight_factor)
    finite_max = new_max
    if MASKED:
        # -inf - -inf is NaN: rows without a visible key are measured from 0.
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = exp2(scores * weight_factor - finite_max[None, :])
    return weights, exp2(row_max - finite_max), new_max


@gluon.jit
def _store_weights(p_tile, weights):
    """Store weights [keys, rows] in shared memory for the product with the values."""
    p_tile.store(gl.permute(weights, (1, 0)).to(p_tile.dtype))
    # WGMMA reads shared memory through the async proxy: fence, then wait for all four warps.
    fence_async_shared()
    partition_barrier()


@gluon.jit
def _multiply(worker, acc, step, config):
    """Multiply by the keys of a tile, and begin to multiply by the values of the tile before it.

    Returns:
        (scores, acc), of which the second is still in flight.
    """
    STAGES: gl.constexpr = config.STAGES
    stage = step % STAGES
    v_stage = (step - 1) % STAGES
    keys = worker.keys
    values = worker.values
    mbarrier.wait(keys.full.index(stage), (step // STAGES) & 1)
    KEYS: gl.constexpr = worker.p_tile.shape[1]
    ROWS: gl.constexpr = worker.q_tile.shape[0]
    LAYOUT: gl.constexpr = acc.type.layout
    zeros = gl.zeros([KEYS, ROWS], gl.float32, LAYOUT)
    tile_keys = keys.memory.index(stage)
    queries = worker.q_tile.permute((1, 0))
    scores = warpgroup_mma(tile_keys, queries, zeros, use_acc=False, is_async=True)
    mbarrier.wait(values.full.index(v_stage), ((step - 1) // STAGES) & 1)
    tile = values.memory.index(v_stage).permute((1, 0))
    acc = warpgroup_mma(tile, worker.p_tile.permute((1, 0)), acc, is_async=True)
    # One group may stay in flight: K @ Q^T is complete, V^T @ P^T overlaps with the softmax.
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(keys.empty.index(stage), count=1)
    return scores, acc


@gluon.jit
def segment_step(worker, segment, totals, rows, slots, step, tile, MASKED: gl.constexpr, config):
    """Multiply by the keys of `tile` and by the values of the tile before it, then do the softmax.
    Where `tile` begins a segment, the complete one is added or written.

    Returns:
        (`Segment`, `Totals`).
    """
    v_stage = (step - 1) % config.STAGES
    scores, acc = _multiply(worker, segment.acc, step, config)
    total = totals.values
    total_max = totals.row_max
    total_sum = totals.row_sum
    begins = ((tile + 1) & ((1 << rows.bits) - 1)) == 0
    row_max = segment.row_max
    weights, acc_scale, next_max = _weigh(
        scores, tile, rows, gl.where(begins, float("-inf"), row_max), MASKED, config
    )
    # All arithmetic of the softmax comes before the branch, over which ptxas moves nothing.
    more = column_sums(weights)
    # V^T @ P^T is complete: its stage and p_tile are free, and the accumulator may be rescaled.
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(worker.values.empty.index(v_stage), count=1)
    _store_weights(worker.p_tile, weights)
    acc = acc * gl.where(begins, 1.0, acc_scale)[None, :]
    if ((tile + 1) & (slots.least_tiles - 1)) == 0:
        slot = ((tile + 1) >> rows.bits) - (slots.begin >> rows.bits)
        complete = Segment(acc, row_max, segment.sums)
        added = add_segment(totals, complete, rows.valid & begins, slot, rows, slots, config)
        total = added.values
        total_max = added.row_max
        total_sum = added.row_sum
        acc = gl.where(begins[None, :], 0.0, acc)
    sums = add_column_sums(segment.sums, acc_scale, more)
    return Segment(acc, next_max, sums), Totals(total_max, total_sum, total)


@gluon.jit
def first_weights(worker, rows, step, tile, seq_len, LAYOUT: gl.constexpr, config):
    """Multiply by the keys of the last tile, which has no values of an earlier tile to multiply by.

    Returns:
        (row_max, sums) of a `Segment`.
    """
    STAGES: gl.constexpr = config.STAGES
    BLOCK_N: gl.constexpr = worker.p_tile.shape[1]
    ROWS: gl.constexpr = worker.q_tile.shape[0]
    keys = worker.keys
    values = worker.values
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, LAYOUT))
    stage = step % STAGES
    parity = (step // STAGES) & 1
    mbarrier.wait(keys.full.index(stage), parity)
    zeros = gl.zeros([BLOCK_N, ROWS], gl.float32, LAYOUT)
    tile_keys = keys.memory.index(stage)
    queries = worker.q_tile.permute((1, 0))
    scores = warpgroup_mma(tile_keys, queries, zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(keys.empty.index(stage), count=1)
    weights, _, row_max = _weigh(scores, tile, rows, row_max, True, config)
    sums = column_sums(weights)
    _store_weights(worker.p_tile, weights)
    # TMA fills whole pages past the end with zeros, but not the rest of the last page.
    past_end = seq_len - tile * BLOCK_N
    if (past_end < BLOCK_N) & (seq_len % config.BLOCK_SIZE != 0):
        mbarrier.wait(values.full.index(stage), parity)
        clear_tile(values.memory.index(stage), past_end, 0)
    return row_max, sums


@gluon.jit
def last_values(worker, acc, step, config):
    """Return the accumulator after the product with the values of the first tile."""
    values = worker.values
    stage = (step - 1) % config.STAGES
    mbarrier.wait(values.full.index(stage), ((step - 1) // config.STAGES) & 1)
    tile = values.memory.index(stage).permute((1, 0))
    acc = warpgroup_mma(tile, worker.p_tile.permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(values.empty.index(stage), count=1)
    return acc
