"""Attention over the packed cache of vLLM's PagedAttention.

A block of one KV head is contiguous in memory: keys `[D / X, N, X]`, where X elements are
16 bytes, and values `[D, N]`. A tile of keys is loaded as `[pages, D / X, N, X]` and a tile of
values as `[pages, D, N]`, so that neighboring threads read neighboring addresses; both are then
reordered to `[keys, D]` in registers.

Work distribution of the decode: one program per (block of query heads, split, request), as in
`decode.py`. The prefill has one program per (tile of query tokens, block of query heads, request);
it visits the cached context first and the new tokens, which are not read from the cache, second.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnlib.ops.triton.kernels.arguments import (
    Logits,
    Output,
    Query,
    Rows,
    State,
    Tile,
    View,
    Work,
)
from attnlib.ops.triton.kernels.attend import empty_state, load_rows
from attnlib.ops.triton.kernels.chunks import (
    aligned,
    load_chunk_queries,
    pack_rows,
    scale_rows,
)
from attnlib.ops.triton.kernels.program import (
    apply_scales,
    clear_rows,
    count_splits,
    divide_results,
    make_rows,
    row_scores,
    store_partials,
    store_results,
)
from attnlib.ops.triton.kernels.quant import decode_kv
from attnlib.ops.triton.kernels.schedule import balanced_tiles
from attnlib.ops.triton.kernels.softmax import LOG2E, of_rows, online_softmax

__all__ = ["packed_decode_kernel", "packed_prefill_kernel"]


class PackedCache(NamedTuple):
    """The cache of one KV head and the block table of one request."""

    key: Any
    value: Any
    table: Any
    stride_kb: Any
    stride_vb: Any


class NewTokens(NamedTuple):
    """New keys and values of one KV head, and the strides of their tokens."""

    key: Any
    value: Any
    stride_kt: Any
    stride_vt: Any


class Pattern(NamedTuple):
    """Numbers of a `BlockSparsePattern`."""

    local: Any
    stride: Any
    block: Any
    step: Any
    first: Any


@triton.jit
def _load_pages(table, start, first, last, CONFIG: tl.constexpr):
    """Load the blocks of the key tile at `start`, and whether each holds a key of [first, last).

    Entries without such a key are not read (P3).
    """
    BLOCK_SIZE: tl.constexpr = CONFIG.BLOCK_SIZE
    PAGES: tl.constexpr = CONFIG.BLOCK_N // BLOCK_SIZE if CONFIG.BLOCK_N > BLOCK_SIZE else 1
    columns = start // BLOCK_SIZE + tl.arange(0, PAGES)
    live = (columns * BLOCK_SIZE < last) & ((columns + 1) * BLOCK_SIZE > first)
    return tl.load(table + columns, mask=live, other=0), live


@triton.jit
def _offset_in_block(start, CONFIG: tl.constexpr):
    """Return the position in its block of the first key of the tile at `start`."""
    # The compiler vectorizes loads only if it sees that the offset is a multiple of the tile.
    offset = 0
    if CONFIG.BLOCK_SIZE > CONFIG.BLOCK_N:
        offset = start % CONFIG.BLOCK_SIZE // CONFIG.BLOCK_N * CONFIG.BLOCK_N
    return offset


@triton.jit
def _load_keys(
    cache, pages, live, start, FIRST: tl.constexpr, CHUNK: tl.constexpr, CONFIG: tl.constexpr
):
    """Load elements FIRST to FIRST + CHUNK of a tile's keys, [BLOCK_N, CHUNK]."""
    BLOCK_SIZE: tl.constexpr = CONFIG.BLOCK_SIZE
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    X: tl.constexpr = CONFIG.X
    SPAN: tl.constexpr = BLOCK_SIZE if BLOCK_SIZE < BLOCK_N else BLOCK_N
    block = aligned(pages.to(tl.int64) * cache.stride_kb, CONFIG.VEC_K)
    groups = FIRST // X + tl.arange(0, CHUNK // X)
    within = (_offset_in_block(start, CONFIG) + tl.arange(0, SPAN)) * X
    offsets = block[:, None, None, None] + (groups * (BLOCK_SIZE * X))[None, :, None, None]
    offsets = offsets + within[None, None, :, None] + tl.arange(0, X)[None, None, None, :]
    mask = live[:, None, None, None]
    if FIRST + CHUNK > CONFIG.D:
        mask = mask & (groups < CONFIG.D // X)[None, :, None, None]
    tile = tl.load(cache.key + offsets, mask=mask, other=0.0)
    tile = tl.reshape(tl.permute(tile, (0, 2, 1, 3)), (BLOCK_N, CHUNK))
    return decode_kv(tile, CONFIG.KV_KIND, CONFIG.COMPUTE)


@triton.jit
def _load_values(
    cache, pages, live, start, FIRST: tl.constexpr, CHUNK: tl.constexpr, CONFIG: tl.constexpr
):
    """Load elements FIRST to FIRST + CHUNK of a tile's values, [BLOCK_N, CHUNK]."""
    BLOCK_SIZE: tl.constexpr = CONFIG.BLOCK_SIZE
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    SPAN: tl.constexpr = BLOCK_SIZE if BLOCK_SIZE < BLOCK_N else BLOCK_N
    block = aligned(pages.to(tl.int64) * cache.stride_vb, CONFIG.VEC_V)
    lanes = FIRST + tl.arange(0, CHUNK)
    within = _offset_in_block(start, CONFIG) + tl.arange(0, SPAN)
    offsets = block[:, None, None] + (lanes * BLOCK_SIZE)[None, :, None] + within[None, None, :]
    mask = live[:, None, None]
    if FIRST + CHUNK > CONFIG.D:
        mask = mask & (lanes < CONFIG.D)[None, :, None]
    tile = tl.load(cache.value + offsets, mask=mask, other=0.0)
    tile = tl.reshape(tl.permute(tile, (0, 2, 1)), (BLOCK_N, CHUNK))
    return decode_kv(tile, CONFIG.KV_KIND, CONFIG.COMPUTE)


@triton.jit
def _add_tile(state, work, elements, keys, visible, MASKED: tl.constexpr, CONFIG: tl.constexpr):
    """Return the softmax with one tile: the chunks of its keys and of its values, [keys, D]."""
    k0, k1, v0, v1 = elements
    qk = tl.dot(work.queries[0], tl.trans(k0), input_precision="ieee")
    if CONFIG.D1 > 0:
        qk = tl.dot(work.queries[1], tl.trans(k1), qk, input_precision="ieee")
    scores = qk * of_rows(work.logits.scale)
    if CONFIG.HAS_ALIBI:
        distance = tl.abs(work.view.positions[:, None] - keys[None, :]).to(tl.float32)
        scores -= work.logits.slopes[:, None] * distance
    scores = scores * LOG2E
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    weights, acc_scale, row_max, row_sum = online_softmax(
        scores, 1.0, state.row_max, state.row_sum, MASKED, False
    )
    weights = weights.to(CONFIG.COMPUTE)
    acc0, acc1 = state.sums
    acc0 = tl.dot(weights, v0, acc0 * acc_scale[:, None], input_precision="ieee")
    if CONFIG.D1 > 0:
        acc1 = tl.dot(weights, v1, acc1 * acc_scale[:, None], input_precision="ieee")
    return State((acc0, acc1), row_max, row_sum)


@triton.jit
def _cached_tile(
    state,
    work,
    pages,
    live,
    start,
    first,
    last,
    visible,
    MASKED: tl.constexpr,
    ENDS: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Return the softmax with the cached key tile at `start`.

    MASKED: `visible` hides keys. ENDS: the tile has keys outside [first, last).
    """
    cache = work.cache
    keys = start + tl.arange(0, CONFIG.BLOCK_N)
    inside = ((keys >= first) & (keys < last))[:, None]
    k0 = _load_keys(cache, pages, live, start, 0, CONFIG.D0, CONFIG)
    v0 = _load_values(cache, pages, live, start, 0, CONFIG.D0, CONFIG)
    if ENDS:
        # Cached values past the end may be NaN, which a weight of 0 would not remove (P5).
        v0 = tl.where(inside, v0, 0.0)
    k1 = k0
    v1 = v0
    if CONFIG.D1 > 0:
        k1 = _load_keys(cache, pages, live, start, CONFIG.D0, CONFIG.D1, CONFIG)
        v1 = _load_values(cache, pages, live, start, CONFIG.D0, CONFIG.D1, CONFIG)
        if ENDS:
            v1 = tl.where(inside, v1, 0.0)
    return _add_tile(state, work, (k0, k1, v0, v1), keys, visible, MASKED, CONFIG)


@triton.jit
def _tiles_per_split(
    seq_lens, num_reqs, num_splits, waves_per_split, LANES: tl.constexpr, CONFIG: tl.constexpr
):
    """Return the number of key tiles in one split of any request."""
    total = 0
    longest = 0
    for base in range(0, num_reqs, LANES):
        lanes = base + tl.arange(0, LANES)
        seq_len = tl.load(seq_lens + lanes, mask=lanes < num_reqs, other=0).to(tl.int32)
        tiles = (seq_len + CONFIG.BLOCK_N - 1) // CONFIG.BLOCK_N
        total += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(tiles, 0))
    return balanced_tiles(total, longest, num_splits, waves_per_split, CONFIG)


@triton.jit
def _stripes(rows, kv_head, pattern, CONFIG: tl.constexpr):
    """Return the first stripe that each row sees, or 0."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    stripe = tl.zeros([BLOCK_M], tl.int32)
    if CONFIG.SPARSE:
        if CONFIG.STRIPES_PER_QUERY_HEAD:
            stripe += (pattern.first + rows.head) * pattern.step + 1
        else:
            stripe += (pattern.first + kv_head) * pattern.step + 1
    return stripe


@triton.jit
def _sparse_visible(keys, stripe, seq_len, pattern):
    """Return the keys [rows, keys] that a block-sparse pattern shows; see `BlockSparsePattern`."""
    key_blocks = keys // pattern.block
    local = key_blocks > (seq_len - 1) // pattern.block - pattern.local
    striped = (key_blocks[None, :] + stripe[:, None]) % pattern.stride == 0
    return local[None, :] | striped


@triton.jit
def _open_cache(
    key, value, block_table, request, kv_head, stride_kb, stride_kh, stride_vb, stride_vh,
    stride_table, CONFIG: tl.constexpr,
):  # fmt: skip
    """Return the cache of one KV head and the block table of one request."""
    kv_head64 = kv_head.to(tl.int64)
    key += aligned(kv_head64 * stride_kh, CONFIG.VEC_K)
    value += aligned(kv_head64 * stride_vh, CONFIG.VEC_V)
    table = block_table + request.to(tl.int64) * stride_table
    return PackedCache(key, value, table, stride_kb, stride_vb)


@triton.jit
def _attend_split(work, begin, end, seq_len, stripe, pattern, CONFIG: tl.constexpr):
    """Return the softmax of the rows of a decode over the keys [begin, end)."""
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    table = work.cache.table
    state = empty_state(CONFIG)
    # Whole tiles need no mask. The last tile of the request is masked and follows the loop.
    whole_end = end // BLOCK_N * BLOCK_N
    pages, live = _load_pages(table, begin, 0, end, CONFIG)
    for start in range(begin, whole_end, BLOCK_N):
        # Blocks are loaded one step ahead, so that keys and values never wait for the table.
        next_pages, next_live = _load_pages(table, start + BLOCK_N, 0, end, CONFIG)
        keys = start + tl.arange(0, BLOCK_N)
        visible = (keys < end)[None, :]
        if CONFIG.SPARSE:
            visible = _sparse_visible(keys, stripe, seq_len, pattern)
        state = _cached_tile(
            state, work, pages, live, start, 0, end, visible, CONFIG.SPARSE, False, CONFIG
        )
        pages = next_pages
        live = next_live
    if whole_end < end:
        # Loaded again: a use of the loop's last blocks would make each of its steps wait for the
        # blocks that it loads ahead.
        pages, live = _load_pages(table, whole_end, 0, end, CONFIG)
        keys = whole_end + tl.arange(0, BLOCK_N)
        visible = (keys < end)[None, :]
        if CONFIG.SPARSE:
            visible = visible & _sparse_visible(keys, stripe, seq_len, pattern)
        state = _cached_tile(
            state, work, pages, live, whole_end, 0, end, visible, True, True, CONFIG
        )
    return state


_UNSPECIALIZED = """
    left num_reqs num_tokens stride_qt stride_qh stride_kt stride_kth stride_vt stride_vth
    stride_kb stride_kh stride_vb stride_vh stride_ot stride_oh stride_table num_splits num_heads
    sparse_local sparse_stride sparse_block sparse_step sparse_first
""".split()
_UNALIGNED = ["query_start_loc", "seq_lens", "block_table", "alibi_slopes", "k_scale", "v_scale"]


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=_UNALIGNED)
def packed_decode_kernel(
    query, key, value, out, partials, seq_lens, block_table, alibi_slopes, k_scale, v_scale, scale,
    num_reqs, num_heads, stride_qt, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
    stride_ot, stride_oh, stride_table, num_splits, waves_per_split, sparse_local, sparse_stride,
    sparse_block, sparse_step, sparse_first, CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute one split of one request for a block of query heads. CONFIG is an `AttentionConfig`.

    Grid: (blocks of heads, splits, requests). Partial results are laid out as in `decode_kernel`,
    so that its combine kernel serves both.
    """
    if CONFIG.PDL:
        gdc_wait()
        gdc_launch_dependents()
    request = tl.program_id(2)
    split = tl.program_id(1)
    kv_head = tl.program_id(0) // CONFIG.HEAD_BLOCKS
    head_offset = tl.program_id(0) % CONFIG.HEAD_BLOCKS * CONFIG.TILE_HEADS
    seq_len = tl.load(seq_lens + request).to(tl.int32)
    own_tiles = (seq_len + CONFIG.BLOCK_N - 1) // CONFIG.BLOCK_N
    splits_used = 1
    begin = 0
    end = seq_len
    if CONFIG.SPLIT:
        per_split = _tiles_per_split(seq_lens, num_reqs, num_splits, waves_per_split, 128, CONFIG)
        splits_used = (own_tiles + per_split - 1) // per_split
        begin = split * per_split * CONFIG.BLOCK_N
        end = tl.minimum(begin + per_split * CONFIG.BLOCK_N, seq_len)
        if split >= tl.maximum(splits_used, 1):
            return

    tile = Tile(request, kv_head, head_offset, request, 0, 0, 1, seq_len, 0)
    rows = make_rows(tile, 1, CONFIG)
    scale, slopes, _ = row_scores(rows, kv_head, scale, k_scale, alibi_slopes, None, 0, CONFIG)
    queries, scale, _ = load_rows(Query(query, stride_qt, stride_qh), rows, scale, CONFIG)
    logits = Logits(scale, 0.0, 0.0, slopes, None, None)
    pattern = Pattern(sparse_local, sparse_stride, sparse_block, sparse_step, sparse_first)
    stripe = _stripes(rows, kv_head, pattern, CONFIG)
    cache = _open_cache(
        key, value, block_table, request, kv_head, stride_kb, stride_kh, stride_vb, stride_vh,
        stride_table, CONFIG)  # fmt: skip
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    positions = tl.zeros([BLOCK_M], tl.int32) + (seq_len - 1)
    view = View(seq_len - 1, positions, 0, 0)
    work = Work(queries, rows, request, cache, logits, view)
    state = _attend_split(work, begin, end, seq_len, stripe, pattern, CONFIG)
    state, v_factor = apply_scales(state, k_scale, v_scale, kv_head, CONFIG)
    parts = divide_results(partials, num_reqs, num_heads, num_splits, 1, CONFIG)
    if CONFIG.SPLIT:
        # One program per request tells the combine kernel how many splits there are.
        if tl.program_id(0) == 0 and split == 0:
            count_splits(parts, rows, splits_used.to(tl.float32), CONFIG)
    if splits_used <= 1:
        output = Output(out, None, stride_ot, stride_oh, 0)
        store_results(output, rows, state, None, v_factor, CONFIG)
    if CONFIG.SPLIT:
        if splits_used > 1:
            store_partials(parts, rows, state, split, v_factor, CONFIG)


@triton.jit
def _attend_context(state, work, first, context, CONFIG: tl.constexpr):
    """Return the softmax with the cached context: every row sees all of it, unless a window hides
    its beginning."""
    table = work.cache.table
    begin = first // CONFIG.BLOCK_N * CONFIG.BLOCK_N
    pages, live = _load_pages(table, begin, first, context, CONFIG)
    for start in range(begin, context, CONFIG.BLOCK_N):
        next_pages, next_live = _load_pages(table, start + CONFIG.BLOCK_N, first, context, CONFIG)
        keys = start + tl.arange(0, CONFIG.BLOCK_N)
        visible = (keys[None, :] >= work.view.row_first[:, None]) & (keys < context)[None, :]
        state = _cached_tile(
            state, work, pages, live, start, first, context, visible, True, True, CONFIG
        )
        pages = next_pages
        live = next_live
    return state


@triton.jit
def _load_new(
    base, rows, stride, inside, FIRST: tl.constexpr, CHUNK: tl.constexpr, CONFIG: tl.constexpr
):
    """Load elements FIRST to FIRST + CHUNK of new keys or values, [BLOCK_N, CHUNK]."""
    lanes = FIRST + tl.arange(0, CHUNK)
    pointers = base + (rows * stride)[:, None] + lanes[None, :]
    tile = tl.load(pointers, mask=inside[:, None] & (lanes < CONFIG.D)[None, :], other=0.0)
    return tile.to(CONFIG.COMPUTE)


@triton.jit
def _attend_new(state, work, tile, new, first, context, CONFIG: tl.constexpr):
    """Return the softmax with the new tokens, up to the last one of this tile."""
    view = work.view
    new_end = tl.minimum(tile.first_token + CONFIG.TILE_TOKENS, tile.query_len)
    new_begin = tl.maximum(first - context, 0) // CONFIG.BLOCK_N * CONFIG.BLOCK_N
    for start in range(new_begin, new_end, CONFIG.BLOCK_N):
        index = start + tl.arange(0, CONFIG.BLOCK_N)
        inside = index < new_end
        new_rows = (tile.start + index).to(tl.int64)
        k0 = _load_new(new.key, new_rows, new.stride_kt, inside, 0, CONFIG.D0, CONFIG)
        v0 = _load_new(new.value, new_rows, new.stride_vt, inside, 0, CONFIG.D0, CONFIG)
        k1 = k0
        v1 = v0
        if CONFIG.D1 > 0:
            k1 = _load_new(new.key, new_rows, new.stride_kt, inside, CONFIG.D0, CONFIG.D1, CONFIG)
            v1 = _load_new(new.value, new_rows, new.stride_vt, inside, CONFIG.D0, CONFIG.D1, CONFIG)
        keys = context + index
        visible = keys[None, :] >= view.row_first[:, None]
        visible = visible & (keys[None, :] <= view.positions[:, None])
        state = _add_tile(state, work, (k0, k1, v0, v1), keys, visible, True, CONFIG)
    return state


@triton.jit
def _clear_rest(output, tile, num_tokens, CONFIG: tl.constexpr):
    """Clear the rows after the last request (M6)."""
    tiles = tl.num_programs(0) // (CONFIG.HEAD_BLOCKS * CONFIG.NUM_KV_HEADS)
    first = tile.start + tile.first_token
    for tail in range(first, num_tokens, tiles * CONFIG.TILE_TOKENS):
        token, head, valid = pack_rows(tail, num_tokens, tile.head_offset, CONFIG)
        rows = Rows(token, token, tile.kv_head * CONFIG.GROUP + head, valid)
        clear_rows(output, rows, CONFIG)


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=_UNALIGNED)
def packed_prefill_kernel(
    query, new_key, new_value, key, value, out, query_start_loc, seq_lens, block_table,
    alibi_slopes, k_scale, v_scale, scale, left, num_tokens, stride_qt, stride_qh, stride_kt,
    stride_kth, stride_vt, stride_vth, stride_kb, stride_kh, stride_vb, stride_vh, stride_ot,
    stride_oh, stride_table, CONFIG: tl.constexpr,
):  # fmt: skip
    """Causal attention of one tile of new tokens over the cached context and the new tokens.

    CONFIG is an `AttentionConfig`. Grid: (KV heads * blocks of heads * tiles of the longest
    request, 1, requests + 1). The last request stands for the rows after the batch, which become 0
    (M6).
    """
    request = tl.program_id(2)
    head_offset = tl.program_id(0) % CONFIG.HEAD_BLOCKS * CONFIG.TILE_HEADS
    kv_head = tl.program_id(0) // CONFIG.HEAD_BLOCKS % CONFIG.NUM_KV_HEADS
    token_tile = tl.program_id(0) // (CONFIG.HEAD_BLOCKS * CONFIG.NUM_KV_HEADS)
    first_token = token_tile * CONFIG.TILE_TOKENS
    num_reqs = tl.num_programs(2) - 1
    output = Output(out, None, stride_ot, stride_oh, 0)
    start_token = tl.load(query_start_loc + request).to(tl.int32)
    if request == num_reqs:
        rest = Tile(request, kv_head, head_offset, start_token, first_token, 0, 0, 0, 0)
        _clear_rest(output, rest, num_tokens, CONFIG)
        return
    query_len = tl.load(query_start_loc + request + 1).to(tl.int32) - start_token
    if first_token >= query_len:
        return
    context = tl.load(seq_lens + request).to(tl.int32) - query_len
    tile = Tile(request, kv_head, head_offset, start_token, first_token, 0, query_len, 0, 0)
    rows = make_rows(tile, query_len, CONFIG)
    cached_scale, slopes, _ = row_scores(
        rows, kv_head, scale, k_scale, alibi_slopes, None, 0, CONFIG
    )
    offsets = rows.row.to(tl.int64) * stride_qt + rows.head.to(tl.int64) * stride_qh
    queries, row_factors = load_chunk_queries(query, offsets, rows.valid, CONFIG)
    # The scale of the keys is that of the cache; new keys have none.
    logits = Logits(scale_rows(scale, row_factors), 0.0, 0.0, slopes, None, None)
    cached = Logits(scale_rows(cached_scale, row_factors), 0.0, 0.0, slopes, None, None)
    positions = context + rows.token
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    row_first = tl.zeros([BLOCK_M], tl.int32)
    first = 0
    if CONFIG.HAS_LEFT:
        row_first = tl.maximum(positions - left, 0)
        first = tl.maximum(context + first_token - left, 0)
    cache = _open_cache(
        key, value, block_table, request, kv_head, stride_kb, stride_kh, stride_vb, stride_vh,
        stride_table, CONFIG)  # fmt: skip
    view = View(context, positions, row_first, 0)
    work = Work(queries, rows, request, cache, cached, view)
    state = _attend_context(empty_state(CONFIG), work, first, context, CONFIG)
    state, v_factor = apply_scales(state, k_scale, v_scale, kv_head, CONFIG)
    acc0, acc1 = state.sums
    factors = of_rows(v_factor)
    state = State((acc0 * factors, acc1 * factors), state.row_max, state.row_sum)
    kv_head64 = kv_head.to(tl.int64)
    new_key += kv_head64 * stride_kth
    new_value += kv_head64 * stride_vth
    new = NewTokens(new_key, new_value, stride_kt, stride_vt)
    work = Work(queries, rows, request, cache, logits, view)
    state = _attend_new(state, work, tile, new, first, context, CONFIG)
    store_results(output, rows, state, None, 1.0, CONFIG)
