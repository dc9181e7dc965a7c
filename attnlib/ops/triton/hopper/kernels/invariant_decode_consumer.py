"""The consumer of the batch-invariant Hopper decode."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.compat import (
    Value,
    aggregate,
    launch_dependent_grids,
    partition_barrier,
    store_in_l2,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.decode_call import (
    Split,
)
from attnlib.ops.triton.hopper.kernels.decode_products import score_layout
from attnlib.ops.triton.hopper.kernels.decode_queries import load_plain_queries, prefetch_queries
from attnlib.ops.triton.hopper.kernels.ranges import worker_range
from attnlib.ops.triton.hopper.kernels.segment_columns import (
    first_weights,
    last_values,
    segment_step,
)
from attnlib.ops.triton.hopper.kernels.segment_rows import (
    ColumnRows,
    Segment,
    SegmentSlots,
    add_segment,
    columns_of,
    load_sinks,
    no_totals,
    store_outputs,
)
from attnlib.ops.triton.hopper.kernels.segments import segment_bits, segment_range
from attnlib.ops.triton.hopper.kernels.softmax import score_factor

__all__ = [
    "InvariantCall",
    "invariant_consumer",
    "tiles_between",
]


@aggregate
class InvariantCall:
    """Tensors and numbers of the call, as objects of `decode_call`.

    `slots` is an upper bound of the segments of a request. `config` is a `DecodeConfig`.
    """

    keys: Value
    queries: Value
    outputs: Value
    partials: Value
    slots: Value
    scale: Value
    soft_cap: Value
    config: Value


@gluon.jit
def _write_header(call, split, rows, bottom, before, length, most_tiles):
    """Write the header from which `invariant_split_kernel` finds the partial results of a request.

    Args:
        bottom: first tile that this CTA has added; those before it follow as partial results.
        before: positions of the line before the request.
        length: positions of a range.
        most_tiles: tiles of the longest segments of the request.
    """
    config: gl.constexpr = call.config
    GROUP: gl.constexpr = config.GROUP
    token = rows.columns.token
    mask = rows.valid & (rows.columns.row % GROUP == 0)
    begin = split.visited.begin
    first_segment = begin >> rows.bits
    places = (split.start + token) * config.NUM_KV_HEADS + split.kv_head
    header = call.partials.headers + places * 8
    gl.store(header, (bottom >> rows.bits) - first_segment, mask=mask)
    if bottom > begin:
        line_end = before + split.visited.end
        gl.store(header + 1, first_segment, mask=mask)
        gl.store(header + 2, token * GROUP, mask=mask)
        gl.store(header + 3, gl.program_id(0) + token * 0, mask=mask)
        gl.store(header + 4, line_end + token * 0, mask=mask)
        gl.store(header + 5, length + token * 0, mask=mask)
        gl.store(header + 6, 1 << rows.bits, mask=mask)
        gl.store(header + 7, most_tiles + token * 0, mask=mask)


@gluon.jit
def _prepare_rows(call, worker, split, columns, factor, stop, range_end):
    """Bring the queries of a request to shared memory, and return its `ColumnRows`.

    `stop` is the end of the request's part of the range, which ends at `range_end`.
    """
    config: gl.constexpr = call.config
    GROUP: gl.constexpr = config.GROUP
    ROWS: gl.constexpr = config.ROWS
    token = columns.token
    queries = load_plain_queries(call.queries, split, ROWS, config.WIDTH, call.config)
    # All warps are done with the previous queries before they are overwritten.
    partition_barrier()
    worker.q_tile.store(queries)
    fence_async_shared()
    partition_barrier()
    if stop < range_end:
        next_token = split.start + split.query_len
        prefetch_queries(call.queries, next_token, split.kv_head, GROUP, config.D, ROWS)
    valid = (columns.row < config.TILE_TOKENS * GROUP) & (token < split.query_len)
    positions = token + (split.seq_len - split.query_len)
    first, last = call.keys.mask.span(positions, split.seq_len)
    bits = segment_bits(positions, config.WIDTH_V, config.BLOCK_N, GROUP)
    return ColumnRows(columns, valid, first, last, bits, factor, call.soft_cap)


@gluon.jit
def _add_tiles(call, worker, split, rows, slots, step, totals, bottom, top):
    """Return `Totals` after the tiles [bottom, top) of a request, from the last to the first; or
    write their segments to their slots."""
    config: gl.constexpr = call.config
    ROWS: gl.constexpr = config.ROWS
    WIDTH_V: gl.constexpr = config.WIDTH_V
    LAYOUT: gl.constexpr = score_layout(ROWS)
    # Prologue: the last tile has no values of an earlier tile to multiply by.
    acc = gl.zeros([WIDTH_V, ROWS], gl.float32, LAYOUT)
    row_max, sums = first_weights(worker, rows, step, top - 1, split.seq_len, LAYOUT, call.config)
    segment = Segment(acc, row_max, sums)
    step += 1
    # Main loop. Only tiles at the ends of the visible keys need a mask.
    for back in range(0, top - 1 - bottom):
        tile = top - 2 - back
        if split.visited.needs_mask(tile):
            segment, totals = segment_step(
                worker, segment, totals, rows, slots, step, tile, True, call.config
            )
        else:
            segment, totals = segment_step(
                worker, segment, totals, rows, slots, step, tile, False, call.config
            )
        step += 1
    # Epilogue: the product with the values of the last tile.
    acc = last_values(worker, segment.acc, step, call.config)
    segment = Segment(acc, segment.row_max, segment.sums)
    slot = (bottom >> rows.bits) - (split.visited.begin >> rows.bits)
    totals = add_segment(totals, segment, rows.valid, slot, rows, slots, call.config)
    return totals, step


@gluon.jit
def _store_totals(call, split, rows, totals, bottom, num_partials, first_partial):
    """Write the outputs of a request all of whose segments have been added, else the partial result
    of the CTA that has begun it."""
    config: gl.constexpr = call.config
    partials = call.partials
    if bottom > split.visited.begin:
        index = (first_partial + call.slots) * partials.rows + rows.columns.row
        store_in_l2(
            partials.values + (index * config.DV)[None, :] + rows.columns.lanes[:, None],
            totals.values,
            rows.valid[None, :] & (rows.columns.lanes < config.DV)[:, None],
        )
        gl.store(partials.lses + index, totals.row_max, mask=rows.valid)
        gl.store(partials.lses + num_partials + index, totals.row_sum, mask=rows.valid)
    else:
        sink = load_sinks(call.outputs.sinks, rows.columns.head, rows.valid, config.HAS_SINK)
        store_outputs(call.outputs, totals, rows, sink, split.start, call.config)


@gluon.jit
def invariant_consumer(call, worker):
    """Multiply, add segments, and write outputs or partial results. One warpgroup."""
    config: gl.constexpr = call.config
    NUM_KV_HEADS: gl.constexpr = config.NUM_KV_HEADS
    GROUP: gl.constexpr = config.GROUP
    ROWS: gl.constexpr = config.ROWS
    WIDTH_V: gl.constexpr = config.WIDTH_V
    keys = call.keys
    factor = score_factor(call.scale, call.soft_cap, config.HAS_CAP)
    # PDL: the previous kernel may have written the queries, the cache or the lengths.
    wait_on_dependent_grids()
    # The kernel that adds partial results may start; it waits for this kernel by itself.
    launch_dependent_grids()
    number = gl.program_id(0)
    own = worker_range(keys, number // NUM_KV_HEADS, gl.num_programs(0) // NUM_KV_HEADS)
    kv_head = number % NUM_KV_HEADS
    num_partials = gl.num_programs(0) * (call.slots + 1) * call.partials.rows
    first_partial = number * (call.slots + 1)
    columns = columns_of(kv_head, score_layout(ROWS), call.config)
    request = own.request
    before = own.before
    position = own.begin
    step = 0
    while position < own.end:
        request_end = before + keys.count(request, True)
        if position < request_end:
            stop = gl.minimum(own.end, request_end)
            continued = position > before
            start, query_len, seq_len = keys.batch.lengths(request, True)
            visited = keys.visited(0, query_len, seq_len, request)
            least_tiles, most_tiles = segment_range(
                query_len, seq_len, WIDTH_V, config.BLOCK_N, GROUP
            )
            bottom, top = tiles_between(position, stop, before, request_end, visited, most_tiles)
            split = Split(request, start, query_len, seq_len, kv_head, None, None, visited)
            slots = SegmentSlots(
                continued, first_partial, num_partials, call.partials, visited.begin, least_tiles
            )
            rows = _prepare_rows(call, worker, split, columns, factor, stop, own.end)
            totals = no_totals(ROWS, WIDTH_V, score_layout(ROWS))
            if top > bottom:
                totals, step = _add_tiles(
                    call, worker, split, rows, slots, step, totals, bottom, top
                )
            if not continued:
                _write_header(call, split, rows, bottom, before, own.length, most_tiles)
                _store_totals(call, split, rows, totals, bottom, num_partials, first_partial)
            position = stop
        if position >= request_end:
            before = request_end
            request += 1


@gluon.jit
def tiles_between(position, stop, before, request_end, visited, tiles):
    """Return (bottom, top) of the tiles of a request that lie between two positions of the line.

    Args:
        position, stop: of the line, within the request.
        before, request_end: positions where the request begins and ends.
        visited: `VisitedTiles` of the request.
        tiles: of the longest segments of its queries, whose ends are ends of all; a power of 2.
    """
    begin = visited.begin
    end = visited.end
    top = gl.maximum((end - (position - before)) & -tiles, begin)
    bottom = gl.maximum((end - (stop - before)) & -tiles, begin)
    return gl.where(stop == request_end, begin, bottom), gl.where(position == before, end, top)
