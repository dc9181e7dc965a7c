"""Map work tiles of a prefill to query tiles, and these to the key tiles of a score function.

The number of work tiles follows from upper bounds alone, so a captured CUDA graph replays correctly
with other sequence lengths.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.ranges import add

__all__ = [
    "bounded_tiles",
    "find_split_tile",
    "find_tile",
]


@gluon.jit
def find_tile(
    number,
    query_start_loc,
    num_reqs,
    num_tiles,
    l2_heads,
    NUM_KV_HEADS: gl.constexpr,
    TILE_TOKENS: gl.constexpr,
    PARTIAL: gl.constexpr = 1,
):
    """Return (request, its first row, first token of the tile in the request, KV head) of the work
    tile with a number.

    The KV heads are divided into groups of `l2_heads`, whose keys and values fit in the L2 cache
    together. Within a group work tiles run from the last query tile to the first with all heads of
    a query tile adjacent, so that under a causal mask the longest rows start first. Request r owns
    the query tiles from start[r] // TILE_TOKENS + PARTIAL * r on, of which at most PARTIAL are
    incomplete; `num_reqs` denotes the rows after the last request.
    """
    per_group = num_tiles * l2_heads
    within = number % per_group
    tile = num_tiles - 1 - within // l2_heads
    kv_head = number // per_group * l2_heads + within % l2_heads
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = 128
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    # The tile's request is the number of requests (from the second on) that begin at or before it,
    # because their first tiles increase strictly. One pass of loads replaces a binary search.
    request = 0
    for base in range(1, num_reqs + 1, LANES):
        lanes = base + gl.arange(0, LANES, layout)
        mask = lanes <= num_reqs
        begins = (
            gl.load(query_start_loc + lanes, mask=mask, other=0) // TILE_TOKENS + PARTIAL * lanes
        )
        request += gl.sum((mask & (begins <= tile)).to(gl.int32), 0)
    start = gl.load(query_start_loc + request)
    first_token = (tile - (start // TILE_TOKENS + PARTIAL * request)) * TILE_TOKENS
    return request, start, first_token, kv_head


@gluon.jit
def find_split_tile(
    number,
    query_start_loc,
    num_reqs,
    HEADS: gl.constexpr,
    TILE_TOKENS: gl.constexpr,
):
    """Return the same as `find_tile` where the query tiles of all requests follow each other, and
    then those of the rows after the last request.

    Tiles without rows have the last numbers. Where keys are divided, all others begin at once:
    the CTAs would otherwise claim them one after the other.
    """
    tile = number // HEADS
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = 128
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    request = 0
    before = 0
    seen = 0
    for base in range(0, num_reqs, LANES):
        lanes = base + gl.arange(0, LANES, layout)
        mask = lanes < num_reqs
        starts = gl.load(query_start_loc + lanes, mask=mask, other=0)
        ends = gl.load(query_start_loc + lanes + 1, mask=mask, other=0)
        tiles = (ends - starts + TILE_TOKENS - 1) // TILE_TOKENS
        last_tiles = seen + gl.associative_scan(tiles, 0, add)
        past = mask & (last_tiles <= tile)
        request += gl.sum(past.to(gl.int32), 0)
        before = gl.maximum(before, gl.max(gl.where(past, last_tiles, 0), 0))
        seen += gl.sum(tiles, 0)
    start = gl.load(query_start_loc + request)
    return request, start, (tile - before) * TILE_TOKENS, number % HEADS


@gluon.jit
def _tile_numbers(first_low, last_high, first_high, last_low, least, BLOCK_N: gl.constexpr):
    """Return (begin, left_end, right_begin, end) of [first_low, last_high), from tile `least` on.

    Keys in [first_high, last_low) are visible to every row.
    """
    begin = gl.maximum(gl.maximum(first_low, 0) // BLOCK_N, least)
    end = gl.maximum((gl.maximum(last_high, 0) + BLOCK_N - 1) // BLOCK_N, begin)
    right_begin = gl.minimum(gl.maximum(gl.maximum(last_low, 0) // BLOCK_N, begin), end)
    left_end = gl.maximum((gl.maximum(first_high, 0) + BLOCK_N - 1) // BLOCK_N, begin)
    return begin, gl.minimum(left_end, right_begin), right_begin, end


@gluon.jit
def bounded_tiles(
    mask,
    first_token,
    query_len,
    seq_len,
    head,
    request,
    aux,
    BOUNDS: gl.constexpr,
    RANGES: gl.constexpr,
    TILE_TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Return the key tiles of a query tile under a score function with one or two RANGES of keys.

    Tiles are numbered as if those between the ranges did not exist. `mailbox.TileRanges.at` gives
    their true numbers.

    Returns:
        (begin, left_end, right_begin, end) as `VisitedTiles`, and (left_end, right_begin) of the
        tiles of the second range that need no mask, its first tile, and the tiles before it that
        are left out. The last four are 0 with one range.
    """
    last_token = gl.minimum(first_token + TILE_TOKENS, query_len) - 1
    shift = seq_len - query_len
    first_low, last_low = mask.span(first_token + shift, seq_len)
    first_high, last_high = mask.span(last_token + shift, seq_len)
    left_b = 0
    right_b = 0
    after_gap = 0
    gap = 0
    if RANGES == 1:
        low, high, same_low, same_high = BOUNDS(
            first_token + shift, last_token + shift, seq_len, head, request, aux
        )
    else:
        low, high, same_low, same_high, low_b, high_b, same_low_b, same_high_b = BOUNDS(
            first_token + shift, last_token + shift, seq_len, head, request, aux
        )
    begin, left_end, right_begin, end = _tile_numbers(
        gl.maximum(first_low, low),
        gl.minimum(last_high, high),
        gl.maximum(first_high, same_low),
        gl.minimum(last_low, same_high),
        0,
        BLOCK_N,
    )
    if RANGES == 2:
        after_gap = end
        begin_b, left_b, right_b, end_b = _tile_numbers(
            gl.maximum(first_low, low_b),
            gl.minimum(last_high, high_b),
            gl.maximum(first_high, same_low_b),
            gl.minimum(last_low, same_high_b),
            end,
            BLOCK_N,
        )
        gap = begin_b - end
        left_b -= gap
        right_b -= gap
        end = end_b - gap
    return begin, left_end, right_begin, end, left_b, right_b, after_gap, gap
