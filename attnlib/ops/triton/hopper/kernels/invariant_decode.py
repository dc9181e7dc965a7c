"""The batch-invariant Hopper decode (M15): `decode.py` with sums over segments of keys.

Work distribution: the key tiles of all requests form one line, request after request and each from
its last tile to its first. The line is cut into equal ranges, and each cut is moved to the end of
its segment. Each range has NUM_KV_HEADS consecutive CTAs, one per KV head.

A CTA adds the segments of a request that begins in its range. If all are in the range, it writes
the output; else one partial result, in slot `slots`. The segments of a request that begins in an
earlier range are written one by one, each in the slot of its number. `invariant_split.py` adds
them in the order of the line. So the order of all additions is that of the line, wherever it is
cut.

Where queries see few keys, `invariant_window.py` computes whole requests instead.

Warps, rings and barriers are those of `hopper_decode_kernel`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.compat import (
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.decode_call import (
    UNALIGNED,
    UNSPECIALIZED,
    Outputs,
    Partials,
    Queries,
)
from attnlib.ops.triton.hopper.kernels.decode_worker import allocate_worker
from attnlib.ops.triton.hopper.kernels.invariant_decode_consumer import (
    InvariantCall,
    invariant_consumer,
    tiles_between,
)
from attnlib.ops.triton.hopper.kernels.ranges import worker_range
from attnlib.ops.triton.hopper.kernels.schedule import Batch, KeyTiles, Mask
from attnlib.ops.triton.hopper.kernels.segments import segment_range
from attnlib.ops.triton.hopper.kernels.tma_load import RequestPages

__all__ = [
    "invariant_decode_kernel",
]


@gluon.jit
def _loader(cache, keys, ring, config):
    """Load the key or value tiles of the CTA's segments into a ring, backwards. One warp.

    Args:
        cache: TMA descriptor.
        keys: `KeyTiles` of the batch.
        ring: `Ring`.
    """
    NUM_KV_HEADS: gl.constexpr = config.NUM_KV_HEADS
    BLOCK_N: gl.constexpr = config.BLOCK_N
    BLOCK_SIZE: gl.constexpr = config.BLOCK_SIZE
    batch = keys.batch
    # PDL: the previous kernel may have written the cache, the lengths or the block table.
    wait_on_dependent_grids()
    worker = gl.program_id(0)
    own = worker_range(keys, worker // NUM_KV_HEADS, gl.num_programs(0) // NUM_KV_HEADS)
    kv_head = worker % NUM_KV_HEADS
    position = own.begin
    request = own.request
    before = own.before
    step = 0
    while position < own.end:
        request_end = before + keys.count(request, True)
        # Requests without queries have no tiles and are skipped.
        if position < request_end:
            _, query_len, seq_len = batch.lengths(request, True)
            visited = keys.visited(0, query_len, seq_len, request)
            table = batch.table(request)
            pages = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
            cached = RequestPages(cache, table, pages, batch.num_blocks, kv_head, BLOCK_SIZE, "nhd")
            stop = gl.minimum(own.end, request_end)
            _, most_tiles = segment_range(query_len, seq_len, config.WIDTH_V, BLOCK_N, config.GROUP)
            bottom, top = tiles_between(position, stop, before, request_end, visited, most_tiles)
            for back in range(0, top - bottom):
                tile = top - 1 - back
                cached.load(ring, step, tile, tile * BLOCK_N // BLOCK_SIZE - 32)
                step += 1
            position = stop
        before = request_end
        request += 1


@gluon.jit(do_not_specialize=[*UNSPECIALIZED, "slots"], do_not_specialize_on_alignment=UNALIGNED)
def invariant_decode_kernel(
    key_desc, value_desc, query, out, lse, sinks, k_scale, v_scale, aux0, aux1, aux2, aux3,
    query_start_loc, seq_lens, block_table, partials, partial_lses, split_headers, counters, scale,
    soft_cap, left, right, chunk, num_reqs, num_tokens, num_blocks, rows, stride_qt, stride_qh,
    stride_ot, stride_oh, stride_lt, stride_table, slots, rows0, columns0, rows1, columns1, rows2,
    columns2, rows3, columns3, CONFIG: gl.constexpr,
):  # fmt: skip
    """One CTA of 4 + 1 + 1 warps. Grid: ranges of segments * NUM_KV_HEADS, all resident.

    Runtime arguments are those of `hopper_decode_kernel` and `slots`.

    Args:
        partials: sums of values, [grid, slots + 1, rows, DV] float32.
        partial_lses: their row maxima and then their sums of weights, [grid, slots + 1, rows] each.
        split_headers: int32 [tokens, KV heads, 8] for `invariant_split_kernel`.
        slots: upper bound of the segments of a request.
        CONFIG: `DecodeConfig`.
    """
    mask = Mask(
        left, right, chunk, CONFIG.CAUSAL, CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, CONFIG.HAS_CHUNK
    )
    batch = Batch(query_start_loc, seq_lens, block_table, num_reqs, num_blocks, stride_table)
    keys = KeyTiles(batch, mask, None, None, CONFIG.TILE_TOKENS, CONFIG.BLOCK_N)
    call = InvariantCall(
        keys=keys,
        queries=Queries(query, stride_qt, stride_qh, num_tokens),
        outputs=Outputs(out, lse, sinks, stride_ot, stride_oh, stride_lt),
        partials=Partials(partials, partial_lses, split_headers, None, rows),
        slots=slots,
        scale=scale,
        soft_cap=soft_cap,
        config=CONFIG,
    )
    worker = allocate_worker(key_desc.dtype, None, None, None, CONFIG)
    # Makes the initialized barriers visible to TMA.
    fence_async_shared()
    gl.warp_specialize(
        [
            (invariant_consumer, (call, worker)),
            (_loader, (key_desc, keys, worker.keys, CONFIG)),
            (_loader, (value_desc, keys, worker.values, CONFIG)),
        ],
        [1, 1],
        # Registers per thread of the two loader warps.
        [48, 48],
    )
