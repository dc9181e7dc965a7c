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
    Value,
    aggregate,
    exp2,
    partition_barrier,
    store_in_l2,
)
from attnlib.ops.triton.hopper.kernels.segments import (
    add_column_sums,
    cap_scores,
    column_sums,
    fold_sums,
    softmax_factor,
    sum_columns,
)
from attnlib.ops.triton.hopper.kernels.softmax import LOG2E

__all__ = [
    "ColumnRows",
    "Columns",
    "Segment",
    "SegmentSlots",
    "Totals",
    "add_segment",
    "columns_of",
    "first_weights",
    "last_values",
    "load_sinks",
    "no_totals",
    "segment_step",
    "store_outputs",
]


@aggregate
class Columns:
    """The columns of scores and the rows of values, which are the same for all requests.

    Fields:
        row: [ROWS], 0 to ROWS - 1.
        token, head: [ROWS], query token of the request and query head.
        lanes: elements of a value.
    """

    row: Value
    token: Value
    head: Value
    lanes: Value


@gluon.jit
def columns_of(kv_head, LAYOUT: gl.constexpr, config):
    """Return the `Columns` of a KV head."""
    row = gl.arange(0, config.ROWS, gl.SliceLayout(0, LAYOUT))
    token = row // config.GROUP
    head = kv_head * config.GROUP + row % config.GROUP
    return Columns(row, token, head, gl.arange(0, config.WIDTH_V, gl.SliceLayout(1, LAYOUT)))


@aggregate
class ColumnRows:
    """The query rows of a request and KV head, along the columns of the scores.

    Fields:
        columns: `Columns`.
        valid: [ROWS], whether the row exists.
        first, last: [ROWS], the keys [first, last) that a row sees.
        bits: [ROWS], base-2 logarithms of the tiles of a segment.
        factor, soft_cap: of the scores.
    """

    columns: Value
    valid: Value
    first: Value
    last: Value
    bits: Value
    factor: Value
    soft_cap: Value


@aggregate
class Totals:
    """Maxima, sums of weights and sums of values [elements, ROWS] of the segments before."""

    row_max: Value
    row_sum: Value
    values: Value


@aggregate
class Segment:
    """Sums of values [elements, ROWS], maxima and sums of weights [4, 4, ROWS] of a segment."""

    acc: Value
    row_max: Value
    sums: Value


@aggregate
class SegmentSlots:
    """Where the segments of a request are written that another CTA has begun.

    Fields:
        continued: whether another CTA has begun the request; else segments are added to `Totals`.
        first: index of the partial result in slot 0.
        num_partials: rows of all partial results.
        partials: `Partials`, whose `lses` are the maxima and then the sums of weights.
        begin: the first tile that the request visits.
        least_tiles: tiles of the shortest segments of all rows.
    """

    continued: Value
    first: Value
    num_partials: Value
    partials: Value
    begin: Value
    least_tiles: Value


@gluon.jit
def no_totals(ROWS: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Return `Totals` of no keys."""
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, LAYOUT))
    row_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(0, LAYOUT))
    return Totals(row_max, row_sum, gl.zeros([WIDTH, ROWS], gl.float32, LAYOUT))


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
def add_segment(totals, segment, complete, slot, rows, slots, config):
    """Add a segment of some rows to those before it, or write it where the request is continued.

    Args:
        totals: `Totals` of the segments before.
        segment: `Segment`.
        complete: [rows], whether the row's segment is complete.
        slot: [rows], of the row's partial result.
        rows: `ColumnRows`.
        slots: `SegmentSlots`.

    Returns:
        `Totals`.
    """
    DV: gl.constexpr = config.DV
    partials = slots.partials
    total = totals.values
    total_max = totals.row_max
    total_sum = totals.row_sum
    COLUMN: gl.constexpr = segment.row_max.type.layout
    part_sum = sum_columns(segment.sums, COLUMN)
    if slots.continued:
        index = (slots.first + slot) * partials.rows + rows.columns.row
        store_in_l2(
            partials.values + (index * DV)[None, :] + rows.columns.lanes[:, None],
            segment.acc,
            complete[None, :] & (rows.columns.lanes < DV)[:, None],
        )
        gl.store(partials.lses + index, segment.row_max, mask=complete)
        gl.store(partials.lses + slots.num_partials + index, part_sum, mask=complete)
    else:
        new_max, new_sum, old, new = fold_sums(total_max, total_sum, segment.row_max, part_sum)
        # A sum of -0.0 becomes 0.0, in the prefill too.
        more = segment.acc * new[None, :] + 0.0
        added = gl.fma(total, gl.broadcast(old[None, :], total)[0], more)
        total = gl.where(complete[None, :], added, total)
        total_max = gl.where(complete, new_max, total_max)
        total_sum = gl.where(complete, new_sum, total_sum)
    return Totals(total_max, total_sum, total)


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


@gluon.jit
def load_sinks(sinks, head, valid, HAS_SINK: gl.constexpr):
    """Return the sinks of rows as base-2 logits; 0.0 without sinks."""
    sink = 0.0
    if HAS_SINK:
        sink = gl.load(sinks + head, mask=valid, other=0.0).to(gl.float32) * LOG2E
    return sink


@gluon.jit
def store_outputs(outputs, totals, rows, sink, start, config):
    """Write the outputs and LSEs of rows all of whose keys are in `totals`.

    Args:
        sink: of `load_sinks`.
        start: first query row of the request.
    """
    head = rows.columns.head
    token = rows.columns.token
    total_max = totals.row_max
    total_sum = totals.row_sum
    ROWS: gl.constexpr = totals.values.shape[1]
    COLUMN: gl.constexpr = total_max.type.layout
    finite_max = gl.where(total_max == float("-inf"), 0.0, total_max)
    acc_scale = gl.full([ROWS], 1.0, gl.float32, COLUMN)
    if config.HAS_SINK:
        # The sink counts in the denominator, once (M4).
        new_max = gl.maximum(total_max, sink)
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
        acc_scale = exp2(total_max - finite_max)
        total_sum = gl.fma(total_sum, acc_scale, exp2(sink - finite_max))
    empty = total_sum == 0.0
    safe_sum = gl.where(empty, 1.0, total_sum)
    normalizer = acc_scale / safe_sum
    offsets = outputs.offsets(start + token, head)
    gl.store(
        outputs.pointer + offsets[None, :] + rows.columns.lanes[:, None],
        (totals.values * normalizer[None, :]).to(outputs.pointer.dtype.element_ty),
        mask=rows.valid[None, :] & (rows.columns.lanes < config.DV)[:, None],
    )
    if config.HAS_LSE:
        base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
        outputs.store_lses(start + token, head, base2, rows.valid)
