"""Consumer warpgroups of the Hopper prefill: prologue, main loop and last product of a work tile.

Key tiles are visited from the diagonal leftwards: masked tiles first, then unmasked ones, then
masked tiles at the left.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from attnlib.ops.triton.hopper.kernels.consumer_state import BOUNDED, Consumer
from attnlib.ops.triton.hopper.kernels.lanes import lane_sums
from attnlib.ops.triton.hopper.kernels.prefill_epilogue import finish_rows
from attnlib.ops.triton.hopper.kernels.prefill_queries import receive_queries, row_state
from attnlib.ops.triton.hopper.kernels.prefill_rows import (
    store_empty_rows,
    store_layout,
    work_rows,
)
from attnlib.ops.triton.hopper.kernels.prefill_visits import first_tile, last_values, main_loop
from attnlib.ops.triton.hopper.kernels.softmax import score_factor
from attnlib.ops.triton.hopper.kernels.two_accumulators import FIRST_COLUMNS, zeros_of_both
from attnlib.ops.triton.hopper.kernels.value_columns import (
    PART_ELEMENTS,
    PART_KEYS,
    product_columns,
    shared_memory_offset,
)
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["consumer"]

_RESCALE_THRESHOLD = gl.constexpr(8)
"""THRESHOLD of `softmax.online_softmax` with three consumers: 1128 instead of 1152 us on an H200
(8k tokens, head size 64), and 1113 instead of 1125 with sums by thread. Two consumers follow the
maximum of every tile: with the branch of `lanes.rescale`, head size 128 took 953 instead of 925
us, and 96 took 864 instead of 837 us."""

_SIGN_LEAD = gl.constexpr(16)
"""Lead of `softmax_by_sign`. Where maxima rise by 2 per tile, 8k tokens took 911 us with 8, 885
with 16 and 857 with 32 on an H200; by 2 ** 10 per tile 1021, 910 and 935. The kernel that computes
maxima took 901 and 895."""


@gluon.jit
def _constants(call, storage, WARPGROUP: gl.constexpr):
    """Return the `Consumer` of a warpgroup."""
    q_tiles = storage.queries.ring.memory
    k_tiles = storage.keys.memory
    v_tiles = storage.values.memory
    SPLIT_V: gl.constexpr = call.config.SPLIT_V
    CONSUMERS: gl.constexpr = call.config.CONSUMERS
    D: gl.constexpr = call.config.D
    DV: gl.constexpr = call.config.DV
    # Values in parts of 32 elements (`value_columns`), or undivided.
    VALUE_PARTS: gl.constexpr = (DV + 31) // 32 if v_tiles.shape[2] == PART_ELEMENTS else 0
    SUMS: gl.constexpr = VALUE_PARTS > 0 and v_tiles.shape[0] > storage.values.STAGES * VALUE_PARTS
    V_COLUMNS: gl.constexpr = product_columns(DV, VALUE_PARTS, SUMS) if VALUE_PARTS > 0 else 0
    V_OFFSET: gl.constexpr = shared_memory_offset(
        (2 * q_tiles.numel, 2 * k_tiles.numel), 2 * v_tiles.numel
    )
    WIDTH_V: gl.constexpr = call.config.WIDTH_V if VALUE_PARTS == 0 else 64 * ((DV + 63) // 64)
    # Elements of a head that products read. Float8 queries and keys are permuted.
    PLAIN: gl.constexpr = call.config.KV_KIND == KV_PLAIN
    ELEMENTS: gl.constexpr = (D + 15) // 16 * 16 if PLAIN else q_tiles.shape[2]
    # With SPLIT_V, all consumers compute the same rows, each for a part of the value elements.
    REST: gl.constexpr = call.config.REST_COLUMNS
    COLUMNS: gl.constexpr = FIRST_COLUMNS if REST > 0 else WIDTH_V // (CONSUMERS if SPLIT_V else 1)
    # `bounded_softmax` has no running maximum, and its sums are those of rows.
    RARELY: gl.constexpr = (CONSUMERS == 3 or call.config.RARELY) and call.config.HAS_CAP != BOUNDED
    MAX_THRESHOLD: gl.constexpr = _RESCALE_THRESHOLD if RARELY else 0
    THRESHOLD: gl.constexpr = _SIGN_LEAD if call.config.SIGN_SOFTMAX else MAX_THRESHOLD
    return Consumer(
        WARPGROUP=WARPGROUP,
        ROW_BLOCK=0 if SPLIT_V else WARPGROUP,
        PART=WARPGROUP if SPLIT_V else -1,
        WIDTH_V=WIDTH_V,
        COLUMNS=COLUMNS,
        ELEMENTS=ELEMENTS,
        S_LAYOUT=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, k_tiles.shape[1], 16]),
        O_LAYOUT=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]),
        REST_COLUMNS=REST,
        REST_LAYOUT=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(REST, 8), 16]),
        V_COLUMNS=V_COLUMNS,
        V_OFFSET=V_OFFSET,
        SUMS=SUMS,
        CHECK_FIRST=call.mask.HAS_LEFT or call.mask.HAS_CHUNK or call.config.EXACT,
        THRESHOLD=THRESHOLD,
        # In the epilogue, sinks take registers that three consumers do not have, and ptxas
        # schedules their main loop worse.
        EARLY_SINK=call.config.HAS_SINK and SUMS and THRESHOLD > 0,
    )


@gluon.jit
def _zero_outputs(warpgroup):
    """Return the accumulator of the outputs of a work tile, or both (`two_accumulators`)."""
    if warpgroup.REST_COLUMNS > 0:
        acc = zeros_of_both(warpgroup)
    elif warpgroup.V_COLUMNS > 0:
        # As wide as the scores, whatever the head size.
        acc = gl.zeros([64, PART_KEYS], gl.float32, warpgroup.S_LAYOUT)
    else:
        acc = gl.zeros([64, warpgroup.COLUMNS], gl.float32, warpgroup.O_LAYOUT)
    return acc


@gluon.jit
def consumer(call, scoring, source, outputs, storage, q_halves, WARPGROUP: gl.constexpr):
    """Compute the 64 rows of consumer warpgroup WARPGROUP of each published work tile.

    Args:
        call, scoring, storage: `PrefillCall`, `Scoring`, `PrefillStorage`.
        source, outputs: `Queries` and `Outputs`.
        q_halves: float16 queries in shared memory; None without a converter.
    """
    warpgroup = _constants(call, storage, WARPGROUP)
    queries = storage.queries
    BLOCK_N: gl.constexpr = call.config.BLOCK_N
    S_LAYOUT: gl.constexpr = warpgroup.S_LAYOUT
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    OWN_QUERIES: gl.constexpr = queries.OWN_QUERIES
    EARLY_QUERIES: gl.constexpr = (
        OWN_QUERIES and call.config.REST_COLUMNS > 0 and call.config.QUERY_REGISTERS
    )
    factor = score_factor(scoring.scale, scoring.soft_cap, call.config.HAS_CAP)
    call.begin()
    mail = 0
    loaded = 0
    step = 0
    request = 0
    while request >= 0:
        work = storage.mailbox.receive(mail)
        request = work.request
        mail += 1
        if request == call.batch.num_reqs:
            EMPTY: gl.constexpr = store_layout(warpgroup.WIDTH_V)
            token, head, valid = work_rows(
                call, work, warpgroup.ROW_BLOCK, gl.SliceLayout(1, EMPTY)
            )
            store_empty_rows(
                outputs,
                work.start,
                token,
                head,
                valid,
                queries.ring.memory.dtype,
                EMPTY,
                warpgroup.WIDTH_V,
                call.config.DV,
                call.config.HAS_LSE and warpgroup.PART <= 0,
            )
            if call.config.SPLIT:
                call.splits.store_counts(work.start + token, head, valid, 0.0)
        if (request >= 0) & (request < call.batch.num_reqs):
            tiles = call.tiles(work)
            q_stage = loaded % queries.ring.STAGES
            q_barrier = queries.barrier(q_stage, WARPGROUP)
            q_tile = receive_queries(call, queries, source, work, loaded, warpgroup)
            loaded += 1
            rows, v_factor = row_state(
                call, scoring, queries, q_halves, work, q_stage, warpgroup, q_tile, factor
            )
            row_max = gl.full([64], float("-inf"), gl.float32, ROW)
            row_sum = gl.full([64], 0.0, gl.float32, ROW)
            if warpgroup.THRESHOLD > 0:
                row_sum = lane_sums(gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT))
            sink = 0.0  # not used
            if warpgroup.EARLY_SINK:
                sink = gl.load(outputs.sinks + rows.heads, mask=rows.valid, other=0.0)
            acc = _zero_outputs(warpgroup)
            if EARLY_QUERIES:  # they are in registers
                mbarrier.arrive(queries.ring.empty.index(q_barrier), count=1)
            elif OWN_QUERIES:
                if tiles.end <= tiles.begin:
                    mbarrier.arrive(queries.ring.empty.index(q_barrier), count=1)
            if tiles.end > tiles.begin:
                row_max, row_sum, acc, weights = first_tile(
                    call,
                    scoring,
                    warpgroup,
                    rows,
                    storage,
                    work,
                    tiles,
                    step,
                    row_max,
                    row_sum,
                    acc,
                    sink,
                )
                step += 1
                step, row_max, row_sum, acc, weights = main_loop(
                    call,
                    scoring,
                    warpgroup,
                    rows,
                    storage,
                    tiles,
                    step,
                    row_max,
                    row_sum,
                    acc,
                    weights,
                )
                if OWN_QUERIES and not EARLY_QUERIES:
                    # The next queries arrive during the rest of this work tile.
                    mbarrier.arrive(queries.ring.empty.index(q_barrier), count=1)
                acc = last_values(call, warpgroup, storage, step, acc, weights)
            finish_rows(
                call,
                scoring,
                warpgroup,
                rows,
                outputs,
                work,
                row_max,
                row_sum,
                acc,
                v_factor,
                OWN_QUERIES,
            )
            if call.config.LOAD_QUERY and not OWN_QUERIES:
                # The next queries arrive here by TMA, after the staged output has been read.
                fence_async_shared()
                mbarrier.arrive(queries.ring.empty.index(q_stage), count=1)
