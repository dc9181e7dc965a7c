"""Attention over the packed cache of vLLM's PagedAttention, and its cache write.

A block of one KV head is contiguous in memory: keys `[D / X, N, X]`, where X elements are
16 bytes, and values `[D, N]`. A tile of keys is loaded as `[pages, D / X, N, X]` and a tile of
values as `[pages, D, N]`, so that neighboring threads read neighboring addresses; both are then
reordered to `[keys, D]` in registers.

Work distribution of the decode: one program per (block of query heads, split, request), as in
`decode.py`. The prefill has one program per (tile of query tokens, block of query heads, request);
it visits the cached context first and the new tokens, which are not read from the cache, second.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnlib.ops.triton.kernels.attend import (
    aligned,
    load_queries,
    pack_rows,
    scale_rows,
    store_rows,
)
from attnlib.ops.triton.kernels.quant import decode_kv, encode_fp8, load_scale
from attnlib.ops.triton.kernels.softmax import LOG2E, finish_rows, of_rows, online_softmax

__all__ = [
    "clear_counters_kernel",
    "packed_decode_kernel",
    "packed_prefill_kernel",
    "packed_write_kernel",
]


@triton.jit
def _load_pages(table, start, first, last, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the blocks of the key tile at `start`, and whether each holds a key of [first, last).

    Entries without such a key are not read (P3).
    """
    PAGES: tl.constexpr = BLOCK_N // BLOCK_SIZE if BLOCK_N > BLOCK_SIZE else 1
    columns = start // BLOCK_SIZE + tl.arange(0, PAGES)
    live = (columns * BLOCK_SIZE < last) & ((columns + 1) * BLOCK_SIZE > first)
    return tl.load(table + columns, mask=live, other=0), live


