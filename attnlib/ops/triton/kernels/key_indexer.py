"""Choose the keys that queries attend to, by scores over a paged cache of index keys (M14).

Two kernels run in turn over chunks of the query tokens. The first writes the scores of a chunk to
the workspace. The second finds the best blocks of each row by radix selection over the bits of the
scores: exact, without sorting, and the same result at every call.

Work distribution: scores: one program per (tile of query tokens of a request, tile of keys), which
loads its keys once. Selection: one program per row of the workspace and head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.chunks import aligned
from attnlib.ops.triton.kernels.quant import decode_kv
from attnlib.ops.triton.kernels.schedule import find_request

__all__ = ["IndexConfig", "index_scores_kernel", "index_select_kernel"]

_UNSPECIALIZED = """
    num_reqs first_tile local_blocks columns num_tokens num_entries stride_table stride_qt
    stride_qh stride_wt stride_kb stride_kn stride_sb stride_sn stride_ot stride_oh
""".split()
_UNALIGNED = ["query_start_loc", "seq_lens", "block_table", "weights", "scales", "out"]


class IndexConfig(NamedTuple):
    """Constants of both kernels; the second one has HEADS, SELECT, TILE_TOKENS and LANES.

    Attributes:
        HEADS, HEADS_PAD: index heads, or lists of a token, and the rows of a product.
        SIZE, SIZE_PAD: elements of an index key.
        SELECT, SELECT_PAD: keys of an entry of the lists.
        BLOCK_SIZE: tokens per block of the cache.
        BLOCKS: entries of a program.
        TILE_TOKENS: query tokens of a tile.
        HAS_WEIGHTS, HAS_SCALES: weights of the heads, scales of the keys.
        KV_KIND, COMPUTE: elements of the cache, dtype of the products.
        VEC_Q, VEC_K: elements of which the offsets of rows are multiples.
        LANES: scores that a program examines at the same time.
    """

    HEADS: int
    SELECT: int
    TILE_TOKENS: int
    LANES: int = 0
    HEADS_PAD: int = 0
    SIZE: int = 0
    SIZE_PAD: int = 0
    SELECT_PAD: int = 0
    BLOCK_SIZE: int = 0
    BLOCKS: int = 0
    HAS_WEIGHTS: bool = False
    HAS_SCALES: bool = False
    KV_KIND: int = 0
    COMPUTE: Any = None
    VEC_Q: int = 1
    VEC_K: int = 1


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
    stride_kn, stride_sb, stride_sn, CONFIG: tl.constexpr,
):  # fmt: skip
    """Write scores [tokens of the chunk, heads, columns] of BLOCKS blocks of SELECT keys.

    The keys of a program are [BLOCKS, SELECT_PAD] positions. Only visible keys are read.
    Grid: (tiles of the chunk, tiles of blocks).
    """
    BLOCKS: tl.constexpr = CONFIG.BLOCKS
    SELECT_PAD: tl.constexpr = CONFIG.SELECT_PAD
    HEADS_PAD: tl.constexpr = CONFIG.HEADS_PAD
    tile = first_tile + tl.program_id(0)
    request, start, first_token, query_len, seq_len = _row_span(
        query_start_loc, seq_lens, tile, num_reqs, CONFIG.TILE_TOKENS
    )
    if first_token >= query_len:
        return
    origin = seq_len - query_len
    end_token = tl.minimum(first_token + CONFIG.TILE_TOKENS, query_len)
    last = origin + end_token  # keys from here on are visible to no token of the tile
    first_block = tl.program_id(1) * BLOCKS
    if first_block * CONFIG.SELECT >= last:
        return
    lanes = tl.arange(0, BLOCKS * SELECT_PAD)
    blocks = first_block + lanes // SELECT_PAD
    positions = blocks * CONFIG.SELECT + lanes % SELECT_PAD
    inside = (lanes % SELECT_PAD < CONFIG.SELECT) & (positions < last)
    pages = tl.load(
        block_table
        + request.to(tl.int64) * stride_table
        + (positions.to(tl.uint32) // CONFIG.BLOCK_SIZE).to(tl.int32),
        mask=inside,
        other=0,
    ).to(tl.int64)
    within = (positions.to(tl.uint32) % CONFIG.BLOCK_SIZE).to(tl.int64)
    elements = tl.arange(0, CONFIG.SIZE_PAD)
    offsets = aligned(pages * stride_kb + within * stride_kn, CONFIG.VEC_K)
    keys = tl.load(
        key + offsets[:, None] + elements[None, :],
        mask=inside[:, None] & (elements < CONFIG.SIZE)[None, :],
        other=0.0,
    )
    keys = decode_kv(keys, CONFIG.KV_KIND, CONFIG.COMPUTE)
    factor = tl.full([BLOCKS * SELECT_PAD], 1.0, tl.float32)
    if CONFIG.HAS_SCALES:
        factor = tl.load(scales + pages * stride_sb + within * stride_sn, mask=inside, other=0.0)
    heads = tl.arange(0, HEADS_PAD)
    row = (tl.program_id(0) * CONFIG.TILE_TOKENS).to(tl.int64)
    own_blocks = first_block + tl.arange(0, BLOCKS)
    for token in range(first_token, end_token):
        offset = (start + token).to(tl.int64) * stride_qt + heads.to(tl.int64) * stride_qh
        q = tl.load(
            query + aligned(offset, CONFIG.VEC_Q)[:, None] + elements[None, :],
            mask=(heads < CONFIG.HEADS)[:, None] & (elements < CONFIG.SIZE)[None, :],
            other=0.0,
        ).to(CONFIG.COMPUTE)
        scores = (
            tl.dot(keys, tl.trans(q), input_precision="ieee") * factor[:, None]
        )  # [keys, heads]
        position = origin + token
        visible = inside & (positions <= position)
        nearest = position // CONFIG.SELECT - local_blocks
        local = (own_blocks * CONFIG.SELECT <= position) & (own_blocks > nearest)
        if CONFIG.HAS_WEIGHTS:
            w = tl.load(
                weights + (start + token).to(tl.int64) * stride_wt + heads,
                mask=heads < CONFIG.HEADS,
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
            target = ((row + token - first_token) * CONFIG.HEADS + heads)[None, :] * columns
            tl.store(
                workspace + target + own_blocks[:, None],
                best,
                mask=(own_blocks < columns)[:, None] & (heads < CONFIG.HEADS)[None, :],
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
    num_entries, stride_ot, stride_oh, CONFIG: tl.constexpr,
):  # fmt: skip
    """Write the blocks with the largest scores of one row and head, in ascending order.

    Grid: (rows of the chunk, heads).
    """
    head = tl.program_id(1)
    tile = first_tile + tl.program_id(0) // CONFIG.TILE_TOKENS
    request, start, first_token, query_len, seq_len = _row_span(
        query_start_loc, seq_lens, tile, num_reqs, CONFIG.TILE_TOKENS
    )
    token = first_token + tl.program_id(0) % CONFIG.TILE_TOKENS
    lanes = tl.arange(0, CONFIG.LANES)
    limit = query_len
    if request == num_reqs:
        limit = num_tokens - start  # rows past the last request get empty lists
    if token >= limit:
        return
    entries = out + (start + token).to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh
    position = seq_len - query_len + token
    count = tl.where(query_len > 0, tl.maximum((position + CONFIG.SELECT) // CONFIG.SELECT, 0), 0)
    if position < 0:
        count = 0
    if request == num_reqs:
        count = 0
    if count <= num_entries:
        for base in range(0, num_entries, CONFIG.LANES):
            places = base + lanes
            tl.store(
                entries + places, tl.where(places < count, places, -1), mask=places < num_entries
            )
        return

    scores = workspace + (tl.program_id(0).to(tl.int64) * CONFIG.HEADS + head) * columns
    # The largest number that at least `num_entries` scores reach, 8 bits at a time.
    threshold = tl.full([1], 0, tl.uint32)
    remaining = num_entries
    bins = tl.arange(0, 256)
    for shift in tl.static_range(24, -8, -8):
        histogram = tl.zeros([256], tl.int32)
        for base in range(0, count, CONFIG.LANES):
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
    for base in range(0, count, CONFIG.LANES):
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
