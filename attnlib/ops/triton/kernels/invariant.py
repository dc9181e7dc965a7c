"""The batch-invariant kernel: decodes, paged prefills and packed keys by one tile (M8, M15).

The bits of a row must depend on its own query, keys and position only. So

- tiles have one shape for all batches of a layer, whatever their sizes and lengths;
- keys are summed in segments of SEGMENT keys, from positions that are multiples of SEGMENT. Each
  segment starts from zero, and segments are added one after the other (`fold`), by a program that
  has all of them or by `invariant_combine_kernel`. So it makes no difference whether the segments
  of a request are computed by one program or by several;
- every tile of keys is masked, and a tile without a visible key leaves a row unchanged. So the
  other rows of a query tile make no difference.

Work distribution: one program per query tile, block of heads and, with SPLIT, segment.

Workspace with SPLIT: sums of values [tokens, heads, splits, DV], row maxima and sums of weights
[tokens, heads, splits] each, and the number of segments of each token's tile [tokens].
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
from attnlib.ops.triton.kernels.attend import attend_tile, empty_state, load_rows, view_rows
from attnlib.ops.triton.kernels.chunks import load_blocks, store_chunks
from attnlib.ops.triton.kernels.mask import visible_span
from attnlib.ops.triton.kernels.program import (
    UNALIGNED,
    UNSPECIALIZED,
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
    store_results,
)
from attnlib.ops.triton.kernels.softmax import LN2, finish_rows, of_rows

__all__ = ["invariant_combine_kernel", "invariant_kernel"]


@triton.jit
def _fold(total, more, old, new):
    """Return total * old + more * new, [M, N] by [M]. The order of the roundings is explicit, so
    that no compilation of this sum differs from another one."""
    old = tl.broadcast_to(old[:, None], total.shape)
    return tl.fma(total, old, more * new[:, None])


@triton.jit
def _fold_weights(row_max, row_sum, more_max, more_sum):
    """Add the maximum and the sum of a segment to those of the segments before it, all [M].

    Returns:
        (row_max, row_sum, factor of the sums of values before, factor of the segment's).
    """
    new_max = tl.maximum(row_max, more_max)
    # -inf - -inf is NaN: rows without a visible key are measured from 0.
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    old = tl.exp2(row_max - finite_max)
    new = tl.exp2(more_max - finite_max)
    return new_max, tl.fma(row_sum, old, more_sum * new), old, new


@triton.jit
def _fold_segment(total, part, v_factor, CONFIG: tl.constexpr):
    """Add the softmax of a segment to that of the segments before it. The scale of the values, a
    number or [M], is applied to each segment, whoever adds the segments.

    Returns:
        (softmax of all, softmax of the segment with scaled values).
    """
    row_max, row_sum, old, new = _fold_weights(
        total.row_max, total.row_sum, part.row_max, part.row_sum
    )
    acc0, acc1 = total.sums
    part0, part1 = part.sums
    part0 = part0 * of_rows(v_factor)
    acc0 = _fold(acc0, part0, old, new)
    if CONFIG.DV1 > 0:
        part1 = part1 * of_rows(v_factor)
        acc1 = _fold(acc1, part1, old, new)
    scaled = State((part0, part1), part.row_max, part.row_sum)
    return State((acc0, acc1), row_max, row_sum), scaled


@triton.jit
def _store_segment(partials, rows, part, split, CONFIG: tl.constexpr):
    """Store the sums of a segment. The sink counts when the segments are added (M4)."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    places = (rows.row.to(tl.int64) * partials.num_heads + rows.head) * partials.num_splits + split
    ones = tl.full([BLOCK_M], 1.0, tl.float32)
    store_chunks(partials.base, places * CONFIG.DV, part.sums, ones, rows.valid, 1, CONFIG)
    rows64 = partials.num_tokens.to(tl.int64) * partials.num_heads
    maxima = partials.base + rows64 * partials.num_splits * CONFIG.DV
    tl.store(maxima + places, part.row_max, mask=rows.valid)
    tl.store(maxima + rows64 * partials.num_splits + places, part.row_sum, mask=rows.valid)


@triton.jit
def _find_keys(tile, mask, aux, BOUNDS: tl.constexpr, CONFIG: tl.constexpr):
    """Return [first, last) of the keys that some row of the tile sees."""
    origin = tile.seq_len - tile.query_len
    first_position = origin + tile.first_token
    last_position = origin + tile.last_token
    first, _ = visible_span(first_position, tile.seq_len, tile.causal, mask, CONFIG)
    _, last = visible_span(last_position, tile.seq_len, tile.causal, mask, CONFIG)
    if BOUNDS is not None:
        low, high, _, _ = BOUNDS(first_position, last_position, tile.seq_len, tile.request, aux)
        first = tl.maximum(first, low)
        last = tl.minimum(last, high)
    return first, last


@triton.jit
def _attend_segment(work, first, last, begin, segment, SCORE: tl.constexpr, CONFIG: tl.constexpr):
    """Return the softmax of one segment: `begin` is that of the first tile with a visible key."""
    table = work.cache.table
    part = empty_state(CONFIG)
    part_begin = tl.maximum(begin, segment * CONFIG.SEGMENT)
    part_end = tl.minimum(last, segment * CONFIG.SEGMENT + CONFIG.SEGMENT)
    blocks = load_blocks(table, part_begin, first, last, CONFIG)
    for start in range(part_begin, part_end, CONFIG.BLOCK_N):
        next_blocks = load_blocks(table, start + CONFIG.BLOCK_N, first, part_end, CONFIG)
        part = attend_tile(
            part, work, blocks, start, first, last, SCORE, True, CONFIG.HAS_BIAS, CONFIG
        )
        blocks = next_blocks
    return part


@triton.jit(
    do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=[*UNALIGNED, "partials"]
)
def invariant_kernel(
    query, key, value, out, lse, query_start_loc, seq_lens, causal_flags, alibi_slopes, sinks, bias,
    k_scale, v_scale, aux0, aux1, aux2, aux3, scale, soft_cap, left, right, chunk, num_reqs,
    num_tokens, stride_qt, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn,
    stride_vh, stride_ot, stride_oh, stride_lt, stride_bt, block_table, stride_table, partials,
    num_tiles, num_splits, num_heads, rows0, columns0, rows1, columns1, rows2, columns2, rows3,
    columns3, SCORE: tl.constexpr, BOUNDS: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute one query tile for a block of heads; with SPLIT, over one segment of its keys.

    CONFIG is an `AttentionConfig`. Grid: (num_tiles, KV heads * HEAD_BLOCKS, num_splits). Without
    SPLIT, num_splits is 1.
    """
    aux = (
        aux0, rows0, columns0, aux1, rows1, columns1, aux2, rows2, columns2, aux3, rows3, columns3,
    )  # fmt: skip
    batch = Batch(query_start_loc, seq_lens, causal_flags, num_reqs, num_tokens)
    mask = Mask(left, right, chunk)
    output = Output(out, lse, stride_ot, stride_oh, stride_lt)
    parts = divide_results(partials, num_tokens, num_heads, num_splits, 2, CONFIG)
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
    first, last = _find_keys(tile, mask, aux, BOUNDS, CONFIG)
    begin = tl.maximum(first, 0) // CONFIG.BLOCK_N * CONFIG.BLOCK_N
    first_segment = begin // CONFIG.SEGMENT
    end_segment = tl.maximum((last + CONFIG.SEGMENT - 1) // CONFIG.SEGMENT, first_segment + 1)
    num_segments = end_segment - first_segment
    if CONFIG.SPLIT:
        if split >= num_segments:
            return
        first_segment += split
        end_segment = first_segment + 1

    rows = make_rows(tile, tile.query_len, CONFIG)
    scale, slopes, bias_rows = row_scores(
        rows, tile.kv_head, scale, k_scale, alibi_slopes, bias, stride_bt, CONFIG
    )
    queries, scale, factor = load_rows(Query(query, stride_qt, stride_qh), rows, scale, CONFIG)
    logits = Logits(scale, factor, soft_cap, slopes, bias_rows, aux)
    view = view_rows(tile, rows, mask, CONFIG)
    cache = Cache(
        key, value, block_table, stride_table, stride_kb, stride_kn, stride_kh, stride_vb,
        stride_vn, stride_vh, k_scale, v_scale, None, None, None, None, None, None)  # fmt: skip
    cache = open_cache(cache, tile, batch, CONFIG)
    work = Work(queries, rows, tile.request, cache, logits, view)
    total = empty_state(CONFIG)
    for segment in range(first_segment, end_segment):
        part = _attend_segment(work, first, last, begin, segment, SCORE, CONFIG)
        part, v_factor = apply_scales(part, k_scale, v_scale, tile.kv_head, CONFIG)
        total, part = _fold_segment(total, part, v_factor, CONFIG)
        if CONFIG.SPLIT:
            if num_segments > 1:
                _store_segment(parts, rows, part, split, CONFIG)

    if CONFIG.SPLIT:
        # One program per tile tells the combine kernel how many segments there are.
        if (tile.kv_head == 0) & (split == 0):
            count_splits(parts, rows, num_segments.to(tl.float32), CONFIG)
        if num_segments > 1:
            return
    store_results(output, rows, total, sinks, 1.0, CONFIG)


@triton.jit(
    do_not_specialize="""
        num_splits num_tokens num_heads stride_ot stride_oh stride_lt
    """.split(),
    do_not_specialize_on_alignment=["sinks", "lse"],
)
def invariant_combine_kernel(
    partials, sinks, out, lse, num_splits, num_tokens, num_heads, stride_ot, stride_oh, stride_lt,
    HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Add the segments of one row in their order, COLUMNS of the values.

    Grid: (tokens, heads, blocks of COLUMNS).
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    rows64 = num_tokens.to(tl.int64) * num_heads
    maxima = partials + rows64 * num_splits * DV
    sums = maxima + rows64 * num_splits
    num_segments = tl.load(sums + rows64 * num_splits + token).to(tl.int32)
    if num_segments <= 1:
        # The attention kernel has written the output.
        return
    row = (token.to(tl.int64) * num_heads + head) * num_splits
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    one = tl.arange(0, 1)
    acc = tl.zeros([1, COLUMNS], tl.float32)
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    for base in range(0, num_segments, STEP):
        # Unrolled, so that the loads of several segments overlap. Rows past the last segment have
        # no key and leave the sums unchanged.
        for i in tl.static_range(STEP):
            index = row + base + i
            live = base + i + one < num_segments
            part = tl.load(
                partials + index * DV + columns[None, :],
                mask=live[:, None] & (columns < DV)[None, :],
                other=0.0,
            )
            part_max = tl.load(maxima + index + one, mask=live, other=float("-inf"))
            part_sum = tl.load(sums + index + one, mask=live, other=0.0)
            row_max, row_sum, old, new = _fold_weights(row_max, row_sum, part_max, part_sum)
            acc = _fold(acc, part, old, new)
    sink = tl.zeros([1], tl.float32)
    if HAS_SINK:
        if HAS_SINK == 2:  # one for each token and head
            sinks += token.to(tl.int64) * num_heads
        sink += tl.load(sinks + head).to(tl.float32)
    normalizer, base2_lse = finish_rows(row_max, row_sum, sink, HAS_SINK)
    offsets = token.to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh + columns
    result = (acc * normalizer[:, None]).to(out.dtype.element_ty)
    tl.store(out + offsets[None, :], result, mask=(columns < DV)[None, :])
    if HAS_LSE:
        if tl.program_id(2) == 0:
            tl.store(lse + token.to(tl.int64) * stride_lt + head + one, base2_lse * LN2)
