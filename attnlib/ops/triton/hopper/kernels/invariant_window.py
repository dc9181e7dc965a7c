"""The batch-invariant Hopper decode of layers whose queries see few keys (M15): a CTA for each
request and KV head.

Requests are not divided, and no second kernel follows. The four warps of a CTA issue the loads of
all their tiles, as far as stages are free, and then multiply. Without loader warps and with few
registers, several CTAs run on a multiprocessor: one waits for memory while another one multiplies,
and the CTAs of the next kernel may be waiting already (PDL).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnlib.ops.triton.hopper.kernels.cache_tiles import allocate_rings
from attnlib.ops.triton.hopper.kernels.combine import clear_rows
from attnlib.ops.triton.hopper.kernels.compat import (
    launch_dependent_grids,
    partition_barrier,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.decode import UNALIGNED, UNSPECIALIZED
from attnlib.ops.triton.hopper.kernels.schedule import load_lengths, visible_span, visited_tiles
from attnlib.ops.triton.hopper.kernels.segment_columns import (
    add_column_segment,
    first_weights,
    last_values,
    load_query_rows,
    load_sinks,
    segment_step,
    store_column_rows,
)
from attnlib.ops.triton.hopper.kernels.segments import segment_bits, segment_tiles
from attnlib.ops.triton.hopper.kernels.softmax import score_factor
from attnlib.ops.triton.hopper.kernels.tma_load import load_tile

__all__ = ["invariant_window_kernel"]


@gluon.jit(
    do_not_specialize=[*UNSPECIALIZED, "slots"], do_not_specialize_on_alignment=UNALIGNED
)  # fmt: skip
def invariant_window_kernel(
    key_desc, value_desc, query, out, lse, sinks, k_scale, v_scale, aux0, aux1, aux2, aux3,
    query_start_loc, seq_lens, block_table, partials, partial_lses, split_headers, counters, scale,
    soft_cap, left, right, chunk, num_reqs, num_tokens, num_blocks, rows, stride_qt, stride_qh,
    stride_ot, stride_oh, stride_lt, stride_table, slots, rows0, columns0, rows1, columns1, rows2,
    columns2, rows3, columns3, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, WIDTH: gl.constexpr, WIDTH_V: gl.constexpr, TILE_TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """One CTA of 4 warps. Grid: requests * NUM_KV_HEADS, at least NUM_KV_HEADS.

    Runtime arguments are those of `invariant_decode_kernel`, of which the workspace is not used.
    """
    DTYPE: gl.constexpr = key_desc.dtype
    # [keys or elements of a value, rows]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], DTYPE)
    P_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_N], DTYPE)
    CHECK_LEFT: gl.constexpr = HAS_LEFT or HAS_CHUNK
    q_tile = gl.allocate_shared_memory(DTYPE, [ROWS, WIDTH], Q_SHARED)
    p_tile = gl.allocate_shared_memory(DTYPE, [ROWS, BLOCK_N], P_SHARED)
    k_ring, v_ring = allocate_rings(DTYPE, STAGES, BLOCK_N, WIDTH, WIDTH_V, BLOCK_SIZE, False)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # full: the expect and the bytes of the TMA loads. empty: the arrival after the products.
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=1)
    # Makes the initialized barriers visible to TMA and to all warps.
    fence_async_shared()
    partition_barrier()

    # PDL: the previous kernel may have written the queries, the cache or the lengths.
    wait_on_dependent_grids()
    # The next kernel may start; it waits for this kernel by itself.
    launch_dependent_grids()
    worker = gl.program_id(0)
    request = worker // NUM_KV_HEADS
    kv_head = worker % NUM_KV_HEADS
    # Without requests, the grid has CTAs of a request 0 that does not exist.
    start, query_len, seq_len = load_lengths(query_start_loc, seq_lens, request, request < num_reqs)
    num_rows = gl.load(query_start_loc + num_reqs)
    if query_len > 0:
        row = gl.arange(0, ROWS, COLUMN)
        token = row // GROUP
        head = kv_head * GROUP + row % GROUP
        lanes = gl.arange(0, WIDTH_V, gl.SliceLayout(1, LAYOUT))
        valid = (row < TILE_TOKENS * GROUP) & (token < query_len)
        # These loads are issued before the table is read, whose latency covers theirs.
        q = load_query_rows(
            query, start, query_len, kv_head, stride_qt, stride_qh, GROUP, TILE_TOKENS, D, ROWS,
            WIDTH)  # fmt: skip
        sink = load_sinks(sinks, head, valid, HAS_SINK)
        begin, left_end, right_begin, end = visited_tiles(
            0, query_len, seq_len, left, right, chunk, request, None, None, TILE_TOKENS, BLOCK_N,
            CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        table = block_table + request.to(gl.int64) * stride_table
        pages = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
        first_page = begin * BLOCK_N // BLOCK_SIZE
        for back in range(0, gl.minimum(end - begin, STAGES)):
            _load_tiles(
                key_desc, value_desc, table, pages, num_blocks, kv_head, end - 1 - back, first_page,
                k_ring, v_ring, k_full, k_empty, v_full, v_empty, back, BLOCK_SIZE,
                STAGES)  # fmt: skip
        q_tile.store(q)
        fence_async_shared()
        partition_barrier()

        factor = score_factor(scale, soft_cap, HAS_CAP)
        row_first, row_last = visible_span(
            token + (seq_len - query_len), seq_len, left, right, chunk, CAUSAL, HAS_LEFT,
            HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        total_max = gl.full([ROWS], float("-inf"), gl.float32, COLUMN)
        total_sum = gl.full([ROWS], 0.0, gl.float32, COLUMN)
        total = gl.zeros([WIDTH_V, ROWS], gl.float32, LAYOUT)
        least_tiles = segment_tiles(seq_len - query_len, WIDTH_V, BLOCK_N, GROUP)
        row_bits = segment_bits(token + (seq_len - query_len), WIDTH_V, BLOCK_N, GROUP)
        if end > begin:
            acc = gl.zeros([WIDTH_V, ROWS], gl.float32, LAYOUT)
            row_max, sums = first_weights(
                q_tile, p_tile, k_ring, v_ring, k_full, k_empty, v_full, 0, end - 1, seq_len,
                row_first, row_last, factor, soft_cap, BLOCK_SIZE, STAGES, CHECK_LEFT, HAS_CAP,
                LAYOUT)  # fmt: skip
            # All tiles have a mask: hardly any is entirely visible.
            for step in range(1, end - begin):
                acc, row_max, sums, total, total_max, total_sum = segment_step(
                    q_tile, p_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc,
                    row_max, sums, total, total_max, total_sum, step, end - 1 - step, begin,
                    least_tiles, row_bits, valid, False, 0, rows, 0, partials, partial_lses, row,
                    lanes, row_first, row_last, factor, soft_cap, DV, STAGES, True, CHECK_LEFT,
                    HAS_CAP)  # fmt: skip
                # The stages of the tile before are free.
                later = step - 1 + STAGES
                if later < end - begin:
                    _load_tiles(
                        key_desc, value_desc, table, pages, num_blocks, kv_head, end - 1 - later,
                        first_page, k_ring, v_ring, k_full, k_empty, v_full, v_empty, later,
                        BLOCK_SIZE, STAGES)  # fmt: skip
            acc = last_values(p_tile, v_ring, v_full, v_empty, acc, end - begin, STAGES)
            total, total_max, total_sum = add_column_segment(
                total, total_max, total_sum, acc, row_max, sums, valid, row_bits, False, 0, rows,
                0, partials, partial_lses, row, lanes, DV)  # fmt: skip
        store_column_rows(
            out, lse, total, total_max, total_sum, sink, start, token, head, valid, lanes,
            stride_ot, stride_oh, stride_lt, DV, HAS_SINK, HAS_LSE)  # fmt: skip
    if num_rows < num_tokens:
        # No other kernel clears the rows after the last request.
        clear_rows(
            out, lse, query_start_loc, worker, gl.num_programs(0), num_reqs, num_tokens, stride_ot,
            stride_oh, stride_lt, NUM_KV_HEADS, GROUP, DV, WIDTH_V, ROWS, HAS_LSE)  # fmt: skip


@gluon.jit
def _load_tiles(
    keys, values, table, pages, num_blocks, kv_head, tile, first_page, k_ring, v_ring, k_full,
    k_empty, v_full, v_empty, step, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Issue the loads of the keys and values of a tile."""
    load_tile(
        keys, table, pages, num_blocks, kv_head, tile, first_page, k_ring, k_full, k_empty, step,
        BLOCK_SIZE, STAGES, "nhd")  # fmt: skip
    load_tile(
        values, table, pages, num_blocks, kv_head, tile, first_page, v_ring, v_full, v_empty, step,
        BLOCK_SIZE, STAGES, "nhd")  # fmt: skip
