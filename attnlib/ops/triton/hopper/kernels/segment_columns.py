"""Steps of the batch-invariant Hopper decodes (M15), which have query rows as the columns of their
products.

Two kernels share them, so that their bits are equal: `invariant_decode.py` divides requests over
CTAs, `invariant_window.py` does not.
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

from attnlib.ops.triton.hopper.kernels.column_softmax import mask_columns
from attnlib.ops.triton.hopper.kernels.compat import exp2, partition_barrier, store_in_l2
from attnlib.ops.triton.hopper.kernels.decode import clear_tile
from attnlib.ops.triton.hopper.kernels.segments import (
    add_column_sums,
    cap_scores,
    column_sums,
    fold_sums,
    softmax_factor,
    sum_columns,
)
from attnlib.ops.triton.hopper.kernels.softmax import LN2, LOG2E

__all__ = [
    "add_column_segment", "first_weights", "last_values", "load_query_rows", "load_sinks",
    "segment_step", "store_column_rows",
]  # fmt: skip


@gluon.jit
def load_query_rows(
    query, start, query_len, kv_head, stride_qt, stride_qh, GROUP: gl.constexpr,
    TILE_TOKENS: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Return the query rows [ROWS, WIDTH] of a request and KV head; 0 where there is none."""
    Q_LANES: gl.constexpr = min(32, WIDTH // 8)
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // Q_LANES, Q_LANES], [4, 1], [1, 0])
    q_rows = gl.arange(0, ROWS, gl.SliceLayout(1, Q_LAYOUT))
    q_valid = (q_rows < TILE_TOKENS * GROUP) & (q_rows // GROUP < query_len)
    q_offsets = (start + q_rows // GROUP).to(gl.int64) * stride_qt + (
        kv_head * GROUP + q_rows % GROUP
    ).to(gl.int64) * stride_qh
    # The launcher checks 16-byte alignment; the shifts tell the compiler.
    q_offsets = (q_offsets >> 3) << 3
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, Q_LAYOUT))
    return gl.load(
        query + q_offsets[:, None] + columns[None, :],
        mask=q_valid[:, None] & (columns < D)[None, :],
        other=0.0,
    )


