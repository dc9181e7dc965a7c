"""Results of a split of the Hopper decode: outputs, or partial results and their combination."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.column_softmax import column_sum
from attnlib.ops.triton.hopper.kernels.combine import combine_in_cta
from attnlib.ops.triton.hopper.kernels.compat import partition_barrier, store_in_l2
from attnlib.ops.triton.hopper.kernels.decode_products import (
    joined_values,
    score_layout,
    value_lanes,
)
from attnlib.ops.triton.hopper.kernels.kv_scales import factor_without_keys
from attnlib.ops.triton.hopper.kernels.ranges import even_begin, even_index
from attnlib.ops.triton.hopper.kernels.rotation import (
    first_half,
    in_order,
    rotate_rows,
    value_levels,
)
from attnlib.ops.triton.hopper.kernels.softmax import add_sink
from attnlib.ops.triton.hopper.kernels.work_counter import PREFILL_COUNTERS, atomic_increment
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["finish_split"]

_FIRST_COUNTER = gl.constexpr(PREFILL_COUNTERS)
"""Index of the decode's first counter."""


@gluon.jit
def _count_splits(share, split, before, tiles, num_reqs, config):
    """Return (splits of the request, the range that has its first tile).

    The range is 0 unless ranges are even.
    """
    request_end = before + tiles
    length = share.range.length
    first_range = 0
    if config.EVEN_RANGES:
        first_range = even_index(before, share.range.total, share.num_ranges, num_reqs)
        last_range = even_index(request_end - 1, share.range.total, share.num_ranges, num_reqs)
        num_splits = last_range - first_range + 1
    elif config.V_KIND == KV_PLAIN:
        num_splits = (request_end - 1) // length - before // length + 1
    else:
        # Loads of fewer bytes hide less of the time between requests: divide rarely.
        num_splits = (split.count == tiles).to(gl.int32)
        if split.count < tiles:
            num_splits = (request_end - 1) // length - before // length + 1
    return num_splits, first_range


@gluon.jit
def _combine(call, share, split, num_splits, first_range, before):
    """Combine the splits of a request if this one has ended last.

    The CTA combines the splits in their order, so the result does not depend on which CTA that is.
    At most one request begins in a range and continues after it, so it can use the counter of the
    range's CTA.
    """
    config: gl.constexpr = call.config
    if config.EVEN_RANGES:
        first_cta = first_range * config.NUM_KV_HEADS + split.kv_head
    else:
        first_cta = before // share.range.length * config.NUM_KV_HEADS + split.kv_head
    arrived = call.partials.counters + _FIRST_COUNTER + first_cta
    # All warps have written their part of the split before the CTA counts itself.
    partition_barrier()
    if atomic_increment(arrived, "acq_rel") == num_splits - 1:
        gl.store(arrived, 0)
        if config.EVEN_RANGES:
            begin = even_begin(
                first_range, share.range.total, share.num_ranges, call.keys.batch.num_reqs
            )
            inside = before > begin
        else:
            inside = before % share.range.length > 0
        first_partial = 2 * first_cta + inside.to(gl.int32)
        combine_in_cta(call.outputs, call.partials, split, first_partial, num_splits, call.config)


@gluon.jit
def _store_rotated(outputs, split, rounded, config):
    """Rotate outputs [elements, rows], in the order of `value_lanes`, back and store them."""
    WIDTH: gl.constexpr = config.WIDTH_V
    GROUP: gl.constexpr = config.GROUP
    DTYPE: gl.constexpr = outputs.pointer.dtype.element_ty
    # A head in the lanes of one warp, so that its elements meet without shared memory.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, WIDTH // 32], [1, 32], [4, 1], [1, 0])
    x = gl.convert_layout(gl.permute(in_order(rounded, config.V_KIND), (1, 0)), LAYOUT)
    if config.HALF_ROWS:
        x = gl.convert_layout(first_half(x), LAYOUT, assert_trivial=True)
    elements = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    LEVELS: gl.constexpr = value_levels(WIDTH, config.DV)
    x = rotate_rows(x.to(gl.float32), elements, config.V_SIGNS, config.DV, LEVELS, True, DTYPE)
    row = gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    token = row // GROUP
    valid = (row < config.TILE_TOKENS * GROUP) & (token < split.query_len)
    offsets = outputs.offsets(split.start + token, split.kv_head * GROUP + row % GROUP)
    mask = valid[:, None] & (elements < config.DV)[None, :]
    gl.store(outputs.pointer + offsets[:, None] + elements[None, :], x, mask=mask)


