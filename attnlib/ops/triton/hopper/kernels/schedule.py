"""Which tile a work item is, and which keys that tile visits; computed on the device, by each partition for itself.

The number of items comes from upper bounds alone, so a captured graph replays right with other lengths.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["find_tile", "row_span", "visited_tiles"]


@gluon.jit
def find_tile(
    item,
    query_start_loc,
    num_reqs,
    num_tiles,
    section,
    NUM_KV_HEADS: gl.constexpr,
    TILE_TOKENS: gl.constexpr,
):
    """(request, its first row, first token of the tile within the request, KV head) of a work item.

    Items come in sections of `section` KV heads, whose keys and values stay in the L2 cache together. Within one they
    run from the last tile to the first, all its heads beside each other, so that under a causal mask the longest rows
    start first. Request r owns the tiles from start[r] // TILE_TOKENS + r on; `num_reqs` stands for the rows after the
    last request.
    """
    per_section = num_tiles * section
    within = item % per_section
    tile = num_tiles - 1 - within // section
    kv_head = item // per_section * section + within % section
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = 128
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    request = 0
    for base in range(1, num_reqs + 1, LANES):
        lanes = base + gl.arange(0, LANES, layout)
        mask = lanes <= num_reqs
        begins = gl.load(query_start_loc + lanes, mask=mask, other=0) // TILE_TOKENS + lanes
        request += gl.sum((mask & (begins <= tile)).to(gl.int32), 0)
    start = gl.load(query_start_loc + request)
    first_token = (tile - (start // TILE_TOKENS + request)) * TILE_TOKENS
    return request, start, first_token, kv_head


@gluon.jit
def row_span(position, seq_len, left, right, chunk, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr,
             HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr):  # fmt: skip
    """[first, last) of the keys that a query at `position` sees (M1, M2); empty when last <= first."""
    first = position * 0
    last = first + seq_len
    if CAUSAL:
        last = gl.minimum(last, position + 1)
    if HAS_LEFT:
        first = gl.maximum(first, position - left)
    if HAS_RIGHT:
        last = gl.minimum(last, position + right + 1)
    if HAS_CHUNK:
        begin = gl.maximum(position, 0) // chunk * chunk
        first = gl.maximum(first, begin)
        last = gl.where(position < 0, 0, gl.minimum(last, begin + chunk))
    return first, last


@gluon.jit
def visited_tiles(first_token, query_len, seq_len, left, right, chunk, TILE_TOKENS: gl.constexpr,
                  BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
                  HAS_CHUNK: gl.constexpr):  # fmt: skip
    """(begin, left_end, right_begin, end): key tiles [begin, end) are visited, and those in [left_end, right_begin)
    are seen whole by every row of the tile. begin <= left_end <= right_begin <= end."""
    last_token = gl.minimum(first_token + TILE_TOKENS, query_len) - 1
    shift = seq_len - query_len
    first_low, last_low = row_span(
        first_token + shift, seq_len, left, right, chunk, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK
    )
    first_high, last_high = row_span(
        last_token + shift, seq_len, left, right, chunk, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK
    )
    begin = gl.maximum(first_low, 0) // BLOCK_N
    end = gl.maximum((gl.maximum(last_high, 0) + BLOCK_N - 1) // BLOCK_N, begin)
    right_begin = gl.minimum(gl.maximum(gl.maximum(last_low, 0) // BLOCK_N, begin), end)
    left_end = begin
    if HAS_LEFT or HAS_CHUNK:
        left_end = gl.minimum(
            gl.maximum((gl.maximum(first_high, 0) + BLOCK_N - 1) // BLOCK_N, begin), right_begin
        )
    return begin, left_end, right_begin, end
