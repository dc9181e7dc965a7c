"""The Hopper decode of batches with shared prefixes: prefixes and suffixes in one launch.

Work distribution (stream-K, Osama et al. 2023). A host schedule lists items: the keys of a shared
prefix for up to 128 query rows per KV head, or the keys that one request has for itself. The tiles
of all items form one line, which is cut into equal ranges. Each range has NUM_KV_HEADS consecutive
CTAs, one per KV head. The tiles of one item in one range are a split; each split writes a partial
result, and `merge_split_rows_kernel` merges those of each row.

A CTA has two consumer warpgroups of 64 query rows, one warp that loads keys and one that loads
values. Items of more than 64 rows are computed by both consumers, tile by tile, with different
rows. Of a long item of fewer rows each consumer computes every second tile, and writes a partial
result of its own. Short items are computed by one consumer each, in turn: the beginning and the end
of an item take longer than its tiles.

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

from attnlib.ops.shared_decode import ITEM_FIELDS, PRODUCT_ROWS, WHOLE_TILES
from attnlib.ops.triton.hopper.kernels.cache_tiles import allocate_rings
from attnlib.ops.triton.hopper.kernels.compat import (
    launch_dependent_grids,
    partition_barrier,
    prefetch_l1,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.decode import clear_tile, prefetch_queries
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
_ROWS = gl.constexpr(PRODUCT_ROWS)
"""Query rows of a consumer."""
_WHOLE = gl.constexpr(WHOLE_TILES)


@gluon.jit
def _own_range(header, range_items, NUM_KV_HEADS: gl.constexpr):
    """Return (begin, end, tiles per range, first item, KV head) of a CTA's range of tiles."""
    worker = gl.program_id(0)
    index = worker // NUM_KV_HEADS
    total = gl.load(header)
    per_range = gl.load(header + 1)
    item = gl.load(range_items + index)
    begin = index * per_range
    return begin, gl.minimum(begin + per_range, total), per_range, item, worker % NUM_KV_HEADS


