"""The Hopper decode of batches with shared prefixes: prefixes and suffixes in one launch.

Work distribution (stream-K, Osama et al. 2023). A host schedule lists items: query rows of one or
two products per KV head, and segments of keys that parts of these rows see, which are shared
prefixes and the keys that one request has for itself. The tiles of all items form one line, which
is cut into similar ranges. Each range has NUM_KV_HEADS consecutive CTAs, one per KV head. The tiles
of one item in one range are a split; each split writes a partial result, and
`hopper_merge_rows_kernel` merges those of each row.

A CTA has two consumer warpgroups of 64 query rows, one warp that loads keys and one that loads
values. Items of more than 64 rows are computed by both consumers, tile by tile, with different
rows. Of an item of fewer rows each consumer computes every second tile, and the first consumer adds
the result of the second one to its own before it writes them. Rows that do not see a segment are
masked: the beginning and the end of an item take longer than several tiles, so that an item for
each request would take longer than products of which most rows are masked.

Query rows are the rows of the products, because a prefix has many; the decode of single requests
(`decode.py`) has them as columns. Sources: Hydragen (Juravsky et al., 2024), cascade inference
(Ye et al., FlashInfer, 2024).
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

from attnlib.ops.shared_decode import ITEM_FIELDS, PRODUCT_ROWS, SEGMENT_FIELDS
from attnlib.ops.triton.hopper.kernels.cache_tiles import allocate_rings, clear_tile
from attnlib.ops.triton.hopper.kernels.compat import (
    exp2,
    launch_dependent_grids,
    partition_barrier,
    prefetch_l1,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.decode_call import Queries
from attnlib.ops.triton.hopper.kernels.decode_queries import prefetch_queries
from attnlib.ops.triton.hopper.kernels.mainloop import pack_weights, unpack_weights
from attnlib.ops.triton.hopper.kernels.softmax import (
    mask_scores,
    online_softmax,
    score_factor,
    transform_scores,
)
from attnlib.ops.triton.hopper.kernels.tma_load import load_tile

__all__ = ["hopper_shared_decode_kernel"]

_FIELDS = gl.constexpr(ITEM_FIELDS)
_SEGMENT = gl.constexpr(SEGMENT_FIELDS)
_ROWS = gl.constexpr(PRODUCT_ROWS)
"""Query rows of a consumer."""


@gluon.jit
def _own_range(ranges, NUM_KV_HEADS: gl.constexpr):
    """Return (number, begin, end, first item, first segment, KV head) of a CTA's range of tiles."""
    worker = gl.program_id(0)
    index = worker // NUM_KV_HEADS
    fields = ranges + 4 * index
    begin = gl.load(fields)
    end = gl.load(fields + 1)
    item = gl.load(fields + 2)
    segment = gl.load(fields + 3)
    return index, begin, end, item, segment, worker % NUM_KV_HEADS


