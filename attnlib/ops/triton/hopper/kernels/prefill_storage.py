"""Shared memory of a Hopper prefill: rings of queries, keys and values, and the mailbox.

Barriers (one pair per stage or mailbox slot):

- full, of keys, values and queries: complete when the TMA loads have delivered their bytes.
- empty: count CONSUMERS arrivals, one per consumer warpgroup. With OWN_QUERIES each consumer has
  its own pair for its rows of a stage of queries.
- full of the mailbox: one arrival, of the key loader. Its empty: one arrival of each reader.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate
from attnlib.ops.triton.hopper.kernels.mailbox import Mailbox
from attnlib.ops.triton.hopper.kernels.ring import Ring

__all__ = ["PrefillStorage", "QueryTiles", "allocate_storage", "allocate_tiles"]


@aggregate
class QueryTiles:
    """A ring of queries. The rows of a consumer in a stage are KEY_PARTS tiles.

    Fields:
        ring: `Ring`, with one pair of barriers per stage, or with OWN_QUERIES per stage and
            consumer.
        BLOCKS: blocks of 64 rows in a stage.
        KEY_PARTS: parts of the rows.
        OWN_QUERIES: each consumer has barriers of its own rows.
        CONSUMERS: consumer warpgroups.
    """

    ring: Value
    BLOCKS: gl.constexpr
    KEY_PARTS: gl.constexpr
    OWN_QUERIES: gl.constexpr
    CONSUMERS: gl.constexpr

    @gluon.jit
    def tile(self, number, part: gl.constexpr = 0):
        """Return a part of the rows with this number, stage * BLOCKS + block."""
        if self.KEY_PARTS == 1:
            return self.ring.memory.index(number)
        else:
            return self.ring.memory.index(number * self.KEY_PARTS + part)

    @gluon.jit
    def barrier(self, stage, consumer: gl.constexpr):
        """Return the number of the barriers of a consumer's rows."""
        if self.OWN_QUERIES:
            return stage * self.CONSUMERS + consumer
        else:
            return stage

    @gluon.jit
    def parity(self, number):
        """Return the parity of the barriers in the pass that work tile `number` belongs to."""
        return (number // self.ring.STAGES) & 1


@aggregate
class PrefillStorage:
    """Mailbox and rings of a CTA. `queries` are `QueryTiles`."""

    mailbox: Value
    queries: Value
    keys: Value
    values: Value


@gluon.jit
def allocate_tiles(
    DTYPE: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr
):
    """Return shared memory for COUNT tiles [ROWS, WIDTH], in the layout of WGMMA."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], DTYPE)
    return gl.allocate_shared_memory(DTYPE, [COUNT, ROWS, WIDTH], LAYOUT)


@gluon.jit
def allocate_storage(
    q_tiles,
    k_tiles,
    v_tiles,
    CONFIG: gl.constexpr,
    READERS: gl.constexpr,
    LOADERS: gl.constexpr = 1,
    OWN_QUERIES: gl.constexpr = False,
):
    """Return the storage with these tiles, a mailbox and initialized barriers.

    Args:
        READERS: partitions that read the mailbox.
        LOADERS: arrivals that complete a stage of keys or values.
        OWN_QUERIES: see `QueryTiles`.
    """
    FIELDS: gl.constexpr = 6 + 4 * CONFIG.RANGES + int(CONFIG.SPLIT)
    STAGES: gl.constexpr = CONFIG.STAGES
    CONSUMERS: gl.constexpr = CONFIG.CONSUMERS
    mailbox = gl.allocate_shared_memory(
        gl.int32, [2 * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    mail_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mail_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    Q_BARRIERS: gl.constexpr = CONFIG.Q_STAGES * (CONSUMERS if OWN_QUERIES else 1)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_BARRIERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_BARRIERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(mail_full.index(slot), count=1)
        mbarrier.init(mail_empty.index(slot), count=READERS)
    for barrier in gl.static_range(Q_BARRIERS):
        mbarrier.init(q_full.index(barrier), count=1)
        mbarrier.init(q_empty.index(barrier), count=1 if OWN_QUERIES else CONSUMERS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=LOADERS)
        mbarrier.init(k_empty.index(stage), count=CONSUMERS)
        mbarrier.init(v_full.index(stage), count=LOADERS)
        mbarrier.init(v_empty.index(stage), count=CONSUMERS)
    # Makes the initialized barriers visible to TMA.
    fence_async_shared()
    BLOCKS: gl.constexpr = q_tiles.shape[0] // (CONFIG.Q_STAGES * CONFIG.KEY_PARTS)
    return PrefillStorage(
        Mailbox(mailbox, mail_full, mail_empty, FIELDS, CONFIG.RANGES, CONFIG.SPLIT),
        QueryTiles(
            Ring(q_tiles, q_full, q_empty, CONFIG.Q_STAGES),
            BLOCKS,
            CONFIG.KEY_PARTS,
            OWN_QUERIES,
            CONSUMERS,
        ),
        Ring(k_tiles, k_full, k_empty, STAGES),
        Ring(v_tiles, v_full, v_empty, STAGES),
    )
