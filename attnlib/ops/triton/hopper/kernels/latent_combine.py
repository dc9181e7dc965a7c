"""Combination of the splits of a request over latents by the CTA whose split ends last.

A launch after the decode takes 2.8 us of 90 (H200, 128 requests of 2k latents, 64 query rows), also
where it finds nothing to combine. So batches in which most requests have one split have none: the
consumers of a CTA count themselves at the request, and those that come last combine, each its half
of the value elements.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import (
    consumers_sync,
    exp2,
    partition_barrier,
    rounded_product,
)
from attnlib.ops.triton.hopper.kernels.latent_rows import query_rows
from attnlib.ops.triton.hopper.kernels.softmax import add_sink
from attnlib.ops.triton.hopper.kernels.work_counter import PREFILL_COUNTERS, atomic_increment

__all__ = ["clear_rows_after", "combine_splits"]

_FIRST_COUNTER = gl.constexpr(PREFILL_COUNTERS)
"""Index of the decode's first counter. A CTA has one for each consumer."""
_ROWS = gl.constexpr(32)
"""Query rows that are combined together."""
_SPLITS = gl.constexpr(2)
"""Splits that are loaded together."""


@gluon.constexpr_function
def _layout(columns):
    """Return the layout of [rows, columns] in which a thread has 8 adjacent elements of a row."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def _combine_rows(
    split, first_partial, blocks, num_splits, first_row, outputs, partials, CONFIG, CONSUMER
):
    """Combine some query rows, from `first_row` on."""
    HALF: gl.constexpr = CONFIG.DV // 2
    START: gl.constexpr = CONSUMER * HALF
    LAYOUT: gl.constexpr = _layout(HALF)
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    rows = query_rows(first_row + gl.arange(0, _ROWS, ROW), split.kv_head, CONFIG)
    valid = rows.exist(split.query_len)
    lanes = START + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    mask = valid[:, None] & (lanes >= 0)[None, :]
    acc = gl.zeros([_ROWS, HALF], gl.float32, LAYOUT)
    row_max = gl.full([_ROWS], float("-inf"), gl.float32, ROW)
    row_sum = gl.zeros([_ROWS], gl.float32, ROW)
    for base in range(0, num_splits, _SPLITS):
        lses = ()
        values = ()
        for i in gl.static_range(_SPLITS):
            index = 2 * (first_partial // 2 + (base + i) * blocks)
            index = gl.where(base + i == 0, first_partial, index)
            live = base + i < num_splits
            places = index * partials.rows + rows.row
            # Other CTAs wrote these: ".cg" bypasses L1, which may hold stale lines.
            loaded = gl.load(
                partials.lses + places, mask=valid & live, other=float("-inf"), cache_modifier=".cg"
            )
            lses = lses + (loaded,)
            offsets = places.to(gl.int64) * CONFIG.DV
            loaded = gl.load(
                partials.values + offsets[:, None] + lanes[None, :],
                mask=mask & live,
                other=0.0,
                cache_modifier=".cg",
            )
            values = values + (loaded,)
        new_max = row_max
        for i in gl.static_range(_SPLITS):
            new_max = gl.maximum(new_max, lses[i])
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
        acc_scale = exp2(row_max - finite_max)
        acc = rounded_product(acc, acc_scale[:, None])
        row_sum = row_sum * acc_scale
        for i in gl.static_range(_SPLITS):
            weight = exp2(lses[i] - finite_max)
            acc = gl.fma(weight[:, None], values[i], acc)
            row_sum += weight
        row_max = new_max
    finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
    factor = gl.full([_ROWS], 1.0, gl.float32, ROW)
    if CONFIG.HAS_SINK:
        # No split has counted the sink, so it counts once (M4).
        sink = gl.load(outputs.sinks + rows.head, mask=valid, other=0.0)
        finite_max, factor, row_sum = add_sink(row_max, row_sum, sink)
    empty = row_sum == 0.0
    safe_sum = gl.where(empty, 1.0, row_sum)
    result = acc * (factor / safe_sum)[:, None]
    offsets = outputs.offsets(split.start + rows.token, rows.head)
    target = outputs.pointer + offsets[:, None] + lanes[None, :]
    gl.store(target, result.to(outputs.pointer.dtype.element_ty), mask=mask)
    if CONFIG.HAS_LSE and CONSUMER == 0:
        base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
        outputs.store_lses(split.start + rows.token, rows.head, base2, valid)


@gluon.jit
def combine_splits(
    own,
    before,
    split,
    place,
    blocks,
    outputs,
    partials,
    CONFIG: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Combine the splits of a request if this one, which has been stored, has ended last.

    Splits are combined in their order, so that the result does not depend on which CTA that is. At
    most one request begins in a range and continues after it, so it can use the counters of the
    range's CTA.

    Args:
        own: the `TileRange` of the CTA.
        before: units of the line before the request.
        split, place: the `Split` and its `SplitPlace`.
        blocks: of query rows of a request.
    """
    first_range = before // own.length
    first_cta = first_range * blocks + split.kv_head
    counter = partials.counters + _FIRST_COUNTER + 2 * first_cta + CONSUMER
    # Both consumers have stored their parts: consumer 0 the LSEs of all elements.
    consumers_sync(2)
    if atomic_increment(counter, "acq_rel") == place.num_splits - 1:
        partition_barrier()
        gl.store(counter, 0)
        first_partial = 2 * first_cta + (before > first_range * own.length).to(gl.int32)
        for first_row in range(0, CONFIG.TILE_TOKENS * CONFIG.GROUP, _ROWS):
            _combine_rows(
                split,
                first_partial,
                blocks,
                place.num_splits,
                first_row,
                outputs,
                partials,
                CONFIG,
                CONSUMER,
            )


@gluon.jit
def clear_rows_after(outputs, batch, num_tokens, CONFIG: gl.constexpr):
    """Set rows after the last request to 0 and their LSEs to -inf (M6). The pairs of a row and a
    block of heads are distributed over the CTAs, one warpgroup each."""
    LAYOUT: gl.constexpr = _layout(256)
    ROWS: gl.constexpr = CONFIG.ROWS
    DV: gl.constexpr = CONFIG.DV
    within = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    lanes = gl.arange(0, DV, gl.SliceLayout(0, LAYOUT))
    inside = within < CONFIG.GROUP
    zeros = gl.zeros([ROWS, DV], outputs.pointer.dtype.element_ty, LAYOUT)
    first = batch.num_rows() * CONFIG.HEAD_BLOCKS + gl.program_id(0)
    for pair in range(first, num_tokens * CONFIG.HEAD_BLOCKS, gl.num_programs(0)):
        token = pair // CONFIG.HEAD_BLOCKS
        head = pair % CONFIG.HEAD_BLOCKS * CONFIG.GROUP + within
        offsets = outputs.offsets(token, head)
        mask = inside[:, None] & (lanes >= 0)[None, :]
        gl.store(outputs.pointer + offsets[:, None] + lanes[None, :], zeros, mask=mask)
        if CONFIG.HAS_LSE:
            empty = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
            outputs.store_lses(token, head, empty, inside)