@gluon.jit
def finish_split(call, worker, share, split, sums, value_scale, position, before, tiles):
    """Write the outputs of a request that has one split, else the partial results of this one; the
    split that ends last combines them, where no other kernel does.

    Args:
        call: `DecodeCall`.
        worker: `Worker`.
        share: `WorkerShare`.
        split: `Split` at `position` of the line.
        sums: its maxima, sums and accumulator.
        value_scale: factor of the values; over quantized caches.
        before: positions of the line before the request, which visits `tiles`.
    """
    config: gl.constexpr = call.config
    V_KIND: gl.constexpr = config.V_KIND
    GROUP: gl.constexpr = config.GROUP
    ROWS: gl.constexpr = config.ROWS
    WIDTH: gl.constexpr = config.WIDTH_V
    LAYOUT: gl.constexpr = score_layout(ROWS)
    partials = call.partials
    num_splits, first_range = _count_splits(
        share, split, before, tiles, call.keys.batch.num_reqs, call.config
    )
    row = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    token = row // GROUP
    head = split.kv_head * GROUP + row % GROUP
    valid = (row < config.TILE_TOKENS * GROUP) & (token < split.query_len)
    partial_index = 2 * share.worker + (position > share.range.begin).to(gl.int32)
    if not config.COMBINE_IN_KERNEL:
        if position == before:
            # The CTA with a request's first tile tells the combine kernel how many splits there are
            # and where the first partial result is.
            header = (partial_index << 15) | (token * GROUP << 9) | num_splits
            gl.store(
                partials.headers + (split.start + token) * config.NUM_KV_HEADS + split.kv_head,
                header,
                mask=valid & (row % GROUP == 0),
            )
    row_max = sums.row_max
    final_sum = sums.row_sum
    if ROWS <= 16:
        final_sum = column_sum(final_sum, worker.columns)
    if V_KIND != KV_PLAIN:
        value_scale = factor_without_keys(value_scale, final_sum == 0.0, config.V_SCALE_KIND)
    finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
    acc_scale = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(0, LAYOUT))
    if config.HAS_SINK:
        if num_splits == 1:
            # Otherwise the sink counts when the splits are combined (M4).
            sink = gl.load(call.outputs.sinks + head, mask=valid, other=0.0)
            finite_max, acc_scale, final_sum = add_sink(row_max, final_sum, sink)
    empty = final_sum == 0.0
    safe_sum = gl.where(empty, 1.0, final_sum)
    if V_KIND == KV_PLAIN:
        base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
    normalizer = acc_scale / safe_sum
    if V_KIND != KV_PLAIN:
        normalizer = normalizer * value_scale
    lanes = value_lanes(WIDTH, LAYOUT, V_KIND)
    result = joined_values(sums.acc, LAYOUT, V_KIND) * normalizer[None, :]
    mask = valid[None, :] & (lanes < config.DV)[:, None]
    if num_splits == 1:
        out = call.outputs.pointer
        offsets = call.outputs.offsets(split.start + token, head)
        rows = out + offsets[None, :] + lanes[:, None]
        if config.V_SIGNS:
            _store_rotated(call.outputs, split, result.to(out.dtype.element_ty), config)
        else:
            gl.store(rows, result.to(out.dtype.element_ty), mask=mask)
        if config.HAS_LSE:
            if V_KIND != KV_PLAIN:
                base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
            call.outputs.store_lses(split.start + token, head, base2, valid)
    else:
        place = partial_index * partials.rows
        places = partials.values + ((place + row) * config.DV)[None, :] + lanes[:, None]
        if config.EVEN_RANGES:
            # The split that ends last reads them, after more keys than L2 holds.
            store_in_l2(places, result, mask)
        else:
            gl.store(places, result, mask=mask)
        if V_KIND != KV_PLAIN:
            base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
        gl.store(partials.lses + place + row, base2, mask=valid)
        if config.COMBINE_IN_KERNEL:
            _combine(call, share, split, num_splits, first_range, before)
