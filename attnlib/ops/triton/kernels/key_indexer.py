"""Choose the keys that queries attend to, by scores over a paged cache of index keys (M14).

Two kernels run in turn over chunks of the query tokens. The first writes the scores of a chunk to
the workspace. The second finds the best blocks of each row by radix selection over the bits of the
scores: exact, without sorting, and the same result at every call.

Work distribution: scores: one program per (tile of query tokens of a request, tile of keys), which
loads its keys once. Selection: one program per row of the workspace and head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.chunks import aligned
from attnlib.ops.triton.kernels.quant import decode_kv
from attnlib.ops.triton.kernels.schedule import find_request

__all__ = ["index_scores_kernel", "index_select_kernel"]

_UNSPECIALIZED = [
    "num_reqs", "first_tile", "local_blocks", "columns", "num_tokens", "num_entries",
    "stride_table", "stride_qt", "stride_qh", "stride_wt", "stride_kb", "stride_kn", "stride_sb",
    "stride_sn", "stride_ot", "stride_oh",
]  # fmt: skip
_UNALIGNED = ["query_start_loc", "seq_lens", "block_table", "weights", "scales", "out"]


@triton.jit
def _row_span(query_start_loc, seq_lens, tile, num_reqs, TILE_TOKENS: tl.constexpr):
    """Return (request, first row, first token in the request, query_len, seq_len) of a tile of
    query tokens. For rows past the last request, query_len is 0."""
    request = find_request(query_start_loc, tile, num_reqs, TILE_TOKENS, 128)
    start = tl.load(query_start_loc + request)
    first_token = (tile - (start // TILE_TOKENS + request)) * TILE_TOKENS
    query_len = 0
    seq_len = 0
    if request < num_reqs:
        query_len = tl.load(query_start_loc + request + 1) - start
        seq_len = tl.load(seq_lens + request)
    return request, start, first_token, query_len, seq_len


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=_UNALIGNED)
def index_scores_kernel(
    query, key, workspace, query_start_loc, seq_lens, block_table, weights, scales, num_reqs,
    first_tile, local_blocks, columns, stride_table, stride_qt, stride_qh, stride_wt, stride_kb,
    stride_kn, stride_sb, stride_sn, HAS_WEIGHTS: tl.constexpr, HAS_SCALES: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    SELECT: tl.constexpr, SELECT_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr, TILE_TOKENS: tl.constexpr, KV_KIND: tl.constexpr,
    COMPUTE: tl.constexpr, VEC_Q: tl.constexpr, VEC_K: tl.constexpr,
):  # fmt: skip
    """Write scores [tokens of the chunk, heads, columns] of BLOCKS blocks of SELECT keys.

    The keys of a program are [BLOCKS, SELECT_PAD] positions. Only visible keys are read.
    Grid: (tiles of the chunk, tiles of blocks).
    """
    tile = first_tile + tl.program_id(0)
    request, start, first_token, query_len, seq_len = _row_span(
        query_start_loc, seq_lens, tile, num_reqs, TILE_TOKENS
    )
    if first_token >= query_len:
        return
    origin = seq_len - query_len
    end_token = tl.minimum(first_token + TILE_TOKENS, query_len)
    last = origin + end_token  # keys from here on are visible to no token of the tile
    first_block = tl.program_id(1) * BLOCKS
    if first_block * SELECT >= last:
        return
    lanes = tl.arange(0, BLOCKS * SELECT_PAD)
    blocks = first_block + lanes // SELECT_PAD
    positions = blocks * SELECT + lanes % SELECT_PAD
    inside = (lanes % SELECT_PAD < SELECT) & (positions < last)
    pages = tl.load(
        block_table
        + request.to(tl.int64) * stride_table
        + (positions.to(tl.uint32) // BLOCK_SIZE).to(tl.int32),
        mask=inside,
        other=0,
    ).to(tl.int64)
    within = (positions.to(tl.uint32) % BLOCK_SIZE).to(tl.int64)
    elements = tl.arange(0, SIZE_PAD)
    offsets = aligned(pages * stride_kb + within * stride_kn, VEC_K)
    keys = tl.load(
        key + offsets[:, None] + elements[None, :],
        mask=inside[:, None] & (elements < SIZE)[None, :],
        other=0.0,
    )
    keys = decode_kv(keys, KV_KIND, COMPUTE)
    factor = tl.full([BLOCKS * SELECT_PAD], 1.0, tl.float32)
    if HAS_SCALES:
        factor = tl.load(scales + pages * stride_sb + within * stride_sn, mask=inside, other=0.0)
    heads = tl.arange(0, HEADS_PAD)
    row = (tl.program_id(0) * TILE_TOKENS).to(tl.int64)
    own_blocks = first_block + tl.arange(0, BLOCKS)
    for token in range(first_token, end_token):
        offset = (start + token).to(tl.int64) * stride_qt + heads.to(tl.int64) * stride_qh
        q = tl.load(
            query + aligned(offset, VEC_Q)[:, None] + elements[None, :],
            mask=(heads < HEADS)[:, None] & (elements < SIZE)[None, :],
            other=0.0,
        ).to(COMPUTE)
        scores = (
            tl.dot(keys, tl.trans(q), input_precision="ieee") * factor[:, None]
        )  # [keys, heads]
        position = origin + token
        visible = inside & (positions <= position)
        local = (own_blocks * SELECT <= position) & (own_blocks > position // SELECT - local_blocks)
        if HAS_WEIGHTS:
            w = tl.load(
                weights + (start + token).to(tl.int64) * stride_wt + heads,
                mask=heads < HEADS,
                other=0.0,
            )
            total = tl.sum(
                tl.maximum(scores, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[None, :], 1
            )
            total = tl.where(visible & (total == total), total, float("-inf"))
            best = tl.max(tl.reshape(total, [BLOCKS, SELECT_PAD]), 1)
            best = tl.where(local, float("inf"), best)
            tl.store(
                workspace + (row + token - first_token) * columns + own_blocks,
                best,
                mask=own_blocks < columns,
            )
        else:
            scores = tl.where(visible[:, None] & (scores == scores), scores, float("-inf"))
            best = tl.max(tl.reshape(scores, [BLOCKS, SELECT_PAD, HEADS_PAD]), 1)
            best = tl.where(local[:, None], float("inf"), best)
            target = ((row + token - first_token) * HEADS + heads)[None, :] * columns
            tl.store(
                workspace + target + own_blocks[:, None],
                best,
                mask=(own_blocks < columns)[:, None] & (heads < HEADS)[None, :],
            )


@triton.jit
def _ordered(scores):
    """Return float32 scores as uint32 in the same order; -0 counts as 0."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=_UNALIGNED)
