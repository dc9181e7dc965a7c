"""Attention over selected keys of the paged cache (M11), for decodes and prefills.

Work distribution: one program per (tile of query tokens that share a list, block of heads, split).
The work of a program follows from its list, not from the length of the request, so decodes and
prefills use one kernel. The key slots of a list are numbered from 0: slot j is position
list[j // SELECT] * SELECT + j % SELECT. A tile covers BLOCK_N slots. Only the positions that a
query of the tile sees are loaded. Where tiles of queries are few, the slots of a list are split
over several programs, and `decode.combine_kernel` combines their partial results.

LIST_HEADS is 0 where all heads share a list, 1 for one per KV head, 2 for one per query head.

Workspace: as in `decode`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.arguments import (
    Batch,
    Cache,
    Logits,
    Mask,
    Output,
    Query,
    State,
    Work,
)
from attnlib.ops.triton.kernels.attend import empty_state, load_rows, view_rows
from attnlib.ops.triton.kernels.chunks import add_chunks, aligned, multiply_chunks
from attnlib.ops.triton.kernels.mask import visible_span
from attnlib.ops.triton.kernels.program import (
    apply_scales,
    clear_rows,
    count_splits,
    divide_results,
    find_tile,
    load_tile,
    make_rows,
    open_cache,
    query_length,
    row_scores,
    store_partials,
    store_results,
)
from attnlib.ops.triton.kernels.softmax import online_softmax, transform_scores

__all__ = ["selected_kernel"]

_UNSPECIALIZED = """
    num_reqs num_tokens num_heads num_entries num_tiles num_splits left right chunk stride_lists
    stride_list_head stride_table stride_qt stride_qh stride_kb stride_kn stride_kh stride_vb
    stride_vn stride_vh stride_ot stride_oh stride_lt
""".split()
_UNALIGNED = [
    "query_start_loc", "seq_lens", "causal_flags", "block_table", "indices", "list_starts",
    "alibi_slopes", "sinks", "k_scale", "v_scale", "lse",
]  # fmt: skip


@triton.jit
def _find_entries(tile, indices, list_starts, stride_lists, stride_list_head, CONFIG: tl.constexpr):
    """Return the pointer to the tile's list."""
    list_row = tile.start + tile.first_token
    if CONFIG.QUERY_BLOCK > 1:
        list_row = tl.load(list_starts + tile.request) + tile.first_token // CONFIG.QUERY_BLOCK
    entries = indices + list_row.to(tl.int64) * stride_lists
    if CONFIG.LIST_HEADS == 1:
        entries += tile.kv_head.to(tl.int64) * stride_list_head
    elif CONFIG.LIST_HEADS == 2:
        head = tile.kv_head * CONFIG.GROUP + tile.head_offset
        entries += head.to(tl.int64) * stride_list_head
    return entries


@triton.jit
def _count_entries(entries, num_entries, first, last, CONFIG: tl.constexpr):
    """Return 1 + the place of the last entry with a position in [first, last); 0 if none has."""
    count = 0
    low = first // CONFIG.SELECT
    high = (last + CONFIG.SELECT - 1) // CONFIG.SELECT
    for base in range(0, num_entries, CONFIG.LIST_LANES):
        lanes = base + tl.arange(0, CONFIG.LIST_LANES)
        entry = tl.load(entries + lanes, mask=lanes < num_entries, other=-1)
        used = (entry >= 0) & (entry >= low) & (entry < high)
        count = tl.maximum(count, tl.max(tl.where(used, lanes + 1, 0), 0))
    return count


