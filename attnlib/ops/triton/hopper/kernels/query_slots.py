"""Queries of the two workers of a CTA of the Hopper decode, which warps prepare.

A warp serves both workers where they have the same range of key tiles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnlib.ops.triton.hopper.kernels.column_softmax import store_columns
from attnlib.ops.triton.hopper.kernels.compat import (
    Value,
    aggregate,
    partition_barrier,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.decode_call import Split
from attnlib.ops.triton.hopper.kernels.decode_queries import scaled_queries
from attnlib.ops.triton.hopper.kernels.kv_scales import load_kv_scale

__all__ = ["QuerySlots", "allocate_slots", "query_loader"]

_ROWS = gl.constexpr(8)
"""Rows that the warp holds in registers at a time."""


@aggregate
class QuerySlots:
    """Queries of the two workers of a CTA, which a warp prepares.

    Fields:
        tiles: [2, ROWS, WIDTH].
        factors: [2, 1, ROWS], factors of the scores.
        barriers: [4, 1], two of each worker: full, by the arrival of the warp that prepares them,
            and empty, by those of the consumer's threads.
    """

    tiles: Value
    factors: Value
    barriers: Value

    @gluon.jit
    def wait_until_there(self, worker, number):
        """Wait until the queries of split number `number` of a worker are there."""
        mbarrier.wait(self.barriers.index(2 * worker), number & 1)

    @gluon.jit
    def wait_until_used(self, worker, number):
        """Wait until a worker has used the queries of the split before number `number`."""
        # The parity is inverted, so that the first split does not wait.
        mbarrier.wait(self.barriers.index(2 * worker + 1), (number & 1) ^ 1)


@gluon.jit
def allocate_slots(config):
    """Return the `QuerySlots` of the two workers of a CTA over a quantized cache."""
    SHAPE: gl.constexpr = [2, config.ROWS, config.WIDTH]
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE[1:], gl.float16)
    tiles = gl.allocate_shared_memory(gl.float16, SHAPE, SHARED)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    factors = gl.allocate_shared_memory(gl.float32, [2, 1, config.ROWS], PLAIN)
    barriers = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for worker in gl.static_range(2):
        mbarrier.init(barriers.index(2 * worker), count=1)
        mbarrier.init(barriers.index(2 * worker + 1), count=128)
    return QuerySlots(tiles, factors, barriers)


@gluon.jit
def _send_queries(queries, slots, split, worker, number, key_scale, config):
    """Load the queries of a split of a worker, and store them once its consumer has used those of
    the previous one. One warp. Not for 4-bit integers.

    Args:
        queries: `Queries`.
        slots: `QuerySlots`.
        number: number of splits of the worker before this one.
        key_scale: scale of the keys of this head.
    """
    q_tile = slots.tiles.index(worker)
    factors = slots.factors.index(worker)
    ROWS: gl.constexpr = q_tile.shape[-2]
    WIDTH: gl.constexpr = q_tile.shape[-1]
    for first in gl.static_range(0, ROWS, _ROWS):
        scaled, inverse = scaled_queries(queries, split, first, WIDTH, _ROWS, 1, config)
        if first == 0:
            slots.wait_until_used(worker, number)
        q_tile.slice(first, _ROWS, 0).store(scaled[0])
        store_columns(factors.slice(first, _ROWS, 1), inverse * key_scale)
    # WGMMA reads shared memory through the async proxy.
    fence_async_shared()
    partition_barrier()
    mbarrier.arrive(slots.barriers.index(2 * worker), count=1)


@gluon.jit
def query_loader(call, slots, share, FIRST: gl.constexpr, WORKERS: gl.constexpr):
    """Prepare the queries of WORKERS workers of a CTA that have the same range, from number FIRST
    on, split after split. One warp.

    Args:
        call: `DecodeCall`.
        slots: `QuerySlots`.
        share: `WorkerShare` of the first one.
    """
    config: gl.constexpr = call.config
    keys = call.keys
    wait_on_dependent_grids()
    position = share.range.begin
    request = share.range.request
    before = share.range.before
    number = 0
    worker = 0
    while position < share.range.end:
        tiles = keys.count(request, True)
        request_end = before + tiles
        # Requests without queries have no tiles and are skipped.
        if position < request_end:
            start, query_len, seq_len = keys.batch.lengths(request, True)
            kv_head = share.kv_head + worker
            key_scale = load_kv_scale(call.k_scale, kv_head, config.K_SCALE_KIND)
            split = Split(request, start, query_len, seq_len, kv_head, 0, 0, None)
            _send_queries(
                call.queries, slots, split, FIRST + worker, number, key_scale, call.config
            )
        if worker == WORKERS - 1:
            number += gl.where(position < request_end, 1, 0)
            before = request_end + gl.where(tiles > 0, share.gap, 0)
            position = gl.maximum(position, gl.minimum(share.range.end, request_end))
            position = gl.maximum(position, before)
            request += 1
            worker = 0
        else:
            worker += 1  # the same split of the next worker
