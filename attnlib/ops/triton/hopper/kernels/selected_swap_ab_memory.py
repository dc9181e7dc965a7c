"""The shared memory of a CTA that attends to lists with up to 16 query heads.

A tile of latents is gathered in four quarters of the elements of the values and the rotary part.
Slots are released together and not one by one, because each wait and each arrival synchronizes the
warps of a partition: the barriers FRONT belong to the first quarter and the rotary part, and the
barriers BACK to the other quarters. The copies of the second quarter count for FRONT.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate
from attnlib.ops.triton.hopper.kernels.latent_columns import LATENTS

__all__ = ["BACK", "FRONT", "NUMBER", "QUARTERS", "GatherMemory", "allocate_memory"]

NUMBER: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
"""Layout of one number in shared memory."""
QUARTERS: gl.constexpr = gl.constexpr(4)
"""Parts of the value elements of a tile, in which it is gathered. The rotary part comes last."""
SLOTS: gl.constexpr = gl.constexpr(5)
"""Quarters in shared memory: quarter q of tile t is in slot (4 * t + q) % 5, so that the first one
of the next tile is there while a tile is used."""
FRONT: gl.constexpr = gl.constexpr(0)
BACK: gl.constexpr = gl.constexpr(1)
"""Barriers of a tile."""


@aggregate
class GatherMemory:
    """Queries, a tile of latents and what the partitions exchange, with the barriers.

    Fields:
        queries: [QUARTERS, 16, elements of a quarter]; the output is staged there.
        query_rotary: [1, 16, elements].
        ring: [SLOTS, 64, elements of a quarter].
        rotary: [1, 64, elements].
        weights: [1, 16, 64], those of a tile.
        maxima: float32 [4, 16], maxima of each warp.
        rounded_sums: float32 [16], sums of the rounded weights of a list.
        num_tiles: int32 [1], tiles of a list.
        listed: mbarrier [1, 1] that completes when `num_tiles` is known.
        summed: mbarrier [1, 1] that completes when `rounded_sums` are known.
        queries_full, queries_empty: mbarriers [1, 1] of the queries of a list.
        full: mbarriers [2, 1] of the copies of a tile, FRONT and BACK.
        empty: mbarriers [2, 1] of its free slots, FRONT and BACK.
    """

    queries: Value
    query_rotary: Value
    ring: Value
    rotary: Value
    weights: Value
    maxima: Value
    rounded_sums: Value
    num_tiles: Value
    listed: Value
    summed: Value
    queries_full: Value
    queries_empty: Value
    full: Value
    empty: Value

    @gluon.jit
    def slots(self, tile):
        """Return the slots of the quarters of tile number `tile` of a list."""
        use = tile * QUARTERS
        return use % SLOTS, (use + 1) % SLOTS, (use + 2) % SLOTS, (use + 3) % SLOTS

    @gluon.jit
    def wait_loaded(self, HALF: gl.constexpr, number):
        """Wait for the copies FRONT or BACK of tile number `number` of the CTA."""
        mbarrier.wait(self.full.index(HALF), number & 1)

    @gluon.jit
    def wait_free(self, HALF: gl.constexpr, parity):
        """Wait until the slots FRONT or BACK are free."""
        mbarrier.wait(self.empty.index(HALF), parity)


@gluon.jit
def allocate_memory(DV: gl.constexpr, ROTARY: gl.constexpr, DTYPE: gl.constexpr):
    """Allocate the shared memory of a CTA and initialize the barriers; a fence must follow."""
    WIDTH: gl.constexpr = DV // QUARTERS
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LATENTS, WIDTH], DTYPE)
    NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LATENTS, ROTARY], DTYPE)
    Q_WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, WIDTH], DTYPE)
    Q_NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, ROTARY], DTYPE)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, LATENTS], DTYPE)
    MATRIX: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(DTYPE, [QUARTERS, 16, WIDTH], Q_WIDE)
    query_rotary = gl.allocate_shared_memory(DTYPE, [1, 16, ROTARY], Q_NARROW)
    ring = gl.allocate_shared_memory(DTYPE, [SLOTS, LATENTS, WIDTH], WIDE)
    rotary = gl.allocate_shared_memory(DTYPE, [1, LATENTS, ROTARY], NARROW)
    weights = gl.allocate_shared_memory(DTYPE, [1, 16, LATENTS], WEIGHTS)
    maxima = gl.allocate_shared_memory(gl.float32, [4, 16], MATRIX)
    rounded_sums = gl.allocate_shared_memory(gl.float32, [16], VECTOR)
    num_tiles = gl.allocate_shared_memory(gl.int32, [1], VECTOR)
    listed = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    summed = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    queries_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    queries_empty = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    mbarrier.init(listed.index(0), count=1)
    mbarrier.init(summed.index(0), count=1)
    mbarrier.init(queries_full.index(0), count=128)
    mbarrier.init(queries_empty.index(0), count=1)
    for half in gl.static_range(2):
        mbarrier.init(empty.index(half), count=1)
        mbarrier.init(full.index(half), count=128)
    return GatherMemory(
        queries,
        query_rotary,
        ring,
        rotary,
        weights,
        maxima,
        rounded_sums,
        num_tiles,
        listed,
        summed,
        queries_full,
        queries_empty,
        full,
        empty,
    )