@gluon.jit
def _weigh(
    scores, tile, row_first, row_last, row_max, factor, soft_cap, MASKED: gl.constexpr,
    CHECK_FIRST: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """Return (weights [keys, rows], factor of what was added before, row_max) of raw products; as
    in the prefill, along the other axis."""
    BLOCK_N: gl.constexpr = scores.shape[0]
    scores = cap_scores(scores, factor, soft_cap, HAS_CAP)
    if MASKED:
        scores = mask_columns(scores, row_first, row_last, tile * BLOCK_N, CHECK_FIRST)
    weight_factor = softmax_factor(factor, HAS_CAP)
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
def _multiply(
    q_tile, p_tile, k_ring, v_ring, k_full, k_empty, v_full, acc, step, STAGES: gl.constexpr
):  # fmt: skip
    """Multiply by the keys of a tile, and begin to multiply by the values of the tile before it.

    Returns:
        (scores, acc), of which the second is still in flight.
    """
    stage = step % STAGES
    v_stage = (step - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
    KEYS: gl.constexpr = p_tile.shape[1]
    ROWS: gl.constexpr = q_tile.shape[0]
    LAYOUT: gl.constexpr = acc.type.layout
    zeros = gl.zeros([KEYS, ROWS], gl.float32, LAYOUT)
    scores = warpgroup_mma(
        k_ring.index(stage), q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    mbarrier.wait(v_full.index(v_stage), ((step - 1) // STAGES) & 1)
    values = v_ring.index(v_stage).permute((1, 0))
    acc = warpgroup_mma(values, p_tile.permute((1, 0)), acc, is_async=True)
    # One group may stay in flight: K @ Q^T is complete, V^T @ P^T overlaps with the softmax.
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(stage), count=1)
    return scores, acc


@gluon.jit
def add_column_segment(
    total, total_max, total_sum, acc, row_max, sums, complete, slot, continued, first_partial,
    rows, num_partials, partials, partial_maxima, row, lanes, DV: gl.constexpr,
):  # fmt: skip
    """Add a segment of some rows to those before it, or write it where the request is `continued`.

    Args:
        complete: [rows], whether the row's segment is complete.
        slot: [rows], of the row's partial result.
        first_partial: index of slot 0.

    Returns:
        (total, total_max, total_sum).
    """
    COLUMN: gl.constexpr = row_max.type.layout
    part_sum = sum_columns(sums, COLUMN)
    if continued:
        index = (first_partial + slot) * rows + row
        store_in_l2(
            partials + (index * DV)[None, :] + lanes[:, None],
            acc,
            complete[None, :] & (lanes < DV)[:, None],
        )
        gl.store(partial_maxima + index, row_max, mask=complete)
        gl.store(partial_maxima + num_partials + index, part_sum, mask=complete)
    else:
        new_max, new_sum, old, new = fold_sums(total_max, total_sum, row_max, part_sum)
        # A sum of -0.0 becomes 0.0, as in the prefill.
        more = acc * new[None, :] + 0.0
        added = gl.fma(total, gl.broadcast(old[None, :], total)[0], more)
        total = gl.where(complete[None, :], added, total)
        total_max = gl.where(complete, new_max, total_max)
        total_sum = gl.where(complete, new_sum, total_sum)
    return total, total_max, total_sum


@gluon.jit
def segment_step(
    q_tile, p_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, row_max, sums, total,
    total_max, total_sum, step, tile, begin, least_tiles, row_bits, valid, continued,
    first_partial, rows, num_partials, partials, partial_maxima, row, lanes, row_first, row_last,
    factor, soft_cap, DV: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    CHECK_FIRST: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """Multiply by the keys of `tile` and by the values of the tile before it, then do the softmax.
    Where `tile` begins a segment, the complete one is added or written.

    Args:
        least_tiles: of the shortest segments of all rows.
        row_bits: [rows], logarithms of the tiles of the segments of each row.

    Returns:
        (acc, row_max, sums, total, total_max, total_sum).
    """
    v_stage = (step - 1) % STAGES
    scores, acc = _multiply(
        q_tile, p_tile, k_ring, v_ring, k_full, k_empty, v_full, acc, step, STAGES
    )
    begins = ((tile + 1) & ((1 << row_bits) - 1)) == 0
    weights, acc_scale, next_max = _weigh(
        scores, tile, row_first, row_last, gl.where(begins, float("-inf"), row_max), factor,
        soft_cap, MASKED, CHECK_FIRST, HAS_CAP)  # fmt: skip
    # All arithmetic of the softmax comes before the branch, over which ptxas moves nothing.
    more = column_sums(weights)
    # V^T @ P^T is complete: its stage and p_tile are free, and the accumulator may be rescaled.
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    _store_weights(p_tile, weights)
    acc = acc * gl.where(begins, 1.0, acc_scale)[None, :]
    if ((tile + 1) & (least_tiles - 1)) == 0:
        slot = ((tile + 1) >> row_bits) - (begin >> row_bits)
        total, total_max, total_sum = add_column_segment(
            total, total_max, total_sum, acc, row_max, sums, valid & begins, slot, continued,
            first_partial, rows, num_partials, partials, partial_maxima, row, lanes,
            DV)  # fmt: skip
        acc = gl.where(begins[None, :], 0.0, acc)
    sums = add_column_sums(sums, acc_scale, more)
    return acc, next_max, sums, total, total_max, total_sum


@gluon.jit
def first_weights(
    q_tile, p_tile, k_ring, v_ring, k_full, k_empty, v_full, step, tile, seq_len, row_first,
    row_last, factor, soft_cap, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
    CHECK_FIRST: gl.constexpr, HAS_CAP: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Multiply by the keys of the last tile, which has no values of an earlier tile to multiply by.

    Returns:
        (row_max, sums).
    """
    BLOCK_N: gl.constexpr = p_tile.shape[1]
    ROWS: gl.constexpr = q_tile.shape[0]
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, LAYOUT))
    stage = step % STAGES
    parity = (step // STAGES) & 1
    mbarrier.wait(k_full.index(stage), parity)
    zeros = gl.zeros([BLOCK_N, ROWS], gl.float32, LAYOUT)
    scores = warpgroup_mma(
        k_ring.index(stage), q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(stage), count=1)
    weights, _, row_max = _weigh(
        scores, tile, row_first, row_last, row_max, factor, soft_cap, True, CHECK_FIRST, HAS_CAP
    )
    sums = column_sums(weights)
    _store_weights(p_tile, weights)
    # TMA fills whole pages past the end with zeros, but not the rest of the last page.
    past_end = seq_len - tile * BLOCK_N
    if (past_end < BLOCK_N) & (seq_len % BLOCK_SIZE != 0):
        mbarrier.wait(v_full.index(stage), parity)
        clear_tile(v_ring.index(stage), past_end, 0)
    return row_max, sums


@gluon.jit
def last_values(p_tile, v_ring, v_full, v_empty, acc, step, STAGES: gl.constexpr):
    """Return the accumulator after the product with the values of the first tile."""
    stage = (step - 1) % STAGES
    mbarrier.wait(v_full.index(stage), ((step - 1) // STAGES) & 1)
    values = v_ring.index(stage).permute((1, 0))
    acc = warpgroup_mma(values, p_tile.permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(stage), count=1)
    return acc


@gluon.jit
def load_sinks(sinks, head, valid, HAS_SINK: gl.constexpr):
    """Return the sinks of rows as base-2 logits; 0.0 without sinks."""
    sink = 0.0
    if HAS_SINK:
        sink = gl.load(sinks + head, mask=valid, other=0.0).to(gl.float32) * LOG2E
    return sink


@gluon.jit
def store_column_rows(
    out, lse, total, total_max, total_sum, sink, start, token, head, valid, lanes, stride_ot,
    stride_oh, stride_lt, DV: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Write the outputs and LSEs of rows whose keys are all in `total`, [elements, rows]."""
    COLUMN: gl.constexpr = total_max.type.layout
    finite_max = gl.where(total_max == float("-inf"), 0.0, total_max)
    acc_scale = gl.full([total.shape[1]], 1.0, gl.float32, COLUMN)
    if HAS_SINK:
        # The sink counts in the denominator, once (M4).
        new_max = gl.maximum(total_max, sink)
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
        acc_scale = exp2(total_max - finite_max)
        total_sum = gl.fma(total_sum, acc_scale, exp2(sink - finite_max))
    empty = total_sum == 0.0
    safe_sum = gl.where(empty, 1.0, total_sum)
    normalizer = acc_scale / safe_sum
    offsets = (start + token).to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
    gl.store(
        out + offsets[None, :] + lanes[:, None],
        (total * normalizer[None, :]).to(out.dtype.element_ty),
        mask=valid[None, :] & (lanes < DV)[:, None],
    )
    if HAS_LSE:
        base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
        gl.store(lse + (start + token).to(gl.int64) * stride_lt + head, base2 * LN2, mask=valid)
