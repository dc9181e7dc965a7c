"""Consumer warpgroups of the batch-invariant Hopper prefill: each segment of keys is added up from
zero, and the sums of segments are added in their order."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from attnlib.ops.triton.hopper.kernels.compat import partition_barrier
from attnlib.ops.triton.hopper.kernels.invariant_epilogue import finish_rows, known_rows
from attnlib.ops.triton.hopper.kernels.invariant_state import InvariantRows, Totals
from attnlib.ops.triton.hopper.kernels.invariant_visits import first_tile, last_segment, main_loop
from attnlib.ops.triton.hopper.kernels.prefill_rows import (
    aligned_offset,
    store_empty_rows,
    store_layout,
)
from attnlib.ops.triton.hopper.kernels.segments import (
    segment_tiles,
)
from attnlib.ops.triton.hopper.kernels.softmax import score_factor

__all__ = ["consumer"]


@gluon.jit
def _receive_queries(call, queries, source, work, loaded, WARPGROUP: gl.constexpr):
    """Wait for the queries of a work tile, or load those that no TMA box covers (GROUP does not
    divide 64); return them in shared memory."""
    stage = loaded % queries.ring.STAGES
    q_tile = queries.tile(stage * queries.BLOCKS + WARPGROUP)
    if call.config.LOAD_QUERY:
        mbarrier.wait(queries.ring.full.index(stage), queries.parity(loaded))
    else:
        WIDTH: gl.constexpr = queries.ring.memory.shape[2]
        LAYOUT: gl.constexpr = store_layout(WIDTH)
        token, head, valid = known_rows(call, work, WARPGROUP, gl.SliceLayout(1, LAYOUT))
        tokens = (work.start + token).to(gl.int64) * source.stride_token
        offsets = aligned_offset(tokens + head.to(gl.int64) * source.stride_head)
        columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
        mask = valid[:, None] & (columns < call.config.D)[None, :]
        pointers = source.pointer + offsets[:, None] + columns[None, :]
        q = gl.load(pointers, mask=mask, other=0.0)
        # All warps are done with the previous queries before they are overwritten.
        partition_barrier()
        q_tile.store(q)
        fence_async_shared()
        partition_barrier()
    return q_tile


@gluon.jit
def _clear_rows(call, outputs, work, DTYPE: gl.constexpr, WARPGROUP: gl.constexpr):
    """Store the rows of a work tile after the last request."""
    WIDTH_V: gl.constexpr = call.config.WIDTH_V
    STORE: gl.constexpr = store_layout(WIDTH_V)
    token, head, valid = known_rows(call, work, WARPGROUP, gl.SliceLayout(1, STORE))
    store_empty_rows(
        outputs,
        work.start,
        token,
        head,
        valid,
        DTYPE,
        STORE,
        WIDTH_V,
        call.config.DV,
        call.config.HAS_LSE,
    )


@gluon.jit
def consumer(call, scoring, source, outputs, storage, totals, WARPGROUP: gl.constexpr):
    """Compute the 64 rows of consumer warpgroup WARPGROUP of each published work tile.

    Args:
        call, scoring, storage: `PrefillCall`, `Scoring`, `PrefillStorage`.
        source, outputs: `Queries` and `Outputs`.
        totals: `Totals`.
    """
    queries = storage.queries
    DTYPE: gl.constexpr = queries.ring.memory.dtype
    BLOCK_N: gl.constexpr = call.config.BLOCK_N
    WIDTH_V: gl.constexpr = call.config.WIDTH_V
    CONSUMERS: gl.constexpr = call.config.CONSUMERS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_V, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    factor = score_factor(scoring.scale, scoring.soft_cap, call.config.HAS_CAP)
    own = totals
    if totals.GLOBAL:
        first = (gl.program_id(0) * CONSUMERS + WARPGROUP) * (64 * WIDTH_V)
        own = Totals(totals.memory + first, totals.staging, True)
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
            _clear_rows(call, outputs, work, DTYPE, WARPGROUP)
        if (request >= 0) & (request < call.batch.num_reqs):
            tiles = call.tiles(work)
            q_stage = loaded % queries.ring.STAGES
            q_tile = _receive_queries(call, queries, source, work, loaded, WARPGROUP)
            loaded += 1
            token, head, valid = known_rows(call, work, WARPGROUP, ROW)
            position = work.seq_len - work.query_len
            row_first, row_last = call.mask.span(token + position, work.seq_len)
            segment = segment_tiles(
                work.first_token + position, WIDTH_V, BLOCK_N, call.config.GROUP
            )
            rows = InvariantRows(
                q_tile,
                row_first,
                row_last,
                factor,
                scoring.soft_cap,
                tiles.end,
                segment,
                call.mask.HAS_LEFT or call.mask.HAS_CHUNK,
                call.config.HAS_CAP,
            )
            total_max = gl.full([64], float("-inf"), gl.float32, ROW)
            total_sum = gl.full([64], 0.0, gl.float32, ROW)
            acc = gl.zeros([64, WIDTH_V], gl.float32, O_LAYOUT)
            row_max = gl.full([64], float("-inf"), gl.float32, ROW)
            if tiles.end > tiles.begin:
                row_max, sums, weights = first_tile(
                    call, storage, rows, work, step, row_max, WARPGROUP
                )
                step += 1
                step, total_max, total_sum, acc, row_max, sums, weights = main_loop(
                    storage,
                    rows,
                    own,
                    tiles,
                    step,
                    total_max,
                    total_sum,
                    acc,
                    row_max,
                    sums,
                    weights,
                )
                if call.config.LOAD_QUERY:
                    # All products with the queries are complete: the next ones may arrive by TMA.
                    mbarrier.arrive(queries.ring.empty.index(q_stage), count=1)
                total_max, total_sum, acc = last_segment(
                    storage,
                    rows,
                    own,
                    tiles.begin,
                    step,
                    total_max,
                    total_sum,
                    acc,
                    row_max,
                    sums,
                    weights,
                )
            elif call.config.LOAD_QUERY:
                mbarrier.arrive(queries.ring.empty.index(q_stage), count=1)
            finish_rows(
                call,
                outputs,
                own,
                work,
                token,
                head,
                valid,
                total_max,
                total_sum,
                acc,
                DTYPE,
                WARPGROUP,
            )
