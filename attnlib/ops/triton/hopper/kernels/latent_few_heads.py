"""The Hopper decode kernel over latents for up to 16 query rows (P10, M12).

Work distribution, partial results and their combination are those of `decode`. One warp loads tiles
of latents by TMA, in quarters, and four warps multiply them in place (`latent_columns`). As soon as
the last product with a quarter is complete, its slot is free for another one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from attnlib.ops.triton.hopper.kernels.column_softmax import (
    mask_columns,
    softmax_columns,
    store_weights,
)
from attnlib.ops.triton.hopper.kernels.compat import (
    launch_dependent_grids,
    opaque_zero,
    partition_barrier,
    store_in_l2,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.decode import UNALIGNED, UNSPECIALIZED, clear_tile
from attnlib.ops.triton.hopper.kernels.latent_columns import (
    COLUMNS,
    LATENTS,
    multiply_keys,
    multiply_values,
)
from attnlib.ops.triton.hopper.kernels.latent_decode import (
    finish_rows,
    load_part,
    store_queries,
    tile_blocks,
)
from attnlib.ops.triton.hopper.kernels.ranges import num_key_tiles, tile_range
from attnlib.ops.triton.hopper.kernels.schedule import visible_span, visited_tiles
from attnlib.ops.triton.hopper.kernels.softmax import score_factor, transform_scores
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["hopper_latent_few_heads_kernel"]

QUARTERS: gl.constexpr = gl.constexpr(4)
"""Parts of the value elements of a tile."""
SLOTS: gl.constexpr = gl.constexpr(11)
"""Quarters in shared memory: quarter q of tile t is in slot (4 * t + q) % 11."""
ROTARY_SLOTS: gl.constexpr = gl.constexpr(3)
"""Rotary parts in shared memory."""
IN_FLIGHT: gl.constexpr = gl.constexpr(4)
"""Quarters (64 KB) of a multiprocessor in flight, at most, beside the rotary parts. They suffice
for the rate of the memory. With more, some multiprocessors of an H200 read faster than others, and
a decode ends with the slowest: copies read 34.0 to 36.2 GB/s with 64 KB, 31.6 to 48.7 with 192 KB,
4.6 TB/s in all."""


@gluon.jit
def _store_quarter(
    out, partials, result, offsets, partial_offsets, valid, num_splits, START: gl.constexpr
):
    """Write some of the results [elements, rows]: the output of a single split, else a partial
    result."""
    lanes = START + gl.arange(0, result.shape[0], gl.SliceLayout(1, COLUMNS))
    mask = valid[None, :] & (lanes >= 0)[:, None]
    if num_splits == 1:
        gl.store(
            out + offsets[None, :] + lanes[:, None], result.to(out.dtype.element_ty), mask=mask
        )
    else:
        # The latents that stream through the L2 cache would evict them before they are combined.
        store_in_l2(partials + partial_offsets[None, :] + lanes[:, None], result, mask)


@gluon.jit
def _loader(
    value_desc, key_desc, query_start_loc, seq_lens, block_table, range_begin, range_end, request,
    before, left, right, chunk, num_blocks, stride_table, ring, k_rotary, full, empty,
    TILE_TOKENS: gl.constexpr, BLOCK_SIZE: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
):  # fmt: skip
    """Load all tiles of the CTA's range. One warp."""
    WIDTH: gl.constexpr = ring.shape[2]
    position = range_begin
    step = 0
    while position < range_end:
        tiles = num_key_tiles(
            query_start_loc, seq_lens, request, True, left, right, chunk, None, None, LATENTS,
            CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        request_end = before + tiles
        if position < request_end:
            skipped = position - before
            count = gl.minimum(tiles - skipped, range_end - position)
            start = gl.load(query_start_loc + request)
            query_len = gl.load(query_start_loc + request + 1) - start
            seq_len = gl.load(seq_lens + request)
            first_tile, _, _, _ = visited_tiles(
                0, query_len, seq_len, left, right, chunk, request, None, None, TILE_TOKENS,
                LATENTS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            first_tile += skipped
            table = block_table + request.to(gl.int64) * stride_table
            pages = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
            next_blocks = tile_blocks(table, pages, num_blocks, first_tile, BLOCK_SIZE)
            for i in range(0, count):
                tile = first_tile + i
                blocks = next_blocks
                # The blocks of the next tile are loaded before the waits for free slots.
                next_blocks = tile_blocks(table, pages, num_blocks, tile + 1, BLOCK_SIZE)
                inside = tile * LATENTS % BLOCK_SIZE
                for quarter in gl.static_range(QUARTERS):
                    use = step * QUARTERS + quarter
                    slot = use % SLOTS
                    mbarrier.wait(empty.index(slot), ((use // SLOTS) & 1) ^ 1)
                    if use >= IN_FLIGHT:
                        loaded = use - IN_FLIGHT
                        mbarrier.wait(full.index(loaded % SLOTS), (loaded // SLOTS) & 1)
                    load_part(
                        value_desc, blocks, inside, ring.index(slot), full.index(slot),
                        quarter * WIDTH)  # fmt: skip
                    if quarter == 0:
                        rotary = step % ROTARY_SLOTS
                        mbarrier.wait(empty.index(SLOTS + rotary), ((step // ROTARY_SLOTS) & 1) ^ 1)
                        load_part(
                            key_desc, blocks, inside, k_rotary.index(rotary),
                            full.index(SLOTS + rotary), QUARTERS * WIDTH)  # fmt: skip
                step += 1
            position += count
        if position >= request_end:
            before = request_end
            request += 1


@gluon.jit
def _multiply_quarter(scores, ring, q_tile, full, use, QUARTER: gl.constexpr):
    """Issue the product with a quarter of the elements once it is loaded."""
    slot = use % SLOTS
    mbarrier.wait(full.index(slot), (use // SLOTS) & 1)
    return multiply_keys(scores, ring.index(slot), q_tile.index(QUARTER), QUARTER > 0)


@gluon.jit
def _consumer(
    query, out, lse, sinks, query_start_loc, seq_lens, partials, partial_lses, split_headers,
    range_begin, range_end, per_range, request, before, scale, soft_cap, left, right, chunk, rows,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, q_tile, q_rotary, ring, k_rotary, p_tile,
    full, empty, GROUP: gl.constexpr, DV: gl.constexpr, TILE_TOKENS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, ROWS: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr, HAS_CAP: gl.constexpr,
    HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Compute the splits of the CTA's range. Four warps."""
    WIDTH: gl.constexpr = DV // QUARTERS
    CHECK_FIRST: gl.constexpr = HAS_LEFT or HAS_CHUNK
    ROW: gl.constexpr = gl.SliceLayout(0, COLUMNS)
    Q_ROW: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
    factor = score_factor(scale, soft_cap, HAS_CAP)
    row = gl.arange(0, ROWS, ROW)
    token = row // GROUP
    head = row % GROUP
    q_row = gl.arange(0, ROWS, Q_ROW)
    position = range_begin
    step = 0
    while position < range_end:
        tiles = num_key_tiles(
            query_start_loc, seq_lens, request, True, left, right, chunk, None, None, LATENTS,
            CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        request_end = before + tiles
        if position < request_end:
            # One split: tiles [skipped, skipped + count) of the request.
            skipped = position - before
            count = gl.minimum(tiles - skipped, range_end - position)
            start = gl.load(query_start_loc + request)
            query_len = gl.load(query_start_loc + request + 1) - start
            seq_len = gl.load(seq_lens + request)
            first_tile, left_end, right_begin, _ = visited_tiles(
                0, query_len, seq_len, left, right, chunk, request, None, None, TILE_TOKENS,
                LATENTS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            first_tile += skipped
            # All warps are done with the tiles and queries of the split before.
            partition_barrier()
            q_offsets = (start + q_row // GROUP).to(gl.int64) * stride_qt
            q_offsets += (q_row % GROUP).to(gl.int64) * stride_qh
            # The launcher checks 16-byte alignment; the shifts tell the compiler.
            q_offsets = (q_offsets >> 3) << 3
            q_valid = (q_row < TILE_TOKENS * GROUP) & (q_row // GROUP < query_len)
            for quarter in gl.static_range(QUARTERS):
                store_queries(q_tile.index(quarter), query, q_offsets, q_valid, quarter * WIDTH)
            store_queries(q_rotary.index(0), query, q_offsets, q_valid, DV)
            # WGMMA reads shared memory through the async proxy: fence, then wait for all warps.
            fence_async_shared()
            partition_barrier()

            row_first, row_last = visible_span(
                token + (seq_len - query_len), seq_len, left, right, chunk, CAUSAL, HAS_LEFT,
                HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
            # Sums of the weights of each latent of a tile; added up at the end.
            sums = gl.zeros([LATENTS, ROWS], gl.float32, COLUMNS)
            acc0 = gl.zeros([WIDTH, ROWS], gl.float32, COLUMNS)
            acc1 = gl.zeros([WIDTH, ROWS], gl.float32, COLUMNS)
            acc2 = gl.zeros([WIDTH, ROWS], gl.float32, COLUMNS)
            acc3 = gl.zeros([WIDTH, ROWS], gl.float32, COLUMNS)
            for i in range(0, count):
                tile = first_tile + i
                use = step * QUARTERS
                slot0 = use % SLOTS
                slot1 = (use + 1) % SLOTS
                slot2 = (use + 2) % SLOTS
                slot3 = (use + 3) % SLOTS
                scores = gl.zeros([LATENTS, ROWS], gl.float32, COLUMNS)
                scores = _multiply_quarter(scores, ring, q_tile, full, use, 0)
                rotary = step % ROTARY_SLOTS
                mbarrier.wait(full.index(SLOTS + rotary), (step // ROTARY_SLOTS) & 1)
                queries = q_rotary.index(opaque_zero())
                scores = multiply_keys(scores, k_rotary.index(rotary), queries, True)
                scores = _multiply_quarter(scores, ring, q_tile, full, use + 1, 1)
                scores = _multiply_quarter(scores, ring, q_tile, full, use + 2, 2)
                scores = _multiply_quarter(scores, ring, q_tile, full, use + 3, 3)
                scores = warpgroup_mma_wait(0, deps=[scores])
                mbarrier.arrive(empty.index(SLOTS + rotary), count=1)
                # TMA fills whole pages past the end with zeros, but not the rest of the last page,
                # which may hold anything (P5).
                past_end = seq_len - tile * LATENTS
                if (past_end < LATENTS) & (seq_len % BLOCK_SIZE != 0):
                    clear_tile(ring.index(slot0), past_end, 0)
                    clear_tile(ring.index(slot1), past_end, 0)
                    clear_tile(ring.index(slot2), past_end, 0)
                    clear_tile(ring.index(slot3), past_end, 0)
                scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
                if (tile >= right_begin) | (tile < left_end):
                    scores = mask_columns(scores, row_first, row_last, tile * LATENTS, CHECK_FIRST)
                weights, acc_scale, row_max = softmax_columns(
                    scores, factor, row_max, None, None, True, HAS_CAP
                )
                sums = sums * acc_scale[None, :] + weights
                acc0 = acc0 * acc_scale[None, :]
                acc1 = acc1 * acc_scale[None, :]
                acc2 = acc2 * acc_scale[None, :]
                acc3 = acc3 * acc_scale[None, :]
                store_weights(p_tile.index(0), weights, None, True, KV_PLAIN)
                weights_tile = p_tile.index(opaque_zero())
                acc0 = multiply_values(acc0, ring.index(slot0), weights_tile)
                acc1 = multiply_values(acc1, ring.index(slot1), weights_tile)
                acc2 = multiply_values(acc2, ring.index(slot2), weights_tile)
                acc3 = multiply_values(acc3, ring.index(slot3), weights_tile)
                acc0 = warpgroup_mma_wait(3, deps=[acc0])
                mbarrier.arrive(empty.index(slot0), count=1)
                acc1 = warpgroup_mma_wait(2, deps=[acc1])
                mbarrier.arrive(empty.index(slot1), count=1)
                acc2 = warpgroup_mma_wait(1, deps=[acc2])
                mbarrier.arrive(empty.index(slot2), count=1)
                acc3 = warpgroup_mma_wait(0, deps=[acc3])
                mbarrier.arrive(empty.index(slot3), count=1)
                step += 1
            row_sum = gl.sum(sums, 0)

            num_splits = (request_end - 1) // per_range - before // per_range + 1
            partial_index = 2 * gl.program_id(0) + (position > range_begin).to(gl.int32)
            valid = (row < TILE_TOKENS * GROUP) & (token < query_len)
            if skipped == 0:
                # The CTA with a request's first tile tells the combine kernel how many splits
                # there are and where the first partial result is.
                header = (partial_index << 15) | (token * GROUP << 9) | num_splits
                gl.store(split_headers + start + token, header, mask=valid & (head == 0))
            normalizer = finish_rows(
                row_max, row_sum, row, start, token, head, valid, num_splits, partial_index, rows,
                sinks, lse, stride_lt, partial_lses, HAS_SINK, HAS_LSE, True)[None, :]  # fmt: skip
            offsets = (start + token).to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
            partial_offsets = (partial_index * rows + row).to(gl.int64) * DV
            for quarter in gl.static_range(QUARTERS):
                _store_quarter(
                    out, partials, (acc0, acc1, acc2, acc3)[quarter] * normalizer, offsets,
                    partial_offsets, valid, num_splits, quarter * WIDTH)  # fmt: skip
            position += count
        if position >= request_end:
            before = request_end
            request += 1


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_latent_few_heads_kernel(
    key_desc, value_desc, query, out, lse, sinks, k_scale, v_scale, aux0, aux1, aux2, aux3,
    query_start_loc, seq_lens, block_table, partials, partial_lses, split_headers, counters, scale,
    soft_cap, left, right, chunk, num_reqs, num_tokens, num_blocks, rows, stride_qt, stride_qh,
    stride_ot, stride_oh, stride_lt, stride_table, rows0, columns0, rows1, columns1, rows2,
    columns2, rows3, columns3,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DV: gl.constexpr, ROTARY: gl.constexpr,
    TILE_TOKENS: gl.constexpr, BLOCK_SIZE: gl.constexpr, ROWS: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_CHUNK: gl.constexpr, HAS_CAP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
    LEAST: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One CTA of 5 warps. Grid: tile ranges. Arguments as in `hopper_latent_decode_kernel`.

    Args:
        value_desc: TMA descriptor of the values, in boxes of DV / 4 elements.
        ROWS: 16.
        NUM_KV_HEADS: 1.
        LEAST: tiles of a range, at least (`tile_range`).
    """
    WIDTH: gl.constexpr = DV // QUARTERS
    DTYPE: gl.constexpr = key_desc.dtype
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LATENTS, WIDTH], DTYPE)
    NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LATENTS, ROTARY], DTYPE)
    Q_WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], DTYPE)
    Q_NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROTARY], DTYPE)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, LATENTS], DTYPE)
    q_tile = gl.allocate_shared_memory(DTYPE, [QUARTERS, ROWS, WIDTH], Q_WIDE)
    q_rotary = gl.allocate_shared_memory(DTYPE, [1, ROWS, ROTARY], Q_NARROW)
    ring = gl.allocate_shared_memory(DTYPE, [SLOTS, LATENTS, WIDTH], WIDE)
    k_rotary = gl.allocate_shared_memory(DTYPE, [ROTARY_SLOTS, LATENTS, ROTARY], NARROW)
    p_tile = gl.allocate_shared_memory(DTYPE, [1, ROWS, LATENTS], WEIGHTS)
    BARRIERS: gl.constexpr = SLOTS + ROTARY_SLOTS
    full = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(BARRIERS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    # Makes the initialized barriers visible to TMA.
    fence_async_shared()

    # PDL: the previous kernel may have written the queries, the cache or the lengths. The combine
    # kernel may start; it waits for this kernel's results by itself.
    wait_on_dependent_grids()
    launch_dependent_grids()
    range_begin, range_end, per_range, request, before = tile_range(
        query_start_loc, seq_lens, left, right, chunk, num_reqs, gl.program_id(0),
        gl.num_programs(0), None, None, LATENTS, CAUSAL, HAS_LEFT, HAS_RIGHT,
        HAS_CHUNK, 0, LEAST)  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer, (
                query, out, lse, sinks, query_start_loc, seq_lens, partials, partial_lses,
                split_headers, range_begin, range_end, per_range, request, before, scale, soft_cap,
                left, right, chunk, rows, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt,
                q_tile, q_rotary, ring, k_rotary, p_tile, full, empty, GROUP, DV,
                TILE_TOKENS, BLOCK_SIZE, ROWS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP,
                HAS_SINK, HAS_LSE)),
            (_loader, (
                value_desc, key_desc, query_start_loc, seq_lens, block_table, range_begin,
                range_end, request, before, left, right, chunk, num_blocks, stride_table, ring,
                k_rotary, full, empty, TILE_TOKENS, BLOCK_SIZE, CAUSAL, HAS_LEFT, HAS_RIGHT,
                HAS_CHUNK)),
        ],
        [1],
        [LOADER_REGISTERS],
    )  # fmt: skip
