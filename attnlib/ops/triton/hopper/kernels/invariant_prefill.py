"""The batch-invariant Hopper prefill (M15): the prefill with sums over segments of keys.

Loaders, work tiles and key tiles are those of `hopper_prefill_kernel`. The consumers add up each
segment of keys from zero. The segments of a work tile are added in shared memory, because two
accumulators and the scores of a tile do not fit in registers; those of more than 128 elements in
global memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.decode_call import Outputs, Queries
from attnlib.ops.triton.hopper.kernels.invariant_consumer import consumer
from attnlib.ops.triton.hopper.kernels.invariant_state import Totals
from attnlib.ops.triton.hopper.kernels.prefill_call import (
    UNALIGNED,
    UNSPECIALIZED,
    PrefillCall,
    Scoring,
    mask_of,
)
from attnlib.ops.triton.hopper.kernels.prefill_loader import key_loader, value_loader
from attnlib.ops.triton.hopper.kernels.prefill_sources import CacheSource
from attnlib.ops.triton.hopper.kernels.prefill_storage import allocate_storage, allocate_tiles
from attnlib.ops.triton.hopper.kernels.schedule import Batch
from attnlib.ops.triton.hopper.kernels.segment_totals import by_thread

__all__ = ["invariant_prefill_kernel"]


@gluon.jit
def _totals(memory, staging, number: gl.constexpr, CONFIG: gl.constexpr):
    """Return the `Totals` of a consumer, in global memory if there is some."""
    if memory is not None:
        return Totals(memory, staging.index(number), True)
    else:
        LAYOUT: gl.constexpr = by_thread(CONFIG.WIDTH_V)
        shared = gl.allocate_shared_memory(gl.float32, [64, CONFIG.WIDTH_V], LAYOUT)
        return Totals(shared, shared, False)


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def invariant_prefill_kernel(
    key_desc, value_desc, query_desc, query, out, lse, sinks, k_scale, v_scale, aux0, aux1, aux2,
    aux3, query_start_loc, seq_lens, block_table, counters, totals_memory, scale, soft_cap, left,
    right, chunk, num_reqs, num_tokens, num_tiles, concurrent, l2_heads, num_blocks, stride_qt,
    stride_qh, stride_ot, stride_oh, stride_lt, stride_table, rows0, columns0, rows1, columns1,
    rows2, columns2, rows3, columns3, CONFIG: gl.constexpr,
):  # fmt: skip
    """One CTA of 4 warps for each of one to three consumers and 1 + 1 loader warps.

    Runtime arguments and grid are those of `hopper_prefill_kernel`. One consumer has the registers
    that the loaders leave. Also,

    Args:
        totals_memory: float32 [grid, CONSUMERS, 64 * WIDTH_V], where shared memory is too small for
            sums of values; else None.
    """
    DTYPE: gl.constexpr = key_desc.dtype
    STAGES: gl.constexpr = CONFIG.STAGES
    CONSUMERS: gl.constexpr = CONFIG.CONSUMERS
    q_tiles = allocate_tiles(DTYPE, CONFIG.Q_STAGES * CONSUMERS, 64, CONFIG.WIDTH)
    k_tiles = allocate_tiles(DTYPE, STAGES, CONFIG.BLOCK_N, CONFIG.WIDTH)
    v_tiles = allocate_tiles(DTYPE, STAGES, CONFIG.BLOCK_N, CONFIG.WIDTH_V)
    staging = None
    if totals_memory is not None:
        staging = allocate_tiles(DTYPE, CONSUMERS, 64, CONFIG.WIDTH_V // 2)
    totals0 = _totals(totals_memory, staging, 0, CONFIG)
    totals1 = totals0
    if CONSUMERS > 1:
        totals1 = _totals(totals_memory, staging, 1, CONFIG)
    totals2 = totals1
    if CONSUMERS > 2:
        totals2 = _totals(totals_memory, staging, 2, CONFIG)
    storage = allocate_storage(q_tiles, k_tiles, v_tiles, CONFIG, CONSUMERS + 1)
    scoring = Scoring(scale, soft_cap, None, None, None, None, None)
    queries = Queries(query, stride_qt, stride_qh, num_tokens)
    outputs = Outputs(out, lse, sinks, stride_ot, stride_oh, stride_lt)
    call = PrefillCall(
        Batch(query_start_loc, seq_lens, block_table, num_reqs, num_blocks, stride_table),
        num_tokens, num_tiles, l2_heads, counters, concurrent, mask_of(left, right, chunk, CONFIG),
        None, None, None, CONFIG,
    )  # fmt: skip
    keys = CacheSource(key_desc, 1, 0)
    values = CacheSource(value_desc, 1, 0)
    REGISTERS: gl.constexpr = CONFIG.CONSUMER_REGISTERS
    PRODUCERS: gl.constexpr = CONFIG.PRODUCER_REGISTERS
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (consumer, (call, scoring, queries, outputs, storage, totals0, 0)),
                (key_loader, (call, storage, keys, query_desc, True)),
                (value_loader, (call, storage, values)),
            ],
            [1, 1],
            [PRODUCERS, PRODUCERS],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (consumer, (call, scoring, queries, outputs, storage, totals0, 0)),
                (consumer, (call, scoring, queries, outputs, storage, totals1, 1)),
                (consumer, (call, scoring, queries, outputs, storage, totals2, 2)),
                (key_loader, (call, storage, keys, query_desc, True)),
                (value_loader, (call, storage, values)),
            ],
            [4, 4, 1, 1],
            [REGISTERS, REGISTERS, PRODUCERS, PRODUCERS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (call, scoring, queries, outputs, storage, totals0, 0)),
                (consumer, (call, scoring, queries, outputs, storage, totals1, 1)),
                (key_loader, (call, storage, keys, query_desc, True)),
                (value_loader, (call, storage, values)),
            ],
            [4, 1, 1],
            [REGISTERS, PRODUCERS, PRODUCERS],
        )
