"""The shared memory of consumers that decode over latents in quarters of a tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate
from attnlib.ops.triton.hopper.kernels.latent_columns import LATENTS
from attnlib.ops.triton.hopper.kernels.ring import Ring
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["QUARTERS", "SwapMemory", "allocate_swap_memory", "with_own_rows"]

QUARTERS: gl.constexpr = gl.constexpr(4)
"""Parts of the value elements of a tile."""


@aggregate
class RotaryRing:
    """The elements of tiles after those of the values, whose barriers follow those of the quarters.

    Fields:
        memory: [STAGES, LATENTS, elements or words].
        scales: float32 [STAGES, LATENTS, QUARTERS] of the tiles, with GROUP_SCALES; else None.
        full, empty: mbarriers of the quarters and, from number FIRST on, of this ring.
        FIRST: stages of the quarters.
        STAGES: stages of this ring.
    """

    memory: Value
    scales: Value
    full: Value
    empty: Value
    FIRST: gl.constexpr
    STAGES: gl.constexpr

    @gluon.jit
    def wait_full(self, stage, step):
        """Wait until tile number `step`, which is in this stage, has been loaded."""
        mbarrier.wait(self.full.index(self.FIRST + stage), (step // self.STAGES) & 1)

    @gluon.jit
    def wait_empty(self, stage, step):
        """Wait until the stage of tile number `step` is free."""
        # The parity is inverted, so that the first pass over the ring does not wait.
        mbarrier.wait(self.empty.index(self.FIRST + stage), ((step // self.STAGES) & 1) ^ 1)

    @gluon.jit
    def release(self, stage):
        """Tell the loader that a stage is free."""
        mbarrier.arrive(self.empty.index(self.FIRST + stage), count=1)


@aggregate
class SwapMemory:
    """What a consumer and its loader share.

    Fields:
        queries: [QUARTERS, rows, elements of a quarter].
        query_rotary: [1, rows, elements after those of the values].
        quarters: the `Ring` of quarters of tiles, which hold words of two elements over 8-bit
            caches.
        rotary: the `RotaryRing` of the other elements of tiles.
        weights: [1, rows, LATENTS] those of one tile, in a tuple; for each quarter with
            GROUP_SCALES.
        columns: float32 [4, rows], through which warps exchange maxima and sums of columns; None
            for up to 16 rows over 16-bit caches.
        factors: float32 [1, rows], factors of the scores, over 8-bit caches; else None.
    """

    queries: Value
    query_rotary: Value
    quarters: Value
    rotary: Value
    weights: Value
    columns: Value
    factors: Value


@gluon.jit
def _allocate_rows(CONFIG: gl.constexpr, DTYPE: gl.constexpr, ROTARY_DTYPE: gl.constexpr):
    """Allocate the queries of a consumer, with dtypes of the operands."""
    ROWS: gl.constexpr = CONFIG.ROWS
    WIDTH: gl.constexpr = CONFIG.DV // QUARTERS
    ROTARY: gl.constexpr = CONFIG.ROTARY
    Q_WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], DTYPE)
    Q_NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROTARY], ROTARY_DTYPE)
    queries = gl.allocate_shared_memory(DTYPE, [QUARTERS, ROWS, WIDTH], Q_WIDE)
    query_rotary = gl.allocate_shared_memory(ROTARY_DTYPE, [1, ROWS, ROTARY], Q_NARROW)
    return queries, query_rotary


@aggregate
class _Exchanged:
    """The fields of `SwapMemory` of these names."""

    weights: Value
    columns: Value
    factors: Value


@gluon.jit
def _allocate_weights(CONFIG: gl.constexpr, DTYPE: gl.constexpr):
    """Allocate the weights of a consumer and what its warps exchange."""
    ROWS: gl.constexpr = CONFIG.ROWS
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, LATENTS], DTYPE)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    weights = (gl.allocate_shared_memory(DTYPE, [1, ROWS, LATENTS], WEIGHTS),)
    if CONFIG.GROUP_SCALES:
        # Separate pieces of memory, so that there is no barrier between the stores.
        for _quarter in gl.static_range(1, QUARTERS):
            more = gl.allocate_shared_memory(DTYPE, [1, ROWS, LATENTS], WEIGHTS)
            weights = weights + (more,)
    if CONFIG.KV_KIND == KV_PLAIN and ROWS <= 16 and not CONFIG.CONVERTS:
        return _Exchanged(weights, None, None)
    else:
        columns = gl.allocate_shared_memory(gl.float32, [4, ROWS], VECTOR)
        factors = gl.allocate_shared_memory(gl.float32, [1, ROWS], VECTOR)
        return _Exchanged(weights, columns, factors)


@gluon.jit
def allocate_swap_memory(CONFIG: gl.constexpr, DTYPE: gl.constexpr, ROTARY_DTYPE: gl.constexpr):
    """Allocate the `SwapMemory` of a consumer and initialize the barriers; a fence must follow.

    Args:
        DTYPE, ROTARY_DTYPE: of quarters and of other elements in the cache, int16 for 8 bits.
    """
    IS_PLAIN: gl.constexpr = CONFIG.KV_KIND == KV_PLAIN
    WORD: gl.constexpr = 1 if IS_PLAIN else 2
    ROTARY_WORD: gl.constexpr = 2 if ROTARY_DTYPE == gl.int16 else 1
    WIDTH: gl.constexpr = CONFIG.DV // QUARTERS // WORD
    ROTARY: gl.constexpr = CONFIG.ROTARY // ROTARY_WORD
    STAGES: gl.constexpr = CONFIG.STAGES
    ROTARY_STAGES: gl.constexpr = CONFIG.ROTARY_STAGES
    COMPUTE: gl.constexpr = DTYPE if IS_PLAIN else gl.float16
    ROTARY_COMPUTE: gl.constexpr = gl.float16 if ROTARY_DTYPE == gl.int16 else ROTARY_DTYPE
    # Consumers that convert the same quarters release them by the arrivals of their threads.
    CONSUMERS: gl.constexpr = CONFIG.WORKERS if CONFIG.SHARES else 1
    RELEASES: gl.constexpr = 1 if IS_PLAIN else 128 * CONSUMERS
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LATENTS, WIDTH], DTYPE)
    NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LATENTS, ROTARY], ROTARY_DTYPE)
    BARRIERS: gl.constexpr = STAGES + ROTARY_STAGES
    queries, query_rotary = _allocate_rows(CONFIG, COMPUTE, ROTARY_COMPUTE)
    quarters = gl.allocate_shared_memory(DTYPE, [STAGES, LATENTS, WIDTH], WIDE)
    rotary = gl.allocate_shared_memory(ROTARY_DTYPE, [ROTARY_STAGES, LATENTS, ROTARY], NARROW)
    exchanged = _allocate_weights(CONFIG, COMPUTE)
    scales = None
    if CONFIG.GROUP_SCALES:
        scales = gl.allocate_shared_memory(
            gl.float32,
            [ROTARY_STAGES, LATENTS, QUARTERS],
            gl.SwizzledSharedLayout(QUARTERS, 1, 1, [1, 0]),
        )
    full = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    # Scales are copied by the 32 threads of the loader.
    ROTARY_LOADS: gl.constexpr = 33 if CONFIG.GROUP_SCALES else 1
    for stage in gl.static_range(BARRIERS):
        mbarrier.init(full.index(stage), count=1 if stage < STAGES else ROTARY_LOADS)
        mbarrier.init(empty.index(stage), count=RELEASES if stage < STAGES else CONSUMERS)
    return SwapMemory(
        queries,
        query_rotary,
        Ring(quarters, full, empty, STAGES),
        RotaryRing(rotary, scales, full, empty, STAGES, ROTARY_STAGES),
        exchanged.weights,
        exchanged.columns,
        exchanged.factors,
    )


@gluon.jit
def with_own_rows(memory, CONFIG: gl.constexpr):
    """Return memory of another consumer with the same rings, for its own query rows."""
    queries, query_rotary = _allocate_rows(CONFIG, memory.queries.dtype, memory.query_rotary.dtype)
    exchanged = _allocate_weights(CONFIG, memory.queries.dtype)
    return SwapMemory(
        queries,
        query_rotary,
        memory.quarters,
        memory.rotary,
        exchanged.weights,
        exchanged.columns,
        exchanged.factors,
    )
