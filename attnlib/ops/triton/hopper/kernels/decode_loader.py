"""The loader warps of the Hopper decode, and the range of key tiles of a worker."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import (
    Value,
    aggregate,
    prefetch_l1,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.decode_call import Split
from attnlib.ops.triton.hopper.kernels.decode_worker import elements_per_word
from attnlib.ops.triton.hopper.kernels.gather import RequestRows
from attnlib.ops.triton.hopper.kernels.ranges import even_worker_range, worker_range
from attnlib.ops.triton.hopper.kernels.tma_load import RequestPages
from attnlib.ops.triton.hopper.kernels.token_scales import copy_token_scales, scales_weights
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["WorkerShare", "first_share", "loader", "second_share", "worker_share"]

_GATHER_AHEAD = gl.constexpr(3)
"""Tiles between the one whose rows are gathered and the one whose block numbers are prefetched."""


@aggregate
class WorkerShare:
    """The part of a launch that a worker computes.

    Fields:
        worker, num_workers: its number in the grid, and theirs.
        num_ranges: workers of a KV head.
        gap: empty positions of the line after the tiles of a request.
        range: `TileRange`.
        kv_head: KV head.
    """

    worker: Value
    num_workers: Value
    num_ranges: Value
    gap: Value
    range: Value
    kv_head: Value


@gluon.jit
def worker_share(keys, WORKER: gl.constexpr, config):
    """Return the `WorkerShare` of a worker of this CTA; `keys` are the `KeyTiles` of the batch."""
    worker = gl.program_id(0)
    num_workers = gl.num_programs(0)
    if config.WORKERS > 1:
        worker = worker * config.WORKERS + WORKER
        num_workers = num_workers * config.WORKERS
    num_ranges = num_workers // config.NUM_KV_HEADS
    # The queries, the first scores and the output of a request take about the time of a tile.
    # Without gaps, ranges of many short requests ended last beside those of a long one. With fewer
    # requests than ranges there is no gap.
    gap = (keys.batch.num_reqs > num_ranges).to(gl.int32)
    index = worker // config.NUM_KV_HEADS
    if config.EVEN_RANGES:
        own = even_worker_range(keys, index, num_ranges, gap)
    else:
        own = worker_range(keys, index, num_ranges, gap)
    return WorkerShare(worker, num_workers, num_ranges, gap, own, worker % config.NUM_KV_HEADS)


@gluon.jit
def first_share(call):
    """Return the `WorkerShare` of the first worker of this CTA."""
    if call.early == 0:
        # PDL: the previous kernel may have written the lengths.
        wait_on_dependent_grids()
    return worker_share(call.keys, 0, call.config)


@gluon.jit
def second_share(call, first):
    """Return the `WorkerShare` of the second worker of this CTA, which often has the same range."""
    if call.config.NUM_KV_HEADS % 2 == 0:
        return WorkerShare(
            first.worker + 1,
            first.num_workers,
            first.num_ranges,
            first.gap,
            first.range,
            first.kv_head + 1,
        )
    else:
        return worker_share(call.keys, 1, call.config)


@gluon.jit
def _load_split(
    call, worker, split, position, before, step, KEYS: gl.constexpr, VALUES: gl.constexpr
):
    """Load the keys and scales, the values, or both of a split; return the steps after it.

    Args:
        position, before: positions of the line where the split and its request begin.
        step: number of tiles that this loader has loaded.
    """
    config: gl.constexpr = call.config
    BLOCK_SIZE: gl.constexpr = config.BLOCK_SIZE
    caches = call.caches
    batch = call.keys.batch
    num_blocks, table = batch.num_blocks, batch.table(split.request)
    pages = (split.seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
    if config.K_KIND != KV_PLAIN and not config.HAS_LEFT and not config.HAS_CHUNK:
        # The first pages of the next request. Over 16-bit caches this gained nothing.
        following = gl.minimum(split.request + 1, batch.num_reqs - 1)
        prefetch_l1(batch.table(following))
    # Scales of weights are needed with the keys, those of elements with the values.
    SCALES: gl.constexpr = "keys and values" if scales_weights(config.V_KIND) else "keys"
    K_LAYOUT: gl.constexpr = "packed_keys" if config.PACKED else "nhd"
    V_LAYOUT: gl.constexpr = "packed_values" if config.PACKED else "nhd"
    for i in range(0, split.count):
        tile = split.visited.begin + (position + i - before)
        # 32 pages ahead: one 128-byte line of the block table.
        later = tile * config.BLOCK_N // BLOCK_SIZE + 32
        if config.GATHERS and KEYS:
            rows = RequestRows(
                caches.keys,
                table,
                split.seq_len,
                split.kv_head,
                caches.stride_kb,
                caches.stride_kn,
                caches.stride_kh,
                config.D // elements_per_word(config.K_KIND),
                BLOCK_SIZE,
            )
            rows.load(worker.keys, step, tile, tile + _GATHER_AHEAD)
        elif config.GATHERS:
            rows = RequestRows(
                caches.values,
                table,
                split.seq_len,
                split.kv_head,
                caches.stride_vb,
                caches.stride_vn,
                caches.stride_vh,
                config.DV // elements_per_word(config.V_KIND),
                BLOCK_SIZE,
            )
            rows.load(worker.values, step, tile, tile + _GATHER_AHEAD)
        else:
            if KEYS:
                keys = RequestPages(
                    caches.keys, table, pages, num_blocks, split.kv_head, BLOCK_SIZE, K_LAYOUT
                )
                keys.load(worker.keys, step, tile, later)
                if worker.scales is not None:
                    # The stage is free: the loads of the tile have waited for it.
                    copy_token_scales(
                        worker.scales,
                        table,
                        pages,
                        num_blocks,
                        split.kv_head,
                        tile,
                        worker.keys.stage(step),
                        worker.keys.full,
                        BLOCK_SIZE,
                        SCALES,
                    )
            if VALUES:
                values = RequestPages(
                    caches.values, table, pages, num_blocks, split.kv_head, BLOCK_SIZE, V_LAYOUT
                )
                values.load(worker.values, step, tile, later)
                if SCALES == "keys":
                    copy_token_scales(
                        worker.scales,
                        table,
                        pages,
                        num_blocks,
                        split.kv_head,
                        tile,
                        worker.values.stage(step),
                        worker.values.full,
                        BLOCK_SIZE,
                        "values",
                    )
        step += 1
    return step


@gluon.jit
def loader(call, worker, share, LOADS: gl.constexpr):
    """Load what LOADS says of a worker's range, split after split: "keys", with the scales of pages
    that hold them, "values" or "keys and values". One warp; 4 where rows are gathered.

    Args:
        call: `DecodeCall`.
        worker: `Worker`.
        share: its `WorkerShare`; None for the only worker of a CTA, whose warps find it.
    """
    KEYS: gl.constexpr = LOADS == "keys" or LOADS == "keys and values"
    VALUES: gl.constexpr = LOADS == "values" or LOADS == "keys and values"
    keys = call.keys
    if call.early == 0:
        # PDL: the previous kernel may have written the cache, the lengths or the block table.
        wait_on_dependent_grids()
    if share is None:
        share = worker_share(keys, 0, call.config)
    position = share.range.begin
    request = share.range.request
    before = share.range.before
    step = 0
    while position < share.range.end:
        tiles = keys.count(request, True)
        request_end = before + tiles
        # Requests without queries have no tiles and are skipped.
        if position < request_end:
            start, query_len, seq_len = keys.batch.lengths(request, True)
            count = gl.minimum(share.range.end, request_end) - position
            visited = keys.visited(0, query_len, seq_len, request)
            split = Split(request, start, query_len, seq_len, share.kv_head, None, count, visited)
            step = _load_split(call, worker, split, position, before, step, KEYS, VALUES)
            position += count
        before = request_end + gl.where(tiles > 0, share.gap, 0)
        position = gl.maximum(position, before)
        request += 1
