"""Find the work of a program on the device.

Grids come from upper bounds. The lengths in memory determine the rest, so that a launch needs no
length on the host, and a captured CUDA graph replays correctly with other lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.mask import visible_span

__all__ = ["balanced_tiles", "find_request", "request_tiles", "tile_share", "tiles_per_split"]


@triton.jit
def find_request(
    query_start_loc,
    tile,
    num_reqs,
    TILE_TOKENS: tl.constexpr,
    LANES: tl.constexpr,
    EXTRA: tl.constexpr = 1,
    lane=None,
):
    """Return the request of query tile `tile`; `num_reqs` denotes the rows after the last request.

    Request r owns the tiles from start[r] // TILE_TOKENS + r * EXTRA on. With EXTRA = 1 these are
    at least as many as it needs, at most one more, and strictly increasing in r. Gluon gives the
    numbers up to LANES as `lane`, which has a layout.
    """
    # The request is the number of requests (from the second on) that begin at or before the tile.
    # One pass of loads replaces a binary search.
    request = 0
    for base in range(1, num_reqs + 1, LANES):
        lanes = base + (tl.arange(0, LANES) if lane is None else lane)
        mask = lanes <= num_reqs
        begins = tl.load(query_start_loc + lanes, mask=mask, other=0) // TILE_TOKENS + lanes * EXTRA
        request += tl.sum((mask & (begins <= tile)).to(tl.int32), 0)
    return request


@triton.jit
def request_tiles(batch, request, exists, mask, aux, BOUNDS: tl.constexpr, CONFIG: tl.constexpr):
    """Return (first key tile, number of key tiles) visible to a request's queries.

    `request` is one request or a vector of requests, of which those that `exists` are read.
    """
    starts = batch.query_start_loc + request
    query_len = tl.load(starts + 1, mask=exists, other=0) - tl.load(starts, mask=exists, other=0)
    seq_len = tl.load(batch.seq_lens + request, mask=exists, other=0)
    causal = 0
    if CONFIG.CAUSAL == 2:
        causal = tl.load(batch.causal_flags + request, mask=exists, other=0).to(tl.int32)
    # The first query has the first visible key, the last query the last one.
    first, _ = visible_span(seq_len - query_len, seq_len, causal, mask, CONFIG)
    _, last = visible_span(seq_len - 1, seq_len, causal, mask, CONFIG)
    if BOUNDS is not None:
        low, high, _, _ = BOUNDS(seq_len - query_len, seq_len - 1, seq_len, request, aux)
        first = tl.maximum(first, low)
        last = tl.minimum(last, high)
    first_tile = first // CONFIG.BLOCK_N
    count = (tl.maximum(last, 0) + CONFIG.BLOCK_N - 1) // CONFIG.BLOCK_N - first_tile
    return first_tile, tl.where(query_len > 0, tl.maximum(count, 0), 0)


@triton.jit
def balanced_tiles(total, longest, num_splits, waves_per_split, CONFIG: tl.constexpr):
    """Return the number of key tiles in one split of any request, so that long requests get many.

    The batch counts as `total` / `longest` requests of the longest length. s splits of each of
    those make `waves_per_split` * s waves of programs per request.
    """
    # All candidates are evaluated at once, one per lane.
    splits = 1 + tl.arange(0, CONFIG.MAX_SPLITS)
    requests = total.to(tl.float32) / tl.maximum(longest, 1).to(tl.float32)
    waves = tl.maximum(requests * waves_per_split * splits.to(tl.float32), 1e-6)
    # Efficiency is the filled share of the waves. Fewer splits cost less to combine, so the
    # smallest candidate within 10% of the best efficiency is chosen.
    efficiency = tl.where(splits <= num_splits, waves / tl.ceil(waves), 0.0)
    enough = efficiency >= 0.9 * tl.max(efficiency, 0)
    chosen = tl.min(tl.where(enough, splits, CONFIG.MAX_SPLITS), 0)
    chosen = tl.minimum(chosen, num_splits)
    return tl.maximum((longest + chosen - 1) // chosen, CONFIG.MIN_TILES)


@triton.jit
def tiles_per_split(
    batch,
    own_tiles,
    num_splits,
    waves_per_split,
    mask,
    aux,
    BOUNDS: tl.constexpr,
    LANES: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Return the number of key tiles in one split.

    Without BALANCED a request is cut into `num_splits` splits, independently of the other requests.
    With BALANCED all requests are cut into splits of one size (`balanced_tiles`).
    """
    if CONFIG.BALANCED:
        total = 0
        longest = 0
        for base in range(0, batch.num_reqs, LANES):
            lanes = base + tl.arange(0, LANES)
            _, tiles = request_tiles(
                batch, lanes, lanes < batch.num_reqs, mask, aux, BOUNDS, CONFIG
            )
            total += tl.sum(tiles, 0)
            longest = tl.maximum(longest, tl.max(tiles, 0))
        per_split = balanced_tiles(total, longest, num_splits, waves_per_split, CONFIG)
    else:
        per_split = tl.maximum((own_tiles + num_splits - 1) // num_splits, 1)
    return per_split


@triton.jit
def tile_share(tile, split, num_splits, mask, CONFIG: tl.constexpr):
    """Return the keys [begin, end) of a split of a query tile of a prefill; none for some splits of
    few key tiles."""
    position = tile.seq_len - tile.query_len
    first, _ = visible_span(position + tile.first_token, tile.seq_len, tile.causal, mask, CONFIG)
    _, last = visible_span(position + tile.last_token, tile.seq_len, tile.causal, mask, CONFIG)
    first_tile = first // CONFIG.BLOCK_N
    tiles = (tl.maximum(last, 0) + CONFIG.BLOCK_N - 1) // CONFIG.BLOCK_N - first_tile
    size = (tl.maximum(tiles, 0) + num_splits - 1) // num_splits
    begin = (first_tile + split * size) * CONFIG.BLOCK_N
    return begin, begin + size * CONFIG.BLOCK_N
