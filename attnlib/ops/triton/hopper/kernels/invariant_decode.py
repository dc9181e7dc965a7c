"""The batch-invariant Hopper decode (M15): `decode.py` with sums over segments of keys.

Work distribution: the key tiles of all requests form one line, request after request and each from
its last tile to its first. The line is cut into equal ranges, and each cut is moved to the end of
its segment. Each range has NUM_KV_HEADS consecutive CTAs, one per KV head.

A CTA adds the segments of a request that begins in its range. If all are in the range, it writes
the output; else one partial result, in slot `slots`. The segments of a request that begins in an
earlier range are written one by one, each in the slot of its number. `invariant_split.py` adds
them in the order of the line. So the order of all additions is that of the line, wherever it is
cut.

Where queries see few keys, `invariant_window.py` computes whole requests instead.

Warps, rings and barriers are those of `hopper_decode_kernel`.
"""

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
    UNALIGNED,
    UNSPECIALIZED,
    Outputs,
    Partials,
    Queries,
    Split,
)
from attnlib.ops.triton.hopper.kernels.decode_products import score_layout
from attnlib.ops.triton.hopper.kernels.decode_queries import load_plain_queries, prefetch_queries
from attnlib.ops.triton.hopper.kernels.decode_worker import allocate_worker
from attnlib.ops.triton.hopper.kernels.ranges import worker_range
from attnlib.ops.triton.hopper.kernels.schedule import Batch, KeyTiles, Mask
from attnlib.ops.triton.hopper.kernels.segment_columns import (
    ColumnRows,
    Segment,
    SegmentSlots,
    add_segment,
    columns_of,
    first_weights,
    last_values,
    load_sinks,
    no_totals,
    segment_step,
    store_outputs,
)
from attnlib.ops.triton.hopper.kernels.segments import segment_bits, segment_range
from attnlib.ops.triton.hopper.kernels.softmax import score_factor
from attnlib.ops.triton.hopper.kernels.tma_load import RequestPages

__all__ = ["invariant_decode_kernel"]


@aggregate
class _Call:
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
def _tiles_between(position, stop, before, request_end, visited, tiles):
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


@gluon.jit
def _loader(cache, keys, ring, config):
    """Load the key or value tiles of the CTA's segments into a ring, backwards. One warp.

    Args:
        cache: TMA descriptor.
        keys: `KeyTiles` of the batch.
        ring: `Ring`.
    """
    NUM_KV_HEADS: gl.constexpr = config.NUM_KV_HEADS
    BLOCK_N: gl.constexpr = config.BLOCK_N
    BLOCK_SIZE: gl.constexpr = config.BLOCK_SIZE
    batch = keys.batch
    # PDL: the previous kernel may have written the cache, the lengths or the block table.
    wait_on_dependent_grids()
    worker = gl.program_id(0)
    own = worker_range(keys, worker // NUM_KV_HEADS, gl.num_programs(0) // NUM_KV_HEADS)
    kv_head = worker % NUM_KV_HEADS
    position = own.begin
    request = own.request
    before = own.before
    step = 0
    while position < own.end:
        request_end = before + keys.count(request, True)
        # Requests without queries have no tiles and are skipped.
        if position < request_end:
            _, query_len, seq_len = batch.lengths(request, True)
            visited = keys.visited(0, query_len, seq_len, request)
            table = batch.table(request)
            pages = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
            cached = RequestPages(cache, table, pages, batch.num_blocks, kv_head, BLOCK_SIZE, "nhd")
            stop = gl.minimum(own.end, request_end)
            _, most_tiles = segment_range(query_len, seq_len, config.WIDTH_V, BLOCK_N, config.GROUP)
            bottom, top = _tiles_between(position, stop, before, request_end, visited, most_tiles)
            for back in range(0, top - bottom):
                tile = top - 1 - back
                cached.load(ring, step, tile, tile * BLOCK_N // BLOCK_SIZE - 32)
                step += 1
            position = stop
        before = request_end
        request += 1


@gluon.jit
def _write_header(call, split, rows, bottom, before, length, most_tiles):
    """Tell the kernel that adds partial results where they are; see there.

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
def _consumer(call, worker):
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
            bottom, top = _tiles_between(position, stop, before, request_end, visited, most_tiles)
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


@gluon.jit(do_not_specialize=[*UNSPECIALIZED, "slots"], do_not_specialize_on_alignment=UNALIGNED)
def invariant_decode_kernel(
    key_desc, value_desc, query, out, lse, sinks, k_scale, v_scale, aux0, aux1, aux2, aux3,
    query_start_loc, seq_lens, block_table, partials, partial_lses, split_headers, counters, scale,
    soft_cap, left, right, chunk, num_reqs, num_tokens, num_blocks, rows, stride_qt, stride_qh,
    stride_ot, stride_oh, stride_lt, stride_table, slots, rows0, columns0, rows1, columns1, rows2,
    columns2, rows3, columns3, CONFIG: gl.constexpr,
):  # fmt: skip
    """One CTA of 4 + 1 + 1 warps. Grid: ranges of segments * NUM_KV_HEADS, all resident.

    Runtime arguments are those of `hopper_decode_kernel` and `slots`.

    Args:
        partials: sums of values, [grid, slots + 1, rows, DV] float32.
        partial_lses: their row maxima and then their sums of weights, [grid, slots + 1, rows] each.
        split_headers: int32 [tokens, KV heads, 8] for `invariant_split_kernel`.
        slots: upper bound of the segments of a request.
        CONFIG: `DecodeConfig`.
    """
    mask = Mask(
        left, right, chunk, CONFIG.CAUSAL, CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, CONFIG.HAS_CHUNK
    )
    batch = Batch(query_start_loc, seq_lens, block_table, num_reqs, num_blocks, stride_table)
    keys = KeyTiles(batch, mask, None, None, CONFIG.TILE_TOKENS, CONFIG.BLOCK_N)
    call = _Call(
        keys=keys,
        queries=Queries(query, stride_qt, stride_qh, num_tokens),
        outputs=Outputs(out, lse, sinks, stride_ot, stride_oh, stride_lt),
        partials=Partials(partials, partial_lses, split_headers, None, rows),
        slots=slots,
        scale=scale,
        soft_cap=soft_cap,
        config=CONFIG,
    )
    worker = allocate_worker(key_desc.dtype, None, None, None, CONFIG)
    # Makes the initialized barriers visible to TMA.
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (call, worker)),
            (_loader, (key_desc, keys, worker.keys, CONFIG)),
            (_loader, (value_desc, keys, worker.values, CONFIG)),
        ],
        [1, 1],
        # Registers per thread of the two loader warps.
        [48, 48],
    )
