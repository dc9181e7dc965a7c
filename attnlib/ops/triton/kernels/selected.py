"""Attention over selected keys of the paged cache (M11), for decodes and prefills.

Work distribution: one program per (tile of query tokens that share a list, block of heads, split).
The work of a program follows from its list, not from the length of the request, so decodes and
prefills use one kernel. The key slots of a list are numbered from 0: slot j is position
list[j // SELECT] * SELECT + j % SELECT. A tile covers BLOCK_N slots. Only the positions that a
query of the tile sees are loaded. Where tiles of queries are few, the slots of a list are split
over several programs, and `decode.combine_kernel` combines their partial results.

Workspace: as in `decode`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.attend import (
    aligned,
    load_queries,
    pack_rows,
    scale_rows,
    store_rows,
)
from attnlib.ops.triton.kernels.mask import visible_span
from attnlib.ops.triton.kernels.quant import decode_kv, load_scale
from attnlib.ops.triton.kernels.schedule import find_request
from attnlib.ops.triton.kernels.softmax import (
    LN2,
    finish_rows,
    online_softmax,
    transform_scores,
)

__all__ = ["selected_kernel"]

_UNSPECIALIZED = [
    "num_reqs", "num_tokens", "num_heads", "num_entries", "num_tiles", "num_splits", "left",
    "right", "chunk", "stride_lists", "stride_list_head", "stride_table", "stride_qt", "stride_qh",
    "stride_kb", "stride_kn", "stride_kh", "stride_vb", "stride_vn", "stride_vh", "stride_ot",
    "stride_oh", "stride_lt",
]  # fmt: skip
_UNALIGNED = [
    "query_start_loc", "seq_lens", "causal_flags", "block_table", "indices", "list_starts",
    "alibi_slopes", "sinks", "k_scale", "v_scale", "lse",
]  # fmt: skip


@triton.jit
def _count_entries(
    entries, num_entries, first, last, SELECT: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Return 1 + the place of the last entry with a position in [first, last); 0 if none has."""
    count = 0
    low = first // SELECT
    high = (last + SELECT - 1) // SELECT
    for base in range(0, num_entries, LANES):
        lanes = base + tl.arange(0, LANES)
        entry = tl.load(entries + lanes, mask=lanes < num_entries, other=-1)
        used = (entry >= 0) & (entry >= low) & (entry < high)
        count = tl.maximum(count, tl.max(tl.where(used, lanes + 1, 0), 0))
    return count


