"""The prefill kernel for Hopper: two or three warpgroups that multiply, one warp that loads keys, and one that loads values.

A work item is a tile of 64 rows for each multiplying warpgroup and one KV head; a row is one query head of one query
token, the heads of a group beside each other, so that they share a stream of keys and values. The loading warps fill
rings of key and value tiles by TMA, one box per page; `full` barriers count bytes, `empty` barriers count the consumers.
Loaders are two, because one would wait for room for values while there is room for keys. The one of the keys chooses work
items and tells the others. Tiles of keys are walked from the diagonal leftwards.

Within a warpgroup the product of the next tile's keys is issued before that of the last tile's values is awaited
(FlashAttention-3, Shah et al. 2024). Ring positions are carried across work items, so a grid smaller than the number of
items is persistent.

With `beside` the kernel starts while the one before it runs, on the multiprocessors that this one left free, and awaits
it at its own end: that is how the prefills of a mixed batch run beside its decodes.
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

from attnlib.ops.triton.hopper.kernels.compat import (
    await_predecessor,
    consumers_sync,
    exp2,
    load_box,
    partition_barrier,
    release_successor,
)
from attnlib.ops.triton.hopper.kernels.mainloop import overlapped_step, pack_weights, unpack_weights
from attnlib.ops.triton.hopper.kernels.schedule import find_tile, row_span, visited_tiles
from attnlib.ops.triton.hopper.kernels.softmax import (
    LN2,
    LOG2E,
    hide_keys,
    score_factor,
    transform_scores,
    weigh,
)
from attnlib.ops.triton.hopper.kernels.tma_load import load_tile
from attnlib.ops.triton.hopper.kernels.work_counter import count_up

__all__ = ["UNALIGNED", "UNSPECIALIZED", "hopper_prefill_kernel"]

UNSPECIALIZED = [
    "left", "right", "chunk", "num_reqs", "num_tokens", "num_tiles", "beside", "section", "num_blocks", "stride_qt", "stride_qh",
    "stride_ot", "stride_oh", "stride_lt", "stride_table",
]  # fmt: skip
"""Parameters whose values must not choose a compilation."""

UNALIGNED = ["lse", "sinks", "query_start_loc", "seq_lens", "block_table"]
"""Pointers whose alignment must not choose one either: they are slices of a batch, cut wherever its decodes end."""


@gluon.jit
def _aligned(offset):
    """An offset that the launcher knows to be a multiple of 8 elements (16 bytes), as the compiler should know too."""
    return (offset >> 3) << 3


@gluon.jit
def _write_note(notes, place, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    notes.index(place).store(gl.full([1], 0, gl.int32, layout) + value)


@gluon.jit
def _read_note(notes, place):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(notes.index(place).load(layout), 0)


@gluon.jit
def _publish(
    notes,
    n_full,
    n_empty,
    turn,
    request,
    start,
    first_token,
    kv_head,
    query_len,
    seq_len,
    NOTE: gl.constexpr,
):
    """Tell both consumers and the loader of values of the next work item; request -1 is the end."""
    slot = turn % 2
    mbarrier.wait(n_empty.index(slot), ((turn // 2) & 1) ^ 1)
    _write_note(notes, slot * NOTE, request)
    _write_note(notes, slot * NOTE + 1, start)
    _write_note(notes, slot * NOTE + 2, first_token)
    _write_note(notes, slot * NOTE + 3, kv_head)
    _write_note(notes, slot * NOTE + 4, query_len)
    _write_note(notes, slot * NOTE + 5, seq_len)
    mbarrier.arrive(n_full.index(slot), count=1)


@gluon.jit
def _key_loader(key, query_map, query_start_loc, seq_lens, block_table, counters, left, right, chunk, num_reqs,
                num_tokens, num_tiles, beside, section, num_blocks, stride_table, notes, q_tiles, k_ring, n_full, n_empty, q_full,
                q_empty, k_full, k_empty, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, TILE_TOKENS: gl.constexpr,
                BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
                CONSUMERS: gl.constexpr, LOAD_QUERY: gl.constexpr, PERSISTENT: gl.constexpr, NOTE: gl.constexpr, CAUSAL: gl.constexpr,
                HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr):  # fmt: skip
    """Choose work items, tell the others, load queries and keys; over the borders of items as far as the rings reach."""
    Q_BYTES: gl.constexpr = CONSUMERS * 64 * q_tiles.shape[2] * 2
    if beside == 0:
        await_predecessor()
        release_successor()
    items = num_tiles * NUM_KV_HEADS
    item = gl.program_id(0)
    handed_out = gl.num_programs(0)
    if PERSISTENT:
        if beside != 0:
            # Programs that find no place yet must not own work.
            item = count_up(counters, "relaxed")
            handed_out = 0
    turn = 0
    fetched = 0
    step = 0
    while item < items:
        request, start, first_token, kv_head = find_tile(item, query_start_loc, num_reqs, num_tiles, section, NUM_KV_HEADS,
                                                         TILE_TOKENS)  # fmt: skip
        query_len = num_tokens - start
        seq_len = 0
        if request < num_reqs:
            query_len = gl.load(query_start_loc + request + 1) - start
            seq_len = gl.load(seq_lens + request)
        begin = 0
        end = 0
        if first_token < query_len:
            _publish(
                notes,
                n_full,
                n_empty,
                turn,
                request,
                start,
                first_token,
                kv_head,
                query_len,
                seq_len,
                NOTE,
            )
            turn += 1
            if request < num_reqs:
                if LOAD_QUERY:
                    q_slot = fetched % Q_STAGES
                    mbarrier.wait(q_empty.index(q_slot), ((fetched // Q_STAGES) & 1) ^ 1)
                    mbarrier.expect(q_full.index(q_slot), Q_BYTES)
                    first_row = start + first_token
                    for part in gl.static_range(CONSUMERS):
                        if GROUP <= 64:
                            load_box(query_map, [first_row + part * (64 // GROUP), kv_head * GROUP, 0],
                                     q_full.index(q_slot), q_tiles.index(q_slot * CONSUMERS + part))  # fmt: skip
                        else:
                            load_box(query_map, [first_row, kv_head * GROUP + part * 64, 0], q_full.index(q_slot),
                                     q_tiles.index(q_slot * CONSUMERS + part))  # fmt: skip
                    fetched += 1
                begin, _, _, end = visited_tiles(first_token, query_len, seq_len, left, right, chunk, TILE_TOKENS,
                                                 BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        table = block_table + gl.minimum(request, num_reqs - 1).to(gl.int64) * stride_table
        pages = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
        # The next item is taken a few steps before this one's end, so that the answer is there in time, and not earlier:
        # an item that a busy program owns is one that an idle one cannot have.
        item = items
        last = gl.minimum(begin + 4, end)
        for back in range(0, end - last):
            tile = end - 1 - back
            load_tile(key, table, pages, num_blocks, kv_head, tile, tile * BLOCK_N // BLOCK_SIZE - 32, k_ring, k_full, k_empty, step,
                      BLOCK_SIZE, STAGES)  # fmt: skip
            step += 1
        if PERSISTENT:
            item = handed_out + count_up(counters, "relaxed")
        for back in range(0, last - begin):
            tile = last - 1 - back
            load_tile(key, table, pages, num_blocks, kv_head, tile, tile * BLOCK_N // BLOCK_SIZE - 32, k_ring, k_full, k_empty, step,
                      BLOCK_SIZE, STAGES)  # fmt: skip
            step += 1
    _publish(notes, n_full, n_empty, turn, -1, 0, 0, 0, 0, 0, NOTE)
    if PERSISTENT:
        # The last CTA to run out of work leaves both counters as they were found.
        if count_up(counters + 1, "relaxed") == gl.num_programs(0) - 1:
            gl.store(counters, 0)
            gl.store(counters + 1, 0)
    if beside != 0:
        # Who waits for this kernel may count on the one before it, too.
        await_predecessor()


@gluon.jit
def _value_loader(value, block_table, left, right, chunk, num_reqs, num_blocks, stride_table, notes, v_ring, n_full, n_empty, v_full,
                  v_empty, TILE_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
                  NOTE: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
                  HAS_CHUNK: gl.constexpr):  # fmt: skip
    """Load the values of the work items that are told."""
    turn = 0
    step = 0
    request = 0
    while request >= 0:
        slot = turn % 2
        mbarrier.wait(n_full.index(slot), (turn // 2) & 1)
        request = _read_note(notes, slot * NOTE)
        first_token = _read_note(notes, slot * NOTE + 2)
        kv_head = _read_note(notes, slot * NOTE + 3)
        query_len = _read_note(notes, slot * NOTE + 4)
        seq_len = _read_note(notes, slot * NOTE + 5)
        mbarrier.arrive(n_empty.index(slot), count=1)
        turn += 1
        if (request >= 0) & (request < num_reqs):
            begin, _, _, end = visited_tiles(first_token, query_len, seq_len, left, right, chunk, TILE_TOKENS, BLOCK_N, CAUSAL,
                                             HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            table = block_table + request.to(gl.int64) * stride_table
            pages = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
            for back in range(0, end - begin):
                tile = end - 1 - back
                load_tile(value, table, pages, num_blocks, kv_head, tile, tile * BLOCK_N // BLOCK_SIZE - 32, v_ring, v_full, v_empty,
                          step, BLOCK_SIZE, STAGES)  # fmt: skip
                step += 1


@gluon.jit
def _clear_values(v_tile, valid, WARPGROUP: gl.constexpr, CONSUMERS: gl.constexpr):
    """Zero the rows of a value tile from `valid` on; the first two consumers do a half each (P5: 0 * NaN is NaN)."""
    ROWS: gl.constexpr = v_tile.shape[0] // 2
    WIDTH: gl.constexpr = v_tile.shape[1]
    LANES: gl.constexpr = min(32, WIDTH // 8)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    if WARPGROUP < 2:
        half = v_tile.slice(WARPGROUP * ROWS, ROWS, 0)
        rows = WARPGROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        content = half.load(layout)
        half.store(gl.where(rows[:, None] < valid, content, 0.0))
        fence_async_shared()
    consumers_sync(CONSUMERS)


@gluon.jit
def _store_rows(out, offsets, tile, valid, head_size):
    """Store rows [M, W] at element offsets [M], columns up to head_size."""
    columns = gl.arange(0, tile.shape[1], gl.SliceLayout(0, tile.type.layout))
    pointers = out + _aligned(offsets)[:, None] + columns[None, :]
    gl.store(pointers, tile, mask=valid[:, None] & (columns < head_size)[None, :])


@gluon.jit
def _rows(first_token, query_len, kv_head, WARPGROUP: gl.constexpr, GROUP: gl.constexpr, TILE_TOKENS: gl.constexpr,
          layout: gl.constexpr):  # fmt: skip
    """(token within the request, query head, whether the row exists) of this warpgroup's 64 rows."""
    rows = WARPGROUP * 64 + gl.arange(0, 64, layout)
    token = first_token + rows // GROUP
    return token, kv_head * GROUP + rows % GROUP, (rows < TILE_TOKENS * GROUP) & (token < query_len)


