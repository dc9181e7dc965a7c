"""The shared memory of a CTA that attends with 64 query rows to tiles of latents (P10, M12).

A CTA has two consumer warpgroups and one or more loader warps. A latent is loaded once and used as
key and as value. Latents are processed in tiles A, B, A, B, ... of 64, and the memory holds one of
each (`latent_steps` says what the consumers do with them).

There is one buffer for the weights of both tiles: each consumer writes to it after its product with
the weights of the other one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate, partition_barrier

__all__ = [
    "HIGH",
    "LOADS",
    "LOW",
    "PARTS",
    "ROTARY_PART",
    "TILE",
    "LatentTiles",
    "LatentParts",
    "allocate_tiles",
    "clear_tile_from",
    "half_load",
]

TILE: gl.constexpr = gl.constexpr(64)
"""Latents of a tile."""
PARTS: gl.constexpr = gl.constexpr(3)
ROTARY_PART: gl.constexpr = gl.constexpr(0)
LOW: gl.constexpr = gl.constexpr(1)
HIGH: gl.constexpr = gl.constexpr(2)
"""Parts of a tile. The rotary part is loaded first, then the half that the owner of the tile
accumulates: it releases that one before the other consumer releases the other one."""
LOADS: gl.constexpr = gl.constexpr(5)
"""Loads of a tile by TMA: the rotary part, then the quarters of the value elements (`half_load`).
The scores of a quarter are issued once it is loaded."""


@gluon.constexpr_function
def half_load(part, quarter):
    """Return the number of the load of quarter 0 or 1 of half LOW or HIGH."""
    return 2 * part - 1 + quarter


@aggregate
class LatentParts:
    """Rows of latents or queries in shared memory, [tiles, 64, elements], in three parts.

    Fields:
        rotary: the elements after those of the values; None without them.
        low, high: the halves of the elements of the values.
    """

    rotary: Value
    low: Value
    high: Value

    @gluon.jit
    def part(self, PART: gl.constexpr):
        """Return the rotary part or a half."""
        if PART == ROTARY_PART:
            return self.rotary
        elif PART == LOW:
            return self.low
        else:
            return self.high


@aggregate
class LatentTiles:
    """Queries, tiles of latents and what the consumers exchange, with the barriers.

    The owner of a tile is the consumer that computes its scores: 0 for tile A, 1 for tile B.

    Fields:
        queries: one tile.
        latents: tiles A and B.
        weights: [64, TILE], those of one tile.
        maxima, scales: float32 [2, 64], for each tile the running maxima after it and the factors
            of earlier results.
        sums: float32 [2, 64], the sums of the weights of each consumer.
        queries_full: mbarrier [1, 1] that completes with the copies of the queries, if GATHERED.
        full: mbarriers that complete with the copies of a part, [2 * PARTS, 1] if GATHERED, else
            of a load, [2 * LOADS, 1]. One arrival per copying thread, or of TMA.
        empty: mbarriers [2 * PARTS, 1] of free parts. One arrival, of the consumer that uses a part
            last: the owner of the tile after its scores for the rotary part, and for a half the
            consumer that multiplies by it.
        weighed: mbarriers [2, 1] of tiles whose weights, maxima and factors are in shared memory.
            One arrival, of the owner.
        summed: mbarriers [2, 1] of consumers whose sums are in shared memory.
        GATHERED: latents are copied by 128 threads with `cp.async`, and not by TMA.
        ROTARY: elements of the rotary part, 0 without one.
        HALVED: bfloat16 queries, latents and weights are float16 (`latent_halves`).
    """

    queries: Value
    latents: Value
    weights: Value
    maxima: Value
    scales: Value
    sums: Value
    queries_full: Value
    full: Value
    empty: Value
    weighed: Value
    summed: Value
    GATHERED: gl.constexpr
    ROTARY: gl.constexpr
    HALVED: gl.constexpr

    @gluon.jit
    def wait_loaded(self, LOAD: gl.constexpr, parity, INDEX: gl.constexpr):
        """Wait until a part, or a load, of tile A or B is in shared memory."""
        LOADS_OF_TILE: gl.constexpr = PARTS if self.GATHERED else LOADS
        mbarrier.wait(self.full.index(INDEX * LOADS_OF_TILE + LOAD), parity)

    @gluon.jit
    def wait_free(self, PART: gl.constexpr, parity, INDEX: gl.constexpr):
        """Wait until a part of tile A or B may be overwritten."""
        mbarrier.wait(self.empty.index(INDEX * PARTS + PART), parity)

    @gluon.jit
    def release(self, PART: gl.constexpr, INDEX: gl.constexpr):
        """Tell the loader that a part of tile A or B has been used."""
        mbarrier.arrive(self.empty.index(INDEX * PARTS + PART), count=1)

    @gluon.jit
    def total_sum(self, row_sum, parity, CONSUMER: gl.constexpr):
        """Return the row sums of both consumers, from those of one.

        Args:
            parity: of the number of calls before.
        """
        self.sums.index(CONSUMER).store(row_sum)
        partition_barrier()
        mbarrier.arrive(self.summed.index(CONSUMER), count=1)
        mbarrier.wait(self.summed.index(1 - CONSUMER), parity)
        return row_sum + self.sums.index(1 - CONSUMER).load(row_sum.type.layout)


@gluon.jit
def _allocate_parts(
    COUNT: gl.constexpr, HALF: gl.constexpr, ROTARY: gl.constexpr, DTYPE: gl.constexpr
):
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, HALF], DTYPE)
    low = gl.allocate_shared_memory(DTYPE, [COUNT, TILE, HALF], WIDE)
    high = gl.allocate_shared_memory(DTYPE, [COUNT, TILE, HALF], WIDE)
    rotary = None
    if ROTARY > 0:
        NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, ROTARY], DTYPE)
        rotary = gl.allocate_shared_memory(DTYPE, [COUNT, TILE, ROTARY], NARROW)
    return LatentParts(rotary, low, high)


@gluon.jit
def allocate_tiles(
    DV: gl.constexpr,
    ROTARY: gl.constexpr,
    DTYPE: gl.constexpr,
    GATHERED: gl.constexpr,
    HALVED: gl.constexpr = False,
):
    """Allocate the shared memory of a CTA and initialize the barriers; a fence must follow."""
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, TILE], DTYPE)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    LOADS_OF_TILE: gl.constexpr = PARTS if GATHERED else LOADS
    queries = _allocate_parts(1, DV // 2, ROTARY, DTYPE)
    latents = _allocate_parts(2, DV // 2, ROTARY, DTYPE)
    weights = gl.allocate_shared_memory(DTYPE, [64, TILE], WEIGHTS)
    maxima = gl.allocate_shared_memory(gl.float32, [2, 64], VECTOR)
    scales = gl.allocate_shared_memory(gl.float32, [2, 64], VECTOR)
    sums = gl.allocate_shared_memory(gl.float32, [2, 64], VECTOR)
    queries_full = None
    if GATHERED:
        queries_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2 * LOADS_OF_TILE, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * PARTS, 1], mbarrier.MBarrierLayout())
    weighed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    if GATHERED:
        mbarrier.init(queries_full.index(0), count=128)
    for part in gl.static_range(2 * PARTS):
        if GATHERED:
            mbarrier.init(full.index(part), count=128)
        mbarrier.init(empty.index(part), count=1)
    if not GATHERED:
        for load in gl.static_range(2 * LOADS):
            mbarrier.init(full.index(load), count=1)
    for tile in gl.static_range(2):
        mbarrier.init(weighed.index(tile), count=1)
        mbarrier.init(summed.index(tile), count=1)
    return LatentTiles(
        queries,
        latents,
        weights,
        maxima,
        scales,
        sums,
        queries_full,
        full,
        empty,
        weighed,
        summed,
        GATHERED,
        ROTARY,
        HALVED,
    )


@gluon.jit
def _clear_rows_from(tile, valid):
    """Set the rows of a tile from `valid` on to 0: a page may hold anything past the sequence's
    end, and 0 * NaN is NaN (P5)."""
    ROWS: gl.constexpr = tile.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    content = tile.load(layout)
    tile.store(gl.where(rows[:, None] < valid, content, 0.0))


@gluon.jit
def clear_tile_from(tiles, valid, parity, INDEX: gl.constexpr):
    """Clear the rows of a tile from `valid` on once it is loaded."""
    for load in gl.static_range(1, LOADS):
        tiles.wait_loaded(load, parity, INDEX)
    _clear_rows_from(tiles.latents.low.index(INDEX), valid)
    _clear_rows_from(tiles.latents.high.index(INDEX), valid)
    fence_async_shared()
    partition_barrier()
