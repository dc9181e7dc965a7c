"""The Hopper decode kernel over latents: values are a prefix of the keys (P10, M12).

A CTA has the two consumer warpgroups of `latent_steps` and a warp that loads latents by TMA, in
three parts: two halves of the values and the rotary part. It attends with a block of up to 64 query
heads, all of which read the one KV head of the cache. The unit of the work distribution
(`latent_splits`) is a pair of tiles. Uses of the shared memory are counted across splits, so the
first latents of a split are loaded while the one before it ends.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.compat import (
    consumers_sync,
    launch_dependent_grids,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.decode_call import (
    UNALIGNED,
    UNSPECIALIZED,
    Outputs,
    Partials,
    Queries,
)
from attnlib.ops.triton.hopper.kernels.latent_loader import load_range
from attnlib.ops.triton.hopper.kernels.latent_pages import LatentCache
from attnlib.ops.triton.hopper.kernels.latent_rows import (
    copy_queries,
    normalizers,
    query_offsets,
    query_rows,
)
from attnlib.ops.triton.hopper.kernels.latent_splits import (
    TileKeys,
    place_of,
    split_at,
)
from attnlib.ops.triton.hopper.kernels.latent_steps import (
    attend_both,
    attend_other,
    attend_own,
    total_sum,
)
from attnlib.ops.triton.hopper.kernels.latent_tiles import (
    TILE,
    allocate_tiles,
    clear_tile_from,
)
from attnlib.ops.triton.hopper.kernels.logits import logits_of
from attnlib.ops.triton.hopper.kernels.ranges import worker_range
from attnlib.ops.triton.hopper.kernels.schedule import Batch, KeyTiles, Mask

__all__ = ["hopper_latent_decode_kernel"]

PAIR: gl.constexpr = gl.constexpr(128)
"""Latents of a pair of tiles, the unit of the work distribution."""


@gluon.jit
def _copy_queries(queries, rows, valid, start, tiles, CONSUMER: gl.constexpr):
    """Copy the queries of a split to shared memory, each consumer a part of them.

    Both consumers are done with the queries of the split before (`total_sum`).
    """
    HALF: gl.constexpr = tiles.queries.low.shape[2]
    offsets = query_offsets(queries, rows, start)
    if CONSUMER == 0:
        copy_queries(tiles.queries.low.index(0), queries, offsets, valid, 0)
    else:
        copy_queries(tiles.queries.high.index(0), queries, offsets, valid, HALF)
        copy_queries(tiles.queries.rotary.index(0), queries, offsets, valid, 2 * HALF)
    fence_async_shared()
    consumers_sync(2)


@gluon.jit
def _attend(
    split, rows, columns, mask, tiles, logits, step, splits, CONFIG: gl.constexpr,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """Attend to all tiles of a split.

    Args:
        columns: [keys], numbers of the keys of a tile.
        step: number of tiles of the consumer before the split.
        splits: number of splits before this one.

    Returns:
        (accumulators of one half of the value elements, maxima, sums of the weights of both
        consumers, number of tiles of the consumer so far).
    """
    HALF: gl.constexpr = CONFIG.DV // 2
    ROWS: gl.constexpr = CONFIG.ROWS
    BLOCK_SIZE: gl.constexpr = CONFIG.BLOCK_SIZE
    ROW: gl.constexpr = rows.row.type.layout
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    seq_len = split.seq_len
    row_first, row_last = mask.span(rows.token + (seq_len - split.query_len), seq_len)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    row_sum = gl.zeros([ROWS], gl.float32, ROW)
    acc = gl.zeros([ROWS, HALF], gl.float32, VALUES)
    first_own = split.first() * PAIR + CONSUMER * TILE
    if CONSUMER == 0:
        if (seq_len - first_own < TILE) & (seq_len % BLOCK_SIZE != 0):
            clear_tile_from(tiles, seq_len - first_own, step & 1, CONSUMER)
        keys = TileKeys(first_own + columns, row_first[:, None], row_last[:, None])
        acc, row_max, row_sum = attend_own(
            acc, row_max, row_sum, keys, step & 1, tiles, logits, CONSUMER
        )
        step += 1
    # Consumer 0 attends to a tile A together with the tile B before it.
    for i in range(1 - CONSUMER, split.count):
        parity = step & 1
        first_key = first_own + i * PAIR
        # TMA fills whole pages past the end with zeros, but not the rest of the last page.
        if (seq_len - first_key < TILE) & (seq_len % BLOCK_SIZE != 0):
            clear_tile_from(tiles, seq_len - first_key, parity, CONSUMER)
        keys = TileKeys(first_key + columns, row_first[:, None], row_last[:, None])
        other_parity = (step + CONSUMER + 1) & 1
        acc, row_max, row_sum = attend_both(
            acc, row_max, row_sum, keys, parity, other_parity, tiles, logits, CONSUMER
        )
        step += 1
    if CONSUMER == 0:
        acc, row_max, row_sum = attend_other(acc, row_max, row_sum, (step - 1) & 1, tiles, CONSUMER)
    row_sum = total_sum(row_sum, splits & 1, tiles, CONSUMER)
    return acc, row_max, row_sum, step


@gluon.jit
def _store_half(acc, factor, rows, split, place, outputs, partials, START: gl.constexpr):
    """Write one half of the results: the output of a single split, else a partial result.

    Args:
        factor: of the accumulators, see `normalizers`.
        rows: in the layout of the accumulators.
    """
    valid = rows.exist(split.query_len)
    offsets = outputs.offsets(split.start + rows.token, rows.head)
    partial_offsets = rows.partial_offsets(partials, place)
    lanes = START + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    result = acc * factor[:, None]
    mask = valid[:, None] & (lanes >= 0)[None, :]
    if place.num_splits == 1:
        pointers = outputs.pointer + offsets[:, None] + lanes[None, :]
        gl.store(pointers, result.to(outputs.pointer.dtype.element_ty), mask=mask)
    else:
        gl.store(partials.values + partial_offsets[:, None] + lanes[None, :], result, mask=mask)


@gluon.jit
def _consumer(
    queries, outputs, partials, keys, own, head_block, tiles, scale, soft_cap, CONFIG: gl.constexpr,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """Compute one half of the value elements of all splits of the CTA's range."""
    # [rows, keys].
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    logits = logits_of(scale, soft_cap, CONFIG.HAS_CAP)
    rows = query_rows(gl.arange(0, CONFIG.ROWS, gl.SliceLayout(1, SCORES)), head_block, CONFIG)
    columns = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    request = own.request
    before = own.before
    position = own.begin
    step = 0
    splits = 0
    while position < own.end:
        units = keys.count(request, True)
        request_end = before + units
        if position < request_end:
            split = split_at(keys, request, head_block, units, before, position, own.end)
            valid = rows.exist(split.query_len)
            _copy_queries(queries, rows, valid, split.start, tiles, CONSUMER)
            acc, row_max, row_sum, step = _attend(
                split, rows, columns, keys.mask, tiles, logits, step, splits, CONFIG, CONSUMER
            )
            splits += 1

            place = place_of(own, before, request_end, position)
            if CONSUMER == 0:
                if split.skipped == 0:
                    header = rows.header(place)
                    token = split.start + rows.token
                    gl.store(
                        partials.headers + token * CONFIG.HEAD_BLOCKS + head_block,
                        header,
                        mask=valid & (rows.row % CONFIG.GROUP == 0),
                    )
            factor = normalizers(
                row_max, row_sum, rows, valid, split, place, outputs, partials, CONSUMER == 0
            )
            OUT_ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
            factor = gl.convert_layout(factor, OUT_ROW)
            out_rows = query_rows(gl.arange(0, CONFIG.ROWS, OUT_ROW), head_block, CONFIG)
            START: gl.constexpr = CONSUMER * (CONFIG.DV // 2)
            _store_half(acc, factor, out_rows, split, place, outputs, partials, START)
            position += split.count
        if position >= request_end:
            before = request_end
            request += 1


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_latent_decode_kernel(
    key_desc, value_desc, latents, query, out, lse, sinks, query_start_loc, seq_lens, block_table,
    partials, partial_lses, split_headers, scale, soft_cap, left, right, chunk, num_reqs,
    num_tokens, num_blocks, rows, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt,
    stride_table, stride_latents, CONFIG: gl.constexpr,
):  # fmt: skip
    """One CTA of 9 warps. Grid: tile ranges * HEAD_BLOCKS, all resident at the same time.

    Args:
        key_desc, value_desc, latents, block_table, stride_latents: see `LatentCache`.
        partials, partial_lses, split_headers, rows: see `Partials`.
        CONFIG: a `LatentConfig` with 64 ROWS.
    """
    HEAD_BLOCKS: gl.constexpr = CONFIG.HEAD_BLOCKS
    tiles = allocate_tiles(CONFIG.DV, CONFIG.ROTARY, key_desc.dtype, GATHERED=False)
    # Makes the initialized barriers visible to TMA.
    fence_async_shared()
    mask = Mask(
        left, right, chunk, CONFIG.CAUSAL, CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, CONFIG.HAS_CHUNK
    )
    batch = Batch(query_start_loc, seq_lens, block_table, num_reqs, num_blocks, stride_table)
    keys = KeyTiles(batch, mask, None, None, CONFIG.TILE_TOKENS, PAIR)
    cache = LatentCache(key_desc, value_desc, latents, batch, stride_latents, CONFIG.BLOCK_SIZE)
    queries = Queries(query, stride_qt, stride_qh, num_tokens)
    outputs = Outputs(out, lse, sinks, stride_ot, stride_oh, stride_lt)
    parts = Partials(partials, partial_lses, split_headers, None, rows)

    # PDL: the previous kernel may have written the queries, the cache or the lengths. The combine
    # kernel may start; it waits for this kernel's results by itself.
    wait_on_dependent_grids()
    launch_dependent_grids()
    index = gl.program_id(0) // HEAD_BLOCKS
    num_ranges = gl.num_programs(0) // HEAD_BLOCKS
    own = worker_range(keys, index, num_ranges, 0, CONFIG.LEAST)
    head_block = gl.program_id(0) % HEAD_BLOCKS
    PREFETCH: gl.constexpr = HEAD_BLOCKS > 1 and CONFIG.BLOCK_SIZE >= TILE
    gl.warp_specialize(
        [
            (
                _consumer,
                (queries, outputs, parts, keys, own, head_block, tiles, scale, soft_cap, CONFIG, 0),
            ),
            (
                _consumer,
                (queries, outputs, parts, keys, own, head_block, tiles, scale, soft_cap, CONFIG, 1),
            ),
            (load_range, (cache, keys, own, head_block, tiles, PREFETCH)),
        ],
        [4, 1],
        [CONFIG.CONSUMER_REGISTERS, CONFIG.LOADER_REGISTERS],
    )
