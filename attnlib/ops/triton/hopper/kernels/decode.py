"""The Hopper decode kernel: every CTA reads an equal share of the keys and values.

Work distribution (stream-K, Osama et al. 2023):

- The key tiles of all requests form one line, request after request. The line is cut into equal
  tile ranges, as many as the chip holds at a time divided by the number of KV heads. Each range has
  NUM_KV_HEADS consecutive CTAs, one per KV head, so that the heads of a page are read at about the
  same time and memory transfers cover whole pages.
- A range may contain the end of one request, several whole requests and the beginning of another.
  The tiles of one request in one range are a split. A request with one split is written directly;
  other splits are written as float32 partial results and combined (`combine.py`).
- A CTA has one consumer warpgroup (4 warps) that multiplies, one warp that loads keys and one warp
  that loads values, or four of each where they gather the rows of small blocks. The loaders run
  ahead over the borders of splits, so that memory stays busy when a new request begins.
- Over quantized caches there may be two such workers, each with ranges of its own. With tiles of 64
  keys, a worker has one warp that loads keys and values and one that prepares queries.

Barriers, one pair per ring stage and ring: `full` completes when the TMA loads of a stage have
delivered their bytes, or the copies of all gathering threads are complete; `empty` counts one
arrival, of the consumer, or those of its threads where a CTA has two.

The few rows of a request (query heads of a group times query tokens) are the N dimension of both
products, K @ Q^T and V^T @ P^T, because WGMMA needs M = 64 but allows N = 8.

Lengths are read on the device only, so a captured CUDA graph replays correctly with other lengths.
FlashAttention-3 and FlashInfer plan a similar distribution before the launch.
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

from attnlib.ops.triton.hopper.kernels.cache_tiles import (
    allocate_rings,
    load_packed_keys,
    value_operand,
)
from attnlib.ops.triton.hopper.kernels.column_softmax import (
    add_weights,
    column_sum,
    load_columns,
    mask_columns,
    softmax_columns,
    store_columns,
    store_weights,
)
from attnlib.ops.triton.hopper.kernels.combine import clear_rows, combine_in_cta
from attnlib.ops.triton.hopper.kernels.compat import (
    arrive_after_copies,
    launch_dependent_grids,
    partition_barrier,
    prefetch_l1,
    store_in_l2,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.decode_queries import (
    load_queries,
    query_layout,
    query_offsets,
    send_queries,
    store_queries,
)
from attnlib.ops.triton.hopper.kernels.gather import GATHER_THREADS, gather_tile
from attnlib.ops.triton.hopper.kernels.int4 import (
    float32_scale,
    int4_key_products,
    int4_result,
    int4_value_products,
    int4_value_rows,
    repeat_columns,
)
from attnlib.ops.triton.hopper.kernels.mainloop import hidden_zero, wait_for_tile
from attnlib.ops.triton.hopper.kernels.quantized import (
    WEIGHT_SCALE,
    copy_token_scales,
    float16_keys,
    float16_values,
    load_kv_scale,
    value_rows,
)
from attnlib.ops.triton.hopper.kernels.ranges import (
    even_begin,
    even_index,
    even_range,
    num_key_tiles,
    tile_range,
)
from attnlib.ops.triton.hopper.kernels.schedule import load_lengths, visible_span, visited_tiles
from attnlib.ops.triton.hopper.kernels.softmax import (
    LN2,
    add_sink,
    apply_function,
    score_factor,
    transform_scores,
)
from attnlib.ops.triton.hopper.kernels.tma_load import load_tile
from attnlib.ops.triton.hopper.kernels.work_counter import PREFILL_COUNTERS, atomic_increment
from attnlib.ops.triton.kernels.quant import KV_INT4, KV_PLAIN, SCALE_FLOAT, SCALE_PER_TOKEN

__all__ = [
    "UNALIGNED", "UNSPECIALIZED", "clear_tile", "hopper_decode_kernel", "prefetch_queries",
]  # fmt: skip

UNSPECIALIZED = [
    "left", "right", "chunk", "num_reqs", "num_tokens", "num_blocks", "rows", "stride_qt",
    "stride_qh", "stride_ot", "stride_oh", "stride_lt", "stride_table", "rows0", "columns0",
    "rows1", "columns1", "rows2", "columns2", "rows3", "columns3", "stride_ksb", "stride_ksn",
    "stride_ksh", "stride_vsb", "stride_vsn", "stride_vsh", "stride_latents", "stride_kb",
    "stride_kn", "stride_kh", "stride_vb", "stride_vn", "stride_vh",
]  # fmt: skip
"""Parameters whose values must not select a compilation, because they change from step to step."""

UNALIGNED = [
    "lse", "sinks", "k_scale", "v_scale", "query_start_loc", "seq_lens", "block_table",
    "partial_lses", "split_headers", "counters", "aux0", "aux1", "aux2", "aux3",
]  # fmt: skip
"""Pointers whose alignment must not select a compilation: slices of a batch or of the workspace
with arbitrary offsets."""

_FIRST_COUNTER = gl.constexpr(PREFILL_COUNTERS)
"""Index of the decode's first counter."""

_GATHER_THREADS = gl.constexpr(GATHER_THREADS)

_GATHER_AHEAD = gl.constexpr(3)
"""Tiles between the one whose rows are gathered and the one whose block numbers are prefetched."""


@gluon.jit
def _workers(WORKER: gl.constexpr, WORKERS: gl.constexpr):
    """Return (index, number) of workers in the grid: of one or two consumers in each CTA."""
    worker = gl.program_id(0)
    num_workers = gl.num_programs(0)
    if WORKERS > 1:
        worker = worker * WORKERS + WORKER
        num_workers = num_workers * WORKERS
    return worker, num_workers


@gluon.jit
def _gap(num_reqs, num_ranges):
    """Return the empty positions after the tiles of a request: 1 with more requests than ranges.

    The queries, the first scores and the output of a request take about the time of a tile. Without
    gaps, ranges of many short requests ended last beside those of a long one.
    """
    return (num_reqs > num_ranges).to(gl.int32)


