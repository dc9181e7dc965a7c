"""Query rows of the batch-invariant Hopper decodes, and what is added of their segments (M15)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import (
    Value,
    aggregate,
    exp2,
    store_in_l2,
)
from attnlib.ops.triton.hopper.kernels.segments import (
    fold_sums,
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
    "load_sinks",
    "no_totals",
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
