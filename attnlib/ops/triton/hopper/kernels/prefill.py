"""The Hopper prefill kernel: 2 or 3 consumer warpgroups, one warp that loads keys, one for values.

Work distribution:

- A work item is a query tile of 64 rows per consumer warpgroup and one KV head. A row is one query
  head of one query token. The heads of a group are adjacent, so they share one stream of keys and
  values.
- The key loader selects work items, publishes them in a mailbox in shared memory, and loads queries
  and keys by TMA. The value loader and the consumers read the mailbox. There are two loaders,
  because a single one would wait for a free value stage while a key stage is free.
- Key tiles are visited from the diagonal leftwards: masked tiles first, then unmasked ones.
- Ring positions continue across work items. A grid smaller than the number of items is persistent:
  CTAs take further items from a counter in global memory.

Barriers (one pair per stage or mailbox slot):

- k_full, v_full, q_full: complete when the TMA loads have delivered their bytes.
- k_empty, v_empty, q_empty: count CONSUMERS arrivals, one per consumer warpgroup. With OWN_QUERIES
  each consumer has its own pair for its rows of a stage of queries.
- mail_full: one arrival, of the key loader. mail_empty: CONSUMERS + 1 arrivals, of all readers.

Within a warpgroup the product with the next tile's keys is issued before the product with the
previous tile's values is awaited (FlashAttention-3, Shah et al. 2024).

With `concurrent` the kernel starts while the previous one runs, on the multiprocessors that the
previous one leaves free, and waits for it at its own end. The prefills of a mixed batch run next to
its decodes this way.
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

from attnlib.ops.triton.hopper.kernels.barriers import allocate_barriers
from attnlib.ops.triton.hopper.kernels.compat import (
    consumers_sync,
    exp2,
    launch_dependent_grids,
    load_box,
    partition_barrier,
    reinterpret,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.converter import converter
from attnlib.ops.triton.hopper.kernels.gather import GATHER_THREADS, gather_tile
from attnlib.ops.triton.hopper.kernels.mailbox import publish, receive
from attnlib.ops.triton.hopper.kernels.mainloop import (
    BOUNDED,
    keep_queries,
    multiply_keys,
    multiply_parts,
    multiply_values,
    overlapped_step,
    pack_weights,
    unpack_weights,
    wait_for_tile,
    weigh_tile,
)
from attnlib.ops.triton.hopper.kernels.quantized import (
    WEIGHT_SCALE,
    halve_queries,
    load_kv_scale,
)
from attnlib.ops.triton.hopper.kernels.schedule import (
    bounded_tiles,
    find_tile,
    tile_at,
    visible_span,
    visited_tiles,
)
from attnlib.ops.triton.hopper.kernels.softmax import (
    LN2,
    LOG2E,
    column_numbers,
    lane_references,
    lane_sums,
    row_references,
    score_factor,
    slope_operand,
)
from attnlib.ops.triton.hopper.kernels.tma_load import load_tile
from attnlib.ops.triton.hopper.kernels.value_columns import (
    PART_ELEMENTS,
    PART_KEYS,
    check_offset,
    clear_value_parts,
    first_columns,
    multiply_value_parts,
    product_columns,
    shared_memory_offset,
    store_ones,
)
from attnlib.ops.triton.hopper.kernels.work_counter import (
    atomic_increment,
    incremented,
    issue_increment,
)
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = [
    "UNALIGNED", "UNSPECIALIZED", "aligned_offset", "clear_values", "hopper_prefill_kernel",
    "item_rows", "key_loader", "stage_rows", "store_rows", "value_loader",
]  # fmt: skip

UNSPECIALIZED = [
    "left", "right", "chunk", "num_reqs", "num_tokens", "num_tiles", "concurrent", "section",
    "num_blocks", "stride_qt", "stride_qh", "stride_ot", "stride_oh", "stride_lt", "stride_table",
    "rows0", "columns0", "rows1", "columns1", "rows2", "columns2", "rows3", "columns3",
    "stride_kb", "stride_kn", "stride_kh", "stride_vb", "stride_vn", "stride_vh",
]  # fmt: skip
"""Parameters whose values must not select a compilation, because they change from step to step."""

UNALIGNED = [
    "lse", "sinks", "k_scale", "v_scale", "query_start_loc", "seq_lens", "block_table", "aux0",
    "aux1", "aux2", "aux3",
]  # fmt: skip
"""Pointers whose alignment must not select a compilation: slices of a batch with arbitrary
offsets."""


_GATHER_THREADS = gl.constexpr(GATHER_THREADS)

_RESCALE_THRESHOLD = gl.constexpr(8)
"""THRESHOLD of `softmax.online_softmax` with three consumers: 1128 instead of 1152 us on an H200
(8k tokens, head size 64), and 1113 instead of 1125 with sums by thread. Two consumers follow the
maximum of every tile: with the branch of `softmax.rescale`, head size 128 took 953 instead of 925
us, and 96 took 864 instead of 837 us."""

_LEAD = gl.constexpr(16)
"""THRESHOLD with LEADS. Where maxima rise by 2 per tile, 8k tokens took 911 us with 8, 885 with 16
and 857 with 32 on an H200; by 2 ** 10 per tile 1021, 910 and 935. The kernel that computes maxima
took 901 and 895."""


@gluon.jit
def aligned_offset(offset):
    """Return the offset, marked as a multiple of 8 elements (16 bytes).

    The launcher checks the alignment; the shifts tell the compiler.
    """
    return (offset >> 3) << 3


@gluon.jit
def query_part(q_tiles, tile, part: gl.constexpr, KEY_PARTS: gl.constexpr):
    """Return a part of a query tile in shared memory."""
    if KEY_PARTS == 1:
        return q_tiles.index(tile)
    else:
        return q_tiles.index(tile * KEY_PARTS + part)


@gluon.jit
def _gather_step(
    key, value, table, seq_len, kv_head, tile, previous, k_ring, v_ring, k_full, k_empty, v_full,
    v_empty, step, first_step, strides, D: gl.constexpr, DV: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gather the keys of `tile`, then the values of the tile before it, which the consumers need
    later and whose stage becomes free later."""
    gather_tile(
        key, table, seq_len, kv_head, tile, tile - 2, k_ring, k_full, k_empty, step, strides[0],
        strides[1], strides[2], D, BLOCK_SIZE, STAGES)  # fmt: skip
    if step > first_step:
        gather_tile(
            value, table, seq_len, kv_head, previous, tile - 2, v_ring, v_full, v_empty, step - 1,
            strides[3], strides[4], strides[5], DV, BLOCK_SIZE, STAGES)  # fmt: skip