@triton.jit
def _locate(
    entries, table, start, end, first, last, SELECT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return (positions [BLOCK_N], blocks) of the key slots from `start` on.

    The position is -1 where a slot selects nothing in [first, last). Its block is not read. Blocks
    are one number if the tile lies in one entry and in one block of the cache, else one per key.
    """
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
def _load_tile(
    base, offsets, inside, SIZE: tl.constexpr, START: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Load [BLOCK_N, CHUNK] of keys or values; 0 where nothing is selected (P5)."""
    lanes = START + tl.arange(0, CHUNK)
    pointers = base + offsets[:, None] + lanes[None, :]
    if START + CHUNK > SIZE:
        tile = tl.load(pointers, mask=inside[:, None] & (lanes < SIZE)[None, :], other=0.0)
    else:
        tile = tl.load(pointers, mask=inside[:, None], other=0.0)
    return tile


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=_UNALIGNED)
def selected_kernel(
    query, key, value, out, partials, query_start_loc, seq_lens, block_table, indices, list_starts,
    causal_flags, alibi_slopes, sinks, k_scale, v_scale, lse, scale, soft_cap, left, right, chunk,
    num_reqs, num_tokens, num_heads, num_entries, num_tiles, num_splits, stride_lists,
    stride_list_head, stride_table, stride_qt, stride_qh, stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh, stride_ot, stride_oh, stride_lt, SELECT: tl.constexpr,
    QUERY_BLOCK: tl.constexpr, LIST_HEADS: tl.constexpr, LIST_LANES: tl.constexpr,
    SPLIT: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_TOKENS: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    LATENT: tl.constexpr, KV_KIND: tl.constexpr, COMPUTE: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr,
    K_SCALE_KIND: tl.constexpr, V_SCALE_KIND: tl.constexpr, SCALE_LATE: tl.constexpr,
    VEC_Q: tl.constexpr, VEC_K: tl.constexpr, VEC_V: tl.constexpr, VEC_O: tl.constexpr,
):  # fmt: skip
    """Compute one split of a tile of query tokens for a block of heads.

    LIST_HEADS is 0 where all heads share a list, 1 for one per KV head, 2 for one per query head.
    With LATENT the values are the first DV elements of the keys (P10), as in `attend`.
    Grid: (num_tiles, KV heads * HEAD_BLOCKS, splits).
    """
    # As in the prefill kernel, the tiles of later tokens start first.
    tile = num_tiles - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    head_offset = tl.program_id(1) % HEAD_BLOCKS * TILE_HEADS
    split = tl.program_id(2)
    split_counts = partials
    if SPLIT:
        rows64 = num_tokens.to(tl.int64) * num_heads
        split_counts = partials + rows64 * num_splits * (DV + 1)
    request = find_request(query_start_loc, tile, num_reqs, TILE_TOKENS, 128)
    start = tl.load(query_start_loc + request)
    first_token = (tile - (start // TILE_TOKENS + request)) * TILE_TOKENS

    if request == num_reqs:
        # Rows after the last request become 0 (M6).
        if split == 0:
            token, head, valid = pack_rows(
                first_token, num_tokens - start, head_offset, GROUP, TILE_HEADS, TILE_TOKENS,
                BLOCK_M)  # fmt: skip
            head = kv_head * GROUP + head
            token64 = (start + token).to(tl.int64)
            zeros = tl.zeros([BLOCK_M], tl.float32)
            offsets = token64 * stride_ot + head.to(tl.int64) * stride_oh
            store_rows(
                out, offsets, tl.zeros([BLOCK_M, DV0], tl.float32), zeros, valid, DV, 0, DV0, VEC_O
            )
            if DV1 > 0:
                store_rows(
                    out, offsets, tl.zeros([BLOCK_M, DV1], tl.float32), zeros, valid, DV, DV0, DV1,
                    VEC_O)  # fmt: skip
            if HAS_LSE:
                tl.store(lse + token64 * stride_lt + head, zeros - float("inf"), mask=valid)
            if SPLIT:
                # No splits: the combine kernel leaves the rows alone.
                tl.store(split_counts + token64, zeros, mask=valid)
        return

    query_len = tl.load(query_start_loc + request + 1) - start
    # The number of tiles is an upper bound: a request may own one tile more than it needs.
    if first_token >= query_len:
        return
    seq_len = tl.load(seq_lens + request)
    causal = 0
    if CAUSAL == 2:
        causal = tl.load(causal_flags + request).to(tl.int32)

    list_row = start + first_token
    if QUERY_BLOCK > 1:
        list_row = tl.load(list_starts + request) + first_token // QUERY_BLOCK
    entries = indices + list_row.to(tl.int64) * stride_lists
    if LIST_HEADS == 1:
        entries += kv_head.to(tl.int64) * stride_list_head
    elif LIST_HEADS == 2:
        entries += (kv_head * GROUP + head_offset).to(tl.int64) * stride_list_head
    table = block_table + request.to(tl.int64) * stride_table

    # Keys in [first, last) are visible to some row of the tile.
    origin = seq_len - query_len
    last_token = tl.minimum(first_token + TILE_TOKENS, query_len) - 1
    first, _ = visible_span(
        origin + first_token, seq_len, causal, left, right, chunk, CAUSAL, HAS_LEFT, HAS_RIGHT,
        HAS_CHUNK)  # fmt: skip
    _, last = visible_span(
        origin + last_token, seq_len, causal, left, right, chunk, CAUSAL, HAS_LEFT, HAS_RIGHT,
        HAS_CHUNK)  # fmt: skip
    first = tl.maximum(first, 0)
    count = _count_entries(entries, num_entries, first, last, SELECT, LIST_LANES)
    end = count * SELECT
    begin = 0
    if SPLIT:
        # The same splits for all lists, because the combine kernel knows one number per token. A
        # split without entries stores an empty partial result.
        tiles = (num_entries * SELECT + BLOCK_N - 1) // BLOCK_N
        per_split = (tiles + num_splits - 1) // num_splits
        begin = split * per_split * BLOCK_N
        end = tl.minimum(end, begin + per_split * BLOCK_N)

    token, head, valid = pack_rows(
        first_token, query_len, head_offset, GROUP, TILE_HEADS, TILE_TOKENS, BLOCK_M
    )
    head = kv_head * GROUP + head
    token64 = (start + token).to(tl.int64)
    slopes = 0.0
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes + head, mask=valid, other=0.0).to(tl.float32)
    query_offsets = token64 * stride_qt + head.to(tl.int64) * stride_qh
    END0: tl.constexpr = DV if LATENT else D
    START1: tl.constexpr = DV if LATENT else D0
    q0, q1, row_factors = load_queries(
        query, query_offsets, valid, D, D0, D1, END0, START1, COMPUTE, VEC_Q
    )
    rows = origin + token
    row_first, row_last = visible_span(
        rows, seq_len, causal, left, right, chunk, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK
    )
    kv_head64 = kv_head.to(tl.int64)
    key += aligned(kv_head64 * stride_kh, VEC_K)
    value += aligned(kv_head64 * stride_vh, VEC_V)
    qk_scale = scale_rows(scale * load_scale(k_scale, kv_head, K_SCALE_KIND), row_factors)
    exponent_scale = qk_scale * 1.4426950408889634

    acc0 = tl.zeros([BLOCK_M, DV0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, DV1 if DV1 > 0 else 1], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    keys, blocks = _locate(entries, table, begin, end, first, last, SELECT, BLOCK_SIZE, BLOCK_N)
    for slot in range(begin, end, BLOCK_N):
        # Positions and blocks of the next tile are loaded one step ahead, so that the loads of its
        # keys and values never wait for the list and the block table.
        next_keys, next_blocks = _locate(
            entries, table, slot + BLOCK_N, end, first, last, SELECT, BLOCK_SIZE, BLOCK_N
        )
        inside = keys >= 0
        within = (keys.to(tl.uint32) % BLOCK_SIZE).to(tl.int64)
        offsets_k = aligned(blocks.to(tl.int64) * stride_kb + within * stride_kn, VEC_K)
        k0 = decode_kv(_load_tile(key, offsets_k, inside, END0, 0, D0), KV_KIND, COMPUTE)
        qk = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        if D1 > 0:
            k1 = decode_kv(_load_tile(key, offsets_k, inside, D, START1, D1), KV_KIND, COMPUTE)
            qk = tl.dot(q1, tl.trans(k1), qk, input_precision="ieee")
        if SCALE_LATE:
            scores = qk
        else:
            scores = transform_scores(
                qk, qk_scale, soft_cap, slopes, rows, keys, 0.0, head, request, None, None, HAS_CAP,
                HAS_ALIBI, False)  # fmt: skip
        visible = (keys[None, :] >= tl.maximum(row_first, 0)[:, None]) & (
            keys[None, :] < row_last[:, None]
        )
        scores = tl.where(visible, scores, float("-inf"))
        weights, acc_scale, row_max, row_sum = online_softmax(
            scores, exponent_scale, row_max, row_sum, True, SCALE_LATE
        )
        weights = weights.to(COMPUTE)
        if LATENT:
            acc0 = tl.dot(weights, k0, acc0 * acc_scale[:, None], input_precision="ieee")
        else:
            offsets_v = aligned(blocks.to(tl.int64) * stride_vb + within * stride_vn, VEC_V)
            v0 = decode_kv(_load_tile(value, offsets_v, inside, DV, 0, DV0), KV_KIND, COMPUTE)
            acc0 = tl.dot(weights, v0, acc0 * acc_scale[:, None], input_precision="ieee")
            if DV1 > 0:
                v1 = decode_kv(_load_tile(value, offsets_v, inside, DV, DV0, DV1), KV_KIND, COMPUTE)
                acc1 = tl.dot(weights, v1, acc1 * acc_scale[:, None], input_precision="ieee")
        keys = next_keys
        blocks = next_blocks

    sink = 0.0
    if HAS_SINK:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32)
    v_factor = load_scale(v_scale, kv_head, V_SCALE_KIND)
    if SPLIT:
        # One program per tile tells the combine kernel how many splits there are.
        if tl.program_id(1) == 0 and split == 0:
            tl.store(
                split_counts + token64,
                tl.zeros([BLOCK_M], tl.float32) + num_splits.to(tl.float32),
                mask=valid,
            )
        # The sink counts when the splits are combined (M4).
        factor, base2_lse = finish_rows(row_max, row_sum, sink, False)
        places = (token64 * num_heads + head) * num_splits + split
        store_rows(partials, places * DV, acc0, factor * v_factor, valid, DV, 0, DV0, 1)
        if DV1 > 0:
            store_rows(partials, places * DV, acc1, factor * v_factor, valid, DV, DV0, DV1, 1)
        lses = partials + num_tokens.to(tl.int64) * num_heads * num_splits * DV
        tl.store(lses + places, base2_lse, mask=valid)
    else:
        factor, base2_lse = finish_rows(row_max, row_sum, sink, HAS_SINK)
        offsets = token64 * stride_ot + head.to(tl.int64) * stride_oh
        store_rows(out, offsets, acc0, factor * v_factor, valid, DV, 0, DV0, VEC_O)
        if DV1 > 0:
            store_rows(out, offsets, acc1, factor * v_factor, valid, DV, DV0, DV1, VEC_O)
        if HAS_LSE:
            tl.store(lse + token64 * stride_lt + head, base2_lse * LN2, mask=valid)
