"""Loader warps of the Hopper prefill: one that loads queries and keys, one that loads values.

The key loader selects work tiles and publishes them in the mailbox. There are two loaders, because
a single one would wait for a free value stage while a key stage is free. Ring positions continue
across work tiles. A grid smaller than the number of work tiles is persistent: CTAs take further
ones from a counter in global memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.ops.triton.hopper.kernels.compat import (
    load_box,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.mailbox import TileRanges, WorkTile
from attnlib.ops.triton.hopper.kernels.work_counter import (
    atomic_increment,
    incremented,
    issue_increment,
)
from attnlib.ops.triton.hopper.kernels.work_tiles import find_ranges, find_work, last_work

__all__ = ["key_loader", "value_loader"]

_STEPS_AHEAD = gl.constexpr(4)
"""Steps before the end of a work tile at which the next one is claimed: early enough to hide the
latency of the atomic, and no earlier, because idle CTAs cannot take a claimed tile."""


@gluon.jit
def _load_queries(call, queries, query_desc, work, loaded):
    """Issue the loads of the queries of a work tile, the one with number `loaded`."""
    GROUP: gl.constexpr = call.config.GROUP
    ring = queries.ring
    BYTES: gl.constexpr = queries.BLOCKS * 64 * queries.KEY_PARTS * ring.memory.shape[2] * 2
    stage = loaded % ring.STAGES
    if not queries.OWN_QUERIES:
        # Wait until all consumers have released the queries of Q_STAGES work tiles ago.
        mbarrier.wait(ring.empty.index(stage), queries.parity(loaded) ^ 1)
        mbarrier.expect(ring.full.index(stage), BYTES)
    first_row = work.start + work.first_token
    # One box for each 64 rows: 64 // GROUP tokens, or 64 heads of one token.
    for block in gl.static_range(queries.BLOCKS):
        barrier = queries.barrier(stage, block)
        if queries.OWN_QUERIES:
            mbarrier.wait(ring.empty.index(barrier), queries.parity(loaded) ^ 1)
            mbarrier.expect(ring.full.index(barrier), BYTES // queries.CONSUMERS)
        for part in gl.static_range(queries.KEY_PARTS):
            column = part * ring.memory.shape[2]
            if GROUP <= 64:
                row = first_row + block * (64 // GROUP)
                head = work.kv_head * GROUP
            else:
                row = first_row
                head = work.kv_head * GROUP + block * 64
            load_box(
                query_desc,
                [row, head, column],
                ring.full.index(barrier),
                queries.tile(stage * queries.BLOCKS + block, part),
            )


@gluon.jit
def _load_key_tile(call, source, work, tiles, table, pages, keys, end, back, step, first_step):
    """Load the keys of tile `end - 1 - back`; where rows are gathered also the values of the tile
    that was visited before it, which the consumers need later and whose stage becomes free later.
    """
    tile = tiles.at(end - 1 - back)
    if call.config.GATHERS:
        previous = tiles.at(end - back)
        source.load_keys(call, work, table, keys, tile, step)
        if step > first_step:
            source.load_values(call, work, table, previous, tile - 2, step - 1)
    else:
        source.load(call, work, table, pages, keys, tile, step)


@gluon.jit
def key_loader(call, storage, source, query_desc, ALIGNED: gl.constexpr = False):
    """Select and publish work tiles; load queries and keys. One warp, or 4 that gather.

    Runs ahead of the consumers, over the borders of work tiles, as far as the rings allow.

    Args:
        call: `PrefillCall`.
        storage: `PrefillStorage`.
        source: `CacheSource` of the keys, or `GatherSource`.
        query_desc: TMA descriptor of the queries; None without LOAD_QUERY.
        ALIGNED: query tiles begin at positions that are multiples of TILE_TOKENS: the first one of
            a request may begin before its first token.
    """
    PERSISTENT: gl.constexpr = call.config.PERSISTENT
    FEW_TILES: gl.constexpr = call.config.RANGES > 0 or (
        ALIGNED and (call.mask.HAS_LEFT or call.mask.HAS_CHUNK)
    )
    OWN_QUERIES: gl.constexpr = storage.queries.OWN_QUERIES
    PAGE: gl.constexpr = max(call.config.BLOCK_SIZE, 1)
    keys = storage.keys
    call.begin()
    count = call.num_tiles * call.config.NUM_KV_HEADS * call.config.SHARED
    if call.config.SPLIT:
        count = count * call.splits.count
    # The first work tile of each CTA is its own index; the counter hands out those after them.
    number = gl.program_id(0)
    first_counted = gl.num_programs(0)
    if PERSISTENT:
        if call.concurrent != 0:
            # CTAs that are not resident yet must not claim work tiles: count from the first one.
            number = atomic_increment(call.counters, "relaxed")
            first_counted = 0
    mail = 0
    loaded = 0
    step = 0
    while number < count:
        split = 0
        found_at = number
        if call.config.SPLIT:
            # Neighboring CTAs have the splits of a query tile and KV head.
            split = number % call.splits.count
            found_at = number // call.splits.count
        request, start, first_token, kv_head, query_len, seq_len = find_work(
            call, found_at, ALIGNED
        )
        begin = 0
        end = 0
        second_begin = 0
        gap = 0
        # The number of tiles is an upper bound: tiles past a request's last token are skipped.
        if first_token < query_len:
            found = find_ranges(call, request, first_token, kv_head, query_len, seq_len)
            begin = found.begin
            end = found.end
            second_begin = found.second_begin
            gap = found.gap
            work = WorkTile(request, start, first_token, kv_head, query_len, seq_len, split, found)
            storage.mailbox.publish(mail, work)
            mail += 1
            if request < call.batch.num_reqs:
                if OWN_QUERIES:
                    if call.config.RANGES == 0:
                        visited = call.tiles(work)
                        begin = visited.begin
                        end = visited.end
                    # The stages of the first keys are free before the queries are.
                    pages = (seq_len + PAGE - 1) // PAGE
                    table = call.batch.table(request)
                    first_keys = gl.minimum(end - begin, keys.STAGES - 1)
                    for back in range(0, first_keys):
                        _load_key_tile(
                            call, source, work, found, table, pages, keys, end, back, step, step
                        )
                        step += 1
                    end -= first_keys
                if call.config.LOAD_QUERY:
                    _load_queries(call, storage.queries, query_desc, work, loaded)
                    loaded += 1
                if call.config.RANGES == 0 and not OWN_QUERIES:
                    visited = call.tiles(work)
                    begin = visited.begin
                    end = visited.end
        tiles = TileRanges(begin, 0, 0, end, 0, 0, second_begin, gap, call.config.RANGES)
        work = WorkTile(request, start, first_token, kv_head, query_len, seq_len, split, tiles)
        table = call.batch.table(gl.minimum(request, call.batch.num_reqs - 1))
        pages = (seq_len + PAGE - 1) // PAGE
        number = count
        first_step = step
        last = gl.minimum(begin + _STEPS_AHEAD, end)
        for back in range(0, end - last):
            _load_key_tile(
                call, source, work, tiles, table, pages, keys, end, back, step, first_step
            )
            step += 1
        if PERSISTENT and not FEW_TILES:
            number = first_counted + atomic_increment(call.counters, "relaxed")
        if PERSISTENT and FEW_TILES:
            # The loads of few keys do not wait for the counter.
            claimed = issue_increment(call.counters, "relaxed")
        for back in range(0, last - begin):
            _load_key_tile(
                call, source, work, tiles, table, pages, keys, last, back, step, first_step
            )
            step += 1
        if call.config.GATHERS:
            if step > first_step:
                source.load_values(call, work, table, tiles.at(begin), 0, step - 1)
        if PERSISTENT and FEW_TILES:
            number = first_counted + incremented(claimed)
    storage.mailbox.publish(mail, last_work(call.config.RANGES))
    if PERSISTENT:
        # The last CTA to run out of work resets both counters for the next launch.
        if atomic_increment(call.counters + 1, "relaxed") == gl.num_programs(0) - 1:
            gl.store(call.counters, 0)
            gl.store(call.counters + 1, 0)
    if call.concurrent != 0:
        # A kernel that waits for this one may rely on the previous one's results, too.
        wait_on_dependent_grids()


@gluon.jit
def value_loader(call, storage, source):
    """Load the values of the published work tiles. One warp. `source`: `CacheSource`."""
    PAGE: gl.constexpr = max(call.config.BLOCK_SIZE, 1)
    mail = 0
    step = 0
    request = 0
    while request >= 0:
        work = storage.mailbox.receive(mail)
        request = work.request
        mail += 1
        if (request >= 0) & (request < call.batch.num_reqs):
            tiles = call.tiles(work)
            table = call.batch.table(request)
            pages = (work.seq_len + PAGE - 1) // PAGE
            for back in range(0, tiles.end - tiles.begin):
                tile = tiles.at(tiles.end - 1 - back)
                source.load(call, work, table, pages, storage.values, tile, step)
                step += 1
