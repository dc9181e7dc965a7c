"""The Hopper decode kernel over latents: values are a prefix of the keys (P10, M12).

Work distribution, partial results and their combination are those of `decode`: blocks of up to 64
query heads take the place of KV heads, and all of them read the one KV head of the cache.

A CTA has the two consumer warpgroups of `latent_tiles` and a warp that loads latents by TMA, in
three parts: two halves of the values and the rotary part. Ring positions continue across splits,
so the first latents of a split are loaded while the one before it ends.

The shared memory holds two tiles, so that a tile is requested only when its predecessor is used up.
Where several CTAs read the same latents, one of them prefetches each tile into the L2 cache, one
tile before. Prefetches of other batches were slower, as were those of blocks of 16 tokens.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnlib.ops.triton.hopper.kernels.compat import (
    consumers_sync,
    launch_dependent_grids,
    load_box,
    partition_barrier,
    prefetch_l2,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.decode import UNALIGNED, UNSPECIALIZED
from attnlib.ops.triton.hopper.kernels.latent_tiles import (
    HIGH,
    LOADS,
    LOW,
    PARTS,
    ROTARY_PART,
    TILE,
    attend_both,
    attend_other,
    attend_own,
    half_load,
    total_sum,
)
from attnlib.ops.triton.hopper.kernels.ranges import num_key_tiles, tile_range
from attnlib.ops.triton.hopper.kernels.schedule import visible_span, visited_tiles
from attnlib.ops.triton.hopper.kernels.softmax import LN2, add_sink, score_factor

__all__ = [
    "PAIR", "finish_rows", "hopper_latent_decode_kernel", "load_part", "store_queries",
    "tile_blocks",
]  # fmt: skip

PAIR: gl.constexpr = gl.constexpr(128)
"""Latents of a pair of tiles, the unit of the work distribution."""


@gluon.jit
def finish_rows(
    row_max, row_sum, row, start, token, head, valid, num_splits, partial_index, rows, sinks, lse,
    stride_lt, partial_lses, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """Return the factors of a split's accumulators. STORE: write its LSEs, too, to `lse` if it is
    the only split of its request, else base-2 LSEs to partial result `partial_index`."""
    finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
    factor = gl.full([row_max.shape[0]], 1.0, gl.float32, row_max.type.layout)
    if HAS_SINK:
        if num_splits == 1:
            # Otherwise the sink counts when the splits are combined (M4).
            finite_max, factor, row_sum = add_sink(
                row_max, row_sum, gl.load(sinks + head, mask=valid, other=0.0)
            )
    empty = row_sum == 0.0
    safe_sum = gl.where(empty, 1.0, row_sum)
    if STORE:
        base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
        if num_splits == 1:
            if HAS_LSE:
                gl.store(
                    lse + (start + token).to(gl.int64) * stride_lt + head, base2 * LN2, mask=valid
                )
        else:
            gl.store(partial_lses + partial_index * rows + row, base2, mask=valid)
    return factor / safe_sum


@gluon.jit
def tile_blocks(table, pages, num_blocks, tile, BLOCK_SIZE: gl.constexpr):
    """Return the blocks of a tile of latents, one for each box.

    Pages past the last one become block `num_blocks`, which is out of bounds: TMA fills their boxes
    with zeros.
    """
    BOX: gl.constexpr = min(BLOCK_SIZE, TILE)
    blocks = ()
    for box in gl.static_range(TILE // BOX):
        column = (tile * TILE + box * BOX) // BLOCK_SIZE
        blocks = blocks + (gl.load(table + column, mask=column < pages, other=num_blocks),)
    return blocks


@gluon.jit
def load_part(descriptor, blocks, inside, target, full, START: gl.constexpr):
    """Issue the TMA loads of elements START and following of a tile.

    Args:
        blocks: of the tile (`tile_blocks`).
        inside: offset of the tile in its block; 0 for blocks smaller than a tile.
    """
    BOXES: gl.constexpr = len(blocks)
    BOX: gl.constexpr = TILE // BOXES
    mbarrier.expect(full, TILE * target.shape[1] * 2)
    for box in gl.static_range(BOXES):
        load_box(descriptor, [blocks[box], 0, inside, START], full, target.slice(box * BOX, BOX, 0))


@gluon.jit
def _prefetch_tile(latents, blocks, inside, num_blocks, stride_latents, ROW: gl.constexpr):
    """Prefetch a tile of one block into the L2 cache; arguments as in `load_part`.

    Args:
        latents: pointer to the cache.
        stride_latents: elements from block to block; 0 if latents are not adjacent, and nothing is
            prefetched.
        ROW: elements of a latent.
    """
    if (stride_latents > 0) & (blocks[0] < num_blocks):
        start = blocks[0].to(gl.int64) * stride_latents + inside * ROW
        prefetch_l2(latents + start, TILE * ROW * 2)


@gluon.jit
def _load_half(
    descriptor, blocks, inside, target, k_full, TILE_INDEX: gl.constexpr, PART: gl.constexpr
):
    """Issue the TMA loads of half PART of the value elements of a tile, in two loads."""
    QUARTER: gl.constexpr = target.shape[1] // 2
    for quarter in gl.static_range(2):
        load_part(
            descriptor, blocks, inside, target.slice(quarter * QUARTER, QUARTER, 1),
            k_full.index(TILE_INDEX * LOADS + half_load(PART, quarter)),
            half_load(PART, quarter) * QUARTER - QUARTER,
        )  # fmt: skip


@gluon.jit
def _loader(
    value_desc, key_desc, latents, query_start_loc, seq_lens, block_table, range_begin, range_end,
    request, before, head_block, left, right, chunk, num_blocks, stride_table, stride_latents,
    k_low, k_high, k_rotary, k_full, k_empty, NUM_KV_HEADS: gl.constexpr,
    TILE_TOKENS: gl.constexpr, BLOCK_SIZE: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
):  # fmt: skip
    """Load all pairs of tiles of the CTA's range. One warp."""
    HALF: gl.constexpr = k_low.shape[2]
    ROW: gl.constexpr = 2 * HALF + k_rotary.shape[2]
    PREFETCH: gl.constexpr = NUM_KV_HEADS > 1 and BLOCK_SIZE >= TILE
    position = range_begin
    step = 0
    while position < range_end:
        tiles = num_key_tiles(
            query_start_loc, seq_lens, request, True, left, right, chunk, None, None, PAIR, CAUSAL,
            HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        request_end = before + tiles
        if position < request_end:
            skipped = position - before
            count = gl.minimum(tiles - skipped, range_end - position)
            start = gl.load(query_start_loc + request)
            query_len = gl.load(query_start_loc + request + 1) - start
            seq_len = gl.load(seq_lens + request)
            first_pair, _, _, _ = visited_tiles(
                0, query_len, seq_len, left, right, chunk, request, None, None, TILE_TOKENS, PAIR,
                CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            first_pair += skipped
            table = block_table + request.to(gl.int64) * stride_table
            pages = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
            for i in range(0, count):
                # Blocks are loaded before the waits for free parts.
                number = 2 * (first_pair + i)
                blocks_a = tile_blocks(table, pages, num_blocks, number, BLOCK_SIZE)
                blocks_b = tile_blocks(table, pages, num_blocks, number + 1, BLOCK_SIZE)
                inside_a = number * TILE % BLOCK_SIZE
                inside_b = (number + 1) * TILE % BLOCK_SIZE
                if PREFETCH and head_block == 0:
                    _prefetch_tile(latents, blocks_b, inside_b, num_blocks, stride_latents, ROW)
                # The parity is inverted, so that the first use of a part does not wait.
                parity = (step & 1) ^ 1
                mbarrier.wait(k_empty.index(ROTARY_PART), parity)
                load_part(
                    key_desc, blocks_a, inside_a, k_rotary.index(0), k_full.index(0), 2 * HALF
                )
                mbarrier.wait(k_empty.index(LOW), parity)
                _load_half(value_desc, blocks_a, inside_a, k_low.index(0), k_full, 0, LOW)
                mbarrier.wait(k_empty.index(HIGH), parity)
                _load_half(value_desc, blocks_a, inside_a, k_high.index(0), k_full, 0, HIGH)
                if PREFETCH and (head_block == 0) & (i + 1 < count):
                    blocks = tile_blocks(table, pages, num_blocks, number + 2, BLOCK_SIZE)
                    inside = (number + 2) * TILE % BLOCK_SIZE
                    _prefetch_tile(latents, blocks, inside, num_blocks, stride_latents, ROW)
                # The half that consumer 1 multiplies by its own weights first.
                mbarrier.wait(k_empty.index(PARTS + ROTARY_PART), parity)
                load_part(
                    key_desc, blocks_b, inside_b, k_rotary.index(1), k_full.index(LOADS), 2 * HALF
                )
                mbarrier.wait(k_empty.index(PARTS + HIGH), parity)
                _load_half(value_desc, blocks_b, inside_b, k_high.index(1), k_full, 1, HIGH)
                mbarrier.wait(k_empty.index(PARTS + LOW), parity)
                _load_half(value_desc, blocks_b, inside_b, k_low.index(1), k_full, 1, LOW)
                step += 1
            position += count
        if position >= request_end:
            before = request_end
            request += 1


@gluon.jit
def store_queries(target, query, offsets, valid, START: gl.constexpr):
    """Copy the elements of the queries from START on to a tile in shared memory."""
    ROWS: gl.constexpr = target.shape[0]
    WIDTH: gl.constexpr = target.shape[1]
    LANES: gl.constexpr = min(32, WIDTH // 8)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = START + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    starts = gl.convert_layout(offsets, gl.SliceLayout(1, layout))
    mask = gl.convert_layout(valid.to(gl.int32), gl.SliceLayout(1, layout)) != 0
    content = gl.load(
        query + starts[:, None] + columns[None, :],
        mask=mask[:, None] & (rows[:, None] < ROWS),
        other=0.0,
    )
    target.store(content)


@gluon.jit
def _clear_rows_from(tile, valid):
    """Set the rows of a tile from `valid` on to 0: a page may hold anything past the sequence's
    end, and 0 * NaN is NaN (P5)."""
    ROWS: gl.constexpr = tile.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    content = tile.load(layout)
    tile.store(gl.where(rows[:, None] < valid, content, 0.0))


@gluon.jit
def _clear_tile(k_low, k_high, k_full, valid, parity, TILE_INDEX: gl.constexpr):
    """Clear the rows of a tile from `valid` on once it is loaded."""
    for load in gl.static_range(1, LOADS):
        mbarrier.wait(k_full.index(TILE_INDEX * LOADS + load), parity)
    _clear_rows_from(k_low.index(TILE_INDEX), valid)
    _clear_rows_from(k_high.index(TILE_INDEX), valid)
    fence_async_shared()
    partition_barrier()


@gluon.jit
def _store_half(
    out, partials, acc, factor, offsets, partial_offsets, valid, num_splits, START: gl.constexpr,
):  # fmt: skip
    """Write one half of the results: the output of a single split, else a partial result."""
    LAYOUT: gl.constexpr = acc.type.layout
    lanes = START + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    result = acc * factor[:, None]
    mask = valid[:, None] & (lanes >= 0)[None, :]
    if num_splits == 1:
        gl.store(
            out + offsets[:, None] + lanes[None, :], result.to(out.dtype.element_ty), mask=mask
        )
    else:
        gl.store(partials + partial_offsets[:, None] + lanes[None, :], result, mask=mask)


@gluon.jit
def _consumer(
    query, out, lse, sinks, query_start_loc, seq_lens, partials, partial_lses, split_headers,
    range_begin, range_end, per_range, request, before, head_block, scale, soft_cap, left, right,
    chunk, rows, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, q_low, q_high, q_rotary,
    k_low, k_high, k_rotary, p_tile, maxima, scales, sums, k_full, k_empty, p_ready, summed,
    CONSUMER: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DV: gl.constexpr,
    TILE_TOKENS: gl.constexpr, BLOCK_SIZE: gl.constexpr, ROWS: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Compute one half of the value elements of all splits of the CTA's range."""
    HALF: gl.constexpr = DV // 2
    # [rows, keys] and [rows, elements of a half].
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, VALUES)
    factor = score_factor(scale, soft_cap, HAS_CAP)
    row = gl.arange(0, ROWS, ROW)
    token = row // GROUP
    head = head_block * GROUP + row % GROUP
    columns = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    position = range_begin
    step = 0
    splits = 0
    while position < range_end:
        tiles = num_key_tiles(
            query_start_loc, seq_lens, request, True, left, right, chunk, None, None, PAIR, CAUSAL,
            HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        request_end = before + tiles
        if position < request_end:
            # One split: pairs of tiles [skipped, skipped + count) of the request.
            skipped = position - before
            count = gl.minimum(tiles - skipped, range_end - position)
            start = gl.load(query_start_loc + request)
            query_len = gl.load(query_start_loc + request + 1) - start
            seq_len = gl.load(seq_lens + request)
            first_pair, _, _, _ = visited_tiles(
                0, query_len, seq_len, left, right, chunk, request, None, None, TILE_TOKENS, PAIR,
                CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            first_pair += skipped
            valid = (row < TILE_TOKENS * GROUP) & (token < query_len)
            # Both consumers are done with the queries of the previous split (`total_sum`).
            q_offsets = (start + token).to(gl.int64) * stride_qt + head.to(gl.int64) * stride_qh
            # The launcher checks 16-byte alignment; the shifts tell the compiler.
            q_offsets = (q_offsets >> 3) << 3
            if CONSUMER == 0:
                store_queries(q_low.index(0), query, q_offsets, valid, 0)
            else:
                store_queries(q_high.index(0), query, q_offsets, valid, HALF)
                store_queries(q_rotary.index(0), query, q_offsets, valid, DV)
            fence_async_shared()
            consumers_sync(2)

            row_first, row_last = visible_span(
                token + (seq_len - query_len), seq_len, left, right, chunk, CAUSAL, HAS_LEFT,
                HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
            row_sum = gl.zeros([ROWS], gl.float32, ROW)
            acc = gl.zeros([ROWS, HALF], gl.float32, VALUES)
            first_own = first_pair * PAIR + CONSUMER * TILE
            if CONSUMER == 0:
                if (seq_len - first_own < TILE) & (seq_len % BLOCK_SIZE != 0):
                    _clear_tile(k_low, k_high, k_full, seq_len - first_own, step & 1, CONSUMER)
                keys = (first_own + columns, row_first[:, None], row_last[:, None])
                acc, row_max, row_sum = attend_own(
                    acc, row_max, row_sum, keys, step & 1, q_low, q_high, q_rotary, k_low, k_high,
                    k_rotary, p_tile, maxima, scales, k_full, k_empty, p_ready, factor, soft_cap,
                    CONSUMER, HAS_CAP, 0)  # fmt: skip
                step += 1
            # Consumer 0 attends to a tile A together with the tile B before it.
            for i in range(1 - CONSUMER, count):
                parity = step & 1
                first_key = first_own + i * PAIR
                # TMA fills whole pages past the end with zeros, but not the rest of the last page.
                if (seq_len - first_key < TILE) & (seq_len % BLOCK_SIZE != 0):
                    _clear_tile(k_low, k_high, k_full, seq_len - first_key, parity, CONSUMER)
                keys = (first_key + columns, row_first[:, None], row_last[:, None])
                acc, row_max, row_sum = attend_both(
                    acc, row_max, row_sum, keys, parity, (step + CONSUMER + 1) & 1, q_low, q_high,
                    q_rotary, k_low, k_high, k_rotary, p_tile, maxima, scales, k_full, k_empty,
                    p_ready, factor, soft_cap, CONSUMER, HAS_CAP, 0, True)  # fmt: skip
                step += 1
            if CONSUMER == 0:
                acc, row_max, row_sum = attend_other(
                    acc, row_max, row_sum, (step - 1) & 1, k_low, k_high, p_tile, maxima, scales,
                    k_empty, p_ready, CONSUMER, 0)  # fmt: skip
            final_sum = total_sum(row_sum, sums, summed, splits & 1, CONSUMER)
            splits += 1

            num_splits = (request_end - 1) // per_range - before // per_range + 1
            partial_index = 2 * gl.program_id(0) + (position > range_begin).to(gl.int32)
            if CONSUMER == 0:
                if skipped == 0:
                    # The CTA with a request's first tile tells the combine kernel how many splits
                    # there are and where the first partial result is.
                    header = (partial_index << 15) | (token * GROUP << 9) | num_splits
                    gl.store(
                        split_headers + (start + token) * NUM_KV_HEADS + head_block,
                        header,
                        mask=valid & (row % GROUP == 0),
                    )
            out_factor = finish_rows(
                row_max, final_sum, row, start, token, head, valid, num_splits, partial_index,
                rows, sinks, lse, stride_lt, partial_lses, HAS_SINK, HAS_LSE,
                CONSUMER == 0)  # fmt: skip
            out_factor = gl.convert_layout(out_factor, OUT_ROW)
            out_row = gl.arange(0, ROWS, OUT_ROW)
            out_token = out_row // GROUP
            out_valid = (out_row < TILE_TOKENS * GROUP) & (out_token < query_len)
            out_head = head_block * GROUP + out_row % GROUP
            offsets = (start + out_token).to(gl.int64) * stride_ot
            offsets += out_head.to(gl.int64) * stride_oh
            partial_offsets = (partial_index * rows + out_row).to(gl.int64) * DV
            _store_half(
                out, partials, acc, out_factor, offsets, partial_offsets, out_valid, num_splits,
                CONSUMER * HALF)  # fmt: skip
            position += count
        if position >= request_end:
            before = request_end
            request += 1


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_latent_decode_kernel(
    key_desc, value_desc, latents, query, out, lse, sinks, k_scale, v_scale, aux0, aux1, aux2, aux3,
    query_start_loc, seq_lens, block_table, partials, partial_lses, split_headers, counters, scale,
    soft_cap, left, right, chunk, num_reqs, num_tokens, num_blocks, rows, stride_qt, stride_qh,
    stride_ot, stride_oh, stride_lt, stride_table, rows0, columns0, rows1, columns1, rows2,
    columns2, rows3, columns3, stride_latents,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DV: gl.constexpr, ROTARY: gl.constexpr,
    TILE_TOKENS: gl.constexpr, BLOCK_SIZE: gl.constexpr, ROWS: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_CHUNK: gl.constexpr, HAS_CAP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
    LEAST: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One CTA of 9 warps. Grid: tile ranges * NUM_KV_HEADS, all resident at the same time.

    Args:
        key_desc: TMA descriptor of the keys, in boxes of ROTARY elements.
        value_desc: TMA descriptor of the values, in boxes of DV / 4 elements.
        latents: the keys.
        partials: float32 partial outputs, [2 * grid, rows, DV].
        partial_lses: float32 base-2 LSEs of the partial outputs, [2 * grid, rows].
        split_headers: int32 [tokens, NUM_KV_HEADS] for `hopper_combine_kernel`.
        rows: GROUP times the largest query length, at most ROWS.
        stride_latents: elements from block to block of the keys; 0 if latents are not adjacent.
        NUM_KV_HEADS: blocks of GROUP query heads.
        LEAST: pairs of tiles of a range, at least (`tile_range`).
        k_scale, v_scale, aux0 to aux3, counters, rows0 to columns3: not used; the arguments are
            those of `hopper_decode_kernel`.
    """
    HALF: gl.constexpr = DV // 2
    DTYPE: gl.constexpr = key_desc.dtype
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, HALF], DTYPE)
    NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, ROTARY], DTYPE)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, TILE], DTYPE)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_low = gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], WIDE)
    q_high = gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], WIDE)
    q_rotary = gl.allocate_shared_memory(DTYPE, [1, ROWS, ROTARY], NARROW)
    k_low = gl.allocate_shared_memory(DTYPE, [2, TILE, HALF], WIDE)
    k_high = gl.allocate_shared_memory(DTYPE, [2, TILE, HALF], WIDE)
    k_rotary = gl.allocate_shared_memory(DTYPE, [2, TILE, ROTARY], NARROW)
    p_tile = gl.allocate_shared_memory(DTYPE, [ROWS, TILE], WEIGHTS)
    maxima = gl.allocate_shared_memory(gl.float32, [2, ROWS], VECTOR)
    scales = gl.allocate_shared_memory(gl.float32, [2, ROWS], VECTOR)
    sums = gl.allocate_shared_memory(gl.float32, [2, ROWS], VECTOR)
    k_full = gl.allocate_shared_memory(gl.int64, [2 * LOADS, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2 * PARTS, 1], mbarrier.MBarrierLayout())
    p_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(2 * PARTS):
        mbarrier.init(k_empty.index(part), count=1)
    for load in gl.static_range(2 * LOADS):
        mbarrier.init(k_full.index(load), count=1)
    for tile in gl.static_range(2):
        mbarrier.init(p_ready.index(tile), count=1)
        mbarrier.init(summed.index(tile), count=1)
    # Makes the initialized barriers visible to TMA.
    fence_async_shared()

    # PDL: the previous kernel may have written the queries, the cache or the lengths. The combine
    # kernel may start; it waits for this kernel's results by itself.
    wait_on_dependent_grids()
    launch_dependent_grids()
    range_begin, range_end, per_range, request, before = tile_range(
        query_start_loc, seq_lens, left, right, chunk, num_reqs, gl.program_id(0) // NUM_KV_HEADS,
        gl.num_programs(0) // NUM_KV_HEADS, None, None, PAIR, CAUSAL, HAS_LEFT, HAS_RIGHT,
        HAS_CHUNK, 0, LEAST)  # fmt: skip
    head_block = gl.program_id(0) % NUM_KV_HEADS
    gl.warp_specialize(
        [
            (_consumer, (
                query, out, lse, sinks, query_start_loc, seq_lens, partials, partial_lses,
                split_headers, range_begin, range_end, per_range, request, before, head_block,
                scale, soft_cap, left, right, chunk, rows, stride_qt, stride_qh, stride_ot,
                stride_oh, stride_lt, q_low, q_high, q_rotary, k_low, k_high, k_rotary, p_tile,
                maxima, scales, sums, k_full, k_empty, p_ready, summed, 0, NUM_KV_HEADS, GROUP, DV,
                TILE_TOKENS, BLOCK_SIZE, ROWS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP,
                HAS_SINK, HAS_LSE)),
            (_consumer, (
                query, out, lse, sinks, query_start_loc, seq_lens, partials, partial_lses,
                split_headers, range_begin, range_end, per_range, request, before, head_block,
                scale, soft_cap, left, right, chunk, rows, stride_qt, stride_qh, stride_ot,
                stride_oh, stride_lt, q_low, q_high, q_rotary, k_low, k_high, k_rotary, p_tile,
                maxima, scales, sums, k_full, k_empty, p_ready, summed, 1, NUM_KV_HEADS, GROUP, DV,
                TILE_TOKENS, BLOCK_SIZE, ROWS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP,
                HAS_SINK, HAS_LSE)),
            (_loader, (
                value_desc, key_desc, latents, query_start_loc, seq_lens, block_table, range_begin,
                range_end, request, before, head_block, left, right, chunk, num_blocks,
                stride_table, stride_latents, k_low, k_high, k_rotary, k_full, k_empty,
                NUM_KV_HEADS, TILE_TOKENS, BLOCK_SIZE, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
