"""The shared memory of a CTA that decodes over latents with up to 16 query rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate
from attnlib.ops.triton.hopper.kernels.latent_columns import LATENTS
from attnlib.ops.triton.hopper.kernels.ring import Ring

__all__ = ["QUARTERS", "ROTARY_STAGES", "STAGES", "SwapMemory", "allocate_swap_memory"]

QUARTERS: gl.constexpr = gl.constexpr(4)
"""Parts of the value elements of a tile."""
STAGES: gl.constexpr = gl.constexpr(11)
"""Quarters in shared memory. Quarter q of tile t is number 4 * t + q of their ring."""
ROTARY_STAGES: gl.constexpr = gl.constexpr(3)
"""Rotary parts in shared memory."""


@aggregate
class RotaryRing:
    """The elements of tiles after those of the values, whose barriers follow those of the quarters.

    Fields:
        memory: [ROTARY_STAGES, LATENTS, elements].
        full, empty: mbarriers of the quarters and, from number STAGES on, of this ring.
    """

    memory: Value
    full: Value
    empty: Value

    @gluon.jit
    def wait_full(self, stage, step):
        """Wait until tile number `step`, which is in this stage, has been loaded."""
        mbarrier.wait(self.full.index(STAGES + stage), (step // ROTARY_STAGES) & 1)

    @gluon.jit
    def wait_empty(self, stage, step):
        """Wait until the stage of tile number `step` is free."""
        # The parity is inverted, so that the first pass over the ring does not wait.
        mbarrier.wait(self.empty.index(STAGES + stage), ((step // ROTARY_STAGES) & 1) ^ 1)

    @gluon.jit
    def release(self, stage):
        """Tell the loader that a stage is free."""
        mbarrier.arrive(self.empty.index(STAGES + stage), count=1)


@aggregate
class SwapMemory:
    """The shared memory of a CTA.

    Fields:
        queries: [QUARTERS, rows, elements of a quarter].
        query_rotary: [1, rows, elements after those of the values].
        quarters: the `Ring` of quarters of tiles.
        rotary: the `RotaryRing` of the other elements of tiles.
        weights: [1, rows, LATENTS], those of one tile.
    """

    queries: Value
    query_rotary: Value
    quarters: Value
    rotary: Value
    weights: Value


@gluon.jit
def allocate_swap_memory(CONFIG: gl.constexpr, DTYPE: gl.constexpr):
    """Allocate the `SwapMemory` of a CTA and initialize the barriers; a fence must follow."""
    ROWS: gl.constexpr = CONFIG.ROWS
    WIDTH: gl.constexpr = CONFIG.DV // QUARTERS
    ROTARY: gl.constexpr = CONFIG.ROTARY
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LATENTS, WIDTH], DTYPE)
    NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LATENTS, ROTARY], DTYPE)
    Q_WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], DTYPE)
    Q_NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROTARY], DTYPE)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, LATENTS], DTYPE)
    BARRIERS: gl.constexpr = STAGES + ROTARY_STAGES
    queries = gl.allocate_shared_memory(DTYPE, [QUARTERS, ROWS, WIDTH], Q_WIDE)
    query_rotary = gl.allocate_shared_memory(DTYPE, [1, ROWS, ROTARY], Q_NARROW)
    quarters = gl.allocate_shared_memory(DTYPE, [STAGES, LATENTS, WIDTH], WIDE)
    rotary = gl.allocate_shared_memory(DTYPE, [ROTARY_STAGES, LATENTS, ROTARY], NARROW)
    weights = gl.allocate_shared_memory(DTYPE, [1, ROWS, LATENTS], WEIGHTS)
    full = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(BARRIERS):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    return SwapMemory(
        queries,
        query_rotary,
        Ring(quarters, full, empty, STAGES),
        RotaryRing(rotary, full, empty),
        weights,
    )