def index_select_kernel(
    workspace, out, query_start_loc, seq_lens, num_reqs, first_tile, columns, num_tokens,
    num_entries, stride_ot, stride_oh, HEADS: tl.constexpr, SELECT: tl.constexpr,
    TILE_TOKENS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the blocks with the largest scores of one row and head, in ascending order.

    Grid: (rows of the chunk, heads).
    """
    head = tl.program_id(1)
    tile = first_tile + tl.program_id(0) // TILE_TOKENS
    request, start, first_token, query_len, seq_len = _row_span(
        query_start_loc, seq_lens, tile, num_reqs, TILE_TOKENS
    )
    token = first_token + tl.program_id(0) % TILE_TOKENS
    lanes = tl.arange(0, LANES)
    limit = query_len
    if request == num_reqs:
        limit = num_tokens - start  # rows past the last request get empty lists
    if token >= limit:
        return
    entries = out + (start + token).to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh
    position = seq_len - query_len + token
    count = tl.where(query_len > 0, tl.maximum((position + SELECT) // SELECT, 0), 0)
    if position < 0:
        count = 0
    if request == num_reqs:
        count = 0
    if count <= num_entries:
        for base in range(0, num_entries, LANES):
            places = base + lanes
            tl.store(
                entries + places, tl.where(places < count, places, -1), mask=places < num_entries
            )
        return

    scores = workspace + (tl.program_id(0).to(tl.int64) * HEADS + head) * columns
    # The largest number that at least `num_entries` scores reach, 8 bits at a time.
    threshold = tl.full([1], 0, tl.uint32)
    remaining = num_entries
    bins = tl.arange(0, 256)
    for shift in tl.static_range(24, -8, -8):
        histogram = tl.zeros([256], tl.int32)
        for base in range(0, count, LANES):
            places = base + lanes
            exists = places < count
            number = _ordered(tl.load(scores + places, mask=exists, other=0.0))
            if shift < 24:
                exists = exists & ((number >> (shift + 8)) == (threshold >> (shift + 8)))
            digit = ((number >> shift) & 255).to(tl.int32)
            histogram += tl.histogram(digit, 256, mask=exists)
        reach = tl.sum(histogram, 0) - tl.cumsum(histogram, 0) + histogram
        found = tl.max(tl.where(reach >= remaining, bins, 0), 0)
        remaining -= tl.sum(tl.where(bins == found, reach - histogram, 0), 0)
        threshold = threshold | (found.to(tl.uint32) << shift)
    # All scores above the threshold, and the first `remaining` of those equal to it.
    taken = 0
    equal_before = 0
    for base in range(0, count, LANES):
        places = base + lanes
        exists = places < count
        number = _ordered(tl.load(scores + places, mask=exists, other=0.0))
        equal = exists & (number == threshold)
        rank = equal_before + tl.cumsum(equal.to(tl.int32), 0)
        take = (exists & (number > threshold)) | (equal & (rank <= remaining))
        target = taken + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(entries + target, places, mask=take & (target < num_entries))
        taken += tl.sum(take.to(tl.int32), 0)
        equal_before += tl.sum(equal.to(tl.int32), 0)