@gluon.jit
def key_loader(
    key_desc, query_desc, query_start_loc, seq_lens, block_table, counters, left, right, chunk,
    num_reqs, num_tokens, num_tiles, concurrent, section, num_blocks, stride_table, mailbox,
    q_tiles, k_ring, mail_full, mail_empty, q_full, q_empty, k_full, k_empty, aux, value_cache,
    v_ring, v_full, v_empty, strides, BOUNDS: gl.constexpr, RANGES: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr, SHARED: gl.constexpr, GROUP: gl.constexpr,
    TILE_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, CONSUMERS: gl.constexpr, LOAD_QUERY: gl.constexpr,
    PERSISTENT: gl.constexpr, FIELDS: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    KEY_PARTS: gl.constexpr = 1, ALIGNED: gl.constexpr = False,
):  # fmt: skip
    """Select and publish work items; load queries and keys. One warp.

    Runs ahead of the consumers, over the borders of items, as far as the rings allow. With the
    `strides` of both caches, 4 warps gather keys and values (`gather.gather_tile`), and the caches
    are pointers; None where TMA reads them. With ALIGNED, query tiles begin at positions that are
    multiples of TILE_TOKENS: the first one of a request may begin before its first token.
    """
    QUERY_BLOCKS: gl.constexpr = q_tiles.shape[0] // (Q_STAGES * KEY_PARTS)
    SHORT: gl.constexpr = RANGES > 0 or (ALIGNED and (HAS_LEFT or HAS_CHUNK))
    OWN_QUERIES: gl.constexpr = q_full.shape[0] > Q_STAGES
    PAGE: gl.constexpr = max(BLOCK_SIZE, 1)
    Q_BYTES: gl.constexpr = QUERY_BLOCKS * 64 * KEY_PARTS * q_tiles.shape[2] * 2
    if concurrent == 0:
        # PDL: the previous kernel may have written the queries, the cache or the lengths.
        wait_on_dependent_grids()
        launch_dependent_grids()
    items = num_tiles * NUM_KV_HEADS * SHARED
    # The first item of each CTA is its own index; the counter hands out the items after those.
    item = gl.program_id(0)
    first_counted = gl.num_programs(0)
    if PERSISTENT:
        if concurrent != 0:
            # CTAs that are not resident yet must not claim work items: count from the first one.
            item = atomic_increment(counters, "relaxed")
            first_counted = 0
    mail = 0
    loaded = 0
    step = 0
    while item < items:
        request, start, first_token, kv_head = find_tile(
            item, query_start_loc, num_reqs, num_tiles, section, NUM_KV_HEADS * SHARED,
            TILE_TOKENS, 2 if ALIGNED else 1)  # fmt: skip
        query_len = num_tokens - start
        seq_len = 0
        if request < num_reqs:
            query_len = gl.load(query_start_loc + request + 1) - start
            seq_len = gl.load(seq_lens + request)
            if BLOCK_SIZE == 0:
                # Keys without pages: `seq_lens` are the first rows of the requests.
                seq_len = gl.load(seq_lens + request + 1) - seq_len
            if ALIGNED:
                context = gl.where(query_len > 0, gl.maximum(seq_len - query_len, 0), 0)
                first_token -= context % TILE_TOKENS
        begin = 0
        end = 0
        after_gap = 0
        gap = 0
        # The number of tiles is an upper bound: tiles past a request's last token are skipped.
        if first_token < query_len:
            left_end = 0
            right_begin = 0
            left_b = 0
            right_b = 0
            if RANGES > 0:
                # Bounds may look tensors up, so they are evaluated here for all partitions.
                if request < num_reqs:
                    begin, left_end, right_begin, end, left_b, right_b, after_gap, gap = (
                        bounded_tiles(
                            first_token, query_len, seq_len, left, right, chunk, kv_head, request,
                            aux, BOUNDS, RANGES, TILE_TOKENS, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT,
                            HAS_CHUNK)
                    )  # fmt: skip
            publish(
                mailbox, mail_full, mail_empty, mail, request, start, first_token, kv_head,
                query_len, seq_len, begin, left_end, right_begin, end, left_b, right_b, after_gap,
                gap, RANGES, FIELDS)  # fmt: skip
            mail += 1
            if request < num_reqs:
                if OWN_QUERIES:
                    if RANGES == 0:
                        begin, _, _, end = visited_tiles(
                            first_token, query_len, seq_len, left, right, chunk, request, aux,
                            None, TILE_TOKENS, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT,
                            HAS_CHUNK)  # fmt: skip
                    # The stages of the first keys are free before the queries are.
                    pages = (seq_len + PAGE - 1) // PAGE
                    table = block_table + request.to(gl.int64) * stride_table
                    first_keys = gl.minimum(end - begin, STAGES - 1)
                    for back in range(0, first_keys):
                        tile = tile_at(end - 1 - back, after_gap, gap, RANGES)
                        load_tile(
                            key_desc, table, pages, num_blocks, kv_head // SHARED, tile,
                            tile * BLOCK_N // PAGE - 32, k_ring, k_full, k_empty, step, BLOCK_SIZE,
                            STAGES, "nhd", KEY_PARTS)  # fmt: skip
                        step += 1
                    end -= first_keys
                if LOAD_QUERY:
                    q_stage = loaded % Q_STAGES
                    if not OWN_QUERIES:
                        # Wait until all consumers have released the queries of Q_STAGES items ago.
                        mbarrier.wait(q_empty.index(q_stage), ((loaded // Q_STAGES) & 1) ^ 1)
                        mbarrier.expect(q_full.index(q_stage), Q_BYTES)
                    first_row = start + first_token
                    # One box for each 64 rows: 64 // GROUP tokens, or 64 heads of one token.
                    for consumer in gl.static_range(QUERY_BLOCKS):
                        q_barrier = q_stage * CONSUMERS + consumer if OWN_QUERIES else q_stage
                        if OWN_QUERIES:
                            mbarrier.wait(q_empty.index(q_barrier), ((loaded // Q_STAGES) & 1) ^ 1)
                            mbarrier.expect(q_full.index(q_barrier), Q_BYTES // CONSUMERS)
                        for part in gl.static_range(KEY_PARTS):
                            column = part * q_tiles.shape[2]
                            if GROUP <= 64:
                                load_box(
                                    query_desc,
                                    [first_row + consumer * (64 // GROUP), kv_head * GROUP, column],
                                    q_full.index(q_barrier),
                                    query_part(q_tiles, q_stage * QUERY_BLOCKS + consumer, part,
                                               KEY_PARTS),
                                )  # fmt: skip
                            else:
                                load_box(
                                    query_desc,
                                    [first_row, kv_head * GROUP + consumer * 64, column],
                                    q_full.index(q_barrier),
                                    query_part(q_tiles, q_stage * QUERY_BLOCKS + consumer, part,
                                               KEY_PARTS),
                                )  # fmt: skip
                    loaded += 1
                if RANGES == 0 and not OWN_QUERIES:
                    begin, _, _, end = visited_tiles(
                        first_token, query_len, seq_len, left, right, chunk, request, aux, None,
                        TILE_TOKENS, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        table = block_table + gl.minimum(request, num_reqs - 1).to(gl.int64) * stride_table
        pages = (seq_len + PAGE - 1) // PAGE
        # The next item is claimed 4 steps before the end of this one: early enough to hide the
        # atomic's latency, and no earlier, because idle CTAs cannot take a claimed item.
        item = items
        first_step = step
        last = gl.minimum(begin + 4, end)
        for back in range(0, end - last):
            tile = tile_at(end - 1 - back, after_gap, gap, RANGES)
            # Tiles go backwards: prefetch the 128-byte line of the block table before this one.
            if strides is None:
                load_tile(
                    key_desc, table, pages, num_blocks, kv_head // SHARED, tile,
                    tile * BLOCK_N // PAGE - 32, k_ring, k_full, k_empty, step, BLOCK_SIZE,
                    STAGES, "nhd", KEY_PARTS)  # fmt: skip
            else:
                _gather_step(
                    key_desc, value_cache, table, seq_len, kv_head // SHARED, tile,
                    tile_at(end - back, after_gap, gap, RANGES), k_ring, v_ring, k_full,
                    k_empty, v_full, v_empty, step, first_step, strides, D, DV, BLOCK_SIZE,
                    STAGES)  # fmt: skip
            step += 1
        if PERSISTENT and not SHORT:
            item = first_counted + atomic_increment(counters, "relaxed")
        if PERSISTENT and SHORT:
            # Items are short: the loads of their keys do not wait for the counter.
            claimed = issue_increment(counters, "relaxed")
        for back in range(0, last - begin):
            tile = tile_at(last - 1 - back, after_gap, gap, RANGES)
            if strides is None:
                load_tile(
                    key_desc, table, pages, num_blocks, kv_head // SHARED, tile,
                    tile * BLOCK_N // PAGE - 32, k_ring, k_full, k_empty, step, BLOCK_SIZE,
                    STAGES, "nhd", KEY_PARTS)  # fmt: skip
            else:
                _gather_step(
                    key_desc, value_cache, table, seq_len, kv_head // SHARED, tile,
                    tile_at(last - back, after_gap, gap, RANGES), k_ring, v_ring, k_full,
                    k_empty, v_full, v_empty, step, first_step, strides, D, DV, BLOCK_SIZE,
                    STAGES)  # fmt: skip
            step += 1
        if strides is not None:
            if step > first_step:
                gather_tile(
                    value_cache, table, seq_len, kv_head // SHARED,
                    tile_at(begin, after_gap, gap, RANGES), 0, v_ring, v_full, v_empty, step - 1,
                    strides[3], strides[4], strides[5], DV, BLOCK_SIZE, STAGES)  # fmt: skip
        if PERSISTENT and SHORT:
            item = first_counted + incremented(claimed)
    publish(
        mailbox, mail_full, mail_empty, mail, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, RANGES,
        FIELDS)  # fmt: skip
    if PERSISTENT:
        # The last CTA to run out of work resets both counters for the next launch.
        if atomic_increment(counters + 1, "relaxed") == gl.num_programs(0) - 1:
            gl.store(counters, 0)
            gl.store(counters + 1, 0)
    if concurrent != 0:
        # A kernel that waits for this one may rely on the previous one's results, too.
        wait_on_dependent_grids()


@gluon.jit
def value_loader(
    value_desc, block_table, left, right, chunk, num_reqs, num_blocks, stride_table, mailbox,
    v_ring, mail_full, mail_empty, v_full, v_empty, RANGES: gl.constexpr, SHARED: gl.constexpr,
    TILE_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr, FIELDS: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr, PARTS: gl.constexpr = 0,
):  # fmt: skip
    """Load the values of the published work items. One warp. PARTS: of values; 0 is undivided."""
    SPARE: gl.constexpr = v_ring.shape[0] // STAGES - PARTS if PARTS > 0 else 0
    DIVIDED: gl.constexpr = max(PARTS, 1)
    PAGE: gl.constexpr = max(BLOCK_SIZE, 1)
    mail = 0
    step = 0
    request = 0
    while request >= 0:
        (
            request, _, first_token, kv_head, query_len, seq_len, begin, _, _, end, _, _, after_gap,
            gap,
        ) = receive(mailbox, mail_full, mail_empty, mail, RANGES, FIELDS)  # fmt: skip
        mail += 1
        if (request >= 0) & (request < num_reqs):
            if RANGES == 0:
                begin, _, _, end = visited_tiles(
                    first_token, query_len, seq_len, left, right, chunk, request, None, None,
                    TILE_TOKENS, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            table = block_table + request.to(gl.int64) * stride_table
            pages = (seq_len + PAGE - 1) // PAGE
            for back in range(0, end - begin):
                tile = tile_at(end - 1 - back, after_gap, gap, RANGES)
                load_tile(
                    value_desc, table, pages, num_blocks, kv_head // SHARED, tile,
                    tile * BLOCK_N // PAGE - 32, v_ring, v_full, v_empty, step, BLOCK_SIZE,
                    STAGES, "nhd", DIVIDED, SPARE)  # fmt: skip
                step += 1


@gluon.jit
def clear_values(v_tile, valid, WARPGROUP: gl.constexpr, CONSUMERS: gl.constexpr):
    """Set the rows of a value tile from `valid` on to 0; of several consumers, two do a half each.

    A page may hold anything past the sequence's end, and 0 * NaN is NaN (P5).
    """
    ROWS: gl.constexpr = v_tile.shape[0] // min(CONSUMERS, 2)
    WIDTH: gl.constexpr = v_tile.shape[1]
    LANES: gl.constexpr = min(32, WIDTH // 8)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    if WARPGROUP < 2:
        half = v_tile.slice(WARPGROUP * ROWS, ROWS, 0)
        rows = WARPGROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        content = half.load(layout)
        half.store(gl.where(rows[:, None] < valid, content, 0.0))
        # WGMMA reads shared memory through the async proxy.
        fence_async_shared()
    # All consumers multiply by the whole tile, so all wait for all rows.
    consumers_sync(CONSUMERS)


@gluon.constexpr_function
def wide_layout(columns):
    """Return a layout of [64, columns] with 8 adjacent elements of a row in each thread.

    Each warp has the rows that it has in an accumulator of WGMMA. At least 32 columns.
    """
    rest = [[0, 32 << bit] for bit in range((columns // 32).bit_length() - 1)]
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *rest]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, columns])


@gluon.jit
def store_rows(out, offsets, tile, valid, head_size):
    """Store rows [M, W] at element offsets [M], columns up to head_size."""
    columns = gl.arange(0, tile.shape[1], gl.SliceLayout(0, tile.type.layout))
    pointers = out + aligned_offset(offsets)[:, None] + columns[None, :]
    gl.store(pointers, tile, mask=valid[:, None] & (columns < head_size)[None, :])


@gluon.jit
def item_rows(
    first_token, query_len, kv_head, WARPGROUP: gl.constexpr, GROUP: gl.constexpr,
    TILE_TOKENS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Return (token in the request, query head, whether the row exists) of 64 rows."""
    rows = WARPGROUP * 64 + gl.arange(0, 64, layout)
    token = first_token + rows // GROUP
    return token, kv_head * GROUP + rows % GROUP, (rows < TILE_TOKENS * GROUP) & (token < query_len)


@gluon.jit
def stage_rows(q_tile, rows):
    """Put output rows into the queries' shared memory, from which stores are 16 bytes wide."""
    partition_barrier()
    q_tile.store(rows)
    partition_barrier()


@gluon.jit
def _consumer(
    query, out, lse, sinks, k_scale, v_scale, scale, soft_cap, left, right, chunk, num_reqs,
    concurrent, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, mailbox, q_tiles, q_halves,
    k_ring, v_ring, mail_full, mail_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty, aux,
    column_tile, SCORE: gl.constexpr, RAW_SCORE: gl.constexpr, KEY_SLOPE: gl.constexpr,
    BOUNDS: gl.constexpr, RANGES: gl.constexpr, EXACT: gl.constexpr, SHARED: gl.constexpr,
    WARPGROUP: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    TILE_TOKENS: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, CONSUMERS: gl.constexpr, LOAD_QUERY: gl.constexpr,
    STAGED_STORE: gl.constexpr, FIELDS: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr, HAS_CAP: gl.constexpr, HAS_SINK: gl.constexpr,
    HAS_LSE: gl.constexpr, KV_KIND: gl.constexpr, K_SCALE_KIND: gl.constexpr,
    V_SCALE_KIND: gl.constexpr, QUERY_REGISTERS: gl.constexpr, COPIED: gl.constexpr,
    SPLIT_V: gl.constexpr, KEY_PARTS: gl.constexpr,
    LEADS: gl.constexpr,
):  # fmt: skip
    """Compute the 64 rows of consumer warpgroup WARPGROUP of each published work item."""
    WIDTH: gl.constexpr = q_tiles.shape[2]
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    # Values in parts of 32 elements (`value_columns`), or undivided.
    VALUE_PARTS: gl.constexpr = (DV + 31) // 32 if v_ring.shape[2] == PART_ELEMENTS else 0
    SUMS: gl.constexpr = VALUE_PARTS > 0 and v_ring.shape[0] > STAGES * VALUE_PARTS
    V_COLUMNS: gl.constexpr = product_columns(DV, VALUE_PARTS, SUMS) if VALUE_PARTS > 0 else 0
    V_OFFSET: gl.constexpr = shared_memory_offset(
        (2 * q_tiles.numel, 2 * k_ring.numel), 2 * v_ring.numel
    )
    WIDTH_V: gl.constexpr = v_ring.shape[2] if VALUE_PARTS == 0 else 64 * ((DV + 63) // 64)
    DTYPE: gl.constexpr = q_tiles.dtype
    COMPUTE: gl.constexpr = k_ring.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    # Elements of a head that products read. Float8 queries and keys are permuted.
    ELEMENTS: gl.constexpr = (D + 15) // 16 * 16 if KV_KIND == KV_PLAIN else WIDTH
    # With SPLIT_V, all consumers compute the same rows, each for a part of the value elements.
    ROW_BLOCK: gl.constexpr = 0 if SPLIT_V else WARPGROUP
    QUERY_BLOCKS: gl.constexpr = 1 if SPLIT_V else CONSUMERS
    PART: gl.constexpr = WARPGROUP if SPLIT_V else -1
    COLUMNS: gl.constexpr = WIDTH_V // (CONSUMERS if SPLIT_V else 1)
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    Q_LANES: gl.constexpr = min(32, WIDTH // 8)
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // Q_LANES, Q_LANES], [4, 1], [1, 0])
    V_LANES: gl.constexpr = min(32, WIDTH_V // 8)
    STORE_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // V_LANES, V_LANES], [4, 1], [1, 0])
    WIDE_LAYOUT: gl.constexpr = wide_layout(COLUMNS)
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    CHECK_LEFT: gl.constexpr = HAS_LEFT or HAS_CHUNK or EXACT
    # `bounded_softmax` has no running maximum, and its sums are those of rows.
    RARELY: gl.constexpr = CONSUMERS == 3 and HAS_CAP != BOUNDED
    RISE: gl.constexpr = _RESCALE_THRESHOLD if RARELY else 0
    THRESHOLD: gl.constexpr = _LEAD if LEADS else RISE
    # The sum of weights begins with that of the sink (M4). In the epilogue it takes registers that
    # three consumers do not have, and ptxas schedules their main loop worse.
    EARLY_SINK: gl.constexpr = HAS_SINK and SUMS and THRESHOLD > 0
    OWN_QUERIES: gl.constexpr = q_full.shape[0] > Q_STAGES
    # With bounds, unmasked tiles have scores that the function does not change.
    FULL_SCORE: gl.constexpr = None if RANGES > 0 else SCORE
    FULL_SLOPE: gl.constexpr = None if RANGES > 0 else KEY_SLOPE
    factor = score_factor(scale, soft_cap, HAS_CAP)
    if concurrent == 0:
        # PDL: the previous kernel may have written the queries or read the output.
        wait_on_dependent_grids()
        launch_dependent_grids()

    mail = 0
    loaded = 0
    step = 0
    request = 0
    while request >= 0:
        (
            request, start, first_token, kv_head, query_len, seq_len, begin, left_end, right_begin,
            end, left_b, right_b, after_gap, gap,
        ) = receive(mailbox, mail_full, mail_empty, mail, RANGES, FIELDS)  # fmt: skip
        mail += 1
        if request == num_reqs:
            # Rows after the last request become 0 (M6).
            token, head, valid = item_rows(
                first_token, query_len, kv_head, ROW_BLOCK, GROUP, TILE_TOKENS,
                gl.SliceLayout(1, STORE_LAYOUT))  # fmt: skip
            offsets = (start + token).to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
            store_rows(out, offsets, gl.zeros([64, WIDTH_V], DTYPE, STORE_LAYOUT), valid, DV)
            if HAS_LSE and PART <= 0:
                empty_lse = gl.full(
                    [64], float("-inf"), gl.float32, gl.SliceLayout(1, STORE_LAYOUT)
                )
                gl.store(
                    lse + (start + token).to(gl.int64) * stride_lt + head, empty_lse, mask=valid
                )
        if (request >= 0) & (request < num_reqs):
            if RANGES == 0:
                begin, left_end, right_begin, end = visited_tiles(
                    first_token, query_len, seq_len, left, right, chunk, request, aux, None,
                    TILE_TOKENS, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip

            q_stage = loaded % Q_STAGES
            q_barrier = q_stage * CONSUMERS + WARPGROUP if OWN_QUERIES else q_stage
            q_tile = query_part(q_tiles, q_stage * QUERY_BLOCKS + ROW_BLOCK, 0, KEY_PARTS)
            if LOAD_QUERY:
                # Wait for the TMA loads of this item's queries.
                mbarrier.wait(q_full.index(q_barrier), (loaded // Q_STAGES) & 1)
            else:
                # No box covers the rows (GROUP does not divide 64): the warpgroup loads its own.
                token, head, valid = item_rows(
                    first_token, query_len, kv_head, ROW_BLOCK, GROUP, TILE_TOKENS,
                    gl.SliceLayout(1, Q_LAYOUT))  # fmt: skip
                offsets = aligned_offset(
                    (start + token).to(gl.int64) * stride_qt + head.to(gl.int64) * stride_qh
                )
                columns = gl.arange(0, WIDTH, gl.SliceLayout(0, Q_LAYOUT))
                for part in gl.static_range(KEY_PARTS):
                    lanes = part * WIDTH + columns
                    mask = valid[:, None] & (lanes < D)[None, :]
                    q = gl.load(query + offsets[:, None] + lanes[None, :], mask=mask, other=0.0)
                    # All warps are done with the previous queries before they are overwritten.
                    partition_barrier()
                    query_part(q_tiles, q_stage * CONSUMERS + WARPGROUP, part, KEY_PARTS).store(q)
                fence_async_shared()
                partition_barrier()
            loaded += 1
            q_operand = q_tiles if SPLIT_V else q_tile
            if KEY_PARTS == 3:
                tile = q_stage * CONSUMERS + WARPGROUP
                q_operand = (
                    q_tile, query_part(q_tiles, tile, 1, 3), query_part(q_tiles, tile, 2, 3)
                )  # fmt: skip
                if OWN_QUERIES:
                    q_operand = keep_queries(q_operand[0], q_operand[1], q_operand[2], A_LAYOUT)
            k_factor = factor  # not used
            if KV_KIND != KV_PLAIN:
                # Products are computed in float16.
                q_operand = q_halves.index(q_stage * CONSUMERS + WARPGROUP)
                k_factor = gl.convert_layout(halve_queries(q_tile, q_operand), ROW)
                if QUERY_REGISTERS:
                    # Leaves more of the shared memory's throughput to the converter.
                    q_operand = q_operand.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
                k_factor = k_factor * load_kv_scale(k_scale, kv_head // SHARED, K_SCALE_KIND)
                # Masked scores are -inf, and -inf * 0 would be NaN.
                k_factor = gl.where(k_factor < 2.0**-105, 2.0**-105, k_factor)
                v_factor = load_kv_scale(v_scale, kv_head // SHARED, V_SCALE_KIND) / WEIGHT_SCALE
            elif k_scale is not None:
                # Copies of a float8 cache, whose scale is not a number.
                k_scaled = scale * load_kv_scale(k_scale, kv_head // SHARED, K_SCALE_KIND)
                k_scaled = gl.where(k_scaled < 2.0**-105, 2.0**-105, k_scaled)
                factor = score_factor(k_scaled, soft_cap, HAS_CAP)

            slopes = 0.0  # not used
            if KEY_SLOPE is not None:
                token, head, valid = item_rows(
                    first_token, query_len, kv_head, ROW_BLOCK, GROUP, TILE_TOKENS,
                    gl.SliceLayout(1, A_LAYOUT))  # fmt: skip
                slope_positions = (token + (seq_len - query_len))[:, None]
                slopes = KEY_SLOPE(
                    0.0, slope_positions, 0, head[:, None], request, aux, 1.0 / scale
                )
                slopes = slope_operand(gl.zeros([64, 1], gl.float32, A_LAYOUT) + slopes)
            token, head, valid = item_rows(
                first_token, query_len, kv_head, ROW_BLOCK, GROUP, TILE_TOKENS, ROW
            )
            positions = token + (seq_len - query_len)
            row_first, row_last = visible_span(
                positions, seq_len, left, right, chunk, CAUSAL, HAS_LEFT,
                HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            if EXACT:
                low, high, same_low, same_high = BOUNDS(
                    positions, positions, seq_len, head, request, aux
                )
                row_first = gl.maximum(row_first, low)
                row_last = gl.minimum(row_last, high)
            row_max = gl.full([64], float("-inf"), gl.float32, ROW)
            row_sum = gl.full([64], 0.0, gl.float32, ROW)
            if THRESHOLD > 0:
                row_sum = lane_sums(gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT))
            if EARLY_SINK:
                sink = gl.load(sinks + head, mask=valid, other=0.0)
            acc = gl.zeros([64, COLUMNS], gl.float32, O_LAYOUT)
            if V_COLUMNS > 0:
                # As wide as the scores, whatever the head size.
                acc = gl.zeros([64, PART_KEYS], gl.float32, S_LAYOUT)
            if OWN_QUERIES:
                if end <= begin:
                    mbarrier.arrive(q_empty.index(q_barrier), count=1)
            if end > begin:
                # Prologue: the last tile has no values of an earlier tile to multiply by.
                stage = step % STAGES
                parity = (step // STAGES) & 1
                # Wait for the TMA loads of the last tile's keys.
                wait_for_tile(k_full, stage, parity, COPIED)
                zeros = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
                if KEY_PARTS == 1:
                    scores = multiply_keys(
                        q_tile if SPLIT_V else q_operand, k_ring.index(stage), zeros, ELEMENTS
                    )
                else:
                    scores = multiply_parts(q_operand, k_ring, stage, zeros, KEY_PARTS)
                if KEY_SLOPE is not None:
                    scores = warpgroup_mma(
                        slopes, column_tile[0].permute((1, 0)), scores, is_async=True
                    )
                scores = warpgroup_mma_wait(0, deps=[scores])
                mbarrier.arrive(k_empty.index(stage), count=1)
                if EARLY_SINK:
                    row_max = sink.to(gl.float32) * LOG2E
                last_tile = tile_at(end - 1, after_gap, gap, RANGES)
                probs, sink_weight, row_max, row_sum = weigh_tile(
                    scores, last_tile, row_first, row_last, row_max, row_sum, factor, k_factor,
                    soft_cap, scale, positions, head, request, aux, SCORE, RAW_SCORE, KEY_SLOPE,
                    True, CHECK_LEFT, HAS_CAP, KV_KIND, True, THRESHOLD, LEADS)  # fmt: skip
                weights = pack_weights(probs, COMPUTE)
                if EARLY_SINK:
                    columns = gl.arange(0, PART_KEYS, gl.SliceLayout(0, S_LAYOUT))
                    is_sum = (columns == V_COLUMNS - 8)[None, :]
                    acc = gl.where(is_sum, sink_weight[:, None], acc)
                past_end = seq_len - last_tile * BLOCK_N
                if KV_KIND == KV_PLAIN and not COPIED:
                    # TMA fills whole pages past the end with zeros, but not the rest of the last
                    # page. (Float8 values are cleared when they are converted.)
                    # Without pages, the rows of the next request follow.
                    partial = past_end < BLOCK_N
                    if BLOCK_SIZE > 0:
                        partial = partial & (seq_len % BLOCK_SIZE != 0)
                    if partial:
                        mbarrier.wait(v_full.index(stage), parity)
                        if V_COLUMNS > 0:
                            clear_value_parts(
                                v_ring, stage, past_end, WARPGROUP, CONSUMERS, VALUE_PARTS, STAGES
                            )
                        else:
                            clear_values(v_ring.index(stage), past_end, WARPGROUP, CONSUMERS)
                step += 1

                # Main loop: masked tiles at the diagonal, unmasked tiles, masked tiles at the
                # left.
                if RANGES == 2:
                    # The second range lies at the right of the first one.
                    full_end = gl.minimum(right_b, end - 1)
                    full_begin = gl.minimum(left_b, full_end)
                    for back in range(0, end - 1 - full_end):
                        tile = tile_at(end - 2 - back, after_gap, gap, RANGES)
                        acc, weights, row_max, row_sum = overlapped_step(
                            q_operand, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc,
                            weights, row_max, row_sum, step, tile, row_first, row_last, factor,
                            k_factor, soft_cap, scale, positions, head, request, aux, slopes,
                            column_tile, SCORE, RAW_SCORE, KEY_SLOPE, STAGES, True, CHECK_LEFT,
                            HAS_CAP, P_LAYOUT, KV_KIND, ELEMENTS, COPIED, PART,
                            KEY_PARTS, THRESHOLD, V_COLUMNS, V_OFFSET, SUMS)  # fmt: skip
                        step += 1
                    for back in range(0, full_end - full_begin):
                        tile = tile_at(full_end - 1 - back, after_gap, gap, RANGES)
                        acc, weights, row_max, row_sum = overlapped_step(
                            q_operand, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc,
                            weights, row_max, row_sum, step, tile, row_first, row_last, factor,
                            k_factor, soft_cap, scale, positions, head, request, aux, slopes,
                            column_tile, FULL_SCORE, RAW_SCORE, FULL_SLOPE, STAGES, False,
                            CHECK_LEFT, HAS_CAP, P_LAYOUT, KV_KIND, ELEMENTS, COPIED, PART,
                            KEY_PARTS, THRESHOLD, V_COLUMNS, V_OFFSET, SUMS)  # fmt: skip
                        step += 1
                    # The tiles that are left, as if the last one had been visited above.
                    end = full_begin + 1
                full_end = gl.minimum(right_begin, end - 1)
                full_begin = gl.minimum(left_end, full_end)
                for back in range(0, end - 1 - full_end):
                    tile = tile_at(end - 2 - back, after_gap, gap, RANGES)
                    acc, weights, row_max, row_sum = overlapped_step(
                        q_operand, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc,
                        weights, row_max, row_sum, step, tile, row_first, row_last, factor,
                        k_factor, soft_cap, scale, positions, head, request, aux, slopes,
                        column_tile, SCORE, RAW_SCORE, KEY_SLOPE, STAGES, True, CHECK_LEFT,
                        HAS_CAP, P_LAYOUT, KV_KIND, ELEMENTS, COPIED, PART,
                        KEY_PARTS, THRESHOLD, V_COLUMNS, V_OFFSET, SUMS, LEADS)  # fmt: skip
                    step += 1
                if LEADS:
                    LANES: gl.constexpr = row_sum.type.layout
                    row_max = lane_references(row_max, LANES)
                for back in range(0, full_end - full_begin):
                    acc, weights, row_max, row_sum = overlapped_step(
                        q_operand, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc,
                        weights, row_max, row_sum, step, full_end - 1 - back, row_first,
                        row_last, factor, k_factor, soft_cap, scale, positions, head, request,
                        aux, slopes, column_tile, FULL_SCORE, RAW_SCORE, FULL_SLOPE, STAGES,
                        False, CHECK_LEFT, HAS_CAP, P_LAYOUT, KV_KIND, ELEMENTS, COPIED, PART,
                        KEY_PARTS, THRESHOLD, V_COLUMNS, V_OFFSET, SUMS, LEADS)  # fmt: skip
                    step += 1
                if LEADS:
                    row_max = row_references(row_max, ROW)
                if CHECK_LEFT or RANGES > 0:
                    for back in range(0, full_begin - begin):
                        acc, weights, row_max, row_sum = overlapped_step(
                            q_operand, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc,
                            weights, row_max, row_sum, step, full_begin - 1 - back, row_first,
                            row_last, factor, k_factor, soft_cap, scale, positions, head,
                            request, aux, slopes, column_tile, SCORE, RAW_SCORE, KEY_SLOPE,
                            STAGES, True, CHECK_LEFT, HAS_CAP, P_LAYOUT, KV_KIND, ELEMENTS,
                            COPIED, PART, KEY_PARTS, THRESHOLD, V_COLUMNS, V_OFFSET,
                            SUMS, LEADS)  # fmt: skip
                        step += 1

                if OWN_QUERIES:
                    # The next queries arrive during the rest of this item.
                    mbarrier.arrive(q_empty.index(q_barrier), count=1)
                # Epilogue: the product with the values of the first tile, the last one visited.
                stage = (step - 1) % STAGES
                wait_for_tile(v_full, stage, ((step - 1) // STAGES) & 1, COPIED)
                if V_COLUMNS > 0:
                    acc = multiply_value_parts(
                        weights, v_ring, stage, acc, V_COLUMNS, STAGES, V_OFFSET
                    )
                else:
                    acc = multiply_values(
                        unpack_weights(weights, COMPUTE, P_LAYOUT), v_ring.index(stage), acc,
                        PART)  # fmt: skip
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(v_empty.index(stage), count=1)

            if KV_KIND != KV_PLAIN:
                row_sum = row_sum * (1.0 / WEIGHT_SCALE)
            if SUMS:
                columns = gl.arange(0, PART_KEYS, gl.SliceLayout(0, S_LAYOUT))
                is_sum = (columns == V_COLUMNS - 8)[None, :]
                row_sum = gl.sum(gl.where(is_sum, acc, 0.0), 1)
            elif THRESHOLD > 0:
                row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROW)
            if V_COLUMNS > 0:
                acc = first_columns(acc, DV, O_LAYOUT)
            finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
            acc_scale = gl.full([64], 1.0, gl.float32, ROW)
            if HAS_SINK and not EARLY_SINK:
                # The sink counts in the denominator, once (M4). This is `add_sink`, written out
                # because ptxas allocates registers differently for a call of it.
                sink = gl.load(sinks + head, mask=valid, other=0.0).to(gl.float32) * LOG2E
                new_max = gl.maximum(row_max, sink)
                finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
                acc_scale = exp2(row_max - finite_max)
                row_sum = row_sum * acc_scale + exp2(sink - finite_max)
            empty = row_sum == 0.0
            safe_sum = gl.where(empty, 1.0, row_sum)
            if HAS_LSE and PART <= 0:
                natural = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum)) * LN2
                gl.store(lse + (start + token).to(gl.int64) * stride_lt + head, natural, mask=valid)
            normalizer = acc_scale / safe_sum
            if KV_KIND != KV_PLAIN:
                normalizer = normalizer * v_factor
            elif v_scale is not None:
                normalizer *= load_kv_scale(v_scale, kv_head // SHARED, V_SCALE_KIND)
            normalizer = gl.convert_layout(normalizer, gl.SliceLayout(1, O_LAYOUT))
            rows = (acc * normalizer[:, None]).to(DTYPE)
            if STAGED_STORE:
                stage_rows(q_tile, rows)
                token, head, valid = item_rows(
                    first_token, query_len, kv_head, ROW_BLOCK, GROUP, TILE_TOKENS,
                    gl.SliceLayout(1, STORE_LAYOUT))  # fmt: skip
                offsets = (start + token).to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
                store_rows(out, offsets, q_tile.load(STORE_LAYOUT), valid, DV)
            elif OWN_QUERIES and COLUMNS >= 32:
                # Stores of 16 bytes, after an exchange within each warp. The queries' shared memory
                # is not free.
                token, head, valid = item_rows(
                    first_token, query_len, kv_head, ROW_BLOCK, GROUP, TILE_TOKENS,
                    gl.SliceLayout(1, WIDE_LAYOUT))  # fmt: skip
                offsets = (start + token).to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
                store_rows(out, offsets, gl.convert_layout(rows, WIDE_LAYOUT), valid, DV)
            else:
                token, head, valid = item_rows(
                    first_token, query_len, kv_head, ROW_BLOCK, GROUP, TILE_TOKENS,
                    gl.SliceLayout(1, O_LAYOUT))  # fmt: skip
                offsets = (start + token).to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
                if SPLIT_V:
                    store_rows(out, offsets + PART * COLUMNS, rows, valid, DV - PART * COLUMNS)
                else:
                    store_rows(out, offsets, rows, valid, DV)
            if LOAD_QUERY and not OWN_QUERIES:
                # The next queries arrive here by TMA, after the staged output has been read.
                fence_async_shared()
                mbarrier.arrive(q_empty.index(q_stage), count=1)


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_prefill_kernel(
    key_desc, value_desc, query_desc, query, out, lse, sinks, k_scale, v_scale, aux0, aux1, aux2,
    aux3, query_start_loc, seq_lens, block_table, counters, scale, soft_cap, left, right, chunk,
    num_reqs, num_tokens, num_tiles, concurrent, section, num_blocks, stride_qt, stride_qh,
    stride_ot, stride_oh, stride_lt, stride_table, rows0, columns0, rows1, columns1, rows2,
    columns2, rows3, columns3, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    SCORE: gl.constexpr, RAW_SCORE: gl.constexpr,
    KEY_SLOPE: gl.constexpr, BOUNDS: gl.constexpr, RANGES: gl.constexpr, EXACT: gl.constexpr,
    SHARED: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, WIDTH: gl.constexpr, WIDTH_V: gl.constexpr, TILE_TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, LOAD_QUERY: gl.constexpr, PERSISTENT: gl.constexpr,
    STAGED_STORE: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr, KV_KIND: gl.constexpr,
    K_SCALE_KIND: gl.constexpr, V_SCALE_KIND: gl.constexpr, BYTE_STAGES: gl.constexpr,
    CONVERTER_WARPS: gl.constexpr, CONVERTER_REGISTERS: gl.constexpr, QUERY_REGISTERS: gl.constexpr,
    GATHERS: gl.constexpr,
    SPLIT_V: gl.constexpr, KEY_PARTS: gl.constexpr,
    VALUE_PARTS: gl.constexpr, LEADS: gl.constexpr,
):  # fmt: skip
    """One CTA of 4 warps per consumer and 1 + 1 loader warps.

    Grid: num_tiles * NUM_KV_HEADS CTAs, or fewer with PERSISTENT.

    Args:
        key_desc, value_desc: TMA descriptors of the caches; of float8 ones as int16.
        k_scale, v_scale: of a float8 cache or its 16-bit copies, as `SCALE_KIND` of each says; else
            None. A `k_scale` of copies is a tensor: numbers are part of `scale`.
        query_desc: TMA descriptor of the queries; only with LOAD_QUERY.
        seq_lens, block_table: with BLOCK_SIZE 0, which stands for keys without pages, the first row
            of each request's keys (the row after the last key at the end); the caches are
            [1, rows, Hkv, D].
        counters: two int32 zeros; only with PERSISTENT.
        num_tiles: query tiles, an upper bound.
        KEY_PARTS: queries and keys are kept in as many parts of WIDTH elements.
        concurrent: 1 to run next to the previous kernel, 0 to wait for it first.
        section: KV heads of a section, as in `schedule.find_tile`.
        num_blocks: blocks of the cache.
        aux0 to columns3: tensors of the score function SCORE, as in `kernels.score`; None without.
            With RAW_SCORE it takes raw products instead of scores. KEY_SLOPE: it adds this times
            the key's position, and terms that are equal for all keys; None for others.
        GATHERS: rows of the caches are gathered: `key_desc` and `value_desc` are pointers.
        stride_kb to stride_vh: with GATHERS, strides of the key and the value cache in blocks, rows
            and heads, in bytes; else None.
        SPLIT_V: the consumers share 64 query rows, and each has a part of the value elements.
        VALUE_PARTS: parts of 32 elements of the values of up to 127 elements (`value_columns`), or
            0; only with tiles of 128 keys, a 16-bit cache, and without GATHERS.
        LEADS: unmasked tiles use `softmax_by_sign` (`prefill_plan`).
    """
    aux = (
        aux0, rows0, columns0, aux1, rows1, columns1, aux2, rows2, columns2, aux3, rows3, columns3,
    )  # fmt: skip
    FIELDS: gl.constexpr = 6 + 4 * RANGES
    strides = (stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh)
    LOADERS: gl.constexpr = _GATHER_THREADS if GATHERS else 1
    COPIED: gl.constexpr = GATHERS
    CACHE: gl.constexpr = key_desc.dtype.element_ty if COPIED else key_desc.dtype
    QUERY: gl.constexpr = query.dtype.element_ty
    COMPUTE: gl.constexpr = CACHE if KV_KIND == KV_PLAIN else gl.float16
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, WIDTH], QUERY)
    K_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, WIDTH], COMPUTE)
    V_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, WIDTH_V], COMPUTE)
    QUERY_BLOCKS: gl.constexpr = 1 if SPLIT_V else CONSUMERS
    q_tiles = gl.allocate_shared_memory(
        QUERY, [Q_STAGES * QUERY_BLOCKS * KEY_PARTS, 64, WIDTH], Q_SHARED
    )
    k_ring = gl.allocate_shared_memory(COMPUTE, [STAGES * KEY_PARTS, BLOCK_N, WIDTH], K_SHARED)
    if VALUE_PARTS > 0:
        SPARE: gl.constexpr = 1 if VALUE_PARTS < 4 and not HAS_LSE else 0
        PART_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
            [PART_KEYS, PART_ELEMENTS], COMPUTE
        )
        v_ring = gl.allocate_shared_memory(
            COMPUTE, [STAGES * (VALUE_PARTS + SPARE), PART_KEYS, PART_ELEMENTS], PART_SHARED
        )
        check_offset(
            v_ring, shared_memory_offset((2 * q_tiles.numel, 2 * k_ring.numel), 2 * v_ring.numel)
        )
        if SPARE > 0:
            store_ones(v_ring, VALUE_PARTS, STAGES)
    else:
        v_ring = gl.allocate_shared_memory(COMPUTE, [STAGES, BLOCK_N, WIDTH_V], V_SHARED)
    # Divided queries take too much shared memory for two stages. A consumer that releases its rows
    # alone, before its last product, waits less for the next ones.
    OWN_QUERIES: gl.constexpr = (
        KEY_PARTS == 3 and CONSUMERS == 3 and LOAD_QUERY and not STAGED_STORE
    )
    READERS: gl.constexpr = CONSUMERS + 1 + int(KV_KIND != KV_PLAIN) - int(COPIED)
    mailbox, mail_full, mail_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty = (
        allocate_barriers(
            FIELDS, STAGES, Q_STAGES, CONSUMERS, READERS, LOADERS, OWN_QUERIES
        )  # fmt: skip
    )
    column_tile = (None,)
    if KEY_SLOPE is not None:
        column_tile = (column_numbers(BLOCK_N),)
    # Both branches are written out in full, because a constexpr in a tuple that is assigned to a
    # variable stops being a constexpr.
    if KV_KIND != KV_PLAIN:
        # The loaders fill rings of bytes, from which the converter fills the rings of the products.
        KB_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, WIDTH // 2], CACHE)
        VB_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
            [BLOCK_N, WIDTH_V // 2], CACHE
        )
        H_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, WIDTH], COMPUTE)
        q_halves = reinterpret(q_tiles, COMPUTE, [Q_STAGES * CONSUMERS, 64, WIDTH], H_SHARED)
        k_bytes = gl.allocate_shared_memory(CACHE, [BYTE_STAGES, BLOCK_N, WIDTH // 2], KB_SHARED)
        v_bytes = gl.allocate_shared_memory(CACHE, [BYTE_STAGES, BLOCK_N, WIDTH_V // 2], VB_SHARED)
        kb_full = gl.allocate_shared_memory(gl.int64, [BYTE_STAGES, 1], mbarrier.MBarrierLayout())
        kb_empty = gl.allocate_shared_memory(gl.int64, [BYTE_STAGES, 1], mbarrier.MBarrierLayout())
        vb_full = gl.allocate_shared_memory(gl.int64, [BYTE_STAGES, 1], mbarrier.MBarrierLayout())
        vb_empty = gl.allocate_shared_memory(gl.int64, [BYTE_STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(BYTE_STAGES):
            mbarrier.init(kb_full.index(stage), count=1)
            mbarrier.init(kb_empty.index(stage), count=1)
            mbarrier.init(vb_full.index(stage), count=1)
            mbarrier.init(vb_empty.index(stage), count=1)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_consumer, (
                    query, out, lse, sinks, k_scale, v_scale, scale, soft_cap, left, right, chunk,
                    num_reqs, concurrent, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt,
                    mailbox, q_tiles, q_halves, k_ring, v_ring, mail_full, mail_empty, q_full,
                    q_empty, k_full, k_empty, v_full, v_empty, aux, column_tile, SCORE, RAW_SCORE,
                    KEY_SLOPE, BOUNDS, RANGES, EXACT, SHARED, 0, GROUP, D, DV, TILE_TOKENS,
                    BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY, STAGED_STORE, FIELDS,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE, KV_KIND,
                    K_SCALE_KIND, V_SCALE_KIND, QUERY_REGISTERS, COPIED, SPLIT_V,
                    KEY_PARTS, LEADS)),
                (_consumer, (
                    query, out, lse, sinks, k_scale, v_scale, scale, soft_cap, left, right, chunk,
                    num_reqs, concurrent, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt,
                    mailbox, q_tiles, q_halves, k_ring, v_ring, mail_full, mail_empty, q_full,
                    q_empty, k_full, k_empty, v_full, v_empty, aux, column_tile, SCORE, RAW_SCORE,
                    KEY_SLOPE, BOUNDS, RANGES, EXACT, SHARED, 1, GROUP, D, DV, TILE_TOKENS,
                    BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY, STAGED_STORE, FIELDS,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE, KV_KIND,
                    K_SCALE_KIND, V_SCALE_KIND, QUERY_REGISTERS, COPIED, SPLIT_V,
                    KEY_PARTS, LEADS)),
                (converter, (
                    left, right, chunk, num_reqs, mailbox, k_bytes, v_bytes, k_ring, v_ring,
                    mail_full, mail_empty, kb_full, kb_empty, vb_full, vb_empty, k_full, k_empty,
                    v_full, v_empty, RANGES, TILE_TOKENS, STAGES, BYTE_STAGES, FIELDS, CAUSAL,
                    HAS_LEFT, HAS_RIGHT, HAS_CHUNK, KV_KIND)),
                (key_loader, (
                    key_desc, query_desc, query_start_loc, seq_lens, block_table, counters, left,
                    right, chunk, num_reqs, num_tokens, num_tiles, concurrent, section, num_blocks,
                    stride_table, mailbox, q_tiles, k_bytes, mail_full, mail_empty, q_full, q_empty,
                    kb_full, kb_empty, aux, None, None, None, None, None, BOUNDS, RANGES,
                    NUM_KV_HEADS, SHARED, GROUP, TILE_TOKENS, BLOCK_N, BLOCK_SIZE, BYTE_STAGES,
                    Q_STAGES, CONSUMERS, LOAD_QUERY, PERSISTENT, FIELDS, CAUSAL, HAS_LEFT,
                    HAS_RIGHT, HAS_CHUNK, D, DV)),
                (value_loader, (
                    value_desc, block_table, left, right, chunk, num_reqs, num_blocks, stride_table,
                    mailbox, v_bytes, mail_full, mail_empty, vb_full, vb_empty, RANGES, SHARED,
                    TILE_TOKENS, BLOCK_N, BLOCK_SIZE, BYTE_STAGES, FIELDS, CAUSAL, HAS_LEFT,
                    HAS_RIGHT, HAS_CHUNK)),
            ],
            [4, CONVERTER_WARPS, 1, 1],
            [CONSUMER_REGISTERS, CONVERTER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consumer, (
                    query, out, lse, sinks, k_scale, v_scale, scale, soft_cap, left, right, chunk,
                    num_reqs, concurrent, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt,
                    mailbox, q_tiles, None, k_ring, v_ring, mail_full, mail_empty, q_full,
                    q_empty, k_full, k_empty, v_full, v_empty, aux, column_tile, SCORE, RAW_SCORE,
                    KEY_SLOPE, BOUNDS, RANGES, EXACT, SHARED, 0, GROUP, D, DV, TILE_TOKENS,
                    BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY, STAGED_STORE, FIELDS,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE, KV_KIND,
                    K_SCALE_KIND, V_SCALE_KIND, QUERY_REGISTERS, COPIED, SPLIT_V,
                    KEY_PARTS, LEADS)),
                (_consumer, (
                    query, out, lse, sinks, k_scale, v_scale, scale, soft_cap, left, right, chunk,
                    num_reqs, concurrent, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt,
                    mailbox, q_tiles, None, k_ring, v_ring, mail_full, mail_empty, q_full,
                    q_empty, k_full, k_empty, v_full, v_empty, aux, column_tile, SCORE, RAW_SCORE,
                    KEY_SLOPE, BOUNDS, RANGES, EXACT, SHARED, 1, GROUP, D, DV, TILE_TOKENS,
                    BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY, STAGED_STORE, FIELDS,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE, KV_KIND,
                    K_SCALE_KIND, V_SCALE_KIND, QUERY_REGISTERS, COPIED, SPLIT_V,
                    KEY_PARTS, LEADS)),
                (_consumer, (
                    query, out, lse, sinks, k_scale, v_scale, scale, soft_cap, left, right, chunk,
                    num_reqs, concurrent, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt,
                    mailbox, q_tiles, None, k_ring, v_ring, mail_full, mail_empty, q_full,
                    q_empty, k_full, k_empty, v_full, v_empty, aux, column_tile, SCORE, RAW_SCORE,
                    KEY_SLOPE, BOUNDS, RANGES, EXACT, SHARED, 2, GROUP, D, DV, TILE_TOKENS,
                    BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY, STAGED_STORE, FIELDS,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE, KV_KIND,
                    K_SCALE_KIND, V_SCALE_KIND, QUERY_REGISTERS, COPIED, SPLIT_V,
                    KEY_PARTS, LEADS)),
                (key_loader, (
                    key_desc, query_desc, query_start_loc, seq_lens, block_table, counters, left,
                    right, chunk, num_reqs, num_tokens, num_tiles, concurrent, section, num_blocks,
                    stride_table, mailbox, q_tiles, k_ring, mail_full, mail_empty, q_full, q_empty,
                    k_full, k_empty, aux, None, None, None, None, None, BOUNDS, RANGES,
                    NUM_KV_HEADS, SHARED, GROUP, TILE_TOKENS, BLOCK_N, BLOCK_SIZE, STAGES, Q_STAGES,
                    CONSUMERS, LOAD_QUERY, PERSISTENT, FIELDS, CAUSAL, HAS_LEFT, HAS_RIGHT,
                    HAS_CHUNK, D, DV, KEY_PARTS)),
                (value_loader, (
                    value_desc, block_table, left, right, chunk, num_reqs, num_blocks, stride_table,
                    mailbox, v_ring, mail_full, mail_empty, v_full, v_empty, RANGES, SHARED,
                    TILE_TOKENS, BLOCK_N, BLOCK_SIZE, STAGES, FIELDS, CAUSAL, HAS_LEFT, HAS_RIGHT,
                    HAS_CHUNK, VALUE_PARTS)),
            ],
            [4, 4, 1, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    elif GATHERS:
        gl.warp_specialize(
            [
                (_consumer, (
                    query, out, lse, sinks, k_scale, v_scale, scale, soft_cap, left, right, chunk,
                    num_reqs, concurrent, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt,
                    mailbox, q_tiles, None, k_ring, v_ring, mail_full, mail_empty, q_full,
                    q_empty, k_full, k_empty, v_full, v_empty, aux, column_tile, SCORE, RAW_SCORE,
                    KEY_SLOPE, BOUNDS, RANGES, EXACT, SHARED, 0, GROUP, D, DV, TILE_TOKENS,
                    BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY, STAGED_STORE, FIELDS,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE, KV_KIND,
                    K_SCALE_KIND, V_SCALE_KIND, QUERY_REGISTERS, COPIED, SPLIT_V,
                    KEY_PARTS, LEADS)),
                (_consumer, (
                    query, out, lse, sinks, k_scale, v_scale, scale, soft_cap, left, right, chunk,
                    num_reqs, concurrent, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt,
                    mailbox, q_tiles, None, k_ring, v_ring, mail_full, mail_empty, q_full,
                    q_empty, k_full, k_empty, v_full, v_empty, aux, column_tile, SCORE, RAW_SCORE,
                    KEY_SLOPE, BOUNDS, RANGES, EXACT, SHARED, 1, GROUP, D, DV, TILE_TOKENS,
                    BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY, STAGED_STORE, FIELDS,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE, KV_KIND,
                    K_SCALE_KIND, V_SCALE_KIND, QUERY_REGISTERS, COPIED, SPLIT_V,
                    KEY_PARTS, LEADS)),
                (key_loader, (
                    key_desc, query_desc, query_start_loc, seq_lens, block_table, counters, left,
                    right, chunk, num_reqs, num_tokens, num_tiles, concurrent, section, num_blocks,
                    stride_table, mailbox, q_tiles, k_ring, mail_full, mail_empty, q_full, q_empty,
                    k_full, k_empty, aux, value_desc, v_ring, v_full, v_empty, strides, BOUNDS,
                    RANGES, NUM_KV_HEADS, SHARED, GROUP, TILE_TOKENS, BLOCK_N, BLOCK_SIZE, STAGES,
                    Q_STAGES, CONSUMERS, LOAD_QUERY, PERSISTENT, FIELDS, CAUSAL, HAS_LEFT,
                    HAS_RIGHT, HAS_CHUNK, D, DV)),
            ],
            [4, 4],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (
                    query, out, lse, sinks, k_scale, v_scale, scale, soft_cap, left, right, chunk,
                    num_reqs, concurrent, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt,
                    mailbox, q_tiles, None, k_ring, v_ring, mail_full, mail_empty, q_full,
                    q_empty, k_full, k_empty, v_full, v_empty, aux, column_tile, SCORE, RAW_SCORE,
                    KEY_SLOPE, BOUNDS, RANGES, EXACT, SHARED, 0, GROUP, D, DV, TILE_TOKENS,
                    BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY, STAGED_STORE, FIELDS,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE, KV_KIND,
                    K_SCALE_KIND, V_SCALE_KIND, QUERY_REGISTERS, COPIED, SPLIT_V,
                    KEY_PARTS, LEADS)),
                (_consumer, (
                    query, out, lse, sinks, k_scale, v_scale, scale, soft_cap, left, right, chunk,
                    num_reqs, concurrent, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt,
                    mailbox, q_tiles, None, k_ring, v_ring, mail_full, mail_empty, q_full,
                    q_empty, k_full, k_empty, v_full, v_empty, aux, column_tile, SCORE, RAW_SCORE,
                    KEY_SLOPE, BOUNDS, RANGES, EXACT, SHARED, 1, GROUP, D, DV, TILE_TOKENS,
                    BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY, STAGED_STORE, FIELDS,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE, KV_KIND,
                    K_SCALE_KIND, V_SCALE_KIND, QUERY_REGISTERS, COPIED, SPLIT_V,
                    KEY_PARTS, LEADS)),
                (key_loader, (
                    key_desc, query_desc, query_start_loc, seq_lens, block_table, counters, left,
                    right, chunk, num_reqs, num_tokens, num_tiles, concurrent, section, num_blocks,
                    stride_table, mailbox, q_tiles, k_ring, mail_full, mail_empty, q_full, q_empty,
                    k_full, k_empty, aux, None, None, None, None, None, BOUNDS, RANGES,
                    NUM_KV_HEADS, SHARED, GROUP, TILE_TOKENS, BLOCK_N, BLOCK_SIZE, STAGES, Q_STAGES,
                    CONSUMERS, LOAD_QUERY, PERSISTENT, FIELDS, CAUSAL, HAS_LEFT, HAS_RIGHT,
                    HAS_CHUNK, D, DV, KEY_PARTS)),
                (value_loader, (
                    value_desc, block_table, left, right, chunk, num_reqs, num_blocks, stride_table,
                    mailbox, v_ring, mail_full, mail_empty, v_full, v_empty, RANGES, SHARED,
                    TILE_TOKENS, BLOCK_N, BLOCK_SIZE, STAGES, FIELDS, CAUSAL, HAS_LEFT, HAS_RIGHT,
                    HAS_CHUNK, VALUE_PARTS)),
            ],
            [4, 1, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
