"""How a program finds its work on the device: grids come from upper bounds, and only lengths in memory say the rest.

So a launch needs no length on the host, and a captured CUDA graph replays right with other lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.mask import visible_span

__all__ = ["find_request", "request_tiles", "tiles_per_split"]


@triton.jit
def find_request(query_start_loc, tile, num_reqs, TILE_TOKENS: tl.constexpr, LANES: tl.constexpr):
    """The request that query tile `tile` belongs to; `num_reqs` stands for the tokens after the last request.

    Request r owns the tiles from start[r] // TILE_TOKENS + r on: at least as many as it needs, at most one more, and
    strictly increasing in r. Counting the requests that begin at or before the tile needs one pass of loads.
    """
    request = 0
    for base in range(1, num_reqs + 1, LANES):
        lanes = base + tl.arange(0, LANES)
        mask = lanes <= num_reqs
        begins = tl.load(query_start_loc + lanes, mask=mask, other=0) // TILE_TOKENS + lanes
        request += tl.sum((mask & (begins <= tile)).to(tl.int32), 0)
    return request


@triton.jit
def request_tiles(query_start_loc, seq_lens, causal_flags, request, mask, left, right, chunk, BLOCK_N: tl.constexpr,
                  CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
                  HAS_CHUNK: tl.constexpr):  # fmt: skip
    """(first key tile, number of key tiles) that the queries of a request see; for one request or a vector of them."""
    query_len = tl.load(query_start_loc + request + 1, mask=mask, other=0) - tl.load(
        query_start_loc + request, mask=mask, other=0
    )
    seq_len = tl.load(seq_lens + request, mask=mask, other=0)
    causal = 0
    if CAUSAL == 2:
        causal = tl.load(causal_flags + request, mask=mask, other=0).to(tl.int32)
    first, _ = visible_span(
        seq_len - query_len,
        seq_len,
        causal,
        left,
        right,
        chunk,
        CAUSAL,
        HAS_LEFT,
        HAS_RIGHT,
        HAS_CHUNK,
    )
    _, last = visible_span(
        seq_len - 1, seq_len, causal, left, right, chunk, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK
    )
    first_tile = first // BLOCK_N
    count = (tl.maximum(last, 0) + BLOCK_N - 1) // BLOCK_N - first_tile
    return first_tile, tl.where(query_len > 0, tl.maximum(count, 0), 0)


@triton.jit
def tiles_per_split(query_start_loc, seq_lens, causal_flags, num_reqs, own_tiles, num_splits, load_per_split, left,
                    right, chunk, BALANCED: tl.constexpr, MIN_TILES: tl.constexpr, MAX_SPLITS: tl.constexpr,
                    LANES: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr,
                    HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr):  # fmt: skip
    """How many key tiles one split takes.

    Without BALANCED a request is cut into `num_splits` parts, whatever its neighbours are. With it, all requests are
    cut into pieces of one size, so that long ones get many splits: the batch counts as (all tiles / longest request)
    requests of the longest length, s splits of those fill `load_per_split` * s waves of the chip each, and the smallest
    s that wastes nearly as little of its last wave as the best one is taken.
    """
    if BALANCED:
        total = 0
        longest = 0
        for base in range(0, num_reqs, LANES):
            lanes = base + tl.arange(0, LANES)
            _, tiles = request_tiles(query_start_loc, seq_lens, causal_flags, lanes, lanes < num_reqs, left, right,
                                     chunk, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            total += tl.sum(tiles, 0)
            longest = tl.maximum(longest, tl.max(tiles, 0))
        splits = 1 + tl.arange(0, MAX_SPLITS)
        requests = total.to(tl.float32) / tl.maximum(longest, 1).to(tl.float32)
        waves = tl.maximum(requests * load_per_split * splits.to(tl.float32), 1e-6)
        efficiency = tl.where(splits <= num_splits, waves / tl.ceil(waves), 0.0)
        enough = efficiency >= 0.9 * tl.max(efficiency, 0)
        chosen = tl.min(tl.where(enough, splits, MAX_SPLITS), 0)
        chosen = tl.minimum(chosen, num_splits)
        per_split = tl.maximum((longest + chosen - 1) // chosen, MIN_TILES)
    else:
        per_split = tl.maximum((own_tiles + num_splits - 1) // num_splits, 1)
    return per_split
