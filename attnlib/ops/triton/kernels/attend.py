"""The loop over keys that decode, paged prefill and varlen prefill share.

Key tiles start at multiples of BLOCK_N from position 0 of the request. What depends on the elements
of the cache, which are chunks of a head (`chunks`) or parts of a head with scales in the page
(`page_parts`), is chosen by `CONFIG.PAGE_KIND`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.arguments import Logits, State, View, Work
from attnlib.ops.triton.kernels.chunks import (
    add_chunks,
    empty_chunks,
    key_offsets,
    load_blocks,
    load_chunk_queries,
    multiply_chunks,
    scale_rows,
)
from attnlib.ops.triton.kernels.mask import visible_span
from attnlib.ops.triton.kernels.page_parts import (
    add_parts,
    empty_parts,
    load_part_queries,
    multiply_parts,
)
from attnlib.ops.triton.kernels.softmax import online_softmax, transform_scores

__all__ = ["attend", "attend_tile", "empty_state", "load_rows", "view_rows"]


@triton.jit
def load_rows(query, rows, scale, CONFIG: tl.constexpr):
    """Load the queries of the rows; returns (queries, scale and factor of their products)."""
    offsets = rows.row.to(tl.int64) * query.stride_t + rows.head.to(tl.int64) * query.stride_h
    if CONFIG.PAGE_KIND is None:
        queries, row_factors = load_chunk_queries(query.base, offsets, rows.valid, CONFIG)
    else:
        queries, row_factors = load_part_queries(query.base, offsets, rows.valid, CONFIG)
    scale = scale_rows(scale, row_factors)
    return queries, scale, scale * 1.4426950408889634


@triton.jit
def empty_state(CONFIG: tl.constexpr):
    """Return the softmax of no keys."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if CONFIG.PAGE_KIND is None:
        state = State(empty_chunks(CONFIG), row_max, row_sum)
    else:
        state = State(empty_parts(CONFIG), row_max, row_sum)
    return state


@triton.jit
def view_rows(tile, rows, mask, CONFIG: tl.constexpr):
    """Return the keys that each row sees."""
    origin = tile.seq_len - tile.query_len
    positions = origin + rows.token
    row_first, row_last = visible_span(positions, tile.seq_len, tile.causal, mask, CONFIG)
    return View(origin, positions, row_first, row_last)


