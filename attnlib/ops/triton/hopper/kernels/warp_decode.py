"""The Hopper decode over quantized caches by CTAs of one warp.

The decode of `decode.py` multiplies with WGMMA, in warpgroups of four warps. Over quantized caches
its time is that of the steps that the four warps take together: they exchange the maxima of the
scores, store the weights to shared memory, and wait for each other several times per tile. Here a
warp has its own range of keys, loads them by TMA into a ring of its own (`warp_tiles.py`), and
multiplies with `mma.sync`, whose operands are all in registers (`warp_operands.py`,
`warp_scores.py`, `warp_products.py`). It waits for no other warp. Several CTAs of one warp on each
multiprocessor hide the latency of each other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import (
    Value,
    aggregate,
    launch_dependent_grids,
    partition_barrier,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.decode_call import (
    UNALIGNED,
    UNSPECIALIZED,
    Outputs,
    Partials,
    Queries,
    Split,
)
from attnlib.ops.triton.hopper.kernels.kv_scales import load_kv_scale
from attnlib.ops.triton.hopper.kernels.ranges import worker_range
from attnlib.ops.triton.hopper.kernels.schedule import Batch, KeyTiles, Mask
from attnlib.ops.triton.hopper.kernels.softmax import score_factor
from attnlib.ops.triton.hopper.kernels.warp_operands import (
    PRODUCTS,
    load_warp_queries,
)
from attnlib.ops.triton.hopper.kernels.warp_output import store_split
from attnlib.ops.triton.hopper.kernels.warp_products import (
    WarpRows,
    multiply_tile,
    zero_sums,
)
from attnlib.ops.triton.hopper.kernels.warp_tiles import allocate_warp_tiles, tile_blocks

__all__ = [
    "hopper_warp_decode_kernel",
]


@aggregate
class _Call:
    """Tensors of the call, as objects of `decode_call`, and the ring of the warp.

    `factor` is the softmax scale in base 2; `key_scale` and `value_scale` are those of the head.
    """

    key_cache: Value
    value_cache: Value
    queries: Value
    outputs: Value
    partials: Value
    keys: Value
    tiles: Value
    factor: Value
    soft_cap: Value
    key_scale: Value
    value_scale: Value
    config: Value

    @gluon.jit
    def load(self, split, blocks, tile, step):
        """Issue the loads of a tile into the stage of a step."""
        self.tiles.load(
            self.key_cache,
            self.value_cache,
            blocks,
            self.keys.batch.num_blocks,
            split.kv_head,
            tile,
            step,
        )


@gluon.jit
def _begin_split(call, split, table, pages, step):
    """Issue the loads of the first tiles of a split, as far as stages are free, and load its
    queries. Returns its `WarpRows`."""
    config: gl.constexpr = call.config
    STAGES: gl.constexpr = config.STAGES
    blocks = ()
    for ahead in gl.static_range(STAGES):
        found = tile_blocks(
            table,
            pages,
            call.keys.batch.num_blocks,
            split.first() + ahead,
            ahead < split.count,
            config.BLOCK_N,
            config.BLOCK_SIZE,
        )
        blocks = blocks + (found,)
    call.load(split, blocks[0], split.first(), step)
    queries = load_warp_queries(call.queries, split, config)
    k_factor = queries.factor * call.key_scale
    # The other stages are loaded once the first tile is here: otherwise it shares the bandwidth
    # with them, and all warps begin later.
    call.tiles.wait(step)
    for ahead in gl.static_range(1, STAGES):
        if ahead < split.count:
            call.load(split, blocks[ahead], split.first() + ahead, step + ahead)
    token = gl.arange(0, config.ROWS, gl.SliceLayout(0, PRODUCTS)) // config.GROUP
    positions = token + (split.seq_len - split.query_len)
    first, last = call.keys.mask.span(positions, split.seq_len)
    return WarpRows(queries, k_factor, call.factor, call.soft_cap, first, last)


@gluon.jit
def _multiply_split(call, split, rows, table, pages, step):
    """Multiply by the tiles of a split, and issue the loads of those that had no stage yet.

    Returns:
        `WarpSums`.
    """
    config: gl.constexpr = call.config
    STAGES: gl.constexpr = config.STAGES
    sums = zero_sums(config)
    for i in range(0, split.count):
        tile = split.first() + i
        stage = (step + i) % STAGES
        later = tile_blocks(
            table,
            pages,
            call.keys.batch.num_blocks,
            tile + STAGES,
            i + STAGES < split.count,
            config.BLOCK_N,
            config.BLOCK_SIZE,
        )
        call.tiles.wait(step + i)
        scales = call.tiles.load_scales(stage)
        if split.visited.needs_mask(tile):
            sums = multiply_tile(
                call.tiles, stage, scales, rows, sums, tile, split.seq_len, True, config
            )
        else:
            sums = multiply_tile(
                call.tiles, stage, scales, rows, sums, tile, split.seq_len, False, config
            )
        # All lanes have the tile in registers.
        partition_barrier()
        if i + STAGES < split.count:
            call.load(split, later, tile + STAGES, step + i)
    return sums


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_warp_decode_kernel(
    key_desc, value_desc, query, out, lse, sinks, k_scale, v_scale, aux0, aux1, aux2, aux3,
    query_start_loc, seq_lens, block_table, partials, partial_lses, split_headers, counters, scale,
    soft_cap, left, right, chunk, num_reqs, num_tokens, num_blocks, rows, stride_qt, stride_qh,
    stride_ot, stride_oh, stride_lt, stride_table, early, rows0, columns0, rows1, columns1, rows2,
    columns2, rows3, columns3, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn,
    stride_vh, CONFIG: gl.constexpr,
):  # fmt: skip
    """One CTA of one warp. Grid: tile ranges * NUM_KV_HEADS.

    Arguments are those of `hopper_decode_kernel`; those of score functions and `counters` are None,
    and `early` is not read.
    A combine kernel follows.
    """
    tiles = allocate_warp_tiles(
        k_scale,
        v_scale,
        stride_kb,
        stride_kn,
        stride_kh,
        stride_vb,
        stride_vn,
        stride_vh,
        CONFIG,
    )
    mask = Mask(
        left, right, chunk, CONFIG.CAUSAL, CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, CONFIG.HAS_CHUNK
    )
    batch = Batch(query_start_loc, seq_lens, block_table, num_reqs, num_blocks, stride_table)
    keys = KeyTiles(batch, mask, None, None, CONFIG.TILE_TOKENS, CONFIG.BLOCK_N)
    factor = score_factor(scale, soft_cap, CONFIG.HAS_CAP)
    # PDL: the previous kernel may have written the queries, the cache, the lengths or the table.
    wait_on_dependent_grids()
    # The combine kernel may start; it waits for this kernel's results by itself.
    launch_dependent_grids()
    worker = gl.program_id(0)
    num_ranges = gl.num_programs(0) // CONFIG.NUM_KV_HEADS
    kv_head = worker % CONFIG.NUM_KV_HEADS
    own = worker_range(keys, worker // CONFIG.NUM_KV_HEADS, num_ranges)
    call = _Call(
        key_cache=key_desc,
        value_cache=value_desc,
        queries=Queries(query, stride_qt, stride_qh, num_tokens),
        outputs=Outputs(out, lse, sinks, stride_ot, stride_oh, stride_lt),
        partials=Partials(partials, partial_lses, split_headers, None, rows),
        keys=keys,
        tiles=tiles,
        factor=factor,
        soft_cap=soft_cap,
        key_scale=load_kv_scale(k_scale, kv_head, CONFIG.K_SCALE_KIND),
        value_scale=load_kv_scale(v_scale, kv_head, CONFIG.V_SCALE_KIND),
        config=CONFIG,
    )
    position = own.begin
    request = own.request
    before = own.before
    step = 0
    while position < own.end:
        num_tiles = keys.count(request, True)
        request_end = before + num_tiles
        if position < request_end:
            skipped = position - before
            count = gl.minimum(num_tiles - skipped, own.end - position)
            start, query_len, seq_len = batch.lengths(request, True)
            visited = keys.visited(0, query_len, seq_len, request)
            split = Split(request, start, query_len, seq_len, kv_head, skipped, count, visited)
            table = batch.table(request)
            pages = (seq_len + CONFIG.BLOCK_SIZE - 1) // CONFIG.BLOCK_SIZE
            # All lanes have read what the stages held.
            partition_barrier()
            split_rows = _begin_split(call, split, table, pages, step)
            sums = _multiply_split(call, split, split_rows, table, pages, step)
            step += count
            num_splits = (request_end - 1) // own.length - before // own.length + 1
            store_split(call, split, sums, num_splits, skipped, position > own.begin)
            position += count
        before = request_end
        position = gl.maximum(position, before)
        request += 1
