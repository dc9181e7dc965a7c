"""Mailbox and barriers of a Hopper prefill in shared memory (`prefill` describes them)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

__all__ = ["allocate_barriers"]


@gluon.jit
def allocate_barriers(
    FIELDS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    READERS: gl.constexpr, LOADERS: gl.constexpr, OWN_QUERIES: gl.constexpr = False,
):  # fmt: skip
    """Allocate and initialize the mailbox and the barriers of a CTA.

    Args:
        FIELDS: int32 fields of a work item.
        STAGES, Q_STAGES: stages of the rings of keys and values, and of queries.
        CONSUMERS: consumer warpgroups.
        READERS: partitions that read the mailbox.
        LOADERS: arrivals that complete a stage of keys or values.
        OWN_QUERIES: each consumer has barriers of its own rows of a stage of queries, in the order
            of stages.

    Returns:
        (mailbox, mail_full, mail_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty).
    """
    # Two slots, so that the key loader can publish an item while the last one is being processed.
    mailbox = gl.allocate_shared_memory(
        gl.int32, [2 * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    mail_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mail_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    Q_BARRIERS: gl.constexpr = Q_STAGES * (CONSUMERS if OWN_QUERIES else 1)
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
    return mailbox, mail_full, mail_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty
