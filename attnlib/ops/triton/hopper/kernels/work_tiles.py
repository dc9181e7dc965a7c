"""Selection of the work tiles of a Hopper prefill, by the warp that publishes them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.mailbox import TileRanges, WorkTile
from attnlib.ops.triton.hopper.kernels.query_tiles import (
    bounded_tiles,
    find_split_tile,
    find_tile,
)

__all__ = ["find_ranges", "find_work", "last_work"]


@gluon.jit
def find_work(call, number, ALIGNED: gl.constexpr):
    """Return (request, start, first_token, kv_head, query_len, seq_len) of a work tile."""
    HEADS: gl.constexpr = call.config.NUM_KV_HEADS * call.config.SHARED
    if call.config.SPLIT:
        request, start, first_token, kv_head = find_split_tile(
            number,
            call.batch.query_start_loc,
            call.batch.num_reqs,
            HEADS,
            call.config.TILE_TOKENS,
        )
    else:
        request, start, first_token, kv_head = find_tile(
            number,
            call.batch.query_start_loc,
            call.batch.num_reqs,
            call.num_tiles,
            call.l2_heads,
            HEADS,
            call.config.TILE_TOKENS,
            2 if ALIGNED else 1,
        )
    query_len = call.num_tokens - start
    seq_len = 0
    if request < call.batch.num_reqs:
        query_len = gl.load(call.batch.query_start_loc + request + 1) - start
        seq_len = gl.load(call.batch.seq_lens + request)
        if call.config.BLOCK_SIZE == 0:
            # Keys without pages: `seq_lens` are the first rows of the requests.
            seq_len = gl.load(call.batch.seq_lens + request + 1) - seq_len
        if ALIGNED:
            context = gl.where(query_len > 0, gl.maximum(seq_len - query_len, 0), 0)
            first_token -= context % call.config.TILE_TOKENS
    return request, start, first_token, kv_head, query_len, seq_len


@gluon.jit
def find_ranges(call, request, first_token, kv_head, query_len, seq_len):
    """Return the `TileRanges` of a work tile with bounds; empty ones without bounds.

    Bounds may look tensors up, so they are evaluated here for all partitions.
    """
    begin = 0
    end = 0
    after_gap = 0
    gap = 0
    left_end = 0
    right_begin = 0
    left_b = 0
    right_b = 0
    if call.config.RANGES > 0:
        if request < call.batch.num_reqs:
            begin, left_end, right_begin, end, left_b, right_b, after_gap, gap = bounded_tiles(
                call.mask,
                first_token,
                query_len,
                seq_len,
                kv_head,
                request,
                call.aux,
                call.BOUNDS,
                call.config.RANGES,
                call.config.TILE_TOKENS,
                call.config.BLOCK_N,
            )
    return TileRanges(
        begin, left_end, right_begin, end, left_b, right_b, after_gap, gap, call.config.RANGES
    )


@gluon.jit
def last_work(RANGES: gl.constexpr):
    """Return the `WorkTile` that ends the loops of all partitions."""
    return WorkTile(-1, 0, 0, 0, 0, 0, 0, TileRanges(0, 0, 0, 0, 0, 0, 0, 0, RANGES))