@gluon.jit
def _loader(
    cache, header, range_items, items, block_table, num_blocks, stride_table, ring, full, empty,
    NUM_KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the key or value tiles of the CTA's range into a ring, split after split. One warp."""
    BLOCK_N: gl.constexpr = ring.shape[1]
    # PDL: the previous kernel may have written the cache.
    wait_on_dependent_grids()
    position, range_end, _, item, kv_head = _own_range(header, range_items, NUM_KV_HEADS)
    step = 0
    fields = items + item * _FIELDS
    begin = gl.load(fields)
    tiles = gl.load(fields + 1)
    row = gl.load(fields + 2)
    column = gl.load(fields + 3)
    keys = gl.load(fields + 4)
    while position < range_end:
        # Items are short: the fields of the next one are loaded, and its pages prefetched, before
        # they are needed. Behind the last item the tensor has other integers.
        fields += _FIELDS
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
def _step(
    q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, weights, row_max, row_sum, step,
    previous, in_turn, last, valid, factor, soft_cap, STAGES: gl.constexpr, HAS_CAP: gl.constexpr,
    P_LAYOUT: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Multiply by the keys of ring step `step` and by the values of step `previous`; with
    `in_turn`, the other consumer multiplies by the tile between them.

    Returns:
        (acc, packed weights, row_max, row_sum).
    """
    DTYPE: gl.constexpr = k_ring.dtype
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    stage = step % STAGES
    v_stage = previous % STAGES
    if in_turn:
        _skip(k_full, k_empty, step - 1, STAGES)
    mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
    zeros = gl.zeros([_ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(
        q_tile, k_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    mbarrier.wait(v_full.index(v_stage), (previous // STAGES) & 1)
    acc = warpgroup_mma(
        unpack_weights(weights, DTYPE, P_LAYOUT), v_ring.index(v_stage), acc, is_async=True
    )
    # One group may stay in flight: Q @ K^T is complete, P @ V overlaps with the softmax.
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(stage), count=1)
    scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
    if last:
        row_last = gl.full([_ROWS], valid, gl.int32, gl.SliceLayout(1, S_LAYOUT))
        scores = mask_scores(scores, row_last, row_last, 0, False)
    probs, acc_scale, row_max, row_sum = online_softmax(
        scores, factor, row_max, row_sum, False, HAS_CAP
    )
    # P @ V is complete: its stage is free, and the accumulator may be rescaled.
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    if in_turn:
        _skip(v_full, v_empty, step - 1, STAGES)
    acc = acc * gl.convert_layout(acc_scale, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, pack_weights(probs, DTYPE), row_max, row_sum


@gluon.jit
def _consumer(
    query, header, range_items, items, tokens, partial_out, partial_lse, scale, soft_cap, num_rows,
    stride_qt, stride_qh, q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, HAS_CAP: gl.constexpr,
    WARPGROUP: gl.constexpr,
):  # fmt: skip
    """Multiply, and write the partial results of one consumer warpgroup."""
    WIDTH: gl.constexpr = q_tile.shape[1]
    WIDTH_V: gl.constexpr = v_ring.shape[2]
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    COMPUTE: gl.constexpr = k_ring.dtype
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
    # PDL: the previous kernel may have written the queries and the cache.
    wait_on_dependent_grids()
    # The merge may start; it waits for this kernel's results by itself.
    launch_dependent_grids()
    position, range_end, per_range, item, kv_head = _own_range(header, range_items, NUM_KV_HEADS)
    step = 0
    fields = items + item * _FIELDS
    item_begin = gl.load(fields)
    tiles = gl.load(fields + 1)
    num_keys = gl.load(fields + 4)
    first_token = gl.load(fields + 5)
    num_tokens = gl.load(fields + 6)
    partial_begin = gl.load(fields + 7)
    while position < range_end:
        # As in `_loader`.
        fields += _FIELDS
        next_begin = gl.load(fields)
        next_tiles = gl.load(fields + 1)
        next_keys = gl.load(fields + 4)
        next_token = gl.load(fields + 5)
        next_count = gl.load(fields + 6)
        next_partial = gl.load(fields + 7)
        skipped = position - item_begin
        count = gl.minimum(tiles - skipped, range_end - position)
        split = position // per_range - item_begin // per_range
        # Both consumers compute all tiles of an item of many rows, for different rows. With fewer
        # rows, each computes every second tile of a long item, and every second one of short items.
        few_rows = num_tokens <= TOKENS
        in_turn = few_rows & (tiles > _WHOLE)
        whole = few_rows & (tiles <= _WHOLE)
        offset = gl.where(few_rows, 0, WARPGROUP * TOKENS)
        begin = gl.where(in_turn, WARPGROUP, 0)
        pace = gl.where(in_turn, 2, 1)
        own = gl.where(in_turn, (count + 1 - WARPGROUP) // 2, count)
        own = gl.where(whole & (item % 2 != WARPGROUP), 0, own)
        partial = gl.where(in_turn, 2 * split + WARPGROUP, split) * num_tokens + partial_begin

        row_max = gl.full([_ROWS], float("-inf"), gl.float32, ROW)
        row_sum = gl.full([_ROWS], 0.0, gl.float32, ROW)
        acc = gl.zeros([_ROWS, WIDTH_V], gl.float32, O_LAYOUT)
        if own > 0:
            row = gl.arange(0, _ROWS, gl.SliceLayout(1, Q_LAYOUT))
            member = offset + row // GROUP
            valid = (row < TOKENS * GROUP) & (member < num_tokens)
            token = gl.load(
                tokens + first_token + member, mask=valid & (num_tokens > 1), other=first_token
            )
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
            # The first tile has no values of an earlier tile to multiply by.
            current = step + begin
            stage = current % STAGES
            if begin > 0:
                _skip(k_full, k_empty, step, STAGES)
            mbarrier.wait(k_full.index(stage), (current // STAGES) & 1)
            zeros = gl.zeros([_ROWS, BLOCK_N], gl.float32, S_LAYOUT)
            scores = warpgroup_mma(
                q_tile, k_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            if (position + count < range_end) & (next_count == 1):
                # The next requests have items behind each other.
                prefetch_queries(
                    query, next_token, kv_head, num_rows, stride_qt, stride_qh, GROUP, D,
                    _ROWS)  # fmt: skip
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_empty.index(stage), count=1)
            if begin > 0:
                _skip(v_full, v_empty, step, STAGES)
            scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
            row_last = gl.full([_ROWS], num_keys, gl.int32, ROW)
            scores = mask_scores(scores, row_last, row_last, (skipped + begin) * BLOCK_N, False)
            probs, _, row_max, row_sum = online_softmax(
                scores, factor, row_max, row_sum, False, HAS_CAP
            )
            weights = pack_weights(probs, COMPUTE)
            for i in range(1, own):
                following = current + pace
                tile = skipped + begin + i * pace
                acc, weights, row_max, row_sum = _step(
                    q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, weights, row_max,
                    row_sum, following, current, in_turn, tile == tiles - 1,
                    num_keys - tile * BLOCK_N, factor, soft_cap, STAGES, HAS_CAP, P_LAYOUT,
                    S_LAYOUT)  # fmt: skip
                current = following
            stage = current % STAGES
            mbarrier.wait(v_full.index(stage), (current // STAGES) & 1)
            # TMA fills whole pages past the end with zeros, but not the rest of the last page.
            # Prefixes are whole pages, so only items of one consumer have such a page.
            past_end = num_keys - (skipped + begin + (own - 1) * pace) * BLOCK_N
            if (past_end < BLOCK_N) & (num_keys % BLOCK_SIZE != 0):
                clear_tile(v_ring.index(stage), past_end, 0)
            acc = warpgroup_mma(
                unpack_weights(weights, COMPUTE, P_LAYOUT), v_ring.index(stage), acc, is_async=True
            )
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(stage), count=1)
            if in_turn & (current + 1 < step + count):
                _skip(k_full, k_empty, current + 1, STAGES)
                _skip(v_full, v_empty, current + 1, STAGES)
        else:
            for i in range(0, count):
                _skip(k_full, k_empty, step + i, STAGES)
                _skip(v_full, v_empty, step + i, STAGES)

        row = gl.arange(0, _ROWS, ROW)
        member = offset + row // GROUP
        # A consumer without a tile has a partial result if they take turns.
        valid = (row < TOKENS * GROUP) & (member < num_tokens) & ((own > 0) | in_turn)
        empty = row_sum == 0.0
        safe_sum = gl.where(empty, 1.0, row_sum)
        base2 = gl.where(empty, float("-inf"), row_max + gl.log2(safe_sum))
        head = kv_head * GROUP + row % GROUP
        entry = (partial + member) * HEADS + head
        gl.store(partial_lse + entry, base2, mask=valid)
        normalizer = gl.convert_layout(1.0 / safe_sum, O_ROW)
        entry = gl.convert_layout(entry, O_ROW).to(gl.int64)
        valid = gl.convert_layout(valid, O_ROW)
        lanes = gl.arange(0, WIDTH_V, gl.SliceLayout(0, O_LAYOUT))
        gl.store(
            partial_out + (entry * DV)[:, None] + lanes[None, :],
            acc * normalizer[:, None],
            mask=valid[:, None] & (lanes < DV)[None, :],
        )
        position += count
        step += count
        item += 1
        item_begin = next_begin
        tiles = next_tiles
        num_keys = next_keys
        first_token = next_token
        num_tokens = next_count
        partial_begin = next_partial


@gluon.jit(
    do_not_specialize=["num_blocks", "num_rows", "stride_qt", "stride_qh", "stride_table"],
    do_not_specialize_on_alignment=["header", "range_items", "items", "tokens", "block_table"],
)  # fmt: skip
def hopper_shared_decode_kernel(
    key_desc, value_desc, query, header, range_items, items, tokens, block_table, partial_out,
    partial_lse, scale, soft_cap, num_blocks, num_rows, stride_qt, stride_qh, stride_table,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    WIDTH: gl.constexpr, WIDTH_V: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """One CTA of 4 + 4 + 1 + 1 warps. Grid: ranges * NUM_KV_HEADS, all resident at the same time.

    Args:
        key_desc, value_desc: TMA descriptors of the caches.
        header: int32 [2], tiles of all items and tiles of a range.
        range_items: int32 [ranges], the item in which each range begins.
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
    # Makes the initialized barriers visible to TMA.
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (
                query, header, range_items, items, tokens, partial_out, partial_lse, scale,
                soft_cap, num_rows, stride_qt, stride_qh, q_tile0, k_ring, v_ring, k_full, k_empty,
                v_full, v_empty, NUM_KV_HEADS, GROUP, D, DV, BLOCK_SIZE, STAGES, HAS_CAP, 0)),
            (_consumer, (
                query, header, range_items, items, tokens, partial_out, partial_lse, scale,
                soft_cap, num_rows, stride_qt, stride_qh, q_tile1, k_ring, v_ring, k_full, k_empty,
                v_full, v_empty, NUM_KV_HEADS, GROUP, D, DV, BLOCK_SIZE, STAGES, HAS_CAP, 1)),
            (_loader, (
                key_desc, header, range_items, items, block_table, num_blocks, stride_table, k_ring,
                k_full, k_empty, NUM_KV_HEADS, BLOCK_SIZE, STAGES)),
            (_loader, (
                value_desc, header, range_items, items, block_table, num_blocks, stride_table,
                v_ring, v_full, v_empty, NUM_KV_HEADS, BLOCK_SIZE, STAGES)),
        ],
        [4, 1, 1],
        # Registers per thread of the second consumer and of the loader warps.
        [216, 48, 48],
    )  # fmt: skip