@gluon.jit
def _consumer(query, out, lse, sinks, scale, soft_cap, left, right, chunk, num_reqs, beside, stride_qt, stride_qh, stride_ot,
              stride_oh, stride_lt, notes, q_tiles, k_ring, v_ring, n_full, n_empty, q_full, q_empty, k_full, k_empty,
              v_full, v_empty, WARPGROUP: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
              TILE_TOKENS: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
              CONSUMERS: gl.constexpr, LOAD_QUERY: gl.constexpr, STAGED_STORE: gl.constexpr,
              NOTE: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
              HAS_CAP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr):  # fmt: skip
    WIDTH: gl.constexpr = q_tiles.shape[2]
    WIDTH_V: gl.constexpr = v_ring.shape[2]
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    DTYPE: gl.constexpr = q_tiles.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_V, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    Q_LANES: gl.constexpr = min(32, WIDTH // 8)
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // Q_LANES, Q_LANES], [4, 1], [1, 0])
    V_LANES: gl.constexpr = min(32, WIDTH_V // 8)
    STORE_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // V_LANES, V_LANES], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    CHECK_LEFT: gl.constexpr = HAS_LEFT or HAS_CHUNK
    factor = score_factor(scale, soft_cap, HAS_CAP)
    if beside == 0:
        await_predecessor()
        release_successor()

    turn = 0
    fetched = 0
    step = 0
    request = 0
    while request >= 0:
        slot = turn % 2
        mbarrier.wait(n_full.index(slot), (turn // 2) & 1)
        request = _read_note(notes, slot * NOTE)
        start = _read_note(notes, slot * NOTE + 1)
        first_token = _read_note(notes, slot * NOTE + 2)
        kv_head = _read_note(notes, slot * NOTE + 3)
        query_len = _read_note(notes, slot * NOTE + 4)
        seq_len = _read_note(notes, slot * NOTE + 5)
        mbarrier.arrive(n_empty.index(slot), count=1)
        turn += 1
        if request == num_reqs:
            # Rows after the last request (M6): zero, whatever lay there.
            token, head, valid = _rows(first_token, query_len, kv_head, WARPGROUP, GROUP, TILE_TOKENS,
                                       gl.SliceLayout(1, STORE_LAYOUT))  # fmt: skip
            offsets = (start + token).to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
            _store_rows(out, offsets, gl.zeros([64, WIDTH_V], DTYPE, STORE_LAYOUT), valid, DV)
            if HAS_LSE:
                nothing = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, STORE_LAYOUT))
                gl.store(lse + (start + token).to(gl.int64) * stride_lt + head, nothing, mask=valid)
        if (request >= 0) & (request < num_reqs):
            begin, left_end, right_begin, end = visited_tiles(
                first_token, query_len, seq_len, left, right, chunk, TILE_TOKENS, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT,
                HAS_CHUNK)  # fmt: skip

            q_slot = fetched % Q_STAGES
            q_tile = q_tiles.index(q_slot * CONSUMERS + WARPGROUP)
            if LOAD_QUERY:
                mbarrier.wait(q_full.index(q_slot), (fetched // Q_STAGES) & 1)
            else:
                token, head, valid = _rows(first_token, query_len, kv_head, WARPGROUP, GROUP, TILE_TOKENS,
                                           gl.SliceLayout(1, Q_LAYOUT))  # fmt: skip
                offsets = _aligned(
                    (start + token).to(gl.int64) * stride_qt + head.to(gl.int64) * stride_qh
                )
                columns = gl.arange(0, WIDTH, gl.SliceLayout(0, Q_LAYOUT))
                mask = valid[:, None] & (columns < D)[None, :]
                q = gl.load(query + offsets[:, None] + columns[None, :], mask=mask, other=0.0)
                partition_barrier()
                q_tile.store(q)
                fence_async_shared()
                partition_barrier()
            fetched += 1

            token, head, valid = _rows(
                first_token, query_len, kv_head, WARPGROUP, GROUP, TILE_TOKENS, ROW
            )
            row_first, row_last = row_span(token + (seq_len - query_len), seq_len, left, right, chunk, CAUSAL,
                                           HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            peak = gl.full([64], float("-inf"), gl.float32, ROW)
            total = gl.full([64], 0.0, gl.float32, ROW)
            acc = gl.zeros([64, WIDTH_V], gl.float32, O_LAYOUT)
            if end > begin:
                stage = step % STAGES
                parity = (step // STAGES) & 1
                mbarrier.wait(k_full.index(stage), parity)
                nothing = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
                scores = warpgroup_mma(
                    q_tile,
                    k_ring.index(stage).permute((1, 0)),
                    nothing,
                    use_acc=False,
                    is_async=True,
                )
                scores = warpgroup_mma_wait(0, deps=[scores])
                mbarrier.arrive(k_empty.index(stage), count=1)
                scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
                scores = hide_keys(scores, row_first, row_last, (end - 1) * BLOCK_N, CHECK_LEFT)
                grown, _, peak, total = weigh(scores, factor, peak, total, True, HAS_CAP)
                weights = pack_weights(grown, DTYPE)
                past_end = seq_len - (end - 1) * BLOCK_N
                if (past_end < BLOCK_N) & (seq_len % BLOCK_SIZE != 0):
                    mbarrier.wait(v_full.index(stage), parity)
                    _clear_values(v_ring.index(stage), past_end, WARPGROUP, CONSUMERS)
                step += 1

                full_end = gl.minimum(right_begin, end - 1)
                full_begin = gl.minimum(left_end, full_end)
                for back in range(0, end - 1 - full_end):
                    acc, weights, peak, total = overlapped_step(
                        q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, weights, peak, total, step,
                        end - 2 - back, row_first, row_last, factor, soft_cap, STAGES, True,
                        CHECK_LEFT, HAS_CAP, P_LAYOUT)  # fmt: skip
                    step += 1
                for back in range(0, full_end - full_begin):
                    acc, weights, peak, total = overlapped_step(
                        q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, weights, peak, total, step,
                        full_end - 1 - back, row_first, row_last, factor, soft_cap, STAGES,
                        False, CHECK_LEFT, HAS_CAP, P_LAYOUT)  # fmt: skip
                    step += 1
                if CHECK_LEFT:
                    for back in range(0, full_begin - begin):
                        acc, weights, peak, total = overlapped_step(
                            q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, weights, peak, total,
                            step, full_begin - 1 - back, row_first, row_last, factor, soft_cap, STAGES,
                            True, CHECK_LEFT, HAS_CAP, P_LAYOUT)  # fmt: skip
                        step += 1

                stage = (step - 1) % STAGES
                mbarrier.wait(v_full.index(stage), ((step - 1) // STAGES) & 1)
                acc = warpgroup_mma(
                    unpack_weights(weights, DTYPE, P_LAYOUT),
                    v_ring.index(stage),
                    acc,
                    is_async=True,
                )
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(v_empty.index(stage), count=1)

            anchor = gl.where(peak == float("-inf"), 0.0, peak)
            decay = gl.full([64], 1.0, gl.float32, ROW)
            if HAS_SINK:
                # The sink counts here, once (M4).
                sink = gl.load(sinks + head, mask=valid, other=0.0) * LOG2E
                top = gl.maximum(peak, sink)
                anchor = gl.where(top == float("-inf"), 0.0, top)
                decay = exp2(peak - anchor)
                total = total * decay + exp2(sink - anchor)
            empty = total == 0.0
            safe = gl.where(empty, 1.0, total)
            if HAS_LSE:
                natural = gl.where(empty, float("-inf"), anchor + gl.log2(safe)) * LN2
                gl.store(lse + (start + token).to(gl.int64) * stride_lt + head, natural, mask=valid)
            finish = gl.convert_layout(decay / safe, gl.SliceLayout(1, O_LAYOUT))
            rows = (acc * finish[:, None]).to(DTYPE)
            if STAGED_STORE:
                # Through the query's own shared memory, so that stores are 16 bytes wide.
                partition_barrier()
                q_tile.store(rows)
                partition_barrier()
                token, head, valid = _rows(first_token, query_len, kv_head, WARPGROUP, GROUP, TILE_TOKENS,
                                           gl.SliceLayout(1, STORE_LAYOUT))  # fmt: skip
                offsets = (start + token).to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
                _store_rows(out, offsets, q_tile.load(STORE_LAYOUT), valid, DV)
            else:
                token, head, valid = _rows(first_token, query_len, kv_head, WARPGROUP, GROUP, TILE_TOKENS,
                                           gl.SliceLayout(1, O_LAYOUT))  # fmt: skip
                offsets = (start + token).to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
                _store_rows(out, offsets, rows, valid, DV)
            if LOAD_QUERY:
                # The next queries come here by TMA, after what was staged here has been read.
                fence_async_shared()
                mbarrier.arrive(q_empty.index(q_slot), count=1)


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_prefill_kernel(key, value, query_map, query, out, lse, sinks, query_start_loc, seq_lens, block_table, counters,
                          scale, soft_cap, left, right, chunk, num_reqs, num_tokens, num_tiles, beside, section, num_blocks,
                          stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_table,
                          NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
                          WIDTH: gl.constexpr, WIDTH_V: gl.constexpr, TILE_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr,
                          BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
                          CONSUMERS: gl.constexpr, LOAD_QUERY: gl.constexpr, PERSISTENT: gl.constexpr,
                          STAGED_STORE: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
                          PRODUCER_REGISTERS: gl.constexpr, CAUSAL: gl.constexpr,
                          HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
                          HAS_CAP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr):  # fmt: skip
    """One CTA of 4 warps for each consumer and 1 + 1 for the loaders; grid: num_tiles * NUM_KV_HEADS programs, or fewer with PERSISTENT."""
    NOTE: gl.constexpr = 6
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, WIDTH], key.dtype)
    K_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, WIDTH], key.dtype)
    V_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, WIDTH_V], key.dtype)
    q_tiles = gl.allocate_shared_memory(key.dtype, [Q_STAGES * CONSUMERS, 64, WIDTH], Q_SHARED)
    k_ring = gl.allocate_shared_memory(key.dtype, [STAGES, BLOCK_N, WIDTH], K_SHARED)
    v_ring = gl.allocate_shared_memory(key.dtype, [STAGES, BLOCK_N, WIDTH_V], V_SHARED)
    notes = gl.allocate_shared_memory(
        gl.int32, [2 * NOTE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    n_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    n_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(n_full.index(slot), count=1)
        mbarrier.init(n_empty.index(slot), count=CONSUMERS + 1)
    for slot in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(q_empty.index(slot), count=CONSUMERS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=CONSUMERS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    # Written out twice: a constant in a tuple that has a name is no constant any more.
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consumer, (
                    query, out, lse, sinks, scale, soft_cap, left, right, chunk, num_reqs, beside, stride_qt, stride_qh, stride_ot,
                    stride_oh, stride_lt, notes, q_tiles, k_ring, v_ring, n_full, n_empty, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, 0, GROUP, D, DV, TILE_TOKENS, BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY,
                    STAGED_STORE, NOTE, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE)),
                (_consumer, (
                    query, out, lse, sinks, scale, soft_cap, left, right, chunk, num_reqs, beside, stride_qt, stride_qh, stride_ot,
                    stride_oh, stride_lt, notes, q_tiles, k_ring, v_ring, n_full, n_empty, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, 1, GROUP, D, DV, TILE_TOKENS, BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY,
                    STAGED_STORE, NOTE, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE)),
                (_consumer, (
                    query, out, lse, sinks, scale, soft_cap, left, right, chunk, num_reqs, beside, stride_qt, stride_qh, stride_ot,
                    stride_oh, stride_lt, notes, q_tiles, k_ring, v_ring, n_full, n_empty, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, 2, GROUP, D, DV, TILE_TOKENS, BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY,
                    STAGED_STORE, NOTE, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE)),
                (_key_loader, (
                    key, query_map, query_start_loc, seq_lens, block_table, counters, left, right, chunk, num_reqs,
                    num_tokens, num_tiles, beside, section, num_blocks, stride_table, notes, q_tiles, k_ring, n_full, n_empty, q_full,
                    q_empty, k_full, k_empty, NUM_KV_HEADS, GROUP, TILE_TOKENS, BLOCK_N, BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY,
                    PERSISTENT, NOTE, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)),
                (_value_loader, (
                    value, block_table, left, right, chunk, num_reqs, num_blocks, stride_table, notes, v_ring, n_full, n_empty,
                    v_full, v_empty, TILE_TOKENS, BLOCK_N, BLOCK_SIZE, STAGES, NOTE, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)),
            ],
            [4, 4, 1, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (
                    query, out, lse, sinks, scale, soft_cap, left, right, chunk, num_reqs, beside, stride_qt, stride_qh, stride_ot,
                    stride_oh, stride_lt, notes, q_tiles, k_ring, v_ring, n_full, n_empty, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, 0, GROUP, D, DV, TILE_TOKENS, BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY,
                    STAGED_STORE, NOTE, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE)),
                (_consumer, (
                    query, out, lse, sinks, scale, soft_cap, left, right, chunk, num_reqs, beside, stride_qt, stride_qh, stride_ot,
                    stride_oh, stride_lt, notes, q_tiles, k_ring, v_ring, n_full, n_empty, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, 1, GROUP, D, DV, TILE_TOKENS, BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY,
                    STAGED_STORE, NOTE, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE)),
                (_key_loader, (
                    key, query_map, query_start_loc, seq_lens, block_table, counters, left, right, chunk, num_reqs,
                    num_tokens, num_tiles, beside, section, num_blocks, stride_table, notes, q_tiles, k_ring, n_full, n_empty, q_full,
                    q_empty, k_full, k_empty, NUM_KV_HEADS, GROUP, TILE_TOKENS, BLOCK_N, BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY,
                    PERSISTENT, NOTE, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)),
                (_value_loader, (
                    value, block_table, left, right, chunk, num_reqs, num_blocks, stride_table, notes, v_ring, n_full, n_empty,
                    v_full, v_empty, TILE_TOKENS, BLOCK_N, BLOCK_SIZE, STAGES, NOTE, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)),
            ],
            [4, 1, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
