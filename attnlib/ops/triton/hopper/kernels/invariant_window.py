"""The batch-invariant Hopper decode of layers whose queries see few keys (M15): a CTA for each
request and KV head.

Requests are not divided, and no second kernel follows. The four warps of a CTA issue the loads of
all their tiles, as far as stages are free, and then multiply. Without loader warps and with few
registers, several CTAs run on a multiprocessor: one waits for memory while another one multiplies,
and the CTAs of the next kernel may be waiting already (PDL).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.combine import clear_rows
from attnlib.ops.triton.hopper.kernels.compat import (
    Value,
    aggregate,
    launch_dependent_grids,
    partition_barrier,
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
from attnlib.ops.triton.hopper.kernels.decode_queries import load_plain_queries
from attnlib.ops.triton.hopper.kernels.decode_worker import allocate_worker
from attnlib.ops.triton.hopper.kernels.schedule import Batch, KeyTiles, Mask
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
from attnlib.ops.triton.hopper.kernels.segments import segment_bits, segment_tiles
from attnlib.ops.triton.hopper.kernels.softmax import score_factor
from attnlib.ops.triton.hopper.kernels.tma_load import RequestPages

__all__ = ["invariant_window_kernel"]


@aggregate
class _Loads:
    """The keys and values of a request as `RequestPages`, and the page of its first tile."""

    keys: Value
    values: Value
    first_page: Value

    @gluon.jit
    def issue(self, worker, step, tile):
        """Issue the loads of the keys and values of a tile."""
        self.keys.load(worker.keys, step, tile, self.first_page)
        self.values.load(worker.values, step, tile, self.first_page)


@gluon.jit
def _add_tiles(worker, split, rows, slots, totals, loads, LAYOUT: gl.constexpr, config):
    """Return `Totals` of all tiles of a request, from the last to the first."""
    ROWS: gl.constexpr = config.ROWS
    WIDTH_V: gl.constexpr = config.WIDTH_V
    begin = split.visited.begin
    end = split.visited.end
    acc = gl.zeros([WIDTH_V, ROWS], gl.float32, LAYOUT)
    row_max, sums = first_weights(worker, rows, 0, end - 1, split.seq_len, LAYOUT, config)
    segment = Segment(acc, row_max, sums)
    # The tiles of a window are few, so each is masked.
    for step in range(1, end - begin):
        segment, totals = segment_step(
            worker, segment, totals, rows, slots, step, end - 1 - step, True, config
        )
        # The stages of the tile before are free.
        later = step - 1 + config.STAGES
        if later < end - begin:
            loads.issue(worker, later, end - 1 - later)
    acc = last_values(worker, segment.acc, end - begin, config)
    segment = Segment(acc, segment.row_max, segment.sums)
    return add_segment(totals, segment, rows.valid, rows.bits, rows, slots, config)


@gluon.jit(do_not_specialize=[*UNSPECIALIZED, "slots"], do_not_specialize_on_alignment=UNALIGNED)
def invariant_window_kernel(
    key_desc, value_desc, query, out, lse, sinks, k_scale, v_scale, aux0, aux1, aux2, aux3,
    query_start_loc, seq_lens, block_table, partials, partial_lses, split_headers, counters, scale,
    soft_cap, left, right, chunk, num_reqs, num_tokens, num_blocks, rows, stride_qt, stride_qh,
    stride_ot, stride_oh, stride_lt, stride_table, slots, rows0, columns0, rows1, columns1, rows2,
    columns2, rows3, columns3, CONFIG: gl.constexpr,
):  # fmt: skip
    """One CTA of 4 warps. Grid: requests * NUM_KV_HEADS, at least NUM_KV_HEADS.

    Arguments are those of `invariant_decode_kernel`, of which the workspace is not used.
    """
    NUM_KV_HEADS: gl.constexpr = CONFIG.NUM_KV_HEADS
    GROUP: gl.constexpr = CONFIG.GROUP
    ROWS: gl.constexpr = CONFIG.ROWS
    WIDTH_V: gl.constexpr = CONFIG.WIDTH_V
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    BLOCK_SIZE: gl.constexpr = CONFIG.BLOCK_SIZE
    LAYOUT: gl.constexpr = score_layout(ROWS)
    mask = Mask(
        left, right, chunk, CONFIG.CAUSAL, CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, CONFIG.HAS_CHUNK
    )
    batch = Batch(query_start_loc, seq_lens, block_table, num_reqs, num_blocks, stride_table)
    keys = KeyTiles(batch, mask, None, None, CONFIG.TILE_TOKENS, BLOCK_N)
    queries = Queries(query, stride_qt, stride_qh, num_tokens)
    outputs = Outputs(out, lse, sinks, stride_ot, stride_oh, stride_lt)
    worker = allocate_worker(key_desc.dtype, None, None, None, CONFIG)
    # Makes the initialized barriers visible to TMA and to all warps.
    fence_async_shared()
    partition_barrier()

    # PDL: the previous kernel may have written the queries, the cache or the lengths.
    wait_on_dependent_grids()
    # The next kernel may start; it waits for this kernel by itself.
    launch_dependent_grids()
    number = gl.program_id(0)
    request = number // NUM_KV_HEADS
    kv_head = number % NUM_KV_HEADS
    # Without requests, the grid has CTAs of a request 0 that does not exist.
    start, query_len, seq_len = batch.lengths(request, request < num_reqs)
    num_rows = batch.num_rows()
    if query_len > 0:
        columns = columns_of(kv_head, LAYOUT, CONFIG)
        valid = (columns.row < CONFIG.TILE_TOKENS * GROUP) & (columns.token < query_len)
        split = Split(request, start, query_len, seq_len, kv_head, None, None, None)
        # These loads are issued before the table is read, whose latency covers theirs.
        loaded = load_plain_queries(queries, split, ROWS, CONFIG.WIDTH, CONFIG)
        sink = load_sinks(sinks, columns.head, valid, CONFIG.HAS_SINK)
        visited = keys.visited(0, query_len, seq_len, request)
        begin = visited.begin
        end = visited.end
        split = Split(request, start, query_len, seq_len, kv_head, None, None, visited)
        table = batch.table(request)
        pages = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
        loads = _Loads(
            RequestPages(key_desc, table, pages, num_blocks, kv_head, BLOCK_SIZE, "nhd"),
            RequestPages(value_desc, table, pages, num_blocks, kv_head, BLOCK_SIZE, "nhd"),
            begin * BLOCK_N // BLOCK_SIZE,
        )
        for back in range(0, gl.minimum(end - begin, CONFIG.STAGES)):
            loads.issue(worker, back, end - 1 - back)
        worker.q_tile.store(loaded)
        fence_async_shared()
        partition_barrier()

        factor = score_factor(scale, soft_cap, CONFIG.HAS_CAP)
        position = columns.token + (seq_len - query_len)
        first, last = mask.span(position, seq_len)
        totals = no_totals(ROWS, WIDTH_V, LAYOUT)
        least_tiles = segment_tiles(seq_len - query_len, WIDTH_V, BLOCK_N, GROUP)
        bits = segment_bits(position, WIDTH_V, BLOCK_N, GROUP)
        query_rows = ColumnRows(columns, valid, first, last, bits, factor, soft_cap)
        unused = Partials(partials, partial_lses, None, None, rows)
        slots_unused = SegmentSlots(False, 0, 0, unused, begin, least_tiles)
        if end > begin:
            totals = _add_tiles(
                worker, split, query_rows, slots_unused, totals, loads, LAYOUT, CONFIG
            )
        store_outputs(outputs, totals, query_rows, sink, start, CONFIG)
    if num_rows < num_tokens:
        # No other kernel clears the rows after the last request.
        clear_rows(outputs, batch, num_tokens, number, gl.num_programs(0), CONFIG)