@triton.jit
def _offset_in_block(start, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the position in its block of the first key of the tile at `start`."""
    # The compiler vectorizes loads only if it sees that the offset is a multiple of the tile.
    offset = 0
    if BLOCK_SIZE > BLOCK_N:
        offset = start % BLOCK_SIZE // BLOCK_N * BLOCK_N
    return offset


@triton.jit
def _load_keys(
    base, pages, live, start, stride_kb, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    SIZE: tl.constexpr, START: tl.constexpr, CHUNK: tl.constexpr, X: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Load elements START to START + CHUNK of a tile's keys, [BLOCK_N, CHUNK]."""
    SPAN: tl.constexpr = BLOCK_SIZE if BLOCK_SIZE < BLOCK_N else BLOCK_N
    block = aligned(pages.to(tl.int64) * stride_kb, VEC)
    groups = START // X + tl.arange(0, CHUNK // X)
    within = (_offset_in_block(start, BLOCK_SIZE, BLOCK_N) + tl.arange(0, SPAN)) * X
    offsets = block[:, None, None, None] + (groups * (BLOCK_SIZE * X))[None, :, None, None]
    offsets = offsets + within[None, None, :, None] + tl.arange(0, X)[None, None, None, :]
    mask = live[:, None, None, None]
    if START + CHUNK > SIZE:
        mask = mask & (groups < SIZE // X)[None, :, None, None]
    tile = tl.load(base + offsets, mask=mask, other=0.0)
    return tl.reshape(tl.permute(tile, (0, 2, 1, 3)), (BLOCK_N, CHUNK))


@triton.jit
def _load_values(
    base, pages, live, start, stride_vb, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    SIZE: tl.constexpr, START: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Load elements START to START + CHUNK of a tile's values, [BLOCK_N, CHUNK]."""
    SPAN: tl.constexpr = BLOCK_SIZE if BLOCK_SIZE < BLOCK_N else BLOCK_N
    block = aligned(pages.to(tl.int64) * stride_vb, VEC)
    lanes = START + tl.arange(0, CHUNK)
    within = _offset_in_block(start, BLOCK_SIZE, BLOCK_N) + tl.arange(0, SPAN)
    offsets = block[:, None, None] + (lanes * BLOCK_SIZE)[None, :, None] + within[None, None, :]
    mask = live[:, None, None]
    if START + CHUNK > SIZE:
        mask = mask & (lanes < SIZE)[None, :, None]
    tile = tl.load(base + offsets, mask=mask, other=0.0)
    return tl.reshape(tl.permute(tile, (0, 2, 1)), (BLOCK_N, CHUNK))


@triton.jit
def _add_tile(
    acc0, acc1, row_max, row_sum, q0, q1, k0, k1, v0, v1, keys, positions, visible, qk_scale,
    slopes, D1: tl.constexpr, COMPUTE: tl.constexpr, HAS_ALIBI: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys and values [keys, D] to the accumulators."""
    qk = tl.dot(q0, tl.trans(k0), input_precision="ieee")
    if D1 > 0:
        qk = tl.dot(q1, tl.trans(k1), qk, input_precision="ieee")
    scores = qk * of_rows(qk_scale)
    if HAS_ALIBI:
        distance = tl.abs(positions[:, None] - keys[None, :]).to(tl.float32)
        scores -= slopes[:, None] * distance
    scores = scores * LOG2E
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    weights, acc_scale, row_max, row_sum = online_softmax(
        scores, 1.0, row_max, row_sum, MASKED, False
    )
    weights = weights.to(COMPUTE)
    acc0 = tl.dot(weights, v0, acc0 * acc_scale[:, None], input_precision="ieee")
    if D1 > 0:
        acc1 = tl.dot(weights, v1, acc1 * acc_scale[:, None], input_precision="ieee")
    return acc0, acc1, row_max, row_sum


@triton.jit
def _cached_tile(
    acc0, acc1, row_max, row_sum, q0, q1, key_base, value_base, pages, live, start, first, last,
    stride_kb, stride_vb, positions, visible, qk_scale, slopes, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, X: tl.constexpr,
    KV_KIND: tl.constexpr, COMPUTE: tl.constexpr, HAS_ALIBI: tl.constexpr, MASKED: tl.constexpr,
    ENDS: tl.constexpr, VEC_K: tl.constexpr, VEC_V: tl.constexpr,
):  # fmt: skip
    """Add the cached key tile at `start` to the accumulators.

    MASKED: `visible` hides keys. ENDS: the tile has keys outside [first, last).
    """
    keys = start + tl.arange(0, BLOCK_N)
    inside = ((keys >= first) & (keys < last))[:, None]
    k0 = decode_kv(
        _load_keys(
            key_base, pages, live, start, stride_kb, BLOCK_SIZE, BLOCK_N, D, 0, D0, X, VEC_K
        ),
        KV_KIND,
        COMPUTE,
    )
    v0 = decode_kv(
        _load_values(
            value_base, pages, live, start, stride_vb, BLOCK_SIZE, BLOCK_N, D, 0, D0, VEC_V
        ),
        KV_KIND,
        COMPUTE,
    )
    if ENDS:
        # Cached values past the end may be NaN, which a weight of 0 would not remove (P5).
        v0 = tl.where(inside, v0, 0.0)
    k1 = k0
    v1 = v0
    if D1 > 0:
        k1 = decode_kv(
            _load_keys(
                key_base, pages, live, start, stride_kb, BLOCK_SIZE, BLOCK_N, D, D0, D1, X, VEC_K
            ),
            KV_KIND,
            COMPUTE,
        )
        v1 = decode_kv(
            _load_values(
                value_base, pages, live, start, stride_vb, BLOCK_SIZE, BLOCK_N, D, D0, D1, VEC_V
            ),
            KV_KIND,
            COMPUTE,
        )
        if ENDS:
            v1 = tl.where(inside, v1, 0.0)
    return _add_tile(
        acc0, acc1, row_max, row_sum, q0, q1, k0, k1, v0, v1, keys, positions, visible, qk_scale,
        slopes, D1, COMPUTE, HAS_ALIBI, MASKED)  # fmt: skip


@triton.jit
def _tiles_per_split(
    seq_lens, num_reqs, num_splits, waves_per_split, BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr, MAX_SPLITS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Return the number of key tiles in one split of any request; see
    `schedule.tiles_per_split`."""
    total = 0
    longest = 0
    for base in range(0, num_reqs, LANES):
        lanes = base + tl.arange(0, LANES)
        seq_len = tl.load(seq_lens + lanes, mask=lanes < num_reqs, other=0).to(tl.int32)
        tiles = (seq_len + BLOCK_N - 1) // BLOCK_N
        total += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(tiles, 0))
    splits = 1 + tl.arange(0, MAX_SPLITS)
    requests = total.to(tl.float32) / tl.maximum(longest, 1).to(tl.float32)
    waves = tl.maximum(requests * waves_per_split * splits.to(tl.float32), 1e-6)
    efficiency = tl.where(splits <= num_splits, waves / tl.ceil(waves), 0.0)
    enough = efficiency >= 0.9 * tl.max(efficiency, 0)
    chosen = tl.minimum(tl.min(tl.where(enough, splits, MAX_SPLITS), 0), num_splits)
    return tl.maximum((longest + chosen - 1) // chosen, MIN_TILES)


@triton.jit
def _sparse_visible(keys, stripe, seq_len, sparse_local, sparse_stride, sparse_block):
    """Return the keys [rows, keys] that a block-sparse pattern shows; see `BlockSparsePattern`."""
    key_blocks = keys // sparse_block
    local = key_blocks > (seq_len - 1) // sparse_block - sparse_local
    striped = (key_blocks[None, :] + stripe[:, None]) % sparse_stride == 0
    return local[None, :] | striped


_UNSPECIALIZED = [
    "left", "num_reqs", "num_tokens", "stride_qt", "stride_qh", "stride_kt", "stride_kth",
    "stride_vt", "stride_vth", "stride_kb", "stride_kh", "stride_vb", "stride_vh", "stride_ot",
    "stride_oh", "stride_table", "num_splits", "num_heads", "sparse_local", "sparse_stride",
    "sparse_block", "sparse_step", "sparse_first",
]  # fmt: skip
_UNALIGNED = ["query_start_loc", "seq_lens", "block_table", "alibi_slopes", "k_scale", "v_scale"]


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=_UNALIGNED)
def packed_decode_kernel(
    query, key, value, out, partials, seq_lens, block_table, alibi_slopes, k_scale, v_scale, scale,
    num_reqs, num_heads, stride_qt, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
    stride_ot, stride_oh, stride_table, num_splits, waves_per_split, sparse_local, sparse_stride,
    sparse_block, sparse_step, sparse_first, PDL: tl.constexpr, SPLIT: tl.constexpr,
    MIN_TILES: tl.constexpr, MAX_SPLITS: tl.constexpr, TILE_HEADS: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D0: tl.constexpr,
    D1: tl.constexpr, X: tl.constexpr, KV_KIND: tl.constexpr, COMPUTE: tl.constexpr,
    HAS_ALIBI: tl.constexpr, SPARSE: tl.constexpr, STRIPES_PER_QUERY_HEAD: tl.constexpr,
    K_SCALE_KIND: tl.constexpr, V_SCALE_KIND: tl.constexpr, VEC_Q: tl.constexpr,
    VEC_K: tl.constexpr, VEC_V: tl.constexpr, VEC_O: tl.constexpr,
):  # fmt: skip
    """Compute one split of one request for a block of query heads.

    Grid: (blocks of heads, splits, requests). Partial results are laid out as in `decode_kernel`,
    so that its combine kernel serves both.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    request = tl.program_id(2)
    split = tl.program_id(1)
    kv_head = tl.program_id(0) // HEAD_BLOCKS
    head_offset = tl.program_id(0) % HEAD_BLOCKS * TILE_HEADS
    seq_len = tl.load(seq_lens + request).to(tl.int32)
    own_tiles = (seq_len + BLOCK_N - 1) // BLOCK_N
    splits_used = 1
    begin = 0
    end = seq_len
    if SPLIT:
        per_split = _tiles_per_split(
            seq_lens, num_reqs, num_splits, waves_per_split, BLOCK_N, MIN_TILES, MAX_SPLITS, 128
        )
        splits_used = (own_tiles + per_split - 1) // per_split
        begin = split * per_split * BLOCK_N
        end = tl.minimum(begin + per_split * BLOCK_N, seq_len)
        if split >= tl.maximum(splits_used, 1):
            return

    _, head, valid = pack_rows(0, 1, head_offset, GROUP, TILE_HEADS, 1, BLOCK_M)
    head = kv_head * GROUP + head
    kv_head64 = kv_head.to(tl.int64)
    query_offsets = request.to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
    q0, q1, row_factors = load_queries(
        query, query_offsets, valid, D, D0, D1, D, D0, COMPUTE, VEC_Q
    )
    slopes = 0.0
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes + head, mask=valid, other=0.0).to(tl.float32)
    stripe = tl.zeros([BLOCK_M], tl.int32)
    if SPARSE:
        if STRIPES_PER_QUERY_HEAD:
            stripe += (sparse_first + head) * sparse_step + 1
        else:
            stripe += (sparse_first + kv_head) * sparse_step + 1
    key_base = key + aligned(kv_head64 * stride_kh, VEC_K)
    value_base = value + aligned(kv_head64 * stride_vh, VEC_V)
    table = block_table + request.to(tl.int64) * stride_table
    positions = tl.zeros([BLOCK_M], tl.int32) + (seq_len - 1)
    qk_scale = scale_rows(scale * load_scale(k_scale, kv_head, K_SCALE_KIND), row_factors)

    acc0 = tl.zeros([BLOCK_M, D0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, D1 if D1 > 0 else 1], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    # Whole tiles need no mask. The last tile of the request is masked and follows the loop.
    whole_end = end // BLOCK_N * BLOCK_N
    pages, live = _load_pages(table, begin, 0, end, BLOCK_SIZE, BLOCK_N)
    for start in range(begin, whole_end, BLOCK_N):
        # Blocks are loaded one step ahead, so that keys and values never wait for the table.
        next_pages, next_live = _load_pages(table, start + BLOCK_N, 0, end, BLOCK_SIZE, BLOCK_N)
        keys = start + tl.arange(0, BLOCK_N)
        visible = (keys < end)[None, :]
        if SPARSE:
            visible = _sparse_visible(
                keys, stripe, seq_len, sparse_local, sparse_stride, sparse_block
            )
        acc0, acc1, row_max, row_sum = _cached_tile(
            acc0, acc1, row_max, row_sum, q0, q1, key_base, value_base, pages, live, start, 0, end,
            stride_kb, stride_vb, positions, visible, qk_scale, slopes, BLOCK_SIZE, BLOCK_N, D, D0,
            D1, X, KV_KIND, COMPUTE, HAS_ALIBI, SPARSE, False, VEC_K, VEC_V)  # fmt: skip
        pages = next_pages
        live = next_live
    if whole_end < end:
        # Loaded again: a use of the loop's last blocks would make each of its steps wait for the
        # blocks that it loads ahead.
        pages, live = _load_pages(table, whole_end, 0, end, BLOCK_SIZE, BLOCK_N)
        keys = whole_end + tl.arange(0, BLOCK_N)
        visible = (keys < end)[None, :]
        if SPARSE:
            visible = visible & _sparse_visible(
                keys, stripe, seq_len, sparse_local, sparse_stride, sparse_block
            )
        acc0, acc1, row_max, row_sum = _cached_tile(
            acc0, acc1, row_max, row_sum, q0, q1, key_base, value_base, pages, live, whole_end, 0,
            end, stride_kb, stride_vb, positions, visible, qk_scale, slopes, BLOCK_SIZE, BLOCK_N, D,
            D0, D1, X, KV_KIND, COMPUTE, HAS_ALIBI, True, True, VEC_K, VEC_V)  # fmt: skip

    factor, base2_lse = finish_rows(row_max, row_sum, 0.0, False)
    factor = factor * load_scale(v_scale, kv_head, V_SCALE_KIND)
    if SPLIT:
        rows64 = num_reqs.to(tl.int64) * num_heads
        # One program per request tells the combine kernel how many splits there are.
        if tl.program_id(0) == 0 and split == 0:
            counts = partials + rows64 * num_splits * (D + 1)
            tl.store(counts + request, splits_used.to(tl.float32))
    if splits_used <= 1:
        offsets = request.to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh
        store_rows(out, offsets, acc0, factor, valid, D, 0, D0, VEC_O)
        if D1 > 0:
            store_rows(out, offsets, acc1, factor, valid, D, D0, D1, VEC_O)
    if SPLIT:
        if splits_used > 1:
            rows = (request.to(tl.int64) * num_heads + head) * num_splits + split
            store_rows(partials, rows * D, acc0, factor, valid, D, 0, D0, 1)
            if D1 > 0:
                store_rows(partials, rows * D, acc1, factor, valid, D, D0, D1, 1)
            lses = partials + num_reqs.to(tl.int64) * num_heads * num_splits * D
            tl.store(lses + rows, base2_lse, mask=valid)


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=_UNALIGNED)
def packed_prefill_kernel(
    query, new_key, new_value, key, value, out, query_start_loc, seq_lens, block_table,
    alibi_slopes, k_scale, v_scale, scale, left, num_tokens, stride_qt, stride_qh, stride_kt,
    stride_kth, stride_vt, stride_vth, stride_kb, stride_kh, stride_vb, stride_vh, stride_ot,
    stride_oh, stride_table, TILE_HEADS: tl.constexpr, TILE_TOKENS: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, X: tl.constexpr, KV_KIND: tl.constexpr,
    COMPUTE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_ALIBI: tl.constexpr,
    K_SCALE_KIND: tl.constexpr, V_SCALE_KIND: tl.constexpr, VEC_Q: tl.constexpr,
    VEC_K: tl.constexpr, VEC_V: tl.constexpr, VEC_O: tl.constexpr,
):  # fmt: skip
    """Causal attention of one tile of new tokens over the cached context and the new tokens.

    Grid: (KV heads * blocks of heads * tiles of the longest request, 1, requests + 1). The last
    request stands for the rows after the batch, which become 0 (M6).
    """
    request = tl.program_id(2)
    head_offset = tl.program_id(0) % HEAD_BLOCKS * TILE_HEADS
    kv_head = tl.program_id(0) // HEAD_BLOCKS % NUM_KV_HEADS
    first_token = tl.program_id(0) // (HEAD_BLOCKS * NUM_KV_HEADS) * TILE_TOKENS
    num_reqs = tl.num_programs(2) - 1
    start_token = tl.load(query_start_loc + request).to(tl.int32)
    if request == num_reqs:
        tiles = tl.num_programs(0) // (HEAD_BLOCKS * NUM_KV_HEADS)
        for tail in range(start_token + first_token, num_tokens, tiles * TILE_TOKENS):
            token, head, valid = pack_rows(
                tail, num_tokens, head_offset, GROUP, TILE_HEADS, TILE_TOKENS, BLOCK_M
            )
            head = kv_head * GROUP + head
            zeros = tl.zeros([BLOCK_M], tl.float32)
            offsets = token.to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh
            store_rows(
                out, offsets, tl.zeros([BLOCK_M, D0], tl.float32), zeros, valid, D, 0, D0, VEC_O
            )
            if D1 > 0:
                store_rows(
                    out, offsets, tl.zeros([BLOCK_M, D1], tl.float32), zeros, valid, D, D0, D1,
                    VEC_O)  # fmt: skip
        return
    query_len = tl.load(query_start_loc + request + 1).to(tl.int32) - start_token
    if first_token >= query_len:
        return
    context = tl.load(seq_lens + request).to(tl.int32) - query_len

    token, head, valid = pack_rows(
        first_token, query_len, head_offset, GROUP, TILE_HEADS, TILE_TOKENS, BLOCK_M
    )
    head = kv_head * GROUP + head
    token64 = (start_token + token).to(tl.int64)
    query_offsets = token64 * stride_qt + head.to(tl.int64) * stride_qh
    q0, q1, row_factors = load_queries(
        query, query_offsets, valid, D, D0, D1, D, D0, COMPUTE, VEC_Q
    )
    slopes = 0.0
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes + head, mask=valid, other=0.0).to(tl.float32)
    positions = context + token
    row_first = tl.zeros([BLOCK_M], tl.int32)
    first = 0
    if HAS_LEFT:
        row_first = tl.maximum(positions - left, 0)
        first = tl.maximum(context + first_token - left, 0)
    kv_head64 = kv_head.to(tl.int64)
    key_base = key + aligned(kv_head64 * stride_kh, VEC_K)
    value_base = value + aligned(kv_head64 * stride_vh, VEC_V)
    table = block_table + request.to(tl.int64) * stride_table

    acc0 = tl.zeros([BLOCK_M, D0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, D1 if D1 > 0 else 1], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    qk_scale = scale_rows(scale, row_factors)
    cached_scale = scale_rows(scale * load_scale(k_scale, kv_head, K_SCALE_KIND), row_factors)
    # Context: every row sees all of it, unless a window hides its beginning.
    begin = first // BLOCK_N * BLOCK_N
    pages, live = _load_pages(table, begin, first, context, BLOCK_SIZE, BLOCK_N)
    for start in range(begin, context, BLOCK_N):
        next_pages, next_live = _load_pages(
            table, start + BLOCK_N, first, context, BLOCK_SIZE, BLOCK_N
        )
        keys = start + tl.arange(0, BLOCK_N)
        visible = (keys[None, :] >= row_first[:, None]) & (keys < context)[None, :]
        acc0, acc1, row_max, row_sum = _cached_tile(
            acc0, acc1, row_max, row_sum, q0, q1, key_base, value_base, pages, live, start, first,
            context, stride_kb, stride_vb, positions, visible, cached_scale, slopes, BLOCK_SIZE,
            BLOCK_N, D, D0, D1, X, KV_KIND, COMPUTE, HAS_ALIBI, True, True, VEC_K,
            VEC_V)  # fmt: skip
        pages = next_pages
        live = next_live
    v_factor = load_scale(v_scale, kv_head, V_SCALE_KIND)
    acc0 = acc0 * v_factor
    acc1 = acc1 * v_factor

    # New tokens, up to the last one of this tile.
    lanes0 = tl.arange(0, D0)
    lanes1 = D0 + tl.arange(0, D1 if D1 > 0 else 1)
    new_keys = new_key + kv_head64 * stride_kth
    new_values = new_value + kv_head64 * stride_vth
    new_end = tl.minimum(first_token + TILE_TOKENS, query_len)
    new_begin = tl.maximum(first - context, 0) // BLOCK_N * BLOCK_N
    for start in range(new_begin, new_end, BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        inside = (index < new_end)[:, None]
        rows = (start_token + index).to(tl.int64)
        k_rows = (rows * stride_kt)[:, None]
        v_rows = (rows * stride_vt)[:, None]
        mask0 = inside & (lanes0 < D)[None, :]
        k0 = tl.load(new_keys + k_rows + lanes0[None, :], mask=mask0, other=0.0).to(COMPUTE)
        v0 = tl.load(new_values + v_rows + lanes0[None, :], mask=mask0, other=0.0).to(COMPUTE)
        k1 = k0
        v1 = v0
        if D1 > 0:
            mask1 = inside & (lanes1 < D)[None, :]
            k1 = tl.load(new_keys + k_rows + lanes1[None, :], mask=mask1, other=0.0).to(COMPUTE)
            v1 = tl.load(new_values + v_rows + lanes1[None, :], mask=mask1, other=0.0).to(COMPUTE)
        keys = context + index
        visible = (keys[None, :] >= row_first[:, None]) & (keys[None, :] <= positions[:, None])
        acc0, acc1, row_max, row_sum = _add_tile(
            acc0, acc1, row_max, row_sum, q0, q1, k0, k1, v0, v1, keys, positions, visible,
            qk_scale, slopes, D1, COMPUTE, HAS_ALIBI, True)  # fmt: skip

    factor, _ = finish_rows(row_max, row_sum, 0.0, False)
    offsets = token64 * stride_ot + head.to(tl.int64) * stride_oh
    store_rows(out, offsets, acc0, factor, valid, D, 0, D0, VEC_O)
    if D1 > 0:
        store_rows(out, offsets, acc1, factor, valid, D, D0, D1, VEC_O)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping", "k_scale", "v_scale"])
def packed_write_kernel(
    key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, num_elements, stride_kt,
    stride_kth, stride_vt, stride_vth, stride_kb, stride_kh, stride_vb, stride_vh,
    BLOCK_SIZE: tl.constexpr, D: tl.constexpr, X: tl.constexpr, BLOCK: tl.constexpr,
    K_SCALE_KIND: tl.constexpr, V_SCALE_KIND: tl.constexpr, FP8: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    """Write keys and values of one token. Grid: (tokens, blocks of BLOCK elements)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    # A negative slot writes nothing (P4).
    if slot >= 0:
        block = slot // BLOCK_SIZE
        within = slot % BLOCK_SIZE
        elements = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = elements < num_elements
        heads = (elements // D).to(tl.int64)
        lanes = elements % D
        k = tl.load(key + token * stride_kt + heads * stride_kth + lanes, mask=mask, other=0.0)
        v = tl.load(value + token * stride_vt + heads * stride_vth + lanes, mask=mask, other=0.0)
        k_target = key_cache + block * stride_kb + heads * stride_kh
        k_target += lanes // X * (BLOCK_SIZE * X) + within * X + lanes % X
        v_target = value_cache + block * stride_vb + heads * stride_vh
        v_target += lanes * BLOCK_SIZE + within
        if FP8:
            # Round-to-nearest division: the stored bits are then the same on every chip.
            k_divisor = _scales(k_scale, heads, mask, K_SCALE_KIND)
            v_divisor = _scales(v_scale, heads, mask, V_SCALE_KIND)
            k = encode_fp8(tl.math.div_rn(k.to(tl.float32), k_divisor), E5M2)
            v = encode_fp8(tl.math.div_rn(v.to(tl.float32), v_divisor), E5M2)
            tl.store(k_target, k, mask=mask)
            tl.store(v_target, v, mask=mask)
        else:
            tl.store(k_target, k.to(key_cache.dtype.element_ty), mask=mask)
            tl.store(v_target, v.to(value_cache.dtype.element_ty), mask=mask)


@triton.jit
def _scales(scale, heads, mask, KIND: tl.constexpr):
    """Return the scale of each element's head."""
    if KIND == 2:
        values = tl.load(scale + heads, mask=mask, other=1.0)
    else:
        values = tl.zeros(heads.shape, tl.float32) + load_scale(scale, 0, KIND)
    return values


@triton.jit(do_not_specialize=["number"])
def clear_counters_kernel(counters, number, SIZE: tl.constexpr, PDL: tl.constexpr):
    """Set the counters of the Hopper decode to 0. One program."""
    if PDL:
        # The grid before may still use this memory; the decode waits for the zeros by itself.
        gdc_wait()
        gdc_launch_dependents()
    lanes = tl.arange(0, SIZE)
    tl.store(counters + lanes, tl.zeros([SIZE], tl.int32), mask=lanes < number)
