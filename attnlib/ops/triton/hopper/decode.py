"""The decode kernel for Hopper: every multiprocessor reads the same share of keys and values, whatever the lengths are.

The key tiles of all requests stand in one line, which is cut into equal parts; each part has one CTA for each KV head,
side by side, so that the heads of a page are read at about the same time and memory sees whole pages. A part may hold
the end of one request, several whole ones and the beginning of another; what belongs to one request is a piece. A
request in one piece is written out at once, the others as float32 partial results that `join_pieces` merges. One warp
loads ahead by TMA over the borders of pieces, so the memory never waits for a new request; one warpgroup multiplies.
Lengths are read on the device only, so a captured graph replays right with others. While the kernel before this one ends,
the first tiles of every part are already on their way into L2.

The equal cut is stream-K's (Osama et al. 2023); FlashAttention-3 and FlashInfer plan a similar one before the launch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnlib.ops.triton.hopper.dialect import (
    await_predecessor,
    exp2,
    load_box,
    partition_barrier,
    prefetch_row,
    release_successor,
)
from attnlib.ops.triton.hopper.products import overlapped_step, pack_weights, unpack_weights
from attnlib.ops.triton.hopper.schedule import row_span, visited_tiles
from attnlib.ops.triton.hopper.softmax import LN2, LOG2E, hide_keys, score_factor, transform_scores, weigh
from attnlib.ops.triton.softmax import finish_rows

__all__ = ["UNALIGNED", "UNSPECIALISED", "hopper_decode_kernel", "join_pieces"]

UNSPECIALISED = [
    "left", "right", "chunk", "num_reqs", "num_blocks", "num_pages", "rows", "stride_qt", "stride_qh", "stride_ot", "stride_oh",
    "stride_lt", "stride_table", "stride_kb", "stride_kn", "stride_kh", "stride_vb", "stride_vn", "stride_vh",
]  # fmt: skip
"""Parameters whose values must not choose a compilation."""

UNALIGNED = ["lse", "sinks", "query_start_loc", "seq_lens", "block_table", "partial_lses", "pieces"]
"""Pointers whose alignment must not choose one either: slices of a batch or of the workspace, cut anywhere."""


@gluon.jit
def _request_tiles(query_start_loc, seq_lens, request, mask, left, right, chunk, BLOCK_N: gl.constexpr,
                   CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
                   HAS_CHUNK: gl.constexpr, EARLY: gl.constexpr = False):  # fmt: skip
    """How many key tiles a request's queries see, at least one when there are queries; for one request or a vector.
    EARLY reads stay out of L1, because what they find may be old."""
    CACHE: gl.constexpr = ".cg" if EARLY else ""
    start = gl.load(query_start_loc + request, mask=mask, other=0, cache_modifier=CACHE)
    query_len = gl.load(query_start_loc + request + 1, mask=mask, other=0, cache_modifier=CACHE) - start
    seq_len = gl.load(seq_lens + request, mask=mask, other=0, cache_modifier=CACHE)
    first, _ = row_span(seq_len - query_len, seq_len, left, right, chunk, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)
    _, last = row_span(seq_len - 1, seq_len, left, right, chunk, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)
    tiles = (gl.maximum(last, 0) + BLOCK_N - 1) // BLOCK_N - gl.maximum(first, 0) // BLOCK_N
    return gl.where(query_len > 0, gl.maximum(tiles, 1), 0)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _my_part(query_start_loc, seq_lens, left, right, chunk, num_reqs, part, parts,
             BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
             HAS_CHUNK: gl.constexpr, EARLY: gl.constexpr = False):  # fmt: skip
    """(first position, end, share, first request, positions before that request) of a part of the line."""
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = 128
    layout: gl.constexpr = gl.BlockedLayout([LANES // (32 * WARPS)], [32], [WARPS], [0])
    total = 0
    if num_reqs == 1:
        total = _request_tiles(query_start_loc, seq_lens, 0, True, left, right, chunk, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT,
                               HAS_CHUNK, EARLY)  # fmt: skip
    else:
        for base in range(0, num_reqs, LANES):
            lanes = base + gl.arange(0, LANES, layout)
            tiles = _request_tiles(query_start_loc, seq_lens, lanes, lanes < num_reqs, left, right, chunk, BLOCK_N, CAUSAL,
                                   HAS_LEFT, HAS_RIGHT, HAS_CHUNK, EARLY)  # fmt: skip
            total += gl.sum(tiles, 0)
    share = (total + parts - 1) // parts
    begin = part * share
    end = gl.minimum(begin + share, total)
    request = 0
    before = 0
    if num_reqs > 1:
        seen = 0
        for base in range(0, num_reqs, LANES):
            lanes = base + gl.arange(0, LANES, layout)
            tiles = _request_tiles(query_start_loc, seq_lens, lanes, lanes < num_reqs, left, right, chunk, BLOCK_N, CAUSAL,
                                   HAS_LEFT, HAS_RIGHT, HAS_CHUNK, EARLY)  # fmt: skip
            ends = seen + gl.associative_scan(tiles, 0, _add)
            past = (ends <= begin) & (lanes < num_reqs)
            request += gl.sum(past.to(gl.int32), 0)
            before = gl.maximum(before, gl.max(gl.where(past, ends, 0), 0))
            seen += gl.sum(tiles, 0)
    return begin, end, share, request, before


@gluon.jit
def _warm_cache(cache, stride_block, stride_position, stride_head, query_start_loc, seq_lens, block_table, left, right,
                chunk, num_reqs, num_blocks, num_pages, stride_table, NUM_KV_HEADS: gl.constexpr, SIZE: gl.constexpr,
                AHEAD: gl.constexpr, TILE_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr,
                CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
                HAS_CHUNK: gl.constexpr):  # fmt: skip
    """Send for the first AHEAD key tiles of this part, into L2, before the kernel ahead of this one has ended.

    What that kernel still writes may be read too early here, lengths and tables included, so nothing depends on what is
    found: rows outside of the pool are left out, and everything is read again later. These reads stay out of L1, which
    would keep what they saw.
    """
    begin, end, _, request, before = _my_part(query_start_loc, seq_lens, left, right, chunk, num_reqs,
                                              gl.program_id(0) // NUM_KV_HEADS, gl.num_programs(0) // NUM_KV_HEADS,
                                              BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, True)  # fmt: skip
    if (begin < end) & (request < num_reqs):
        query_len = (gl.load(query_start_loc + request + 1, cache_modifier=".cg")
                     - gl.load(query_start_loc + request, cache_modifier=".cg"))  # fmt: skip
        seq_len = gl.load(seq_lens + request, cache_modifier=".cg")
        first_tile, _, _, _ = visited_tiles(0, query_len, seq_len, left, right, chunk, TILE_TOKENS, BLOCK_N, CAUSAL,
                                            HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        first_key = (first_tile + begin - before) * BLOCK_N
        last_key = gl.minimum(seq_len, first_key + gl.minimum(end - begin, AHEAD) * BLOCK_N)
        WARPS: gl.constexpr = gl.num_warps()
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        table = block_table + request.to(gl.int64) * stride_table
        rows = cache + (gl.program_id(0) % NUM_KV_HEADS).to(gl.int64) * stride_head
        for base in range(0, AHEAD * BLOCK_N, 32 * WARPS):
            key = first_key + base + gl.arange(0, 32 * WARPS, layout)
            there = (key >= 0) & (key < last_key) & (key // BLOCK_SIZE < num_pages)
            block = gl.load(table + key // BLOCK_SIZE, mask=there, other=-1, cache_modifier=".cg")
            there = there & (block >= 0) & (block < num_blocks)
            prefetch_row(rows + block.to(gl.int64) * stride_block + (key % BLOCK_SIZE).to(gl.int64) * stride_position, there, SIZE * 2)


@gluon.jit
def _producer(key, value, key_rows, query_start_loc, seq_lens, block_table, left, right, chunk, num_reqs, num_blocks,
              num_pages, stride_table, stride_kb, stride_kn, stride_kh, k_ring, v_ring, k_full, k_empty, v_full, v_empty,
              NUM_KV_HEADS: gl.constexpr, D: gl.constexpr, AHEAD: gl.constexpr, TILE_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
              CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
              HAS_CHUNK: gl.constexpr):  # fmt: skip
    """Fill the rings piece after piece. Pages past a request's last one are aimed past the pool's end: zeros."""
    BOX: gl.constexpr = min(BLOCK_SIZE, BLOCK_N)
    BOXES: gl.constexpr = BLOCK_N // BOX
    K_BYTES: gl.constexpr = BLOCK_N * k_ring.shape[2] * 2
    V_BYTES: gl.constexpr = BLOCK_N * v_ring.shape[2] * 2
    if AHEAD > 0:
        _warm_cache(key_rows, stride_kb, stride_kn, stride_kh, query_start_loc, seq_lens, block_table, left, right, chunk,
                    num_reqs, num_blocks, num_pages, stride_table, NUM_KV_HEADS, D, AHEAD, TILE_TOKENS, BLOCK_N, BLOCK_SIZE,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
    await_predecessor()
    release_successor()
    position, part_end, _, request, before = _my_part(query_start_loc, seq_lens, left, right, chunk, num_reqs,
                                                      gl.program_id(0) // NUM_KV_HEADS, gl.num_programs(0) // NUM_KV_HEADS,
                                                      BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
    kv_head = gl.program_id(0) % NUM_KV_HEADS
    step = 0
    while position < part_end:
        tiles = _request_tiles(query_start_loc, seq_lens, request, True, left, right, chunk, BLOCK_N, CAUSAL, HAS_LEFT,
                               HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        request_end = before + tiles
        if position < request_end:
            query_len = gl.load(query_start_loc + request + 1) - gl.load(query_start_loc + request)
            seq_len = gl.load(seq_lens + request)
            first_tile, _, _, _ = visited_tiles(0, query_len, seq_len, left, right, chunk, TILE_TOKENS, BLOCK_N, CAUSAL,
                                                HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            table = block_table + request.to(gl.int64) * stride_table
            pages = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
            count = gl.minimum(part_end, request_end) - position
            for i in range(0, count):
                tile = first_tile + (position + i - before)
                first_page = tile * BLOCK_N // BLOCK_SIZE
                inside = tile * BLOCK_N % BLOCK_SIZE
                blocks = ()
                for box in gl.static_range(BOXES):
                    page = gl.load(table + first_page + box, mask=first_page + box < pages, other=num_blocks)
                    blocks = blocks + (page,)
                stage = step % STAGES
                parity = (step // STAGES) & 1
                k_tile = k_ring.index(stage)
                mbarrier.wait(k_empty.index(stage), parity ^ 1)
                mbarrier.expect(k_full.index(stage), K_BYTES)
                for box in gl.static_range(BOXES):
                    load_box(key, [blocks[box], kv_head, inside, 0], k_full.index(stage), k_tile.slice(box * BOX, BOX, 0))
                v_tile = v_ring.index(stage)
                mbarrier.wait(v_empty.index(stage), parity ^ 1)
                mbarrier.expect(v_full.index(stage), V_BYTES)
                for box in gl.static_range(BOXES):
                    load_box(value, [blocks[box], kv_head, inside, 0], v_full.index(stage), v_tile.slice(box * BOX, BOX, 0))
                step += 1
            position += count
        before = request_end
        request += 1


@gluon.jit
def _clear_values(v_tile, valid):
    """Zero the rows of a value tile from `valid` on (P5: 0 * NaN is NaN)."""
    ROWS: gl.constexpr = v_tile.shape[0]
    WIDTH: gl.constexpr = v_tile.shape[1]
    LANES: gl.constexpr = min(32, WIDTH // 8)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    content = v_tile.load(layout)
    v_tile.store(gl.where(rows[:, None] < valid, content, 0.0))
    fence_async_shared()
    partition_barrier()


@gluon.jit
def _consumer(query, value_rows, out, lse, sinks, query_start_loc, seq_lens, block_table, partials, partial_lses, pieces, scale,
              soft_cap, left, right, chunk, num_reqs, num_blocks, num_pages, rows, stride_qt, stride_qh, stride_ot, stride_oh,
              stride_lt, stride_table, stride_vb, stride_vn, stride_vh, q_tile, k_ring, v_ring, k_full, k_empty, v_full,
              v_empty, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
              DV: gl.constexpr, AHEAD: gl.constexpr, TILE_TOKENS: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
              CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
              HAS_CAP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr):  # fmt: skip
    WIDTH: gl.constexpr = q_tile.shape[1]
    WIDTH_V: gl.constexpr = v_ring.shape[2]
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    DTYPE: gl.constexpr = q_tile.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_V, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    Q_LANES: gl.constexpr = min(32, WIDTH // 8)
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // Q_LANES, Q_LANES], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    CHECK_LEFT: gl.constexpr = HAS_LEFT or HAS_CHUNK
    factor = score_factor(scale, soft_cap, HAS_CAP)
    if AHEAD > 0:
        _warm_cache(value_rows, stride_vb, stride_vn, stride_vh, query_start_loc, seq_lens, block_table, left, right, chunk,
                    num_reqs, num_blocks, num_pages, stride_table, NUM_KV_HEADS, DV, AHEAD, TILE_TOKENS, BLOCK_N, BLOCK_SIZE,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
    await_predecessor()
    release_successor()
    part_begin, part_end, share, request, before = _my_part(query_start_loc, seq_lens, left, right, chunk, num_reqs,
                                                            gl.program_id(0) // NUM_KV_HEADS,
                                                            gl.num_programs(0) // NUM_KV_HEADS, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT,
                                                            HAS_CHUNK)  # fmt: skip
    kv_head = gl.program_id(0) % NUM_KV_HEADS
    position = part_begin
    step = 0
    while position < part_end:
        tiles = _request_tiles(query_start_loc, seq_lens, request, True, left, right, chunk, BLOCK_N, CAUSAL, HAS_LEFT,
                               HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        request_end = before + tiles
        if position < request_end:
            # One piece: tiles [skipped, skipped + count) of the request.
            skipped = position - before
            count = gl.minimum(tiles - skipped, part_end - position)
            start = gl.load(query_start_loc + request)
            query_len = gl.load(query_start_loc + request + 1) - start
            seq_len = gl.load(seq_lens + request)
            first_tile, left_end, right_begin, _ = visited_tiles(
                0, query_len, seq_len, left, right, chunk, TILE_TOKENS, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT,
                HAS_CHUNK)  # fmt: skip

            q_rows = gl.arange(0, 64, gl.SliceLayout(1, Q_LAYOUT))
            q_valid = (q_rows < TILE_TOKENS * GROUP) & (q_rows // GROUP < query_len)
            offsets = (start + q_rows // GROUP).to(gl.int64) * stride_qt + (kv_head * GROUP + q_rows % GROUP).to(gl.int64) * stride_qh
            offsets = (offsets >> 3) << 3
            columns = gl.arange(0, WIDTH, gl.SliceLayout(0, Q_LAYOUT))
            q = gl.load(query + offsets[:, None] + columns[None, :], mask=q_valid[:, None] & (columns < D)[None, :], other=0.0)
            partition_barrier()
            q_tile.store(q)
            fence_async_shared()
            partition_barrier()

            row = gl.arange(0, 64, ROW)
            token = row // GROUP
            row_first, row_last = row_span(token + (seq_len - query_len), seq_len, left, right, chunk, CAUSAL, HAS_LEFT,
                                           HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            peak = gl.full([64], float("-inf"), gl.float32, ROW)
            total = gl.full([64], 0.0, gl.float32, ROW)
            acc = gl.zeros([64, WIDTH_V], gl.float32, O_LAYOUT)
            tile = first_tile + skipped
            stage = step % STAGES
            parity = (step // STAGES) & 1
            mbarrier.wait(k_full.index(stage), parity)
            nothing = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
            scores = warpgroup_mma(q_tile, k_ring.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_empty.index(stage), count=1)
            scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
            scores = hide_keys(scores, row_first, row_last, tile * BLOCK_N, CHECK_LEFT)
            grown, _, peak, total = weigh(scores, factor, peak, total, True, HAS_CAP)
            weights = pack_weights(grown, DTYPE)
            for i in range(1, count):
                tile = first_tile + skipped + i
                if (tile >= right_begin) | (tile < left_end):
                    acc, weights, peak, total = overlapped_step(
                        q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, weights, peak, total, step + i,
                        tile, row_first, row_last, factor, soft_cap, 0, STAGES, False, True, CHECK_LEFT, HAS_CAP,
                        P_LAYOUT)  # fmt: skip
                else:
                    acc, weights, peak, total = overlapped_step(
                        q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, weights, peak, total, step + i,
                        tile, row_first, row_last, factor, soft_cap, 0, STAGES, False, False, CHECK_LEFT, HAS_CAP,
                        P_LAYOUT)  # fmt: skip
            step += count
            stage = (step - 1) % STAGES
            mbarrier.wait(v_full.index(stage), ((step - 1) // STAGES) & 1)
            past_end = seq_len - (first_tile + skipped + count - 1) * BLOCK_N
            if (past_end < BLOCK_N) & (seq_len % BLOCK_SIZE != 0):
                _clear_values(v_ring.index(stage), past_end)
            acc = warpgroup_mma(unpack_weights(weights, DTYPE, P_LAYOUT), v_ring.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(stage), count=1)

            # Whoever has a request's first tile says in how many pieces it comes, and where the first one lies.
            num_pieces = (request_end - 1) // share - before // share + 1
            head = kv_head * GROUP + row % GROUP
            valid = (row < TILE_TOKENS * GROUP) & (token < query_len)
            place = 2 * gl.program_id(0) + (position > part_begin).to(gl.int32)
            if skipped == 0:
                note = (place << 14) | (token * GROUP << 8) | num_pieces
                gl.store(pieces + (start + token) * NUM_KV_HEADS + kv_head, note, mask=valid & (row % GROUP == 0))
            anchor = gl.where(peak == float("-inf"), 0.0, peak)
            decay = gl.full([64], 1.0, gl.float32, ROW)
            if HAS_SINK:
                if num_pieces == 1:
                    # A request in one piece meets its sink here, the others in the join (M4).
                    sink = gl.load(sinks + head, mask=valid, other=0.0) * LOG2E
                    top = gl.maximum(peak, sink)
                    anchor = gl.where(top == float("-inf"), 0.0, top)
                    decay = exp2(peak - anchor)
                    total = total * decay + exp2(sink - anchor)
            empty = total == 0.0
            safe = gl.where(empty, 1.0, total)
            base2 = gl.where(empty, float("-inf"), anchor + gl.log2(safe))
            finish = gl.convert_layout(decay / safe, O_ROW)
            result = acc * finish[:, None]
            o_row = gl.arange(0, 64, O_ROW)
            o_valid = (o_row < TILE_TOKENS * GROUP) & (o_row // GROUP < query_len)
            o_columns = gl.arange(0, WIDTH_V, gl.SliceLayout(0, O_LAYOUT))
            o_mask = o_valid[:, None] & (o_columns < DV)[None, :]
            if num_pieces == 1:
                o_offsets = (start + o_row // GROUP).to(gl.int64) * stride_ot + (kv_head * GROUP + o_row % GROUP).to(gl.int64) * stride_oh
                gl.store(out + o_offsets[:, None] + o_columns[None, :], result.to(DTYPE), mask=o_mask)
                if HAS_LSE:
                    gl.store(lse + (start + token).to(gl.int64) * stride_lt + head, base2 * LN2, mask=valid)
            else:
                piece_offsets = (place * rows + o_row) * DV
                gl.store(partials + piece_offsets[:, None] + o_columns[None, :], result, mask=o_mask)
                gl.store(partial_lses + place * rows + row, base2, mask=valid)
            position += count
        if position >= request_end:
            before = request_end
            request += 1


@gluon.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_decode_kernel(key, value, key_rows, value_rows, query, out, lse, sinks, query_start_loc, seq_lens, block_table, partials,
                         partial_lses, pieces, scale, soft_cap, left, right, chunk, num_reqs, num_blocks, num_pages, rows,
                         stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_table, stride_kb, stride_kn, stride_kh,
                         stride_vb, stride_vn, stride_vh, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
                         DV: gl.constexpr, WIDTH: gl.constexpr, WIDTH_V: gl.constexpr, AHEAD: gl.constexpr,
                         TILE_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr,
                         BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr,
                         HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr, HAS_CAP: gl.constexpr,
                         HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr):  # fmt: skip
    """One CTA of 4 + 1 warps; grid: parts times NUM_KV_HEADS, all of which the chip holds at a time."""
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, WIDTH], key.dtype)
    K_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, WIDTH], key.dtype)
    V_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, WIDTH_V], key.dtype)
    q_tile = gl.allocate_shared_memory(key.dtype, [64, WIDTH], Q_SHARED)
    k_ring = gl.allocate_shared_memory(key.dtype, [STAGES, BLOCK_N, WIDTH], K_SHARED)
    v_ring = gl.allocate_shared_memory(key.dtype, [STAGES, BLOCK_N, WIDTH_V], V_SHARED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (
                query, value_rows, out, lse, sinks, query_start_loc, seq_lens, block_table, partials, partial_lses, pieces, scale,
                soft_cap, left, right, chunk, num_reqs, num_blocks, num_pages, rows, stride_qt, stride_qh, stride_ot,
                stride_oh, stride_lt, stride_table, stride_vb, stride_vn, stride_vh, q_tile, k_ring, v_ring, k_full, k_empty,
                v_full, v_empty, NUM_KV_HEADS, GROUP, D, DV, AHEAD, TILE_TOKENS, BLOCK_SIZE, STAGES,
                CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE)),
            (_producer, (
                key, value, key_rows, query_start_loc, seq_lens, block_table, left, right, chunk, num_reqs, num_blocks,
                num_pages, stride_table, stride_kb, stride_kn, stride_kh, k_ring, v_ring, k_full, k_empty, v_full, v_empty,
                NUM_KV_HEADS, D, AHEAD, TILE_TOKENS, BLOCK_N, BLOCK_SIZE, STAGES, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)),
        ],
        [1],
        [48],
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_reqs", "rows", "stride_ot", "stride_oh", "stride_lt"],
    do_not_specialize_on_alignment=["sinks", "lse", "query_start_loc", "pieces", "partial_lses"],
)
def join_pieces(partials, partial_lses, pieces, query_start_loc, sinks, out, lse, num_reqs, rows, stride_ot, stride_oh,
                stride_lt, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr,
                DV_PAD: tl.constexpr, STEP: tl.constexpr, HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr):  # fmt: skip
    """Merge the pieces of HEADS query heads of one token and KV head; rows after the last request become 0 (M6).
    Grid: (T, KV heads, blocks of HEADS in a group)."""
    gdc_launch_dependents()  # first: who comes next can set itself up, and waits for this kernel's end by itself
    gdc_wait()
    token = tl.program_id(0)
    kv_head = tl.program_id(1)
    within = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    head = kv_head * GROUP + within
    inside = within < GROUP
    num_rows = tl.load(query_start_loc + num_reqs)
    note = tl.load(pieces + token * NUM_KV_HEADS + kv_head)
    lanes = tl.arange(0, DV_PAD)
    offsets = token.to(tl.int64) * stride_ot + head.to(tl.int64)[:, None] * stride_oh + lanes[None, :]
    mask = inside[:, None] & (lanes < DV)[None, :]
    if token >= num_rows:
        tl.store(out + offsets, tl.zeros([HEADS, DV_PAD], tl.float32).to(out.dtype.element_ty), mask=mask)
        if HAS_LSE:
            tl.store(lse + token.to(tl.int64) * stride_lt + head, tl.full([HEADS], float("-inf"), tl.float32), mask=inside)
        return
    count = note & 255
    if count <= 1:
        return
    row = (note >> 8 & 63) + within
    place = note >> 14
    acc = tl.zeros([HEADS, DV_PAD], tl.float32)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    for base in range(0, count, STEP):
        piece = base + tl.arange(0, STEP)
        live = (piece < count)[:, None] & inside[None, :]
        at = tl.where(piece == 0, place, (place // 2 + piece * NUM_KV_HEADS) * 2)[:, None] * rows + row[None, :]
        parts = tl.load(partial_lses + at, mask=live, other=float("-inf"))
        values = tl.load(partials + at[:, :, None] * DV + lanes[None, None, :],
                         mask=live[:, :, None] & (lanes < DV)[None, None, :], other=0.0)  # fmt: skip
        top = tl.maximum(peak, tl.max(parts, 0))
        anchor = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(parts - anchor[None, :])
        decay = tl.exp2(peak - anchor)
        acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * values, 0)
        total = total * decay + tl.sum(weights, 0)
        peak = top
    sink = tl.zeros([HEADS], tl.float32)
    if HAS_SINK:
        sink += tl.load(sinks + head, mask=inside, other=0.0)
    factor, base2_lse = finish_rows(peak, total, sink, HAS_SINK)
    tl.store(out + offsets, (acc * factor[:, None]).to(out.dtype.element_ty), mask=mask)
    if HAS_LSE:
        tl.store(lse + token.to(tl.int64) * stride_lt + head, base2_lse * 0.6931471805599453, mask=inside)
