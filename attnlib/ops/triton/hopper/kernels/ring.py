"""A ring of tiles in shared memory, with the barriers between its loaders and its consumers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate

__all__ = ["Ring", "Stage", "ring_pair"]


@aggregate
class Stage:
    """The stage of a ring that holds one tile (`Ring.at`).

    Fields:
        ring: the ring.
        index: number of the stage.
        step: number of the tile.
    """

    ring: Value
    index: Value
    step: Value

    @gluon.jit
    def tile(self):
        """Return the shared memory of the tile."""
        return self.ring.memory.index(self.index)

    @gluon.jit
    def wait_full(self):
        """Wait until the tile has been loaded."""
        mbarrier.wait(self.ring.full.index(self.index), (self.step // self.ring.STAGES) & 1)

    @gluon.jit
    def release(self):
        """Tell the loader that this consumer does not read the tile any more."""
        mbarrier.arrive(self.ring.empty.index(self.index), count=1)


@aggregate
class Ring:
    """Tiles in shared memory that loaders fill and consumers read and release.

    Loaders and consumers count tiles: tile number `step` is in stage `step % STAGES`, and the
    parity of its barriers is that of `step // STAGES`, the number of earlier passes over the ring.

    Fields:
        memory: shared memory with STAGES tiles in its first dimension.
        full: mbarriers [STAGES, 1] that complete when a stage has been filled.
        empty: mbarriers [STAGES, 1] that complete when all consumers have released a stage.
        STAGES: number of stages.
    """

    memory: Value
    full: Value
    empty: Value
    STAGES: gl.constexpr

    @gluon.jit
    def at(self, step):
        """Return the stage of tile number `step`, whose number is computed here.

        A main loop takes the stages of its step before the products: no arithmetic is then left
        between a product and the wait for it.
        """
        return Stage(self, step % self.STAGES, step)

    @gluon.jit
    def stage(self, step):
        """Return the stage of tile number `step`."""
        return step % self.STAGES

    @gluon.jit
    def tile(self, step):
        """Return the shared memory of tile number `step`."""
        return self.memory.index(step % self.STAGES)

    @gluon.jit
    def wait_full(self, step):
        """Wait until tile number `step` has been loaded."""
        mbarrier.wait(self.full.index(step % self.STAGES), (step // self.STAGES) & 1)

    @gluon.jit
    def wait_empty(self, step):
        """Wait until all consumers have released the tile that was loaded STAGES steps before."""
        # The parity is inverted, so that the first pass over the ring does not wait.
        mbarrier.wait(self.empty.index(step % self.STAGES), ((step // self.STAGES) & 1) ^ 1)

    @gluon.jit
    def expect(self, step, BYTES: gl.constexpr):
        """Let the barrier of tile number `step` wait for BYTES of TMA loads, and return it."""
        barrier = self.full.index(step % self.STAGES)
        mbarrier.expect(barrier, BYTES)
        return barrier

    @gluon.jit
    def release(self, step):
        """Tell the loader that this consumer does not read tile number `step` any more."""
        mbarrier.arrive(self.empty.index(step % self.STAGES), count=1)


@gluon.jit
def ring_pair(
    k_memory,
    v_memory,
    STAGES: gl.constexpr,
    K_LOADS: gl.constexpr = 1,
    V_LOADS: gl.constexpr = 1,
    RELEASES: gl.constexpr = 1,
):
    """Return the rings of keys and of values, with barriers, in these two pieces of memory.

    A fence must follow before TMA or another warp uses the barriers.

    Args:
        K_LOADS, V_LOADS: arrivals that complete the load of a tile; the `expect` of a loader is
            one.
        RELEASES: arrivals that make a stage empty.
    """
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=K_LOADS)
        mbarrier.init(k_empty.index(stage), count=RELEASES)
        mbarrier.init(v_full.index(stage), count=V_LOADS)
        mbarrier.init(v_empty.index(stage), count=RELEASES)
    return Ring(k_memory, k_full, k_empty, STAGES), Ring(v_memory, v_full, v_empty, STAGES)