@gluon.jit
def _loader(
    cache, ranges, segments, block_table, num_blocks, stride_table, ring, full, empty,
    NUM_KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the key or value tiles of the CTA's range into a ring, by one warp, segment after
    segment."""
    BLOCK_N: gl.constexpr = ring.shape[1]
    # PDL: the schedule is copied from the host, and not written by the previous kernel.
    _, position, range_end, _, segment, kv_head = _own_range(ranges, NUM_KV_HEADS)
    step = 0
    fields = segments + segment * _SEGMENT
    begin = gl.load(fields)
    tiles = gl.load(fields + 1)
    row = gl.load(fields + 2)
    column = gl.load(fields + 3)
    keys = gl.load(fields + 4)
    # The previous kernel may have written the cache and the block table.
    wait_on_dependent_grids()
    while position < range_end:
        # Segments may be short: the fields of the next one are loaded, and its pages prefetched,
        # before they are needed. Behind the last segment the tensor has other integers.
        fields += _SEGMENT
        next_begin = gl.load(fields)
        next_tiles = gl.load(fields + 1)
        next_row = gl.load(fields + 2)
        next_column = gl.load(fields + 3)
        next_keys = gl.load(fields + 4)
        skipped = position - begin
        count = gl.minimum(tiles - skipped, range_end - position)
        pages = (keys + BLOCK_SIZE - 1) // BLOCK_SIZE
        table = block_table + row.to(gl.int64) * stride_table + column
        if position + count < range_end:
            prefetch_l1(block_table + next_row.to(gl.int64) * stride_table + next_column)
        for i in range(0, count):
            tile = skipped + i
            # 32 pages ahead: one 128-byte line of the block table.
            load_tile(
                cache, table, pages, num_blocks, kv_head, tile,
                tile * BLOCK_N // BLOCK_SIZE + 32, ring, full, empty, step, BLOCK_SIZE, STAGES,
                "nhd")  # fmt: skip
            step += 1
        position += count
        begin = next_begin
        tiles = next_tiles
        row = next_row
        column = next_column
        keys = next_keys


@gluon.jit
def _skip(full, empty, step, STAGES: gl.constexpr):
    """Release a stage that only the other consumer reads.

    A consumer waits for every tile, because a barrier tells apart two phases only.
    """
    stage = step % STAGES
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def _next_segment(fields):
    """Return (tiles, keys, first member, members) of the segment behind the one at `fields`."""
    fields += _SEGMENT
    return (
        gl.load(fields + 1), gl.load(fields + 4), gl.load(fields + 5), gl.load(fields + 6),
    )  # fmt: skip


@gluon.jit
def _advance(
    position, fields, begin, end, keys, low, seeing, next_tiles, next_keys, next_low, next_seeing
):  # fmt: skip
    """Move on to the segment with the tile at `position`; the fields of the next one are loaded
    ahead, so that nothing waits for them."""
    while position >= end:
        fields += _SEGMENT
        begin = end
        end += next_tiles
        keys = next_keys
        low = next_low
        seeing = next_seeing
        next_tiles, next_keys, next_low, next_seeing = _next_segment(fields)
    return (
        fields, begin, end, keys, low, seeing, next_tiles, next_keys, next_low, next_seeing,
    )  # fmt: skip


@gluon.jit
def _sees(offset, low, seeing, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Return which query rows are those of `seeing` members of an item from `low` on."""
    member = offset + gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT)) // GROUP
    return (member >= low) & (member < low + seeing)


