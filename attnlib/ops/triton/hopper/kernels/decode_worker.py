"""The shared memory of a worker of the Hopper decode: a consumer warpgroup and its loaders."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.cache_tiles import allocate_rings
from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate, arrive_after_copies
from attnlib.ops.triton.hopper.kernels.gather import GATHER_THREADS
from attnlib.ops.triton.hopper.kernels.ring import ring_pair
from attnlib.ops.triton.hopper.kernels.token_scales import (
    TokenScales,
    allocate_token_scales,
    scales_weights,
)
from attnlib.ops.triton.kernels.quant import KV_INT4, KV_NVFP4, KV_PLAIN, SCALE_PER_TOKEN

__all__ = ["Worker", "allocate_worker", "release_by_thread"]

_GATHER_THREADS = gl.constexpr(GATHER_THREADS)


@aggregate
class Worker:
    """What a consumer and its loaders share. A CTA has one or two workers.

    Fields:
        q_tile: queries [ROWS, WIDTH], or [4, ROWS, WIDTH / 4] of four groups of the keys.
        p_tile: weights [ROWS, BLOCK_N], or [4 * ROWS, BLOCK_N] of four groups of the values.
        keys, values: `Ring` of each.
        scales: `TokenScales`; None where the pages hold none.
        columns: [4, ROWS], through which warps exchange maxima and sums of columns, over quantized
            caches; else None.
        factors: [1, ROWS], factors of the scores, over quantized caches; else None.
        slots: `QuerySlots` of both workers of a CTA; None where the consumer prepares queries.
        number: of this worker in the CTA, with slots; else None.
    """

    q_tile: Value
    p_tile: Value
    keys: Value
    values: Value
    scales: Value
    columns: Value
    factors: Value
    slots: Value
    number: Value

    @gluon.jit
    def with_slots(self, slots, NUMBER: gl.constexpr):
        """Return this worker, number NUMBER of the CTA, with queries that a warp prepares."""
        return Worker(
            slots.tiles.index(NUMBER),
            self.p_tile,
            self.keys,
            self.values,
            self.scales,
            self.columns,
            slots.factors.index(NUMBER),
            slots,
            NUMBER,
        )

    @gluon.jit
    def wait_for_queries(self, split):
        """Wait until the queries of split number `split` are there."""
        self.slots.wait_until_there(self.number, split)

    @gluon.jit
    def release_queries(self):
        """Tell the warp that prepares queries that this thread has used them."""
        release_by_thread(self.slots.barriers, 2 * self.number + 1)


@gluon.jit
def release_by_thread(barriers, index):
    """Arrive on a barrier as each of the 128 threads of a worker.

    The thread has converted its part of the tile and issued a product with it, so its loads from
    shared memory are complete. It has issued no copies that this would wait for. One arrival for
    all threads needs a barrier before it, and Triton adds another one after it.
    """
    arrive_after_copies(barriers.index(index), increment_count=False)


@gluon.constexpr_function
def elements_per_word(kind):
    """Return the elements in 16 bits of a cache."""
    return {KV_PLAIN.value: 1, KV_INT4.value: 4, KV_NVFP4.value: 4}.get(kind, 2)


@gluon.jit
def _allocate_columns(COUNT: gl.constexpr, ROWS: gl.constexpr):
    """Return shared memory for COUNT numbers of each column of scores."""
    return gl.allocate_shared_memory(
        gl.float32, [COUNT, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )


@gluon.jit
def allocate_worker(CACHE: gl.constexpr, k_scale, v_scale, caches, config):
    """Return a `Worker` without `slots`.

    Args:
        CACHE: dtype of the words of the caches.
        k_scale, v_scale: of a quantized cache, as `SCALE_KIND` of each says; else None.
        caches: `Caches`, with the strides of scales where the pages hold them.
        config: `DecodeConfig`.
    """
    ROWS: gl.constexpr = config.ROWS
    WIDTH: gl.constexpr = config.WIDTH
    BLOCK_N: gl.constexpr = config.BLOCK_N
    # Quantized caches are read as 16-bit words and multiplied in float16.
    COMPUTE: gl.constexpr = CACHE if config.K_KIND == KV_PLAIN else gl.float16
    Q_SHAPE: gl.constexpr = [4, ROWS, WIDTH // 4] if config.K_KIND == KV_INT4 else [ROWS, WIDTH]
    P_ROWS: gl.constexpr = 4 * ROWS if config.V_KIND == KV_INT4 else ROWS
    P_SHAPE: gl.constexpr = [P_ROWS, BLOCK_N]
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for(Q_SHAPE[-2:], COMPUTE)
    P_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for(P_SHAPE[-2:], COMPUTE)
    q_tile = gl.allocate_shared_memory(COMPUTE, Q_SHAPE, Q_SHARED)
    p_tile = gl.allocate_shared_memory(COMPUTE, P_SHAPE, P_SHARED)
    k_memory, v_memory = allocate_rings(
        CACHE,
        config.STAGES,
        BLOCK_N,
        WIDTH // elements_per_word(config.K_KIND),
        config.WIDTH_V // elements_per_word(config.V_KIND),
        config.BLOCK_SIZE,
        config.PACKED,
    )
    # Loads: the loader's expect and the bytes of its TMA loads, and 32 threads that copy scales; or
    # the threads that gather rows. Releases: the consumer's arrival, or those of its threads.
    LOADS: gl.constexpr = _GATHER_THREADS if config.GATHERS else 1
    V_LOADS: gl.constexpr = LOADS if scales_weights(config.V_KIND) else 33
    K_LOADS: gl.constexpr = 33 if config.K_SCALE_KIND == SCALE_PER_TOKEN else LOADS
    RELEASES: gl.constexpr = 1 if config.WORKERS == 1 else 128
    keys, values = ring_pair(k_memory, v_memory, config.STAGES, K_LOADS, V_LOADS, RELEASES)
    scales = None
    if config.K_SCALE_KIND == SCALE_PER_TOKEN:
        scales = TokenScales(
            k_scale,
            v_scale,
            caches.stride_kb,
            caches.stride_kn,
            caches.stride_kh,
            caches.stride_vb,
            caches.stride_vn,
            caches.stride_vh,
            allocate_token_scales(config.STAGES, BLOCK_N, config.K_KIND, config.V_KIND),
            config.K_KIND,
            config.V_KIND,
        )
    if config.K_KIND == KV_PLAIN:
        return Worker(q_tile, p_tile, keys, values, scales, None, None, None, None)
    else:
        columns = _allocate_columns(4, ROWS)
        factors = _allocate_columns(1, ROWS)
        return Worker(q_tile, p_tile, keys, values, scales, columns, factors, None, None)