@gluon.jit
def _loader(
    key_cache, value_cache, query_start_loc, seq_lens, block_table, left, right, chunk, num_reqs,
    num_blocks, stride_table, memory, scales, queries, aux, strides, BOUNDS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr, TILE_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
    KV_KIND: gl.constexpr, LOADS: gl.constexpr, WORKER: gl.constexpr, WORKERS: gl.constexpr,
    EVEN: gl.constexpr, GATHERS: gl.constexpr, D: gl.constexpr = 0, DV: gl.constexpr = 0,
    GROUP: gl.constexpr = 0, K_SCALE_KIND: gl.constexpr = SCALE_FLOAT,
):  # fmt: skip
    """Load what LOADS says of a worker's range, split after split: "keys", with the scales of pages
    that hold them, "values", "keys and values" or "queries". One warp.

    With GATHERS, 4 warps gather the rows of both caches by address and `strides`.

    Args:
        memory: of the worker, see `_allocate_worker`; and the barriers of `send_queries`.
        scales: of pages that hold them, and the ring for them (`copy_token_scales`).
        queries: (query, k_scale, strides of tokens and heads of the query), for "queries".
        EVEN: ranges are those of `even_range` instead of `tile_range`.
        D, DV: head sizes; the latter only with GATHERS, the former also for "queries".
        GROUP, K_SCALE_KIND: as in `hopper_decode_kernel`, for "queries".
    """
    KEYS: gl.constexpr = LOADS == "keys" or LOADS == "keys and values"
    VALUES: gl.constexpr = LOADS == "values" or LOADS == "keys and values"
    # PDL: the previous kernel may have written the cache, the lengths or the block table.
    wait_on_dependent_grids()
    worker, num_workers = _workers(WORKER, WORKERS)
    gap = _gap(num_reqs, num_workers // NUM_KV_HEADS)
    if EVEN:
        position, range_end, _, request, before = even_range(
            query_start_loc, seq_lens, left, right, chunk, num_reqs, worker // NUM_KV_HEADS,
            num_workers // NUM_KV_HEADS, aux, gap, BOUNDS, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT,
            HAS_CHUNK)  # fmt: skip
    else:
        position, range_end, _, request, before = tile_range(
            query_start_loc, seq_lens, left, right, chunk, num_reqs, worker // NUM_KV_HEADS,
            num_workers // NUM_KV_HEADS, aux, BOUNDS, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT,
            HAS_CHUNK, gap)  # fmt: skip
    kv_head = worker % NUM_KV_HEADS
    if LOADS == "queries":
        query, key_scales, stride_qt, stride_qh = queries
        key_scale = load_kv_scale(key_scales, kv_head, K_SCALE_KIND)
    step = 0
    while position < range_end:
        tiles = num_key_tiles(
            query_start_loc, seq_lens, request, True, left, right, chunk, aux, BOUNDS, BLOCK_N,
            CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        request_end = before + tiles
        # Requests without queries have no tiles and are skipped.
        if position < request_end:
            start, query_len, seq_len = load_lengths(query_start_loc, seq_lens, request, True)
            count = gl.minimum(range_end, request_end) - position
            if LOADS == "queries":
                send_queries(
                    query, key_scale, start, query_len, kv_head, step, stride_qt, stride_qh,
                    memory[0], scales[10], memory[8], GROUP, D, TILE_TOKENS, KV_KIND)  # fmt: skip
                step += 1
            else:
                first_tile, _, _, _ = visited_tiles(
                    0, query_len, seq_len, left, right, chunk, request, aux, BOUNDS, TILE_TOKENS,
                    BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
                table = block_table + request.to(gl.int64) * stride_table
                pages = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
                if KV_KIND != KV_PLAIN and not HAS_LEFT and not HAS_CHUNK:
                    # The first pages of the next request. Over 16-bit caches this gained nothing.
                    following = gl.minimum(request + 1, num_reqs - 1).to(gl.int64)
                    prefetch_l1(block_table + following * stride_table)
                for i in range(0, count):
                    tile = first_tile + (position + i - before)
                    # 32 pages ahead: one 128-byte line of the block table.
                    later = tile * BLOCK_N // BLOCK_SIZE + 32
                    if GATHERS and KEYS:
                        gather_tile(
                            key_cache, table, seq_len, kv_head, tile, tile + _GATHER_AHEAD,
                            memory[2], memory[4], memory[5], step, strides[0], strides[1],
                            strides[2], D, BLOCK_SIZE, STAGES)  # fmt: skip
                    elif GATHERS:
                        gather_tile(
                            value_cache, table, seq_len, kv_head, tile, tile + _GATHER_AHEAD,
                            memory[3], memory[6], memory[7], step, strides[3], strides[4],
                            strides[5], DV, BLOCK_SIZE, STAGES)  # fmt: skip
                    else:
                        if KEYS:
                            load_tile(
                                key_cache, table, pages, num_blocks, kv_head, tile, later,
                                memory[2], memory[4], memory[5], step, BLOCK_SIZE, STAGES,
                                "packed_keys" if PACKED else "nhd")  # fmt: skip
                            if scales[8] is not None:
                                # The stage is free: the loads of the tile have waited for it.
                                copy_token_scales(
                                    scales, table, pages, num_blocks, kv_head, tile, step % STAGES,
                                    memory[4], BLOCK_SIZE, KV_KIND)  # fmt: skip
                        if VALUES:
                            load_tile(
                                value_cache, table, pages, num_blocks, kv_head, tile, later,
                                memory[3], memory[6], memory[7], step, BLOCK_SIZE, STAGES,
                                "packed_values" if PACKED else "nhd")  # fmt: skip
                    step += 1
            position += count
        before = request_end + gl.where(tiles > 0, gap, 0)
        position = gl.maximum(position, before)
        request += 1


@gluon.jit
def prefetch_queries(
    query, token, kv_head, num_tokens, stride_qt, stride_qh, GROUP: gl.constexpr, D: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Prefetch the query rows of the split that begins at `token` into L1.

    A split begins with the load of its queries. Where requests have few key tiles, no other work of
    the warpgroup hides that latency.
    """
    LINES: gl.constexpr = (D + 63) // 64  # of 128 bytes, in a row
    LANES: gl.constexpr = max(128, ROWS * ((D + 127) // 128 * 2))
    index = gl.arange(0, LANES, gl.BlockedLayout([LANES // 128], [32], [4], [0]))
    row = index // LINES % ROWS
    tokens = gl.minimum(token + row // GROUP, num_tokens - 1).to(gl.int64)
    heads = (kv_head * GROUP + row % GROUP).to(gl.int64)
    prefetch_l1(query + tokens * stride_qt + heads * stride_qh + index % LINES * 64)


@gluon.jit
def clear_tile(v_tile, valid, AXIS: gl.constexpr):
    """Set a value tile's positions along AXIS from `valid` on to 0.

    A page may hold anything past the sequence's end, and 0 * NaN is NaN (P5).
    """
    KEYS: gl.constexpr = v_tile.shape[AXIS]
    LANES: gl.constexpr = min(32, v_tile.shape[1] // 8)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    keys = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(1 - AXIS, layout)), 1 - AXIS)
    content = v_tile.load(layout)
    v_tile.store(gl.where(keys < valid, content, 0.0))
    # WGMMA reads shared memory through the async proxy: fence, then wait for all four warps.
    fence_async_shared()
    partition_barrier()


@gluon.jit
def _multiply_keys(
    k_ring, k_empty, stage, q_tile, zeros, PACKED: gl.constexpr, KV_KIND: gl.constexpr
):  # fmt: skip
    """Issue K @ Q^T, [keys, rows]."""
    LAYOUT: gl.constexpr = zeros.type.layout
    if KV_KIND == KV_INT4:
        return int4_key_products(k_ring.index(stage), q_tile, zeros)
    elif KV_KIND != KV_PLAIN:
        keys = float16_keys(k_ring.index(stage), KV_KIND, gl.DotOperandLayout(0, LAYOUT, 2))
    elif PACKED:
        keys = load_packed_keys(k_ring, k_empty, stage, LAYOUT)
    else:
        keys = k_ring.index(stage)
    if KV_KIND != KV_INT4:
        return warpgroup_mma(keys, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _release(empty, stage):
    """Arrive on the barrier of a stage, as each of the 128 threads of a worker.

    The thread has converted its part of the tile and issued a product with it, so its loads from
    shared memory are complete. It has issued no copies that this would wait for. One arrival for
    all threads needs a barrier before it, and Triton adds another one after it.
    """
    arrive_after_copies(empty.index(stage), increment_count=False)


@gluon.jit
def _finish_scores(scores, k_factor, k_scales, LATER: gl.constexpr, KV_KIND: gl.constexpr):
    """Wait for K @ Q^T, with LATER groups of products in flight behind it; return it in units of
    the keys and queries."""
    if KV_KIND == KV_INT4:
        s0, s1, s2, s3 = warpgroup_mma_wait(
            LATER, deps=[scores[0], scores[1], scores[2], scores[3]]
        )
        finished = s0 * float32_scale(k_scales, 0)[:, None]
        finished += s1 * float32_scale(k_scales, 1)[:, None]
        finished += s2 * float32_scale(k_scales, 2)[:, None]
        finished += s3 * float32_scale(k_scales, 3)[:, None]
        finished = finished * k_factor[None, :]
    else:
        finished = warpgroup_mma_wait(LATER, deps=[scores])
        if KV_KIND != KV_PLAIN:
            finished = finished * k_factor[None, :]
            if k_scales is not None:
                finished = finished * k_scales[:, None]
    return finished


@gluon.jit
def _finish_values(acc, KV_KIND: gl.constexpr):
    """Wait for V^T @ P^T + acc."""
    if KV_KIND == KV_INT4:
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc[0], acc[1]])
        return acc0, acc1
    else:
        return warpgroup_mma_wait(0, deps=[acc])


@gluon.constexpr_function
def _score_layout(rows):
    """Return the layout of [keys, rows] and [elements of a value, rows]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])


@gluon.jit
def _multiply_values(
    v_ring, stage, p_tile, acc, valid, PACKED: gl.constexpr, MASKED: gl.constexpr,
    KV_KIND: gl.constexpr,
):  # fmt: skip
    """Issue V^T @ P^T + acc, [elements of a value, rows]; MASKED as in `float16_values`."""
    if KV_KIND == KV_INT4:
        return int4_value_products(v_ring.index(stage), p_tile, acc[0], acc[1])
    elif KV_KIND != KV_PLAIN:
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
        values = float16_values(v_ring.index(stage), valid, MASKED, KV_KIND, OPERAND)
    else:
        values = value_operand(v_ring, stage, PACKED)
    if KV_KIND != KV_INT4:
        return warpgroup_mma(values, p_tile.permute((1, 0)), acc, is_async=True)


@gluon.constexpr_function
def _sends_queries(workers, keys, kind):
    """Return whether a warp of its own prepares the queries of a split while the consumer works on
    the previous one, and one warp loads keys and values.

    One loader warp instead of two takes 0.983 of the time of 128 x 2k and 256 x 1k (e4m3, H200).
    Tiles of 128 keys of 64 elements have twice as many boxes for the same bytes: one warp that
    loads keys and values costs 6% there.
    """
    return workers > 1 and keys <= 64 and kind != KV_INT4.value


@gluon.constexpr_function
def elements_per_word(kind):
    """Return the elements in 16 bits of a cache."""
    return {KV_PLAIN.value: 1, KV_INT4.value: 4}.get(kind, 2)


@gluon.jit
def _step(
    q_tile, p_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, row_max, row_sum, step,
    tile, row_first, row_last, factor, k_factor, soft_cap, scale, positions, heads, request, aux,
    scales, SCORE: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr,
    MASKED: gl.constexpr, CHECK_FIRST: gl.constexpr, HAS_CAP: gl.constexpr, KV_KIND: gl.constexpr,
    COPIED: gl.constexpr, EACH: gl.constexpr,
):  # fmt: skip
    """Multiply by the keys of `tile` and by the values of the tile before it, then do the softmax.

    Returns:
        (acc, row_max, row_sum).
    """
    KEYS: gl.constexpr = p_tile.shape[-1]
    ROWS: gl.constexpr = q_tile.shape[-2]
    LAYOUT: gl.constexpr = _score_layout(ROWS)
    stage = step % STAGES
    v_stage = (step - 1) % STAGES
    if STAGES == 1:
        stage = hidden_zero(step)
        v_stage = stage
    zeros = gl.zeros([KEYS, ROWS], gl.float32, LAYOUT)
    # Wait for the loads of this tile's keys, then issue K @ Q^T.
    wait_for_tile(k_full, stage, (step // STAGES) & 1, COPIED)
    k_scales = None
    v_scales = None
    if scales[8] is not None:
        k_scales = scales[8].index(2 * stage).load(gl.SliceLayout(1, LAYOUT))
        v_scales = scales[8].index(2 * stage + 1).load(gl.SliceLayout(1, LAYOUT))
    scores = _multiply_keys(k_ring, k_empty, stage, q_tile, zeros, PACKED, KV_KIND)
    # Wait for the loads of the previous tile's values, then issue V^T @ P^T behind it.
    wait_for_tile(v_full, v_stage, ((step - 1) // STAGES) & 1, COPIED)
    acc = _multiply_values(v_ring, v_stage, p_tile, acc, 0, PACKED, False, KV_KIND)
    if KV_KIND != KV_PLAIN:
        # Both tiles are in registers.
        if EACH:
            _release(k_empty, stage)
            _release(v_empty, v_stage)
        else:
            partition_barrier()
            mbarrier.arrive(k_empty.index(stage), count=1)
            mbarrier.arrive(v_empty.index(v_stage), count=1)
    # One group may stay in flight: K @ Q^T is complete, V^T @ P^T overlaps with the softmax.
    scores = _finish_scores(scores, k_factor, k_scales, 2 if KV_KIND == KV_INT4 else 1, KV_KIND)
    if (KV_KIND == KV_PLAIN) and (not PACKED):
        mbarrier.arrive(k_empty.index(stage), count=1)
    if SCORE is not None:
        keys = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
        scores = apply_function(
            scores, scale, factor, soft_cap, positions[None, :], keys[:, None], heads[None, :],
            request, aux, SCORE, HAS_CAP)  # fmt: skip
    else:
        scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
    if MASKED:
        scores = mask_columns(scores, row_first, row_last, tile * KEYS, CHECK_FIRST)
    weights, acc_scale, row_max = softmax_columns(
        scores, factor, row_max, v_scales, SCORE, MASKED, HAS_CAP, scales[9]
    )
    row_sum = add_weights(row_sum, acc_scale, weights)
    # V^T @ P^T is complete: its stage and p_tile are free, and the accumulator may be rescaled.
    acc = _finish_values(acc, KV_KIND)
    if KV_KIND == KV_PLAIN:
        mbarrier.arrive(v_empty.index(v_stage), count=1)
    if KV_KIND == KV_INT4:
        TWICE: gl.constexpr = _score_layout(2 * ROWS)
        acc_scale = repeat_columns(acc_scale, TWICE)
        acc = (acc[0] * acc_scale[None, :], acc[1] * acc_scale[None, :])
    else:
        acc = acc * acc_scale[None, :]
    store_weights(p_tile, weights, v_scales, MASKED, KV_KIND)
    return acc, row_max, row_sum


@gluon.jit
def _consumer(
    query, out, lse, sinks, k_scale, v_scale, query_start_loc, seq_lens, partials, partial_lses,
    split_headers, counters, scale, soft_cap, left, right, chunk, num_reqs, num_tokens, rows,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, memory, scales, aux,
    SCORE: gl.constexpr, BOUNDS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    TILE_TOKENS: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr,
    COMBINE_IN_KERNEL: gl.constexpr, SPLITS_PER_LOAD: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr, HAS_CAP: gl.constexpr,
    HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr, KV_KIND: gl.constexpr,
    K_SCALE_KIND: gl.constexpr, V_SCALE_KIND: gl.constexpr, WORKER: gl.constexpr,
    WORKERS: gl.constexpr, EVEN: gl.constexpr, COPIED: gl.constexpr = False,
):  # fmt: skip
    """Multiply, and write or combine the results of a worker's splits. One warpgroup.

    Args:
        memory: of the worker, see `_allocate_worker`; and the barriers of `send_queries`.
        scales: [8] is the ring of the scales of pages or None; [9] and [10] exchange numbers of
            columns between threads over quantized caches, as `column_softmax` takes them.
        EVEN: as in `_loader`.
        COPIED: the tiles are loaded by `cp.async`.
    """
    q_tile, p_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty = memory[:8]
    ROWS: gl.constexpr = q_tile.shape[-2]
    WIDTH: gl.constexpr = q_tile.shape[-1]
    WIDTH_V: gl.constexpr = elements_per_word(KV_KIND) * v_ring.shape[1 if PACKED else 2]
    BLOCK_N: gl.constexpr = p_tile.shape[-1]
    DTYPE: gl.constexpr = out.dtype.element_ty
    # [keys or elements of a value, rows]
    LAYOUT: gl.constexpr = _score_layout(ROWS)
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    Q_LAYOUT: gl.constexpr = query_layout(WIDTH, 4)
    CHECK_LEFT: gl.constexpr = HAS_LEFT or HAS_CHUNK
    EACH: gl.constexpr = WORKERS > 1
    SENT: gl.constexpr = _sends_queries(WORKERS, BLOCK_N, KV_KIND)
    # With bounds, unmasked tiles have scores that the function does not change.
    FULL_SCORE: gl.constexpr = None if BOUNDS is not None else SCORE
    factor = score_factor(scale, soft_cap, HAS_CAP)
    # PDL: the previous kernel may have written the queries, the cache or the lengths.
    wait_on_dependent_grids()
    if not COMBINE_IN_KERNEL:
        # The combine kernel may start; it waits for this kernel's results by itself.
        launch_dependent_grids()
    worker, num_workers = _workers(WORKER, WORKERS)
    num_ranges = num_workers // NUM_KV_HEADS
    gap = _gap(num_reqs, num_ranges)
    if EVEN:
        range_begin, range_end, total, request, before = even_range(
            query_start_loc, seq_lens, left, right, chunk, num_reqs, worker // NUM_KV_HEADS,
            num_ranges, aux, gap, BOUNDS, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT,
            HAS_CHUNK)  # fmt: skip
    else:
        range_begin, range_end, per_range, request, before = tile_range(
            query_start_loc, seq_lens, left, right, chunk, num_reqs, worker // NUM_KV_HEADS,
            num_ranges, aux, BOUNDS, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK,
            gap)  # fmt: skip
    kv_head = worker % NUM_KV_HEADS
    if KV_KIND != KV_PLAIN:
        key_scale = load_kv_scale(k_scale, kv_head, K_SCALE_KIND)
        value_factor = load_kv_scale(v_scale, kv_head, V_SCALE_KIND) / WEIGHT_SCALE
    position = range_begin
    step = 0
    split = 0
    while position < range_end:
        tiles = num_key_tiles(
            query_start_loc, seq_lens, request, True, left, right, chunk, aux, BOUNDS, BLOCK_N,
            CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        request_end = before + tiles
        if position < request_end:
            # One split: tiles [skipped, skipped + count) of the request.
            skipped = position - before
            count = gl.minimum(tiles - skipped, range_end - position)
            start, query_len, seq_len = load_lengths(query_start_loc, seq_lens, request, True)
            first_tile, left_end, right_begin, _ = visited_tiles(
                0, query_len, seq_len, left, right, chunk, request, aux, BOUNDS, TILE_TOKENS,
                BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip

            if SENT:
                # Another warp has prepared the queries.
                mbarrier.wait(memory[8].index(0), split & 1)
            elif KV_KIND != KV_PLAIN:
                scaled, inverse = load_queries(
                    query, start, query_len, kv_head, 0, stride_qt, stride_qh, GROUP, D,
                    TILE_TOKENS, WIDTH, ROWS, Q_LAYOUT, KV_KIND)  # fmt: skip
                store_columns(scales[10], inverse * key_scale)
                # All warps have exchanged maxima since they used the previous split's queries.
                store_queries(q_tile, scaled, KV_KIND)
                fence_async_shared()
                partition_barrier()
            else:
                q_offsets, q_valid = query_offsets(
                    start, query_len, kv_head, 0, stride_qt, stride_qh, GROUP, TILE_TOKENS, ROWS,
                    Q_LAYOUT)  # fmt: skip
                columns = gl.arange(0, WIDTH, gl.SliceLayout(0, Q_LAYOUT))
                q = gl.load(
                    query + q_offsets[:, None] + columns[None, :],
                    mask=q_valid[:, None] & (columns < D)[None, :],
                    other=0.0,
                )
                # All warps are done with the previous split's queries before they are overwritten.
                partition_barrier()
                q_tile.store(q)
                fence_async_shared()
                partition_barrier()
            k_factor = 0.0
            if KV_KIND != KV_PLAIN:
                k_factor = load_columns(scales[10], LAYOUT)
            if not SENT:
                if position + count < range_end:
                    prefetch_queries(
                        query, start + query_len, kv_head, num_tokens, stride_qt, stride_qh, GROUP,
                        D, ROWS)  # fmt: skip

            row = gl.arange(0, ROWS, COLUMN)
            token = row // GROUP
            positions = token + (seq_len - query_len)
            query_head = kv_head * GROUP + row % GROUP
            row_first, row_last = visible_span(
                positions, seq_len, left, right, chunk, CAUSAL, HAS_LEFT,
                HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            row_max = gl.full([ROWS], float("-inf"), gl.float32, COLUMN)
            if KV_KIND == KV_INT4:
                # Two groups of the values, with the weights of both.
                none = gl.zeros([WIDTH_V // 2, 2 * ROWS], gl.float32, _score_layout(2 * ROWS))
                acc = (none, none)
            else:
                acc = gl.zeros([WIDTH_V, ROWS], gl.float32, LAYOUT)

            # Prologue: the first tile has no values of an earlier tile to multiply by.
            tile = first_tile + skipped
            stage = step % STAGES
            wait_for_tile(k_full, stage, (step // STAGES) & 1, COPIED)
            zeros = gl.zeros([BLOCK_N, ROWS], gl.float32, LAYOUT)
            k_scales = None
            v_scales = None
            if scales[8] is not None:
                k_scales = scales[8].index(2 * stage).load(gl.SliceLayout(1, LAYOUT))
                v_scales = scales[8].index(2 * stage + 1).load(gl.SliceLayout(1, LAYOUT))
            scores = _multiply_keys(k_ring, k_empty, stage, q_tile, zeros, PACKED, KV_KIND)
            scores = _finish_scores(scores, k_factor, k_scales, 0, KV_KIND)
            if EACH:
                _release(k_empty, stage)  # the keys are in registers
            elif not PACKED:
                if KV_KIND != KV_PLAIN:
                    partition_barrier()
                mbarrier.arrive(k_empty.index(stage), count=1)
            if SCORE is not None:
                keys = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
                scores = apply_function(
                    scores, scale, factor, soft_cap, positions[None, :], keys[:, None],
                    query_head[None, :], request, aux, SCORE, HAS_CAP)  # fmt: skip
            else:
                scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
            scores = mask_columns(scores, row_first, row_last, tile * BLOCK_N, CHECK_LEFT)
            weights, _, row_max = softmax_columns(
                scores, factor, row_max, v_scales, SCORE, True, HAS_CAP, scales[9]
            )
            row_sum = weights
            if ROWS > 16:
                row_sum = gl.sum(weights, 0)
            store_weights(p_tile, weights, v_scales, True, KV_KIND)

            # Main loop. Only tiles at the ends of the visible keys need a mask.
            for i in range(1, count):
                tile = first_tile + skipped + i
                if (tile >= right_begin) | (tile < left_end):
                    acc, row_max, row_sum = _step(
                        q_tile, p_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc,
                        row_max, row_sum, step + i, tile, row_first, row_last, factor, k_factor,
                        soft_cap, scale, positions, query_head, request, aux, scales, SCORE,
                        STAGES, PACKED, True, CHECK_LEFT, HAS_CAP, KV_KIND, COPIED,
                        EACH)  # fmt: skip
                else:
                    acc, row_max, row_sum = _step(
                        q_tile, p_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc,
                        row_max, row_sum, step + i, tile, row_first, row_last, factor, k_factor,
                        soft_cap, scale, positions, query_head, request, aux, scales,
                        FULL_SCORE, STAGES, PACKED, False, CHECK_LEFT, HAS_CAP,
                        KV_KIND, COPIED, EACH)  # fmt: skip

            # Epilogue: the product with the values of the last tile.
            step += count
            stage = (step - 1) % STAGES
            wait_for_tile(v_full, stage, ((step - 1) // STAGES) & 1, COPIED)
            past_end = seq_len - (first_tile + skipped + count - 1) * BLOCK_N
            # TMA fills whole pages past the end with zeros, but not the rest of the last page.
            if KV_KIND == KV_PLAIN:
                if (past_end < BLOCK_N) & (seq_len % BLOCK_SIZE != 0):
                    clear_tile(v_ring.index(stage), past_end, 1 if PACKED else 0)
            acc = _multiply_values(v_ring, stage, p_tile, acc, past_end, PACKED, True, KV_KIND)
            acc = _finish_values(acc, KV_KIND)
            if EACH:
                _release(v_empty, stage)  # the values are in registers
                if SENT:
                    _release(memory[8], 1)  # products with the queries are complete
                    split += 1
            else:
                if KV_KIND != KV_PLAIN:
                    partition_barrier()
                mbarrier.arrive(v_empty.index(stage), count=1)

            if EVEN:
                first_range = even_index(before, total, num_ranges, num_reqs)
                last_range = even_index(request_end - 1, total, num_ranges, num_reqs)
                num_splits = last_range - first_range + 1
            elif KV_KIND == KV_PLAIN:
                num_splits = (request_end - 1) // per_range - before // per_range + 1
            else:
                # Loads of fewer bytes hide less of the time between requests: divide rarely.
                num_splits = (count == tiles).to(gl.int32)
                if count < tiles:
                    num_splits = (request_end - 1) // per_range - before // per_range + 1
            head = kv_head * GROUP + row % GROUP
            valid = (row < TILE_TOKENS * GROUP) & (token < query_len)
            partial_index = 2 * worker + (position > range_begin).to(gl.int32)
            if not COMBINE_IN_KERNEL:
                if skipped == 0:
                    # The CTA with a request's first tile tells the combine kernel how many splits
                    # there are and where the first partial result is.
                    header = (partial_index << 15) | (token * GROUP << 9) | num_splits
                    gl.store(
                        split_headers + (start + token) * NUM_KV_HEADS + kv_head,
                        header,
                        mask=valid & (row % GROUP == 0),
                    )
            final_sum = row_sum
            if ROWS <= 16:
                final_sum = column_sum(row_sum, scales[9])
            finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
            acc_scale = gl.full([ROWS], 1.0, gl.float32, COLUMN)
            if HAS_SINK:
                if num_splits == 1:
                    # Otherwise the sink counts when the splits are combined (M4).
                    finite_max, acc_scale, final_sum = add_sink(
                        row_max, final_sum, gl.load(sinks + head, mask=valid, other=0.0)
                    )
            empty = final_sum == 0.0
            safe_sum = gl.where(empty, 1.0, final_sum)
            if KV_KIND == KV_PLAIN:
                base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
            normalizer = acc_scale / safe_sum
            lanes = gl.arange(0, WIDTH_V, gl.SliceLayout(1, LAYOUT))
            if KV_KIND == KV_INT4:
                normalizer = normalizer * value_factor
                lanes = int4_value_rows(WIDTH_V, gl.SliceLayout(1, LAYOUT))
                acc = int4_result(acc[0], acc[1], LAYOUT)
            elif KV_KIND != KV_PLAIN:
                normalizer = normalizer * value_factor
                lanes = value_rows(WIDTH_V, gl.SliceLayout(1, LAYOUT))
            result = acc * normalizer[None, :]
            mask = valid[None, :] & (lanes < DV)[:, None]
            if num_splits == 1:
                offsets = (start + token).to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
                gl.store(out + offsets[None, :] + lanes[:, None], result.to(DTYPE), mask=mask)
                if HAS_LSE:
                    if KV_KIND != KV_PLAIN:
                        base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
                    gl.store(
                        lse + (start + token).to(gl.int64) * stride_lt + head,
                        base2 * LN2,
                        mask=valid,
                    )
            else:
                places = partials + ((partial_index * rows + row) * DV)[None, :] + lanes[:, None]
                if EVEN:
                    # The split that ends last reads them, after more keys than L2 holds.
                    store_in_l2(places, result, mask)
                else:
                    gl.store(places, result, mask=mask)
                if KV_KIND != KV_PLAIN:
                    base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
                gl.store(partial_lses + partial_index * rows + row, base2, mask=valid)
                if COMBINE_IN_KERNEL:
                    # The last CTA to finish combines the splits in their order, so the result does
                    # not depend on which CTA that is. At most one request begins in a range and
                    # continues after it, so it can use the counter of the range's CTA.
                    if EVEN:
                        first_cta = first_range * NUM_KV_HEADS + kv_head
                    else:
                        first_cta = before // per_range * NUM_KV_HEADS + kv_head
                    arrived = counters + _FIRST_COUNTER + first_cta
                    # All warps have written their part of the split before the CTA counts itself.
                    partition_barrier()
                    if atomic_increment(arrived, "acq_rel") == num_splits - 1:
                        gl.store(arrived, 0)
                        if EVEN:
                            first_begin = even_begin(first_range, total, num_ranges, num_reqs)
                            inside = before > first_begin
                        else:
                            inside = before % per_range > 0
                        first_partial = 2 * first_cta + inside.to(gl.int32)
                        combine_in_cta(
                            partials, partial_lses, sinks, out, lse, first_partial, num_splits,
                            start, query_len, kv_head, rows, stride_ot, stride_oh, stride_lt,
                            NUM_KV_HEADS, GROUP, DV, WIDTH_V, ROWS, SPLITS_PER_LOAD, HAS_SINK,
                            HAS_LSE)  # fmt: skip
            position += count
        if position >= request_end:
            before = request_end + gl.where(tiles > 0, gap, 0)
            position = gl.maximum(position, before)
            request += 1
    if COMBINE_IN_KERNEL:
        # Without a combine kernel, the rows after the last request are cleared here.
        clear_rows(
            out, lse, query_start_loc, worker, num_workers, num_reqs, num_tokens, stride_ot,
            stride_oh, stride_lt, NUM_KV_HEADS, GROUP, DV, WIDTH_V, ROWS, HAS_LSE)  # fmt: skip
        launch_dependent_grids()


@gluon.jit
def _allocate_worker(
    CACHE: gl.constexpr, COMPUTE: gl.constexpr, Q_SHAPE: gl.constexpr, P_SHAPE: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr, K_COLUMNS: gl.constexpr, V_COLUMNS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, PACKED: gl.constexpr, K_SCALE_KIND: gl.constexpr,
    COPIED: gl.constexpr = False, WORKERS: gl.constexpr = 1,
):  # fmt: skip
    """Return (q_tile, p_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty) of a worker.

    Each worker has loaders, rings and splits of its own.
    """
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for(Q_SHAPE[-2:], COMPUTE)
    P_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for(P_SHAPE[-2:], COMPUTE)
    q_tile = gl.allocate_shared_memory(COMPUTE, Q_SHAPE, Q_SHARED)
    p_tile = gl.allocate_shared_memory(COMPUTE, P_SHAPE, P_SHARED)
    k_ring, v_ring = allocate_rings(
        CACHE, STAGES, BLOCK_N, K_COLUMNS, V_COLUMNS, BLOCK_SIZE, PACKED
    )
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # full: the loader's expect and the bytes of its TMA loads, and 32 threads that copy scales; or
    # the threads that gather rows. empty: the consumer's arrival, or those of its threads.
    V_ARRIVALS: gl.constexpr = _GATHER_THREADS if COPIED else 1
    K_ARRIVALS: gl.constexpr = 33 if K_SCALE_KIND == SCALE_PER_TOKEN else V_ARRIVALS
    EMPTY_ARRIVALS: gl.constexpr = 1 if WORKERS == 1 else 128
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=K_ARRIVALS)
        mbarrier.init(k_empty.index(stage), count=EMPTY_ARRIVALS)
        mbarrier.init(v_full.index(stage), count=V_ARRIVALS)
        mbarrier.init(v_empty.index(stage), count=EMPTY_ARRIVALS)
    return q_tile, p_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty


@gluon.jit
def _allocate_query_barriers():
    """Return the barriers of the queries of one of two workers, (full, empty) for `send_queries`:
    of the arrival of the warp that prepares them, and of those of the consumer's threads."""
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barriers.index(0), count=1)
    mbarrier.init(barriers.index(1), count=128)
    return barriers


@gluon.jit
def _allocate_columns(COUNT: gl.constexpr, ROWS: gl.constexpr):
    """Return shared memory for COUNT numbers of each column of scores."""
    return gl.allocate_shared_memory(
        gl.float32, [COUNT, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )


@gluon.jit
def _allocate_scales(STAGES: gl.constexpr, BLOCK_N: gl.constexpr, KV_KIND: gl.constexpr):
    """Return the ring of scales: of the keys and of the values of each stage. The four scales of a
    head of int4 values are one number."""
    DTYPE: gl.constexpr = gl.int64 if KV_KIND == KV_INT4 else gl.float32
    return gl.allocate_shared_memory(
        DTYPE, [2 * STAGES, BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_decode_kernel(
    key_desc, value_desc, query, out, lse, sinks, k_scale, v_scale, aux0, aux1, aux2, aux3,
    query_start_loc, seq_lens, block_table, partials, partial_lses, split_headers, counters, scale,
    soft_cap, left, right, chunk, num_reqs, num_tokens, num_blocks, rows, stride_qt, stride_qh,
    stride_ot, stride_oh, stride_lt, stride_table, rows0, columns0, rows1, columns1, rows2,
    columns2, rows3, columns3, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn,
    stride_vh, SCORE: gl.constexpr, BOUNDS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    WIDTH: gl.constexpr, WIDTH_V: gl.constexpr, TILE_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr,
    COMBINE_IN_KERNEL: gl.constexpr, SPLITS_PER_LOAD: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr, HAS_CAP: gl.constexpr,
    HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr, KV_KIND: gl.constexpr,
    K_SCALE_KIND: gl.constexpr, V_SCALE_KIND: gl.constexpr, WORKERS: gl.constexpr,
    GATHERS: gl.constexpr = False,
):  # fmt: skip
    """One CTA of WORKERS consumers of 4 warps and their loaders. Grid: tile ranges * NUM_KV_HEADS
    workers, all resident at the same time.

    Args:
        key_desc, value_desc: TMA descriptors of the caches; PACKED as in `cache_tiles`, of float8
            caches as int16.
        query_start_loc: None if every request has one query row.
        k_scale, v_scale: of a float8 cache, as `SCALE_KIND` of each says; else None.
        partials: float32 partial outputs, [2 * grid, rows, DV].
        partial_lses: float32 base-2 LSEs of the partial outputs, [2 * grid, rows].
        split_headers: int32 [tokens, KV heads] for `hopper_combine_kernel`; not COMBINE_IN_KERNEL.
        counters: int32 zeros, one for each CTA after the prefill's; only with COMBINE_IN_KERNEL.
        rows: query heads of a group times the largest query length; ROWS is the N of WGMMA.
        aux0 to columns3: tensors of the score function SCORE, as in `kernels.score`; None without.
        GATHERS: rows of the caches are gathered: `key_desc` and `value_desc` are pointers, and
            WORKERS is 1.
        stride_kb to stride_vh: strides of keys and values in blocks, rows and heads of what is read
            by address: of the caches in bytes with GATHERS, of the scales in the pages
            with SCALE_PER_TOKEN; else None.
    """
    aux = (
        aux0, rows0, columns0, aux1, rows1, columns1, aux2, rows2, columns2, aux3, rows3, columns3,
    )  # fmt: skip
    # For several query tokens: 24 requests of 8 over 2k keys take 56.4 instead of 60.0 us in even
    # ranges (H200). 48 requests of one over 5k keys and 28/4 heads take 122.3 instead of 120.4 us
    # on an H200, and 174.2 instead of 177.1 on an H100. Not measured over quantized caches.
    EVEN: gl.constexpr = COMBINE_IN_KERNEL and KV_KIND == KV_PLAIN and ROWS >= max(16, 2 * GROUP)
    COPIED: gl.constexpr = GATHERS
    strides = (None, None, None, None, None, None)
    if GATHERS:
        strides = (stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh)
    # Of keys and of values, with one worker. Warps that gather keep the addresses of rows.
    LOADER_WARPS: gl.constexpr = 4 if COPIED else 1
    LOADER_REGISTERS: gl.constexpr = 112 if COPIED else 48
    CACHE: gl.constexpr = key_desc.dtype.element_ty if COPIED else key_desc.dtype
    # Float8 caches are read as 16-bit words, two elements each, and multiplied in float16.
    COMPUTE: gl.constexpr = CACHE if KV_KIND == KV_PLAIN else gl.float16
    K_COLUMNS: gl.constexpr = WIDTH // elements_per_word(KV_KIND)
    V_COLUMNS: gl.constexpr = WIDTH_V // elements_per_word(KV_KIND)
    Q_SHAPE: gl.constexpr = [4, ROWS, WIDTH // 4] if KV_KIND == KV_INT4 else [ROWS, WIDTH]
    P_SHAPE: gl.constexpr = [4 * ROWS, BLOCK_N] if KV_KIND == KV_INT4 else [ROWS, BLOCK_N]
    # What decodes over quantized caches need besides: `copy_token_scales` names the first nine
    # values, the next one exchanges maxima and sums of columns, and the last one their factors.
    plain = (None, None, None, None, None, None, None, None, None, None, None)
    memory0 = _allocate_worker(
        CACHE, COMPUTE, Q_SHAPE, P_SHAPE, STAGES, BLOCK_N, K_COLUMNS, V_COLUMNS, BLOCK_SIZE,
        PACKED, K_SCALE_KIND, COPIED, WORKERS)  # fmt: skip
    scales0 = plain
    if K_SCALE_KIND == SCALE_PER_TOKEN:
        scales0 = (
            k_scale, v_scale, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn,
            stride_vh, _allocate_scales(STAGES, BLOCK_N, KV_KIND), _allocate_columns(4, ROWS),
            _allocate_columns(1, ROWS),
        )  # fmt: skip
    elif KV_KIND != KV_PLAIN:
        scales0 = (
            None, None, None, None, None, None, None, None, None, _allocate_columns(4, ROWS),
            _allocate_columns(1, ROWS),
        )  # fmt: skip
    if WORKERS == 1:
        # Makes the initialized barriers visible to TMA.
        fence_async_shared()
        gl.warp_specialize(
            [
                (_consumer, (
                    query, out, lse, sinks, k_scale, v_scale, query_start_loc, seq_lens, partials,
                    partial_lses, split_headers, counters, scale, soft_cap, left, right, chunk,
                    num_reqs, num_tokens, rows, stride_qt, stride_qh, stride_ot, stride_oh,
                    stride_lt, memory0, scales0, aux, SCORE, BOUNDS, NUM_KV_HEADS, GROUP, D,
                    DV, TILE_TOKENS, BLOCK_SIZE, STAGES, PACKED, COMBINE_IN_KERNEL, SPLITS_PER_LOAD,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE, KV_KIND,
                    K_SCALE_KIND, V_SCALE_KIND, 0, WORKERS, EVEN, COPIED)),
                (_loader, (
                    key_desc, value_desc, query_start_loc, seq_lens, block_table, left, right,
                    chunk, num_reqs, num_blocks, stride_table, memory0, scales0, None, aux, strides,
                    BOUNDS, NUM_KV_HEADS, TILE_TOKENS, BLOCK_N, BLOCK_SIZE, STAGES, PACKED, CAUSAL,
                    HAS_LEFT, HAS_RIGHT, HAS_CHUNK, KV_KIND, "keys", 0, WORKERS, EVEN, GATHERS, D,
                    DV)),
                (_loader, (
                    key_desc, value_desc, query_start_loc, seq_lens, block_table, left, right,
                    chunk, num_reqs, num_blocks, stride_table, memory0, scales0, None, aux, strides,
                    BOUNDS, NUM_KV_HEADS, TILE_TOKENS, BLOCK_N, BLOCK_SIZE, STAGES, PACKED, CAUSAL,
                    HAS_LEFT, HAS_RIGHT, HAS_CHUNK, KV_KIND, "values", 0, WORKERS, EVEN, GATHERS, D,
                    DV)),
            ],
            [LOADER_WARPS, LOADER_WARPS],
            [LOADER_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    else:
        memory1 = _allocate_worker(
            CACHE, COMPUTE, Q_SHAPE, P_SHAPE, STAGES, BLOCK_N, K_COLUMNS, V_COLUMNS, BLOCK_SIZE,
            PACKED, K_SCALE_KIND, WORKERS=WORKERS)  # fmt: skip
        if K_SCALE_KIND == SCALE_PER_TOKEN:
            scales1 = (
                k_scale, v_scale, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn,
                stride_vh, _allocate_scales(STAGES, BLOCK_N, KV_KIND), _allocate_columns(4, ROWS),
                _allocate_columns(1, ROWS),
            )  # fmt: skip
        else:
            scales1 = (
                None, None, None, None, None, None, None, None, None, _allocate_columns(4, ROWS),
                _allocate_columns(1, ROWS),
            )  # fmt: skip
        SENT: gl.constexpr = _sends_queries(WORKERS, BLOCK_N, KV_KIND)
        # Registers per thread of the second consumer, and of the loader warps.
        SECOND_REGISTERS: gl.constexpr = 200 if SENT else 216
        REGISTERS: gl.constexpr = 80 if SENT else LOADER_REGISTERS
        FIRST: gl.constexpr = "keys and values" if SENT else "keys"
        SECOND: gl.constexpr = "queries" if SENT else "values"
        queries = (query, k_scale, stride_qt, stride_qh)
        if SENT:
            memory0 = memory0 + (_allocate_query_barriers(),)
            memory1 = memory1 + (_allocate_query_barriers(),)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_consumer, (
                    query, out, lse, sinks, k_scale, v_scale, query_start_loc, seq_lens,
                    partials, partial_lses, split_headers, counters, scale, soft_cap, left,
                    right, chunk, num_reqs, num_tokens, rows, stride_qt, stride_qh, stride_ot,
                    stride_oh, stride_lt, memory0, scales0, aux, SCORE, BOUNDS,
                    NUM_KV_HEADS, GROUP, D, DV, TILE_TOKENS, BLOCK_SIZE, STAGES, PACKED,
                    COMBINE_IN_KERNEL, SPLITS_PER_LOAD, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK,
                    HAS_CAP, HAS_SINK, HAS_LSE, KV_KIND, K_SCALE_KIND, V_SCALE_KIND, 0, WORKERS,
                    EVEN)),
                (_consumer, (
                    query, out, lse, sinks, k_scale, v_scale, query_start_loc, seq_lens,
                    partials, partial_lses, split_headers, counters, scale, soft_cap, left,
                    right, chunk, num_reqs, num_tokens, rows, stride_qt, stride_qh, stride_ot,
                    stride_oh, stride_lt, memory1, scales1, aux, SCORE, BOUNDS,
                    NUM_KV_HEADS, GROUP, D, DV, TILE_TOKENS, BLOCK_SIZE, STAGES, PACKED,
                    COMBINE_IN_KERNEL, SPLITS_PER_LOAD, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK,
                    HAS_CAP, HAS_SINK, HAS_LSE, KV_KIND, K_SCALE_KIND, V_SCALE_KIND, 1, WORKERS,
                    EVEN)),
                (_loader, (
                    key_desc, value_desc, query_start_loc, seq_lens, block_table, left, right,
                    chunk, num_reqs, num_blocks, stride_table, memory0, scales0, queries, aux,
                    None, BOUNDS, NUM_KV_HEADS, TILE_TOKENS, BLOCK_N, BLOCK_SIZE, STAGES, PACKED,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, KV_KIND, FIRST, 0, WORKERS, EVEN,
                    False)),
                (_loader, (
                    key_desc, value_desc, query_start_loc, seq_lens, block_table, left, right,
                    chunk, num_reqs, num_blocks, stride_table, memory0, scales0, queries, aux,
                    None, BOUNDS, NUM_KV_HEADS, TILE_TOKENS, BLOCK_N, BLOCK_SIZE, STAGES, PACKED,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, KV_KIND, SECOND, 0, WORKERS, EVEN,
                    False, D, DV, GROUP, K_SCALE_KIND)),
                (_loader, (
                    key_desc, value_desc, query_start_loc, seq_lens, block_table, left, right,
                    chunk, num_reqs, num_blocks, stride_table, memory1, scales1, queries, aux,
                    None, BOUNDS, NUM_KV_HEADS, TILE_TOKENS, BLOCK_N, BLOCK_SIZE, STAGES, PACKED,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, KV_KIND, FIRST, 1, WORKERS, EVEN,
                    False)),
                (_loader, (
                    key_desc, value_desc, query_start_loc, seq_lens, block_table, left, right,
                    chunk, num_reqs, num_blocks, stride_table, memory1, scales1, queries, aux,
                    None, BOUNDS, NUM_KV_HEADS, TILE_TOKENS, BLOCK_N, BLOCK_SIZE, STAGES, PACKED,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, KV_KIND, SECOND, 1, WORKERS, EVEN,
                    False, D, DV, GROUP, K_SCALE_KIND)),
            ],
            [4, 1, 1, 1, 1],
            [SECOND_REGISTERS, REGISTERS, REGISTERS, REGISTERS, REGISTERS],
        )  # fmt: skip
