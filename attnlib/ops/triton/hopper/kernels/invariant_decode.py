"""The batch-invariant Hopper decode (M15): `decode.py` with sums over segments of keys.

Work distribution: the key tiles of all requests form one line, request after request and each from
its last tile to its first. The line is cut into equal ranges, and each cut is moved to the end of
its segment. Each range has NUM_KV_HEADS consecutive CTAs, one per KV head.

A CTA adds the segments of a request that begins in its range. If all are in the range, it writes
the output; else one partial result, in slot `slots`. The segments of a request that begins in an
earlier range are written one by one, each in the slot of its number. `invariant_split_kernel` adds
them in the order of the line. So the order of all additions is that of the line, wherever it is
cut.

Where queries see few keys, `invariant_window.py` computes whole requests instead.

Warps, rings and barriers are those of `hopper_decode_kernel`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnlib.ops.triton.hopper.kernels.cache_tiles import allocate_rings
from attnlib.ops.triton.hopper.kernels.compat import (
    exp2,
    launch_dependent_grids,
    partition_barrier,
    store_in_l2,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.decode import UNALIGNED, UNSPECIALIZED, prefetch_queries
from attnlib.ops.triton.hopper.kernels.ranges import num_key_tiles, tile_range
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
from attnlib.ops.triton.hopper.kernels.segments import segment_bits, segment_range
from attnlib.ops.triton.hopper.kernels.softmax import LN2, LOG2E, score_factor
from attnlib.ops.triton.hopper.kernels.tma_load import load_tile

__all__ = ["invariant_decode_kernel", "invariant_split_kernel"]


@gluon.jit
def _part(position, stop, before, request_end, begin, end, tiles):
    """Return (bottom, top) of the tiles of a request that lie between two positions of the line.

    Args:
        position, stop: of the line, within the request.
        before, request_end: positions where the request begins and ends.
        begin, end: tiles that the request visits.
        tiles: of the longest segments of its queries, whose ends are ends of all; a power of 2.
    """
    top = gl.maximum((end - (position - before)) & -tiles, begin)
    bottom = gl.maximum((end - (stop - before)) & -tiles, begin)
    return gl.where(stop == request_end, begin, bottom), gl.where(position == before, end, top)


@gluon.jit
def _loader(
    cache, query_start_loc, seq_lens, block_table, left, right, chunk, num_reqs, num_blocks,
    stride_table, ring, full, empty, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    WIDTH_V: gl.constexpr, TILE_TOKENS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_CHUNK: gl.constexpr,
):  # fmt: skip
    """Load the key or value tiles of the CTA's segments into a ring, backwards. One warp."""
    BLOCK_N: gl.constexpr = ring.shape[1]
    # PDL: the previous kernel may have written the cache, the lengths or the block table.
    wait_on_dependent_grids()
    worker = gl.program_id(0)
    position, range_end, _, request, before = tile_range(
        query_start_loc, seq_lens, left, right, chunk, num_reqs, worker // NUM_KV_HEADS,
        gl.num_programs(0) // NUM_KV_HEADS, None, None, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT,
        HAS_CHUNK)  # fmt: skip
    kv_head = worker % NUM_KV_HEADS
    step = 0
    while position < range_end:
        request_end = before + num_key_tiles(
            query_start_loc, seq_lens, request, True, left, right, chunk, None, None, BLOCK_N,
            CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        # Requests without queries have no tiles and are skipped.
        if position < request_end:
            _, query_len, seq_len = load_lengths(query_start_loc, seq_lens, request, True)
            begin, _, _, end = visited_tiles(
                0, query_len, seq_len, left, right, chunk, request, None, None, TILE_TOKENS,
                BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            table = block_table + request.to(gl.int64) * stride_table
            pages = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
            stop = gl.minimum(range_end, request_end)
            _, most_tiles = segment_range(query_len, seq_len, WIDTH_V, BLOCK_N, GROUP)
            bottom, top = _part(position, stop, before, request_end, begin, end, most_tiles)
            for back in range(0, top - bottom):
                tile = top - 1 - back
                load_tile(
                    cache, table, pages, num_blocks, kv_head, tile,
                    tile * BLOCK_N // BLOCK_SIZE - 32, ring, full, empty, step, BLOCK_SIZE,
                    STAGES, "nhd")  # fmt: skip
                step += 1
            position = stop
        before = request_end
        request += 1


@gluon.jit
def _write_header(
    split_headers, bottom, begin, end, before, start, token, kv_head, worker, per_range, row_bits,
    most_tiles, first_head, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Tell the kernel that adds partial results where they are; see there."""
    first_segment = begin >> row_bits
    header = split_headers + ((start + token) * NUM_KV_HEADS + kv_head) * 8
    gl.store(header, (bottom >> row_bits) - first_segment, mask=first_head)
    if bottom > begin:
        line_end = before + end
        gl.store(header + 1, first_segment, mask=first_head)
        gl.store(header + 2, token * GROUP, mask=first_head)
        gl.store(header + 3, worker + token * 0, mask=first_head)
        gl.store(header + 4, line_end + token * 0, mask=first_head)
        gl.store(header + 5, per_range + token * 0, mask=first_head)
        gl.store(header + 6, 1 << row_bits, mask=first_head)
        gl.store(header + 7, most_tiles + token * 0, mask=first_head)


@gluon.jit
def _consumer(
    query, out, lse, sinks, query_start_loc, seq_lens, partials, partial_maxima, split_headers,
    scale, soft_cap, left, right, chunk, num_reqs, num_tokens, rows, slots, stride_qt, stride_qh,
    stride_ot, stride_oh, stride_lt, q_tile, p_tile, k_ring, v_ring, k_full, k_empty, v_full,
    v_empty, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    TILE_TOKENS: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_CHUNK: gl.constexpr, HAS_CAP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Multiply, add segments, and write outputs or partial results. One warpgroup."""
    ROWS: gl.constexpr = q_tile.shape[0]
    WIDTH: gl.constexpr = q_tile.shape[1]
    WIDTH_V: gl.constexpr = v_ring.shape[2]
    BLOCK_N: gl.constexpr = p_tile.shape[1]
    # [keys or elements of a value, rows]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    CHECK_LEFT: gl.constexpr = HAS_LEFT or HAS_CHUNK
    factor = score_factor(scale, soft_cap, HAS_CAP)
    # PDL: the previous kernel may have written the queries, the cache or the lengths.
    wait_on_dependent_grids()
    # The kernel that adds partial results may start; it waits for this kernel by itself.
    launch_dependent_grids()
    worker = gl.program_id(0)
    range_begin, range_end, per_range, request, before = tile_range(
        query_start_loc, seq_lens, left, right, chunk, num_reqs, worker // NUM_KV_HEADS,
        gl.num_programs(0) // NUM_KV_HEADS, None, None, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT,
        HAS_CHUNK)  # fmt: skip
    kv_head = worker % NUM_KV_HEADS
    num_partials = gl.num_programs(0) * (slots + 1) * rows
    first_partial = worker * (slots + 1)
    row = gl.arange(0, ROWS, COLUMN)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    lanes = gl.arange(0, WIDTH_V, gl.SliceLayout(1, LAYOUT))
    position = range_begin
    step = 0
    while position < range_end:
        request_end = before + num_key_tiles(
            query_start_loc, seq_lens, request, True, left, right, chunk, None, None, BLOCK_N,
            CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        if position < request_end:
            stop = gl.minimum(range_end, request_end)
            continued = position > before
            start, query_len, seq_len = load_lengths(query_start_loc, seq_lens, request, True)
            begin, left_end, right_begin, end = visited_tiles(
                0, query_len, seq_len, left, right, chunk, request, None, None, TILE_TOKENS,
                BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            least_tiles, most_tiles = segment_range(query_len, seq_len, WIDTH_V, BLOCK_N, GROUP)
            bottom, top = _part(position, stop, before, request_end, begin, end, most_tiles)

            q = load_query_rows(
                query, start, query_len, kv_head, stride_qt, stride_qh, GROUP, TILE_TOKENS, D,
                ROWS, WIDTH)  # fmt: skip
            # All warps are done with the previous queries before they are overwritten.
            partition_barrier()
            q_tile.store(q)
            fence_async_shared()
            partition_barrier()

            if stop < range_end:
                prefetch_queries(
                    query, start + query_len, kv_head, num_tokens, stride_qt, stride_qh, GROUP, D,
                    ROWS)  # fmt: skip

            valid = (row < TILE_TOKENS * GROUP) & (token < query_len)
            row_first, row_last = visible_span(
                token + (seq_len - query_len), seq_len, left, right, chunk, CAUSAL, HAS_LEFT,
                HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            total_max = gl.full([ROWS], float("-inf"), gl.float32, COLUMN)
            total_sum = gl.full([ROWS], 0.0, gl.float32, COLUMN)
            total = gl.zeros([WIDTH_V, ROWS], gl.float32, LAYOUT)
            row_bits = segment_bits(token + (seq_len - query_len), WIDTH_V, BLOCK_N, GROUP)
            if top > bottom:
                # Prologue: the last tile has no values of an earlier tile to multiply by.
                acc = gl.zeros([WIDTH_V, ROWS], gl.float32, LAYOUT)
                row_max, sums = first_weights(
                    q_tile, p_tile, k_ring, v_ring, k_full, k_empty, v_full, step, top - 1,
                    seq_len, row_first, row_last, factor, soft_cap, BLOCK_SIZE, STAGES, CHECK_LEFT,
                    HAS_CAP, LAYOUT)  # fmt: skip
                step += 1

                # Main loop. Only tiles at the ends of the visible keys need a mask.
                for back in range(0, top - 1 - bottom):
                    tile = top - 2 - back
                    if (tile >= right_begin) | (tile < left_end):
                        acc, row_max, sums, total, total_max, total_sum = segment_step(
                            q_tile, p_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc,
                            row_max, sums, total, total_max, total_sum, step, tile, begin,
                            least_tiles, row_bits, valid, continued, first_partial, rows,
                            num_partials, partials, partial_maxima, row, lanes, row_first,
                            row_last, factor, soft_cap, DV, STAGES, True, CHECK_LEFT,
                            HAS_CAP)  # fmt: skip
                    else:
                        acc, row_max, sums, total, total_max, total_sum = segment_step(
                            q_tile, p_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc,
                            row_max, sums, total, total_max, total_sum, step, tile, begin,
                            least_tiles, row_bits, valid, continued, first_partial, rows,
                            num_partials, partials, partial_maxima, row, lanes, row_first,
                            row_last, factor, soft_cap, DV, STAGES, False, CHECK_LEFT,
                            HAS_CAP)  # fmt: skip
                    step += 1

                # Epilogue: the product with the values of the last tile.
                acc = last_values(p_tile, v_ring, v_full, v_empty, acc, step, STAGES)
                slot = (bottom >> row_bits) - (begin >> row_bits)
                total, total_max, total_sum = add_column_segment(
                    total, total_max, total_sum, acc, row_max, sums, valid, slot, continued,
                    first_partial, rows, num_partials, partials, partial_maxima, row, lanes,
                    DV)  # fmt: skip

            if not continued:
                _write_header(
                    split_headers, bottom, begin, end, before, start, token, kv_head, worker,
                    per_range, row_bits, most_tiles, valid & (row % GROUP == 0), NUM_KV_HEADS,
                    GROUP)  # fmt: skip
                if bottom > begin:
                    index = (first_partial + slots) * rows + row
                    store_in_l2(
                        partials + (index * DV)[None, :] + lanes[:, None],
                        total,
                        valid[None, :] & (lanes < DV)[:, None],
                    )
                    gl.store(partial_maxima + index, total_max, mask=valid)
                    gl.store(partial_maxima + num_partials + index, total_sum, mask=valid)
                else:
                    sink = load_sinks(sinks, head, valid, HAS_SINK)
                    store_column_rows(
                        out, lse, total, total_max, total_sum, sink, start, token, head, valid,
                        lanes, stride_ot, stride_oh, stride_lt, DV, HAS_SINK, HAS_LSE)  # fmt: skip
            position = stop
        if position >= request_end:
            before = request_end
            request += 1


@gluon.jit(
    do_not_specialize=[*UNSPECIALIZED, "slots"], do_not_specialize_on_alignment=UNALIGNED
)  # fmt: skip
def invariant_decode_kernel(
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
    """One CTA of 4 + 1 + 1 warps. Grid: ranges of segments * NUM_KV_HEADS, all resident.

    Runtime arguments are those of `hopper_decode_kernel` and `slots`.

    Args:
        partials: sums of values, [grid, slots + 1, rows, DV] float32.
        partial_lses: their row maxima and then their sums of weights, [grid, slots + 1, rows] each.
        split_headers: int32 [tokens, KV heads, 8] for `invariant_split_kernel`.
        slots: upper bound of the segments of a request.
    """
    DTYPE: gl.constexpr = key_desc.dtype
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], DTYPE)
    P_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_N], DTYPE)
    q_tile = gl.allocate_shared_memory(DTYPE, [ROWS, WIDTH], Q_SHARED)
    p_tile = gl.allocate_shared_memory(DTYPE, [ROWS, BLOCK_N], P_SHARED)
    k_ring, v_ring = allocate_rings(DTYPE, STAGES, BLOCK_N, WIDTH, WIDTH_V, BLOCK_SIZE, False)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # full: the loader's expect and the bytes of its TMA loads. empty: the consumer's arrival.
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=1)
    # Makes the initialized barriers visible to TMA.
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (
                query, out, lse, sinks, query_start_loc, seq_lens, partials, partial_lses,
                split_headers, scale, soft_cap, left, right, chunk, num_reqs, num_tokens, rows,
                slots, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, q_tile, p_tile,
                k_ring, v_ring, k_full, k_empty, v_full, v_empty, NUM_KV_HEADS, GROUP, D, DV,
                TILE_TOKENS, BLOCK_SIZE, STAGES, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP,
                HAS_SINK, HAS_LSE)),
            (_loader, (
                key_desc, query_start_loc, seq_lens, block_table, left, right, chunk, num_reqs,
                num_blocks, stride_table, k_ring, k_full, k_empty, NUM_KV_HEADS, GROUP,
                WIDTH_V, TILE_TOKENS, BLOCK_SIZE, STAGES, CAUSAL, HAS_LEFT, HAS_RIGHT,
                HAS_CHUNK)),
            (_loader, (
                value_desc, query_start_loc, seq_lens, block_table, left, right, chunk, num_reqs,
                num_blocks, stride_table, v_ring, v_full, v_empty, NUM_KV_HEADS, GROUP,
                WIDTH_V, TILE_TOKENS, BLOCK_SIZE, STAGES, CAUSAL, HAS_LEFT, HAS_RIGHT,
                HAS_CHUNK)),
        ],
        [1, 1],
        # Registers per thread of the two loader warps.
        [48, 48],
    )  # fmt: skip


