"""Map work tiles of a prefill to query tiles, and these to the key tiles of a score function.

The number of work tiles follows from upper bounds alone, so a captured CUDA graph replays correctly
with other sequence lengths.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.ranges import add

__all__ = [
    "bounded_tiles",
    "find_tile",
]


@gluon.jit
def _tile_counts(batch, request, num_tokens, TILE_TOKENS: gl.constexpr, ALIGNED: gl.constexpr):
    """Return (first rows, query tiles) of a vector of requests, as `find_tile` numbers them."""
    exists = (request >= 0) & (request < batch.num_reqs)
    start = gl.load(batch.query_start_loc + request, mask=(request >= 0), other=num_tokens)
    end = gl.load(batch.query_start_loc + request + 1, mask=exists, other=num_tokens)
    rows = gl.maximum(end - start, 0)
    if ALIGNED:
        seq_len = gl.load(batch.seq_lens + request, mask=exists, other=0)
        context = gl.where(rows > 0, gl.maximum(seq_len - rows, 0), 0)
        rows += context % TILE_TOKENS
    return start, (rows + TILE_TOKENS - 1) // TILE_TOKENS


@gluon.jit
def find_tile(
    number,
    batch,
    num_tokens,
    num_tiles,
    l2_heads,
    NUM_KV_HEADS: gl.constexpr,
    TILE_TOKENS: gl.constexpr,
    ALIGNED: gl.constexpr = False,
):
    """Return (request, its first row, first token of the tile in the request, KV head) of the work
    tile with a number.

    The KV heads are divided into groups of `l2_heads`, whose keys and values fit in the L2 cache
    together. Within a group work tiles run from the last query tile to the first with all heads of
    a query tile adjacent, so that under a causal mask the longest rows start first. The request
    `num_reqs` denotes the rows after the last request; numbers past the last tile of a group, of
    which `num_tiles` is a bound, have the request -1 and no token. ALIGNED tiles begin at positions
    that are multiples of TILE_TOKENS: the first one of a request may begin before its first token.
    """
    per_group = num_tiles * l2_heads
    within = number % per_group
    tile = within // l2_heads
    kv_head = number // per_group * l2_heads + within % l2_heads
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = 128
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    # One pass of loads and a scan replace a binary search. Lanes are requests from the last one.
    found = 0
    start = 0
    last = 0
    seen = 0
    for base in range(0, batch.num_reqs + 1, LANES):
        lanes = base + gl.arange(0, LANES, layout)
        starts, counts = _tile_counts(
            batch, batch.num_reqs - lanes, num_tokens, TILE_TOKENS, ALIGNED
        )
        ends = seen + gl.associative_scan(counts, 0, add)
        here = (ends > tile) & (ends - counts <= tile)
        found += gl.sum(gl.where(here, lanes + 1, 0), 0)
        start += gl.sum(gl.where(here, starts, 0), 0)
        last += gl.sum(gl.where(here, ends, 0), 0)
        seen += gl.sum(counts, 0)
    request = gl.where(found > 0, batch.num_reqs + 1 - found, -1)
    first_token = gl.where(found > 0, (last - 1 - tile) * TILE_TOKENS, num_tokens)
    return request, start, first_token, kv_head


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