@gluon.jit
def _step(
    q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, row_max, row_sum, step, masked,
    offset, low, seeing, valid, clear, factor, soft_cap, GROUP: gl.constexpr, STAGES: gl.constexpr,
    HAS_CAP: gl.constexpr, P_LAYOUT: gl.constexpr, S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Multiply by the keys and values of ring step `step`.

    The products of one consumer overlap with the softmax of the other one, so that nothing overlaps
    within a consumer. All tiles have the same instructions: a kernel with more of them for first,
    last and masked tiles took longer.

    Args:
        masked: some rows do not see the tile, or it has keys past the end of its segment.
        valid: keys of the tile in its segment.
        clear: the first value of the tile that may be NaN.

    Returns:
        (acc, row_max, row_sum).
    """
    DTYPE: gl.constexpr = k_ring.dtype
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    WIDTH_V: gl.constexpr = v_ring.shape[2]
    stage = step % STAGES
    phase = (step // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    scores = gl.zeros([_ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(
        q_tile, k_ring.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True
    )
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(stage), count=1)
    scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
    if masked:
        row_last = gl.where(_sees(offset, low, seeing, GROUP, S_LAYOUT), valid, 0)
        scores = mask_scores(scores, row_last, row_last, 0, False)
    probs, acc_scale, row_max, row_sum = online_softmax(
        scores, factor, row_max, row_sum, True, HAS_CAP
    )
    weights = unpack_weights(pack_weights(probs, DTYPE), DTYPE, P_LAYOUT)
    mbarrier.wait(v_full.index(stage), phase)
    if clear < BLOCK_N:
        clear_tile(v_ring.index(stage), clear, 0)
    found = gl.zeros([_ROWS, WIDTH_V], gl.float32, O_LAYOUT)
    found = warpgroup_mma(weights, v_ring.index(stage), found, use_acc=False, is_async=True)
    found = warpgroup_mma_wait(0, deps=[found])
    mbarrier.arrive(v_empty.index(stage), count=1)
    # The weights of rows that do not see the values are 0, but 0 * NaN is NaN.
    found = gl.where(_sees(offset, low, seeing, GROUP, O_LAYOUT)[:, None], found, 0.0)
    acc = acc * gl.convert_layout(acc_scale, gl.SliceLayout(1, O_LAYOUT))[:, None] + found
    return acc, row_max, row_sum


@gluon.jit
def _many_rows(
    q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, row_max, row_sum, step, count,
    valid, factor, soft_cap, STAGES: gl.constexpr, HAS_CAP: gl.constexpr, P_LAYOUT: gl.constexpr,
    S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Multiply by `count` tiles from ring step `step` on, which all rows see; they have `valid`
    keys. Products with values overlap with the softmax of the next tile.

    Returns:
        (acc, row_max, row_sum).
    """
    DTYPE: gl.constexpr = k_ring.dtype
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    stage = step % STAGES
    mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
    zeros = gl.zeros([_ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(
        q_tile, k_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(stage), count=1)
    scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
    row_last = gl.full([_ROWS], valid, gl.int32, ROW)
    scores = mask_scores(scores, row_last, row_last, 0, False)
    probs, _, row_max, row_sum = online_softmax(scores, factor, row_max, row_sum, False, HAS_CAP)
    weights = pack_weights(probs, DTYPE)
    for i in range(1, count):
        v_stage = stage
        v_phase = ((step + i - 1) // STAGES) & 1
        stage = (step + i) % STAGES
        mbarrier.wait(k_full.index(stage), ((step + i) // STAGES) & 1)
        zeros = gl.zeros([_ROWS, BLOCK_N], gl.float32, S_LAYOUT)
        scores = warpgroup_mma(
            q_tile, k_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        mbarrier.wait(v_full.index(v_stage), v_phase)
        acc = warpgroup_mma(
            unpack_weights(weights, DTYPE, P_LAYOUT), v_ring.index(v_stage), acc, is_async=True
        )
        # One group may stay in flight: Q @ K^T is complete, P @ V overlaps with the softmax.
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
        if valid < (i + 1) * BLOCK_N:
            row_last = gl.full([_ROWS], valid - i * BLOCK_N, gl.int32, ROW)
            scores = mask_scores(scores, row_last, row_last, 0, False)
        probs, acc_scale, row_max, row_sum = online_softmax(
            scores, factor, row_max, row_sum, False, HAS_CAP
        )
        # P @ V is complete: its stage is free, and the accumulator may be rescaled.
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        acc = acc * gl.convert_layout(acc_scale, gl.SliceLayout(1, acc.type.layout))[:, None]
        weights = pack_weights(probs, DTYPE)
    mbarrier.wait(v_full.index(stage), ((step + count - 1) // STAGES) & 1)
    acc = warpgroup_mma(
        unpack_weights(weights, DTYPE, P_LAYOUT), v_ring.index(stage), acc, is_async=True
    )
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(stage), count=1)
    return acc, row_max, row_sum


@gluon.jit
def _hand_over(
    acc, row_max, row_sum, state, state_max, state_sum, state_full, state_empty, handed
):  # fmt: skip
    """Give the state of the second consumer to the first one, the `handed`-th time."""
    mbarrier.wait(state_empty, (handed & 1) ^ 1)
    state.store(acc)
    state_max.store(row_max)
    state_sum.store(row_sum)
    partition_barrier()
    mbarrier.arrive(state_full, count=1)


@gluon.jit
def _add_other(
    acc, row_max, row_sum, state, state_max, state_sum, state_full, state_empty, handed
):  # fmt: skip
    """Add the state that the second consumer has given to that of the first one.

    Returns:
        (acc, row_max, row_sum).
    """
    LAYOUT: gl.constexpr = acc.type.layout
    mbarrier.wait(state_full, handed & 1)
    other_max = state_max.load(row_max.type.layout)
    other_sum = state_sum.load(row_max.type.layout)
    new_max = gl.maximum(row_max, other_max)
    finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    keep = exp2(row_max - finite_max)
    other_keep = exp2(other_max - finite_max)
    acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, LAYOUT))[:, None]
    # Accumulators of rows without keys are 0.
    acc += state.load(LAYOUT) * gl.convert_layout(other_keep, gl.SliceLayout(1, LAYOUT))[:, None]
    row_sum = row_sum * keep + other_sum * other_keep
    partition_barrier()
    mbarrier.arrive(state_empty, count=1)
    return acc, new_max, row_sum


@gluon.jit
def _consumer(
    query, ranges, segments, items, tokens, partial_out, partial_lse, scale, soft_cap,
    num_rows, stride_qt, stride_qh, q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty,
    state, state_max, state_sum, state_full, state_empty,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, HAS_CAP: gl.constexpr,
    WARPGROUP: gl.constexpr,
):  # fmt: skip
    """Multiply, and write the partial results of one consumer warpgroup."""
    WIDTH: gl.constexpr = q_tile.shape[1]
    WIDTH_V: gl.constexpr = v_ring.shape[2]
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    TOKENS: gl.constexpr = _ROWS // GROUP
    HEADS: gl.constexpr = NUM_KV_HEADS * GROUP
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_V, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    Q_LANES: gl.constexpr = min(32, WIDTH // 8)
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // Q_LANES, Q_LANES], [4, 1], [1, 0])
    factor = score_factor(scale, soft_cap, HAS_CAP)
    # PDL: the merge may start; it waits for this kernel's results by itself.
    launch_dependent_grids()
    index, position, range_end, item, segment, kv_head = _own_range(ranges, NUM_KV_HEADS)
    step = 0
    handed = 0
    fields = items + item * _FIELDS
    item_begin = gl.load(fields)
    tiles = gl.load(fields + 1)
    first = gl.load(fields + 2)
    num_tokens = gl.load(fields + 3)
    partial_begin = gl.load(fields + 4)
    first_token = gl.load(fields + 5)
    consecutive = gl.load(fields + 6)
    first_range = gl.load(fields + 7)
    segment_fields = segments + segment * _SEGMENT
    begin = gl.load(segment_fields)
    end = begin + gl.load(segment_fields + 1)
    keys = gl.load(segment_fields + 4)
    low = gl.load(segment_fields + 5)
    seeing = gl.load(segment_fields + 6)
    next_tiles, next_keys, next_low, next_seeing = _next_segment(segment_fields)
    # The previous kernel may have written the queries.
    wait_on_dependent_grids()
    while position < range_end:
        # As in `_loader`.
        fields += _FIELDS
        next_item_begin = gl.load(fields)
        next_item_tiles = gl.load(fields + 1)
        next_first = gl.load(fields + 2)
        next_count = gl.load(fields + 3)
        next_partial = gl.load(fields + 4)
        next_token = gl.load(fields + 5)
        next_consecutive = gl.load(fields + 6)
        next_range = gl.load(fields + 7)
        count = gl.minimum(item_begin + tiles, range_end) - position
        split = index - first_range
        # Both consumers compute all tiles of an item of many rows, for different rows. With fewer
        # rows, each computes every second tile.
        in_turn = num_tokens <= TOKENS
        offset = gl.where(in_turn, 0, WARPGROUP * TOKENS)
        own = gl.where(in_turn, (count + 1 - WARPGROUP) // 2, count)
        partial = split * num_tokens + partial_begin

        row_max = gl.full([_ROWS], float("-inf"), gl.float32, ROW)
        row_sum = gl.full([_ROWS], 0.0, gl.float32, ROW)
        acc = gl.zeros([_ROWS, WIDTH_V], gl.float32, O_LAYOUT)
        if own > 0:
            row = gl.arange(0, _ROWS, gl.SliceLayout(1, Q_LAYOUT))
            member = offset + row // GROUP
            valid = (row < TOKENS * GROUP) & (member < num_tokens)
            token = gl.load(
                tokens + first + member, mask=valid & (consecutive == 0),
                other=0,
            )  # fmt: skip
            token = gl.where(consecutive != 0, first_token + member, token)
            offsets = token.to(gl.int64) * stride_qt
            offsets += (kv_head * GROUP + row % GROUP).to(gl.int64) * stride_qh
            # The launcher checks 16-byte alignment; the shifts tell the compiler.
            offsets = (offsets >> 3) << 3
            columns = gl.arange(0, WIDTH, gl.SliceLayout(0, Q_LAYOUT))
            q = gl.load(
                query + offsets[:, None] + columns[None, :],
                mask=valid[:, None] & (columns < D)[None, :],
                other=0.0,
            )
            # All warps are done with the previous split's queries before they are overwritten.
            partition_barrier()
            q_tile.store(q)
            fence_async_shared()
            partition_barrier()
            if (position + count < range_end) & (next_consecutive != 0):
                queries = Queries(query, stride_qt, stride_qh, num_rows)
                prefetch_queries(queries, next_token, kv_head, GROUP, D, _ROWS)
        if in_turn:
            for i in range(0, count):
                if i % 2 != WARPGROUP:
                    _skip(k_full, k_empty, step + i, STAGES)
                    _skip(v_full, v_empty, step + i, STAGES)
                else:
                    tile = position + i
                    (
                        segment_fields, begin, end, keys, low, seeing, next_tiles, next_keys,
                        next_low, next_seeing,
                    ) = _advance(
                        tile, segment_fields, begin, end, keys, low, seeing, next_tiles, next_keys,
                        next_low, next_seeing)  # fmt: skip
                    past_end = keys - (tile - begin) * BLOCK_N
                    # TMA fills whole pages past the end with zeros, but not the rest of the last
                    # page. Prefixes, which more rows see, are whole pages.
                    clear = gl.where(keys % BLOCK_SIZE != 0, past_end, BLOCK_N)
                    masked = (past_end < BLOCK_N) | (seeing < num_tokens)
                    acc, row_max, row_sum = _step(
                        q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, row_max,
                        row_sum, step + i, masked, offset, low, seeing, past_end, clear, factor,
                        soft_cap, GROUP, STAGES, HAS_CAP, P_LAYOUT, S_LAYOUT,
                        O_LAYOUT)  # fmt: skip
        else:
            (
                segment_fields, begin, end, keys, low, seeing, next_tiles, next_keys, next_low,
                next_seeing,
            ) = _advance(
                position, segment_fields, begin, end, keys, low, seeing, next_tiles, next_keys,
                next_low, next_seeing)  # fmt: skip
            acc, row_max, row_sum = _many_rows(
                q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, row_max, row_sum,
                step, count, keys - (position - begin) * BLOCK_N, factor, soft_cap, STAGES, HAS_CAP,
                P_LAYOUT, S_LAYOUT)  # fmt: skip

        row = gl.arange(0, _ROWS, ROW)
        member = offset + row // GROUP
        valid = (row < TOKENS * GROUP) & (member < num_tokens)
        if in_turn:
            if WARPGROUP == 1:
                _hand_over(
                    acc, row_max, row_sum, state, state_max, state_sum, state_full, state_empty,
                    handed)  # fmt: skip
                valid = row < 0
            else:
                acc, row_max, row_sum = _add_other(
                    acc, row_max, row_sum, state, state_max, state_sum, state_full, state_empty,
                    handed)  # fmt: skip
            handed += 1
        empty = row_sum == 0.0
        safe_sum = gl.where(empty, 1.0, row_sum)
        base2 = gl.where(empty, float("-inf"), row_max + gl.log2(safe_sum))
        head = kv_head * GROUP + row % GROUP
        entry = member * HEADS + head
        first_entry = partial.to(gl.int64) * HEADS
        gl.store(partial_lse + first_entry + entry, base2, mask=valid)
        normalizer = gl.convert_layout(1.0 / safe_sum, O_ROW)
        entry = gl.convert_layout(entry, O_ROW)
        # The merge does not use rows without a key.
        valid = gl.convert_layout(valid & (row_sum != 0.0), O_ROW)
        lanes = gl.arange(0, WIDTH_V, gl.SliceLayout(0, O_LAYOUT))
        gl.store(
            partial_out + first_entry * DV + ((entry * DV)[:, None] + lanes[None, :]),
            acc * normalizer[:, None],
            mask=valid[:, None] & (lanes < DV)[None, :],
        )
        position += count
        step += count
        item_begin = next_item_begin
        tiles = next_item_tiles
        first = next_first
        num_tokens = next_count
        partial_begin = next_partial
        first_token = next_token
        consecutive = next_consecutive
        first_range = next_range


@gluon.jit(
    do_not_specialize=[
        "num_blocks", "num_rows", "stride_qt", "stride_qh", "stride_table",
    ],
    do_not_specialize_on_alignment=[
        "ranges", "segments", "items", "tokens",
        "block_table",
    ],
)  # fmt: skip
def hopper_shared_decode_kernel(
    key_desc, value_desc, query, ranges, segments, items, tokens, block_table, partial_out,
    partial_lse, scale, soft_cap, num_blocks, num_rows, stride_qt, stride_qh, stride_table,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    WIDTH: gl.constexpr, WIDTH_V: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """One CTA of 4 + 4 + 1 + 1 warps. Grid: ranges * NUM_KV_HEADS, all resident at the same time.

    Args:
        key_desc, value_desc: TMA descriptors of the caches.
        ranges: int32 [ranges, 4], as in `ops.shared_decode`.
        segments: int32 [segments, SEGMENT_FIELDS], as in `ops.shared_decode`.
        items: int32 [items, ITEM_FIELDS], as in `ops.shared_decode`.
        tokens: int32, rows of `query`, those of each item together.
        partial_out: float32 [P, Hq, DV], written.
        partial_lse: float32 [P, Hq], base-2 log-sum-exps, written.
        num_rows: tokens of `query`.
    """
    CACHE: gl.constexpr = key_desc.dtype
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, WIDTH], CACHE)
    q_tile0 = gl.allocate_shared_memory(CACHE, [_ROWS, WIDTH], Q_SHARED)
    q_tile1 = gl.allocate_shared_memory(CACHE, [_ROWS, WIDTH], Q_SHARED)
    k_ring, v_ring = allocate_rings(CACHE, STAGES, BLOCK_N, WIDTH, WIDTH_V, BLOCK_SIZE, False)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # full: the loader's expect and the bytes of its TMA loads. empty: both consumers.
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    # The result of the second consumer, for items that both compute in turn.
    STATE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, WIDTH_V], gl.float32)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    state = gl.allocate_shared_memory(gl.float32, [_ROWS, WIDTH_V], STATE)
    state_max = gl.allocate_shared_memory(gl.float32, [_ROWS], VECTOR)
    state_sum = gl.allocate_shared_memory(gl.float32, [_ROWS], VECTOR)
    state_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    state_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(state_full, count=1)
    mbarrier.init(state_empty, count=1)
    # Makes the initialized barriers visible to TMA.
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (
                query, ranges, segments, items, tokens, partial_out, partial_lse, scale,
                soft_cap, num_rows, stride_qt, stride_qh, q_tile0, k_ring, v_ring, k_full, k_empty,
                v_full, v_empty, state, state_max, state_sum, state_full, state_empty,
                NUM_KV_HEADS, GROUP, D, DV, BLOCK_SIZE, STAGES, HAS_CAP, 0)),
            (_consumer, (
                query, ranges, segments, items, tokens, partial_out, partial_lse, scale,
                soft_cap, num_rows, stride_qt, stride_qh, q_tile1, k_ring, v_ring, k_full, k_empty,
                v_full, v_empty, state, state_max, state_sum, state_full, state_empty,
                NUM_KV_HEADS, GROUP, D, DV, BLOCK_SIZE, STAGES, HAS_CAP, 1)),
            (_loader, (
                key_desc, ranges, segments,
                block_table, num_blocks, stride_table, k_ring, k_full, k_empty, NUM_KV_HEADS,
                BLOCK_SIZE, STAGES)),
            (_loader, (
                value_desc, ranges, segments,
                block_table, num_blocks, stride_table, v_ring, v_full, v_empty, NUM_KV_HEADS,
                BLOCK_SIZE, STAGES)),
        ],
        [4, 1, 1],
        # Registers per thread of the second consumer and of the loader warps.
        [216, 48, 48],
    )  # fmt: skip