@triton.jit
def attend_tile(
    state,
    work,
    blocks,
    start,
    first,
    last,
    SCORE: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Return the softmax with the key tile at `start`; rows see keys of [first, last) only."""
    cache = work.cache
    logits = work.logits
    view = work.view
    keys = start + tl.arange(0, CONFIG.BLOCK_N)
    inside = (keys >= first) & (keys < last)
    if CONFIG.PAGE_KIND is None:
        offsets = key_offsets(blocks, start, cache.stride_kb, cache.stride_kn, CONFIG.VEC_K, CONFIG)
        qk, k0 = multiply_chunks(work.queries, cache.key, offsets, inside, MASKED, CONFIG)
    else:
        qk = multiply_parts(work.queries, cache, blocks, start, inside, MASKED, CONFIG)
        k0 = 0.0

    if CONFIG.SCALE_LATE:
        scores = qk
    else:
        bias = 0.0
        if HAS_BIAS:
            # The bias covers the query span only; hidden keys have no column of their own.
            bias_mask = (keys[None, :] >= view.origin) & (keys[None, :] >= view.row_first[:, None])
            bias_mask = bias_mask & (keys[None, :] < view.row_last[:, None])
            bias = tl.load(
                logits.bias_rows[:, None] + (keys - view.origin)[None, :],
                mask=bias_mask,
                other=0.0,
            )
        scores = transform_scores(
            qk,
            logits,
            view.positions,
            keys,
            bias,
            work.rows.head,
            work.request,
            SCORE,
            HAS_BIAS,
            CONFIG,
        )
    if MASKED:
        row_first = view.row_first[:, None]
        visible = (keys[None, :] >= row_first) & (keys[None, :] < view.row_last[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    MAY_BE_EMPTY: tl.constexpr = MASKED or SCORE is not None
    weights, acc_scale, row_max, row_sum = online_softmax(
        scores, logits.factor, state.row_max, state.row_sum, MAY_BE_EMPTY, CONFIG.SCALE_LATE
    )
    if CONFIG.PAGE_KIND is None:
        weights = weights.to(CONFIG.COMPUTE)
        if not CONFIG.LATENT:
            offsets = key_offsets(
                blocks, start, cache.stride_vb, cache.stride_vn, CONFIG.VEC_V, CONFIG
            )
        sums = add_chunks(
            state.sums, weights, acc_scale, k0, cache.value, offsets, inside, MASKED, CONFIG
        )
    else:
        sums = add_parts(
            state.sums, weights, acc_scale, cache, blocks, start, inside, MASKED, CONFIG
        )
    return State(sums, row_max, row_sum)


@triton.jit
def _skip(index, at, count):
    """Return an index as if the `count` elements from `at` on did not exist."""
    return tl.where(index < at, index, index + count)


@triton.jit
def _find_spans(tile, logits, bound_head, mask, BOUNDS: tl.constexpr, CONFIG: tl.constexpr):
    """Return the spans of keys of a tile: the first two numbers of a span bound the keys that some
    row sees, the other two those that all rows see and to which no function applies.

    There are two spans; with fewer than two RANGES both are the same.
    """
    first_position = tile.seq_len - tile.query_len + tile.first_token
    last_position = tile.seq_len - tile.query_len + tile.last_token
    first, all_last = visible_span(first_position, tile.seq_len, tile.causal, mask, CONFIG)
    all_first, last = visible_span(last_position, tile.seq_len, tile.causal, mask, CONFIG)
    span = (first, last, all_first, all_last)
    span_b = span
    if BOUNDS is not None:
        if CONFIG.RANGES == 0:
            low, high, same_low, same_high = BOUNDS(
                first_position, last_position, tile.seq_len, tile.request, logits.aux
            )
        elif CONFIG.RANGES == 1:
            low, high, same_low, same_high = BOUNDS(
                first_position, last_position, tile.seq_len, bound_head, tile.request, logits.aux
            )
        else:
            low, high, same_low, same_high, low_b, high_b, same_low_b, same_high_b = BOUNDS(
                first_position, last_position, tile.seq_len, bound_head, tile.request, logits.aux
            )
            span_b = _narrow(span, low_b, high_b, same_low_b, same_high_b)
        # Outside of the inner range the function is applied, which only masked tiles do.
        span = _narrow(span, low, high, same_low, same_high)
    return span, span_b


@triton.jit
def _narrow(span, low, high, same_low, same_high):
    first, last, all_first, all_last = span
    first = tl.maximum(first, low)
    last = tl.minimum(last, high)
    return first, last, tl.maximum(all_first, same_low), tl.minimum(all_last, same_high)


@triton.jit
def attend(
    query,
    rows,
    tile,
    cache,
    logits,
    mask,
    split_begin,
    split_end,
    bound_head,
    SCORE: tl.constexpr,
    BOUNDS: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Compute the softmax of the rows of a tile over their visible keys, without normalization.

    Only tiles with a visible key are visited; with SPLIT, only those in [split_begin, split_end).
    SCORE is a score function (`kernels.score`) or None, and BOUNDS its bounds or None: in decodes
    `bound_keys`, with RANGES 0, and in prefills `bound_ranges`, with the number of their ranges.
    `bound_head` is the query head of a tile with one head. With EXACT, the bounds of each row
    replace the function, and SCORE is not called.

    Returns:
        `State`.
    """
    queries, scale, factor = load_rows(query, rows, logits.scale, CONFIG)
    logits = Logits(scale, factor, logits.soft_cap, logits.slopes, logits.bias_rows, logits.aux)
    view = view_rows(tile, rows, mask, CONFIG)
    if CONFIG.EXACT:
        row_low, row_high, _, _ = BOUNDS(
            view.positions, view.positions, tile.seq_len, rows.head, tile.request, logits.aux
        )
        row_first = tl.maximum(view.row_first, row_low)
        row_last = tl.minimum(view.row_last, row_high)
        view = View(view.origin, view.positions, row_first, row_last)
    span, span_b = _find_spans(tile, logits, bound_head, mask, BOUNDS, CONFIG)
    work = Work(queries, rows, tile.request, cache, logits, view)
    if CONFIG.ONE_LOOP:
        begin = span[0] // CONFIG.BLOCK_N * CONFIG.BLOCK_N
        end = span[1]
        if CONFIG.SPLIT:
            begin = tl.maximum(begin, split_begin)
            end = tl.minimum(end, split_end)
        state = _attend_masked(work, span, begin, end, SCORE, CONFIG)
    else:
        if CONFIG.SPLIT:
            span = _narrow(span, split_begin, split_end, split_begin, split_end)
            span_b = _narrow(span_b, split_begin, split_end, split_begin, split_end)
        CALLED: tl.constexpr = None if CONFIG.EXACT else SCORE
        FULL_SCORE: tl.constexpr = None if BOUNDS is not None else SCORE
        state = _attend_spans(work, span, span_b, CALLED, FULL_SCORE, CONFIG)
    return state


@triton.jit
def _attend_masked(work, span, begin, end, SCORE: tl.constexpr, CONFIG: tl.constexpr):
    """Visit the tiles in [begin, end), all of them masked: short runs of tiles, as decodes have,
    are then in one software pipeline."""
    table = work.cache.table
    state = empty_state(CONFIG)
    first, last, _, _ = span
    blocks = load_blocks(table, begin, first, last, CONFIG)
    for start in range(begin, end, CONFIG.BLOCK_N):
        # The next tile's blocks are loaded one step ahead, so that the loads of its keys and
        # values never wait for the block table.
        next_blocks = load_blocks(table, start + CONFIG.BLOCK_N, first, end, CONFIG)
        state = attend_tile(
            state, work, blocks, start, first, last, SCORE, True, CONFIG.HAS_BIAS, CONFIG
        )
        blocks = next_blocks
    return state


@triton.jit
def _full_tiles(span, begin, top, origin, CONFIG: tl.constexpr):
    """Return (begin, end) of the tiles of a span that are entirely visible to all rows."""
    _, last, all_first, all_last = span
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    if CONFIG.HAS_BIAS:
        # Tiles with a bias count as masked, so that unmasked tiles need not load it.
        all_last = tl.minimum(all_last, origin)
    full_begin = tl.minimum(tl.maximum((all_first + BLOCK_N - 1) // BLOCK_N * BLOCK_N, begin), top)
    return full_begin, tl.maximum(tl.minimum(all_last, last) // BLOCK_N * BLOCK_N, full_begin)


@triton.jit
def _attend_spans(
    work, span, span_b, CALLED: tl.constexpr, FULL_SCORE: tl.constexpr, CONFIG: tl.constexpr
):
    """Visit the tiles of one or two spans: those that are entirely visible to all rows need no mask
    and come first; the masked tiles at the ends follow."""
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    table = work.cache.table
    first, last, _, _ = span
    begin = first // BLOCK_N * BLOCK_N
    end = last
    top = tl.maximum(begin, (end + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
    full_begin, full_end = _full_tiles(span, begin, top, work.view.origin, CONFIG)
    full_start = full_begin
    full_stop = full_end
    full_limit = full_end
    if CONFIG.RANGES == 2:
        # The tiles of the second span, from the end of the first one on. Loop variables count as
        # if the tiles between the spans did not exist.
        first_b, last_b, _, _ = span_b
        begin_b = tl.maximum(first_b // BLOCK_N * BLOCK_N, top)
        top_b = tl.maximum(begin_b, (last_b + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
        full_begin_b, full_end_b = _full_tiles(span_b, begin_b, top_b, work.view.origin, CONFIG)
        skipped_b = full_end_b - full_begin_b
        full_start = _skip(full_begin, full_end, full_begin_b - full_end)
        full_stop += skipped_b
        first = tl.minimum(first, first_b)
        last = tl.maximum(last, last_b)
        end = last
        full_limit = last
    state = empty_state(CONFIG)
    blocks = load_blocks(table, full_start, first, full_limit, CONFIG)
    for unshifted in range(full_begin, full_stop, BLOCK_N):
        start = unshifted
        after = unshifted + BLOCK_N
        if CONFIG.RANGES == 2:
            start = _skip(start, full_end, full_begin_b - full_end)
            after = _skip(after, full_end, full_begin_b - full_end)
        next_blocks = load_blocks(table, after, first, full_limit, CONFIG)
        state = attend_tile(
            state, work, blocks, start, first, last, FULL_SCORE, False, False, CONFIG
        )
        blocks = next_blocks
    # One loop for the masked tiles of all ends, which halves the code: the loop variable counts as
    # if the unmasked tiles did not exist.
    skipped = full_end - full_begin
    masked_first = tl.where(full_begin > begin, begin, full_end)
    masked_end = top - skipped
    if CONFIG.RANGES == 2:
        masked_end += top_b - begin_b - skipped_b
        masked_first = _skip(masked_first, top, begin_b - top)
        masked_first = _skip(masked_first, full_begin_b, skipped_b)
    blocks = load_blocks(table, masked_first, first, end, CONFIG)
    for unshifted in range(begin, masked_end, BLOCK_N):
        start = tl.where(unshifted < full_begin, unshifted, unshifted + skipped)
        after = unshifted + BLOCK_N
        after = tl.where(after < full_begin, after, after + skipped)
        if CONFIG.RANGES == 2:
            start = _skip(_skip(start, top, begin_b - top), full_begin_b, skipped_b)
            after = _skip(_skip(after, top, begin_b - top), full_begin_b, skipped_b)
        next_blocks = load_blocks(table, after, first, end, CONFIG)
        state = attend_tile(
            state, work, blocks, start, first, last, CALLED, True, CONFIG.HAS_BIAS, CONFIG
        )
        blocks = next_blocks
    return state
