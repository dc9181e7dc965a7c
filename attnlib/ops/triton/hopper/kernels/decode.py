"""The decode kernel for Hopper: every multiprocessor reads the same share of keys and values, whatever the lengths are.

The key tiles of all requests stand in one line, which is cut into equal parts; each part has one CTA for each KV head,
side by side, so that the heads of a page are read at about the same time and memory sees whole pages. A part may hold
the end of one request, several whole ones and the beginning of another; what belongs to one request is a piece. A
request in one piece is written out at once, the others as float32 partial results that are merged (`join`). Two
warps load keys and values ahead by TMA over the borders of pieces, so the memory never waits for a new request; one
warpgroup multiplies.

The few rows of a request (query heads of a group times tokens) are the columns of both products: keys times queries, then
values times weights, because an asynchronous product has at least 64 rows and may have as few as 8 columns.
Lengths are read on the device only, so a captured graph replays right with others.

The equal cut is stream-K's (Osama et al. 2023); FlashAttention-3 and FlashInfer plan a similar one before the launch.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnlib.ops.triton.hopper.kernels.combine import clear_rows, join_here
from attnlib.ops.triton.hopper.kernels.compat import (
    await_predecessor,
    exp2,
    partition_barrier,
    release_successor,
)
from attnlib.ops.triton.hopper.kernels.schedule import row_span, visited_tiles
from attnlib.ops.triton.hopper.kernels.softmax import LN2, meet_sink, score_factor, transform_scores
from attnlib.ops.triton.hopper.kernels.tma_load import load_tile
from attnlib.ops.triton.hopper.kernels.work_counter import PREFILL_COUNTERS, count_up

__all__ = ["UNALIGNED", "UNSPECIALIZED", "hopper_decode_kernel"]

UNSPECIALIZED = [
    "left", "right", "chunk", "num_reqs", "num_tokens", "num_blocks", "rows", "stride_qt", "stride_qh", "stride_ot",
    "stride_oh", "stride_lt", "stride_table",
]  # fmt: skip
"""Parameters whose values must not choose a compilation."""

UNALIGNED = [
    "lse",
    "sinks",
    "query_start_loc",
    "seq_lens",
    "block_table",
    "partial_lses",
    "pieces",
    "counters",
]
"""Pointers whose alignment must not choose one either: slices of a batch or of the workspace, cut anywhere."""

_OWN_COUNTERS = gl.constexpr(PREFILL_COUNTERS)
"""Where those of the decode begin."""


@gluon.jit
def _request_tiles(query_start_loc, seq_lens, request, mask, left, right, chunk, BLOCK_N: gl.constexpr,
                   CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
                   HAS_CHUNK: gl.constexpr):  # fmt: skip
    """How many key tiles a request's queries see, at least one when there are queries; for one request or a vector."""
    start = gl.load(query_start_loc + request, mask=mask, other=0)
    query_len = gl.load(query_start_loc + request + 1, mask=mask, other=0) - start
    seq_len = gl.load(seq_lens + request, mask=mask, other=0)
    first, _ = row_span(
        seq_len - query_len, seq_len, left, right, chunk, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK
    )
    _, last = row_span(
        seq_len - 1, seq_len, left, right, chunk, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK
    )
    tiles = (gl.maximum(last, 0) + BLOCK_N - 1) // BLOCK_N - gl.maximum(first, 0) // BLOCK_N
    return gl.where(query_len > 0, gl.maximum(tiles, 1), 0)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _my_part(query_start_loc, seq_lens, left, right, chunk, num_reqs, part, parts,
             BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
             HAS_CHUNK: gl.constexpr):  # fmt: skip
    """(first position, end, share, first request, positions before that request) of a part of the line."""
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = 128
    layout: gl.constexpr = gl.BlockedLayout([LANES // (32 * WARPS)], [32], [WARPS], [0])
    total = 0
    request = 0
    before = 0
    if num_reqs == 1:
        total = _request_tiles(query_start_loc, seq_lens, 0, True, left, right, chunk, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT,
                               HAS_CHUNK)  # fmt: skip
    elif num_reqs <= LANES:
        # Every request has a lane, so the lengths are read and summed once; nothing is loaded before this has ended.
        lanes = gl.arange(0, LANES, layout)
        tiles = _request_tiles(query_start_loc, seq_lens, lanes, lanes < num_reqs, left, right, chunk, BLOCK_N, CAUSAL,
                               HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        ends = gl.associative_scan(tiles, 0, _add)
        total = gl.max(ends, 0)
        past = (ends <= part * ((total + parts - 1) // parts)) & (lanes < num_reqs)
        request = gl.sum(past.to(gl.int32), 0)
        before = gl.max(gl.where(past, ends, 0), 0)
    else:
        for base in range(0, num_reqs, LANES):
            lanes = base + gl.arange(0, LANES, layout)
            tiles = _request_tiles(query_start_loc, seq_lens, lanes, lanes < num_reqs, left, right, chunk, BLOCK_N, CAUSAL,
                                   HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            total += gl.sum(tiles, 0)
        begin = part * ((total + parts - 1) // parts)
        seen = 0
        for base in range(0, num_reqs, LANES):
            lanes = base + gl.arange(0, LANES, layout)
            tiles = _request_tiles(query_start_loc, seq_lens, lanes, lanes < num_reqs, left, right, chunk, BLOCK_N, CAUSAL,
                                   HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            ends = seen + gl.associative_scan(tiles, 0, _add)
            past = (ends <= begin) & (lanes < num_reqs)
            request += gl.sum(past.to(gl.int32), 0)
            before = gl.maximum(before, gl.max(gl.where(past, ends, 0), 0))
            seen += gl.sum(tiles, 0)
    share = (total + parts - 1) // parts
    begin = part * share
    return begin, gl.minimum(begin + share, total), share, request, before


@gluon.jit
def _loader(cache, query_start_loc, seq_lens, block_table, left, right, chunk, num_reqs, num_blocks, stride_table, ring, full,
            empty, NUM_KV_HEADS: gl.constexpr, TILE_TOKENS: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
            CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr):  # fmt: skip
    """Fill the ring of keys, or that of values, piece after piece."""
    BLOCK_N: gl.constexpr = ring.shape[1]
    await_predecessor()
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
                load_tile(cache, table, pages, num_blocks, kv_head, tile, tile * BLOCK_N // BLOCK_SIZE + 32, ring, full, empty,
                          step, BLOCK_SIZE, STAGES)  # fmt: skip
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
def _weigh_keys(scores, factor, peak, MASKED: gl.constexpr, HAS_CAP: gl.constexpr):
    """(weights, decay of what came before, new peak) of scores [keys, rows]; as `softmax.weigh`, across the other axis."""
    if HAS_CAP:
        weight_factor = 1.0
    else:
        weight_factor = factor
    new_peak = gl.maximum(peak, gl.max(scores, 0) * weight_factor)
    anchor = new_peak
    if MASKED:
        anchor = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    return exp2(scores * weight_factor - anchor[None, :]), exp2(peak - anchor), new_peak


@gluon.jit
def _hide_keys(scores, row_first, row_last, tile_start, CHECK_FIRST: gl.constexpr):
    """-inf for the keys that a row does not see; scores [keys, rows]."""
    KEYS: gl.constexpr = scores.shape[0]
    keys = tile_start + gl.arange(0, KEYS, gl.SliceLayout(1, scores.type.layout))
    visible = keys[:, None] < row_last[None, :]
    if CHECK_FIRST:
        visible = visible & (keys[:, None] >= row_first[None, :])
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def _add_weights(total, decay, weights):
    """The sum of weights by key, which saves a sum across warps in every step, where registers hold so many numbers."""
    if weights.shape[1] <= 16:
        return total * decay[None, :] + weights
    else:
        return total * decay + gl.sum(weights, 0)


@gluon.jit
def _hand_over(p_tile, weights):
    """Put weights [keys, rows] where the product with the values finds them. Nothing may still read the last ones."""
    p_tile.store(gl.permute(weights, (1, 0)).to(p_tile.dtype))
    fence_async_shared()
    partition_barrier()


@gluon.jit
def _step(q_tile, p_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, peak, total, step, tile, row_first, row_last,
          factor, soft_cap, STAGES: gl.constexpr, MASKED: gl.constexpr, CHECK_FIRST: gl.constexpr,
          HAS_CAP: gl.constexpr):  # fmt: skip
    """Products with the keys of `tile` and with the values of the tile before it, then the softmax between them."""
    KEYS: gl.constexpr = k_ring.shape[1]
    ROWS: gl.constexpr = q_tile.shape[0]
    LAYOUT: gl.constexpr = acc.type.layout
    stage = step % STAGES
    v_stage = (step - 1) % STAGES
    nothing = gl.zeros([KEYS, ROWS], gl.float32, LAYOUT)
    mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
    scores = warpgroup_mma(
        k_ring.index(stage), q_tile.permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    mbarrier.wait(v_full.index(v_stage), ((step - 1) // STAGES) & 1)
    acc = warpgroup_mma(
        v_ring.index(v_stage).permute((1, 0)), p_tile.permute((1, 0)), acc, is_async=True
    )
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(stage), count=1)
    scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
    if MASKED:
        scores = _hide_keys(scores, row_first, row_last, tile * KEYS, CHECK_FIRST)
    weights, decay, peak = _weigh_keys(scores, factor, peak, MASKED, HAS_CAP)
    total = _add_weights(total, decay, weights)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    acc = acc * decay[None, :]
    _hand_over(p_tile, weights)
    return acc, peak, total


@gluon.jit
def _consumer(query, out, lse, sinks, query_start_loc, seq_lens, partials, partial_lses, pieces, counters, scale, soft_cap,
              left, right, chunk, num_reqs, num_tokens, rows, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, q_tile, p_tile, k_ring,
              v_ring, k_full, k_empty, v_full, v_empty, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
              DV: gl.constexpr, TILE_TOKENS: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
              JOINS: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
              HAS_CHUNK: gl.constexpr, HAS_CAP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr):  # fmt: skip
    ROWS: gl.constexpr = q_tile.shape[0]
    WIDTH: gl.constexpr = q_tile.shape[1]
    WIDTH_V: gl.constexpr = v_ring.shape[2]
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    DTYPE: gl.constexpr = q_tile.dtype
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, ROWS, 16]
    )  # [keys or values, rows]
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    Q_LANES: gl.constexpr = min(32, WIDTH // 8)
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // Q_LANES, Q_LANES], [4, 1], [1, 0])
    CHECK_LEFT: gl.constexpr = HAS_LEFT or HAS_CHUNK
    factor = score_factor(scale, soft_cap, HAS_CAP)
    await_predecessor()
    if not JOINS:
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

            q_rows = gl.arange(0, ROWS, gl.SliceLayout(1, Q_LAYOUT))
            q_valid = (q_rows < TILE_TOKENS * GROUP) & (q_rows // GROUP < query_len)
            offsets = (start + q_rows // GROUP).to(gl.int64) * stride_qt + (
                kv_head * GROUP + q_rows % GROUP
            ).to(gl.int64) * stride_qh
            offsets = (offsets >> 3) << 3
            columns = gl.arange(0, WIDTH, gl.SliceLayout(0, Q_LAYOUT))
            q = gl.load(
                query + offsets[:, None] + columns[None, :],
                mask=q_valid[:, None] & (columns < D)[None, :],
                other=0.0,
            )
            partition_barrier()
            q_tile.store(q)
            fence_async_shared()
            partition_barrier()

            row = gl.arange(0, ROWS, COLUMN)
            token = row // GROUP
            row_first, row_last = row_span(token + (seq_len - query_len), seq_len, left, right, chunk, CAUSAL, HAS_LEFT,
                                           HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            peak = gl.full([ROWS], float("-inf"), gl.float32, COLUMN)
            acc = gl.zeros([WIDTH_V, ROWS], gl.float32, LAYOUT)
            tile = first_tile + skipped
            stage = step % STAGES
            mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
            nothing = gl.zeros([BLOCK_N, ROWS], gl.float32, LAYOUT)
            scores = warpgroup_mma(
                k_ring.index(stage), q_tile.permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_empty.index(stage), count=1)
            scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
            scores = _hide_keys(scores, row_first, row_last, tile * BLOCK_N, CHECK_LEFT)
            weights, _, peak = _weigh_keys(scores, factor, peak, True, HAS_CAP)
            total = weights
            if ROWS > 16:
                total = gl.sum(weights, 0)
            _hand_over(p_tile, weights)
            for i in range(1, count):
                tile = first_tile + skipped + i
                if (tile >= right_begin) | (tile < left_end):
                    acc, peak, total = _step(
                        q_tile, p_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, peak, total, step + i, tile,
                        row_first, row_last, factor, soft_cap, STAGES, True, CHECK_LEFT, HAS_CAP)  # fmt: skip
                else:
                    acc, peak, total = _step(
                        q_tile, p_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, peak, total, step + i, tile,
                        row_first, row_last, factor, soft_cap, STAGES, False, CHECK_LEFT, HAS_CAP)  # fmt: skip
            step += count
            stage = (step - 1) % STAGES
            mbarrier.wait(v_full.index(stage), ((step - 1) // STAGES) & 1)
            past_end = seq_len - (first_tile + skipped + count - 1) * BLOCK_N
            if (past_end < BLOCK_N) & (seq_len % BLOCK_SIZE != 0):
                _clear_values(v_ring.index(stage), past_end)
            acc = warpgroup_mma(
                v_ring.index(stage).permute((1, 0)), p_tile.permute((1, 0)), acc, is_async=True
            )
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(stage), count=1)

            num_pieces = (request_end - 1) // share - before // share + 1
            head = kv_head * GROUP + row % GROUP
            valid = (row < TILE_TOKENS * GROUP) & (token < query_len)
            place = 2 * gl.program_id(0) + (position > part_begin).to(gl.int32)
            if not JOINS:
                if skipped == 0:
                    # Whoever has a request's first tile says in how many pieces it comes, and where the first one lies.
                    note = (place << 14) | (token * GROUP << 8) | num_pieces
                    gl.store(
                        pieces + (start + token) * NUM_KV_HEADS + kv_head,
                        note,
                        mask=valid & (row % GROUP == 0),
                    )
            summed = total
            if ROWS <= 16:
                summed = gl.sum(total, 0)
            anchor = gl.where(peak == float("-inf"), 0.0, peak)
            decay = gl.full([ROWS], 1.0, gl.float32, COLUMN)
            if HAS_SINK:
                if num_pieces == 1:
                    # A request in one piece meets its sink here, the others in the join.
                    anchor, decay, summed = meet_sink(
                        peak, summed, gl.load(sinks + head, mask=valid, other=0.0)
                    )
            empty = summed == 0.0
            safe = gl.where(empty, 1.0, summed)
            base2 = gl.where(empty, float("-inf"), anchor + gl.log2(safe))
            result = acc * (decay / safe)[None, :]
            lanes = gl.arange(0, WIDTH_V, gl.SliceLayout(1, LAYOUT))
            mask = valid[None, :] & (lanes < DV)[:, None]
            if num_pieces == 1:
                places = (start + token).to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
                gl.store(out + places[None, :] + lanes[:, None], result.to(DTYPE), mask=mask)
                if HAS_LSE:
                    gl.store(
                        lse + (start + token).to(gl.int64) * stride_lt + head,
                        base2 * LN2,
                        mask=valid,
                    )
            else:
                gl.store(
                    partials + ((place * rows + row) * DV)[None, :] + lanes[:, None],
                    result,
                    mask=mask,
                )
                gl.store(partial_lses + place * rows + row, base2, mask=valid)
                if JOINS:
                    # The last of a request's CTAs merges its pieces, in their order: which one that is changes nothing. The
                    # request that begins in a part and goes on after it has that part's counter.
                    first_cta = before // share * NUM_KV_HEADS + kv_head
                    arrived = counters + _OWN_COUNTERS + first_cta
                    partition_barrier()
                    if count_up(arrived, "acq_rel") == num_pieces - 1:
                        gl.store(arrived, 0)
                        first_place = 2 * first_cta + (before % share > 0).to(gl.int32)
                        join_here(partials, partial_lses, sinks, out, lse, first_place, num_pieces, start, query_len, kv_head, rows,
                                  stride_ot, stride_oh, stride_lt, NUM_KV_HEADS, GROUP, DV, WIDTH_V, ROWS, HAS_SINK,
                                  HAS_LSE)  # fmt: skip
            position += count
        if position >= request_end:
            before = request_end
            request += 1
    if JOINS:
        clear_rows(out, lse, query_start_loc, num_reqs, num_tokens, stride_ot, stride_oh, stride_lt, NUM_KV_HEADS, GROUP, DV, WIDTH_V,
                   ROWS, HAS_LSE)  # fmt: skip
        release_successor()


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_decode_kernel(key, value, query, out, lse, sinks, query_start_loc, seq_lens, block_table, partials,
                         partial_lses, pieces, counters, scale, soft_cap, left, right, chunk, num_reqs, num_tokens, num_blocks,
                         rows, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_table, NUM_KV_HEADS: gl.constexpr,
                         GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, WIDTH: gl.constexpr,
                         WIDTH_V: gl.constexpr, TILE_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr,
                         BLOCK_SIZE: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, JOINS: gl.constexpr,
                         CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr, HAS_CAP: gl.constexpr,
                         HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr):  # fmt: skip
    """One CTA of 4 + 1 + 1 warps; grid: parts times NUM_KV_HEADS, all of which the chip holds at a time."""
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], key.dtype)
    P_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_N], key.dtype)
    K_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, WIDTH], key.dtype)
    V_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, WIDTH_V], key.dtype)
    q_tile = gl.allocate_shared_memory(key.dtype, [ROWS, WIDTH], Q_SHARED)
    p_tile = gl.allocate_shared_memory(key.dtype, [ROWS, BLOCK_N], P_SHARED)
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
                query, out, lse, sinks, query_start_loc, seq_lens, partials, partial_lses, pieces, counters, scale, soft_cap,
                left, right, chunk, num_reqs, num_tokens, rows, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, q_tile, p_tile, k_ring,
                v_ring, k_full, k_empty, v_full, v_empty, NUM_KV_HEADS, GROUP, D, DV, TILE_TOKENS, BLOCK_SIZE, STAGES,
                JOINS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE)),
            (_loader, (
                key, query_start_loc, seq_lens, block_table, left, right, chunk, num_reqs, num_blocks, stride_table, k_ring,
                k_full, k_empty, NUM_KV_HEADS, TILE_TOKENS, BLOCK_SIZE, STAGES, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)),
            (_loader, (
                value, query_start_loc, seq_lens, block_table, left, right, chunk, num_reqs, num_blocks, stride_table, v_ring,
                v_full, v_empty, NUM_KV_HEADS, TILE_TOKENS, BLOCK_SIZE, STAGES, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)),
        ],
        [1, 1],
        [48, 48],
    )  # fmt: skip