@triton.jit
def _locate(entries, table, start, end, first, last, CONFIG: tl.constexpr):
    """Return (positions [BLOCK_N], blocks) of the key slots from `start` on.

    The position is -1 where a slot selects nothing in [first, last). Its block is not read. Blocks
    are one number if the tile lies in one entry and in one block of the cache, else one per key.
    """
    SELECT: tl.constexpr = CONFIG.SELECT
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    BLOCK_SIZE: tl.constexpr = CONFIG.BLOCK_SIZE
    lanes = start + tl.arange(0, BLOCK_N)
    limit = (last + SELECT - 1) // SELECT  # compared before a product that could overflow
    if SELECT % BLOCK_N == 0:
        entry = tl.load(entries + start // SELECT, mask=start < end, other=-1)
        offset = start % SELECT
        exists = (entry >= 0) & (entry < limit)
        base = tl.where(exists, entry, 0) * SELECT + offset
        positions = base + tl.arange(0, BLOCK_N)
        positions = tl.where(
            exists & (lanes < end) & (positions >= first) & (positions < last), positions, -1
        )
        if BLOCK_SIZE % BLOCK_N == 0:
            blocks = tl.load(
                table + base // BLOCK_SIZE,
                mask=exists & (base < last) & (base + BLOCK_N > first),
                other=0,
            )
        else:
            blocks = tl.load(
                table + (positions.to(tl.uint32) // BLOCK_SIZE).to(tl.int32),
                mask=positions >= 0,
                other=0,
            )
    else:
        entry = tl.load(
            entries + (lanes.to(tl.uint32) // SELECT).to(tl.int32), mask=lanes < end, other=-1
        )
        exists = (entry >= 0) & (entry < limit)
        positions = tl.where(exists, entry, 0) * SELECT + (lanes.to(tl.uint32) % SELECT).to(
            tl.int32
        )
        positions = tl.where(exists & (positions >= first) & (positions < last), positions, -1)
        blocks = tl.load(
            table + (positions.to(tl.uint32) // BLOCK_SIZE).to(tl.int32),
            mask=positions >= 0,
            other=0,
        )
    return positions, blocks


@triton.jit
def _attend_slots(state, work, keys, blocks, CONFIG: tl.constexpr):
    """Return the softmax with a tile of key slots, at the positions `keys`."""
    cache = work.cache
    logits = work.logits
    view = work.view
    inside = keys >= 0
    within = (keys.to(tl.uint32) % CONFIG.BLOCK_SIZE).to(tl.int64)
    blocks = blocks.to(tl.int64)
    offsets = aligned(blocks * cache.stride_kb + within * cache.stride_kn, CONFIG.VEC_K)
    qk, k0 = multiply_chunks(work.queries, cache.key, offsets, inside, True, CONFIG)
    if CONFIG.SCALE_LATE:
        scores = qk
    else:
        scores = transform_scores(
            qk, logits, view.positions, keys, 0.0, work.rows.head, work.request, None, False, CONFIG
        )
    row_first = tl.maximum(view.row_first, 0)
    visible = (keys[None, :] >= row_first[:, None]) & (keys[None, :] < view.row_last[:, None])
    scores = tl.where(visible, scores, float("-inf"))
    weights, acc_scale, row_max, row_sum = online_softmax(
        scores, logits.factor, state.row_max, state.row_sum, True, CONFIG.SCALE_LATE
    )
    weights = weights.to(CONFIG.COMPUTE)
    if not CONFIG.LATENT:
        offsets = aligned(blocks * cache.stride_vb + within * cache.stride_vn, CONFIG.VEC_V)
    sums = add_chunks(
        state.sums, weights, acc_scale, k0, cache.value, offsets, inside, True, CONFIG
    )
    return State(sums, row_max, row_sum)


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=_UNALIGNED)
def selected_kernel(
    query, key, value, out, partials, query_start_loc, seq_lens, block_table, indices, list_starts,
    causal_flags, alibi_slopes, sinks, k_scale, v_scale, lse, scale, soft_cap, left, right, chunk,
    num_reqs, num_tokens, num_heads, num_entries, num_tiles, num_splits, stride_lists,
    stride_list_head, stride_table, stride_qt, stride_qh, stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh, stride_ot, stride_oh, stride_lt, CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute one split of a tile of query tokens for a block of heads.

    CONFIG is an `AttentionConfig`. Grid: (num_tiles, KV heads * HEAD_BLOCKS, splits).
    """
    batch = Batch(query_start_loc, seq_lens, causal_flags, num_reqs, num_tokens)
    mask = Mask(left, right, chunk)
    output = Output(out, lse, stride_ot, stride_oh, stride_lt)
    parts = divide_results(partials, num_tokens, num_heads, num_splits, 1, CONFIG)
    split = tl.program_id(2)
    tile = find_tile(batch, num_tiles, CONFIG)
    if tile.request == num_reqs:
        if split == 0:
            rows = make_rows(tile, num_tokens - tile.start, CONFIG)
            clear_rows(output, rows, CONFIG)
            if CONFIG.SPLIT:
                count_splits(parts, rows, 0.0, CONFIG)
        return
    query_len = query_length(tile, batch)
    if tile.first_token >= query_len:
        return
    tile = load_tile(tile, query_len, batch, CONFIG)
    # Keys in [first, last) are visible to some row of the tile.
    origin = tile.seq_len - tile.query_len
    first, _ = visible_span(origin + tile.first_token, tile.seq_len, tile.causal, mask, CONFIG)
    _, last = visible_span(origin + tile.last_token, tile.seq_len, tile.causal, mask, CONFIG)
    first = tl.maximum(first, 0)
    entries = _find_entries(tile, indices, list_starts, stride_lists, stride_list_head, CONFIG)
    begin = 0
    end = _count_entries(entries, num_entries, first, last, CONFIG) * CONFIG.SELECT
    if CONFIG.SPLIT:
        # The same splits for all lists, because the combine kernel knows one number per token. A
        # split without entries stores an empty partial result.
        tiles = (num_entries * CONFIG.SELECT + CONFIG.BLOCK_N - 1) // CONFIG.BLOCK_N
        per_split = (tiles + num_splits - 1) // num_splits
        begin = split * per_split * CONFIG.BLOCK_N
        end = tl.minimum(end, begin + per_split * CONFIG.BLOCK_N)

    rows = make_rows(tile, tile.query_len, CONFIG)
    scale, slopes, _ = row_scores(rows, tile.kv_head, scale, k_scale, alibi_slopes, None, 0, CONFIG)
    queries, scale, factor = load_rows(Query(query, stride_qt, stride_qh), rows, scale, CONFIG)
    logits = Logits(scale, factor, soft_cap, slopes, None, None)
    view = view_rows(tile, rows, mask, CONFIG)
    cache = Cache(
        key, value, block_table, stride_table, stride_kb, stride_kn, stride_kh, stride_vb,
        stride_vn, stride_vh, k_scale, v_scale, None, None, None, None, None, None)  # fmt: skip
    cache = open_cache(cache, tile, batch, CONFIG)
    work = Work(queries, rows, tile.request, cache, logits, view)
    state = empty_state(CONFIG)
    keys, blocks = _locate(entries, cache.table, begin, end, first, last, CONFIG)
    for slot in range(begin, end, CONFIG.BLOCK_N):
        # Positions and blocks of the next tile are loaded one step ahead, so that the loads of its
        # keys and values never wait for the list and the block table.
        next_keys, next_blocks = _locate(
            entries, cache.table, slot + CONFIG.BLOCK_N, end, first, last, CONFIG
        )
        state = _attend_slots(state, work, keys, blocks, CONFIG)
        keys = next_keys
        blocks = next_blocks

    state, v_factor = apply_scales(state, k_scale, v_scale, tile.kv_head, CONFIG)
    if CONFIG.SPLIT:
        # One program per tile tells the combine kernel how many splits there are.
        if tl.program_id(1) == 0 and split == 0:
            count_splits(parts, rows, num_splits.to(tl.float32), CONFIG)
        store_partials(parts, rows, state, split, v_factor, CONFIG)
    else:
        store_results(output, rows, state, sinks, v_factor, CONFIG)