@gluon.jit
def _divide(number, divisor, reciprocal):
    """Return number // divisor, in fewer instructions than an integer division."""
    quotient = (number.to(gl.float32) * reciprocal).to(gl.int32)
    rest = number - quotient * divisor
    quotient = gl.where(rest < 0, quotient - 1, quotient)
    return gl.where(rest >= divisor, quotient + 1, quotient)


@gluon.jit
def _maximum(left, right):
    return gl.maximum(left, right)


@gluon.jit
def _shared_value(memory, number: gl.constexpr):
    """Return an element of a vector in shared memory, to all lanes."""
    value = memory.slice(number, 1).load(gl.BlockedLayout([1], [32], [1], [0]))
    return gl.sum(value, 0)


@gluon.jit(
    do_not_specialize=[
        "num_reqs", "rows", "slots", "grid", "stride_ot", "stride_oh", "stride_lt",
    ],
    do_not_specialize_on_alignment=[
        "sinks", "lse", "query_start_loc", "split_headers", "partial_lses",
    ],
)  # fmt: skip
def invariant_split_kernel(
    partials, partial_lses, split_headers, query_start_loc, sinks, out, lse, num_reqs, rows, slots,
    grid, stride_ot, stride_oh, stride_lt, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    DV: gl.constexpr, HEADS: gl.constexpr, COLUMNS: gl.constexpr, STEP: gl.constexpr,
    HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Add the partial results of a row in the order of the line: COLUMNS of the values of HEADS
    query heads of a group, one after the other. One warp.

    Grid: (tokens, query heads / HEADS, blocks of COLUMNS). Rows after the last request become 0
    (M6).

    `split_headers` has for each token and KV head: the segments to be added, 0 if the output is
    written; the number of the first visited segment; the token's first row; the CTA that began the
    request; the position of the line that tile 0 has; the positions of a range; the tiles of a
    segment, and of the longest ones of the request.

    Each of the first STEP lanes has one segment of a round and computes its address and factors,
    which depend on the maxima only. Then all lanes add the values of one segment after the other.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    WIDE: gl.constexpr = gl.BlockedLayout([COLUMNS // 32], [32], [1], [0])
    # PDL: started early; nothing may be read before the decode kernel has ended.
    wait_on_dependent_grids()
    launch_dependent_grids()
    token = gl.program_id(0)
    first_head = gl.program_id(1) * HEADS
    columns = gl.program_id(2) * COLUMNS + gl.arange(0, COLUMNS, WIDE)
    inside = columns < DV
    kv_head = first_head // GROUP
    header = split_headers + (token * NUM_KV_HEADS + kv_head) * 8
    num_rows = gl.load(query_start_loc + num_reqs)
    rest = gl.load(header)
    first_segment = gl.load(header + 1)
    first_row = gl.load(header + 2)
    worker = gl.load(header + 3)
    line_end = gl.load(header + 4)
    per_range = gl.load(header + 5)
    tiles = gl.load(header + 6)
    most_tiles = gl.load(header + 7)
    if token >= num_rows:
        for head in range(first_head, first_head + HEADS):
            offset = token.to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
            zeros = gl.zeros([COLUMNS], out.dtype.element_ty, WIDE)
            gl.store(out + offset + columns, zeros, mask=inside)
            if HAS_LSE:
                gl.store(lse + token.to(gl.int64) * stride_lt + head, float("-inf"))
    # With no segment, the decode kernel has written the output.
    heads = gl.where((token < num_rows) & (rest > 0), HEADS, 0)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    indices = gl.allocate_shared_memory(gl.int32, [STEP], VECTOR)
    olds = gl.allocate_shared_memory(gl.float32, [STEP], VECTOR)
    news = gl.allocate_shared_memory(gl.float32, [STEP], VECTOR)
    addends = gl.allocate_shared_memory(gl.float32, [STEP], VECTOR)
    reciprocal = 1.0 / per_range.to(gl.float32)
    maxima = partial_lses
    sums = partial_lses + grid * (slots + 1) * rows
    lane = gl.arange(0, STEP, LANES)
    for head in range(first_head, first_head + heads):
        row = first_row + head % GROUP
        output = out + token.to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh + columns
        own = (worker * (slots + 1) + slots) * rows + row
        total = gl.load(partials + own * DV + columns, mask=inside, other=0.0)
        total_max = gl.load(maxima + own)
        total_sum = gl.load(sums + own)
        for base in range(0, rest, STEP):
            # The segment of a lane and the one that is added before it.
            slot = rest - 1 - base - lane
            live = slot >= 0
            # The range that has the segment's end, moved to the end of a longest one.
            end = ((first_segment + slot + 1) * tiles + most_tiles - 1) & -most_tiles
            section = _divide(line_end - end, per_range, reciprocal)
            index = ((section * NUM_KV_HEADS + kv_head) * (slots + 1) + slot) * rows + row
            end = ((first_segment + slot + 2) * tiles + most_tiles - 1) & -most_tiles
            section = _divide(line_end - end, per_range, reciprocal)
            before = ((section * NUM_KV_HEADS + kv_head) * (slots + 1) + slot + 1) * rows + row
            # Segments past the last one have no key and leave the sums unchanged.
            part_max = gl.load(maxima + index, mask=live, other=float("-inf"))
            part_sum = gl.load(sums + index, mask=live, other=0.0)
            # A lane after the last segment has the maximum of all: its factor must not be 0.
            is_before = (slot >= -1) & (lane > 0)
            max_before = gl.load(maxima + before, mask=is_before, other=float("-inf"))
            indices.store(index)
            # All loads of a round are issued before the first result is used.
            values = ()
            for i in gl.static_range(STEP):
                pointers = partials + _shared_value(indices, i) * DV + columns
                mask = inside & (base + i < rest)
                values = values + (gl.load(pointers, mask=mask, other=0.0),)
            # `segments.fold_sums`, of all segments of the round at once.
            max_before = gl.where(lane == 0, total_max, max_before)
            max_before = gl.associative_scan(max_before, 0, _maximum)
            new_max = gl.maximum(max_before, part_max)
            finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
            new = exp2(part_max - finite_max)
            olds.store(exp2(max_before - finite_max))
            news.store(new)
            addends.store(part_sum * new)
            for i in gl.static_range(STEP):
                old = _shared_value(olds, i)
                more = values[i] * _shared_value(news, i) + 0.0
                total = gl.fma(total, gl.full([COLUMNS], old, gl.float32, WIDE), more)
                total_sum = gl.fma(total_sum, old, _shared_value(addends, i))
            total_max = gl.maximum(total_max, gl.max(part_max, 0))
        finite_max = gl.where(total_max == float("-inf"), 0.0, total_max)
        acc_scale = 1.0
        if HAS_SINK:
            # The sink counts in the denominator, once (M4).
            sink = gl.load(sinks + head).to(gl.float32) * LOG2E
            new_max = gl.maximum(total_max, sink)
            finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
            acc_scale = exp2(total_max - finite_max)
            total_sum = gl.fma(total_sum, acc_scale, exp2(sink - finite_max))
        empty = total_sum == 0.0
        safe_sum = gl.where(empty, 1.0, total_sum)
        gl.store(output, (total * (acc_scale / safe_sum)).to(out.dtype.element_ty), mask=inside)
        if HAS_LSE:
            if gl.program_id(2) == 0:
                base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
                gl.store(lse + token.to(gl.int64) * stride_lt + head, base2 * LN2)
