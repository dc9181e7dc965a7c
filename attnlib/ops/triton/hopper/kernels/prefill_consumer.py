"""Consumer warpgroups of the Hopper prefill: prologue, main loop and last product of a work tile.

Key tiles are visited from the diagonal leftwards: masked tiles first, then unmasked ones, then
masked tiles at the left.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from attnlib.ops.triton.hopper.kernels.compat import partition_barrier
from attnlib.ops.triton.hopper.kernels.lanes import lane_sums
from attnlib.ops.triton.hopper.kernels.mainloop import (
    BOUNDED,
    Consumer,
    RowState,
    key_product,
    overlapped_step,
    value_product,
    weigh_tile,
)
from attnlib.ops.triton.hopper.kernels.prefill_epilogue import finish_rows
from attnlib.ops.triton.hopper.kernels.prefill_products import (
    keep_queries,
    pack_weights,
    wait_for_tile,
)
from attnlib.ops.triton.hopper.kernels.prefill_rows import (
    aligned_offset,
    clear_values,
    store_empty_rows,
    store_layout,
    work_rows,
)
from attnlib.ops.triton.hopper.kernels.quantized import WEIGHT_SCALE, halve_queries, load_kv_scale
from attnlib.ops.triton.hopper.kernels.sign_softmax import lane_references, row_references
from attnlib.ops.triton.hopper.kernels.slopes import slope_operand
from attnlib.ops.triton.hopper.kernels.softmax import LOG2E, score_factor
from attnlib.ops.triton.hopper.kernels.value_columns import (
    PART_ELEMENTS,
    PART_KEYS,
    clear_value_parts,
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
    WIDTH_V: gl.constexpr = v_tiles.shape[2] if VALUE_PARTS == 0 else 64 * ((DV + 63) // 64)
    # Elements of a head that products read. Float8 queries and keys are permuted.
    PLAIN: gl.constexpr = call.config.KV_KIND == KV_PLAIN
    ELEMENTS: gl.constexpr = (D + 15) // 16 * 16 if PLAIN else q_tiles.shape[2]
    # With SPLIT_V, all consumers compute the same rows, each for a part of the value elements.
    COLUMNS: gl.constexpr = WIDTH_V // (CONSUMERS if SPLIT_V else 1)
    # `bounded_softmax` has no running maximum, and its sums are those of rows.
    RARELY: gl.constexpr = CONSUMERS == 3 and call.config.HAS_CAP != BOUNDED
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
def _receive_queries(call, queries, source, work, loaded, warpgroup):
    """Wait for the queries of a work tile, or load those that no TMA box covers (GROUP does not
    divide 64); return them, or their first part, in shared memory."""
    stage = loaded % queries.ring.STAGES
    tile = queries.tile(stage * queries.BLOCKS + warpgroup.ROW_BLOCK)
    if call.config.LOAD_QUERY:
        barrier = queries.barrier(stage, warpgroup.WARPGROUP)
        mbarrier.wait(queries.ring.full.index(barrier), queries.parity(loaded))
    else:
        WIDTH: gl.constexpr = queries.ring.memory.shape[2]
        LAYOUT: gl.constexpr = store_layout(WIDTH)
        token, head, valid = work_rows(
            call, work, warpgroup.ROW_BLOCK, gl.SliceLayout(1, LAYOUT)
        )  # fmt: skip
        tokens = (work.start + token).to(gl.int64) * source.stride_token
        offsets = aligned_offset(tokens + head.to(gl.int64) * source.stride_head)
        columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
        for part in gl.static_range(queries.KEY_PARTS):
            lanes = part * WIDTH + columns
            mask = valid[:, None] & (lanes < call.config.D)[None, :]
            pointers = source.pointer + offsets[:, None] + lanes[None, :]
            q = gl.load(pointers, mask=mask, other=0.0)
            # All warps are done with the previous queries before they are overwritten.
            partition_barrier()
            number = stage * queries.CONSUMERS + warpgroup.WARPGROUP
            queries.tile(number, part).store(q)
        fence_async_shared()
        partition_barrier()
    return tile


@gluon.jit
def _query_operand(call, queries, stage, warpgroup, tile):
    """Return the queries as operand of Q @ K^T; those of a float8 cache are not divided."""
    number = stage * queries.BLOCKS + warpgroup.ROW_BLOCK
    if call.config.SPLIT_V:
        return queries.ring.memory
    elif queries.OWN_QUERIES:
        LAYOUT: gl.constexpr = gl.DotOperandLayout(0, warpgroup.S_LAYOUT, 2)
        return keep_queries(tile, queries.tile(number, 1), queries.tile(number, 2), LAYOUT)
    elif queries.KEY_PARTS == 3:
        return tile, queries.tile(number, 1), queries.tile(number, 2)
    else:
        return tile


@gluon.jit
def _row_slopes(call, scoring, work, warpgroup):
    """Return the operand of the slopes of a score function with KEY_SLOPE."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, warpgroup.S_LAYOUT, 2)
    token, head, valid = work_rows(call, work, warpgroup.ROW_BLOCK, gl.SliceLayout(1, LAYOUT))
    positions = (token + (work.seq_len - work.query_len))[:, None]
    slopes = scoring.KEY_SLOPE(
        0.0, positions, 0, head[:, None], work.request, call.aux, 1.0 / scoring.scale
    )
    return slope_operand(gl.zeros([64, 1], gl.float32, LAYOUT) + slopes)


@gluon.jit
def _row_state(call, scoring, queries, q_halves, work, stage, warpgroup, tile, factor):
    """Return the `RowState` of a work tile whose queries have arrived, and the factor of the values
    of a float8 cache."""
    ROW: gl.constexpr = gl.SliceLayout(1, warpgroup.S_LAYOUT)
    kv_head = work.kv_head // call.config.SHARED
    operand = _query_operand(call, queries, stage, warpgroup, tile)
    k_factor = factor  # not used
    v_factor = factor  # not used
    if call.config.KV_KIND != KV_PLAIN:
        # Products are computed in float16.
        halves = q_halves.index(stage * call.config.CONSUMERS + warpgroup.WARPGROUP)
        k_factor = gl.convert_layout(halve_queries(operand, halves), ROW)
        if call.config.QUERY_REGISTERS:
            # Leaves more of the shared memory's throughput to the converter.
            operand = halves.load(gl.DotOperandLayout(0, warpgroup.S_LAYOUT, 2))
        else:
            operand = halves
        k_factor = k_factor * load_kv_scale(scoring.k_scale, kv_head, call.config.K_SCALE_KIND)
        # Masked scores are -inf, and -inf * 0 would be NaN.
        k_factor = gl.where(k_factor < 2.0**-105, 2.0**-105, k_factor)
        v_factor = (
            load_kv_scale(scoring.v_scale, kv_head, call.config.V_SCALE_KIND) / WEIGHT_SCALE
        )  # fmt: skip
    elif scoring.k_scale is not None:
        # Copies of a float8 cache, whose scale is not a number.
        k_scaled = scoring.scale * load_kv_scale(
            scoring.k_scale, kv_head, call.config.K_SCALE_KIND
        )  # fmt: skip
        k_scaled = gl.where(k_scaled < 2.0**-105, 2.0**-105, k_scaled)
        factor = score_factor(k_scaled, scoring.soft_cap, call.config.HAS_CAP)
    slopes = 0.0  # not used
    if scoring.KEY_SLOPE is not None:
        slopes = _row_slopes(call, scoring, work, warpgroup)
    token, head, valid = work_rows(call, work, warpgroup.ROW_BLOCK, ROW)
    positions = token + (work.seq_len - work.query_len)
    row_first, row_last = call.mask.span(positions, work.seq_len)
    if call.config.EXACT:
        low, high, same_low, same_high = call.BOUNDS(
            positions, positions, work.seq_len, head, work.request, call.aux
        )
        row_first = gl.maximum(row_first, low)
        row_last = gl.minimum(row_last, high)
    rows = RowState(
        tile, operand, slopes, row_first, row_last, token, positions, head, valid, work.request,
        factor, k_factor,
    )  # fmt: skip
    return rows, v_factor


@gluon.jit
def _first_tile(
    call, scoring, warpgroup, rows, storage, work, tiles, step, row_max, row_sum, acc, sink,
):  # fmt: skip
    """Weigh the last tile, the first one visited, which has no values of an earlier one to multiply
    by; clear its values past the end of the request.

    Returns:
        (row_max, row_sum, acc, packed weights).
    """
    COPIED: gl.constexpr = call.config.GATHERS
    KEY_PARTS: gl.constexpr = call.config.KEY_PARTS
    keys = storage.keys
    values = storage.values
    stage = step % keys.STAGES
    parity = (step // keys.STAGES) & 1
    # Wait for the TMA loads of the last tile's keys.
    wait_for_tile(keys.full, stage, parity, COPIED)
    if call.config.SPLIT_V:
        operand = rows.tile
    else:
        operand = rows.operand
    scores = key_product(
        scoring, warpgroup, rows, keys, stage, operand, KEY_PARTS, scoring.KEY_SLOPE is not None
    )
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(keys.empty.index(stage), count=1)
    if warpgroup.EARLY_SINK:
        row_max = sink.to(gl.float32) * LOG2E
    last_tile = tiles.at(tiles.end - 1)
    probs, sink_weight, row_max, row_sum = weigh_tile(
        call, scoring, warpgroup, rows, scores, last_tile, row_max, row_sum, True, FIRST=True
    )
    weights = pack_weights(probs, keys.memory.dtype)
    if warpgroup.EARLY_SINK:
        columns = gl.arange(0, PART_KEYS, gl.SliceLayout(0, warpgroup.S_LAYOUT))
        is_sum = (columns == warpgroup.V_COLUMNS - 8)[None, :]
        acc = gl.where(is_sum, sink_weight[:, None], acc)
    past_end = work.seq_len - last_tile * call.config.BLOCK_N
    if call.config.KV_KIND == KV_PLAIN and not COPIED:
        # TMA fills whole pages past the end with zeros, but not the rest of the last page. (Float8
        # values are cleared when they are converted.) Without pages, the rows of the next request
        # follow.
        partial = past_end < call.config.BLOCK_N
        if call.config.BLOCK_SIZE > 0:
            partial = partial & (work.seq_len % call.config.BLOCK_SIZE != 0)
        if partial:
            mbarrier.wait(values.full.index(stage), parity)
            if warpgroup.V_COLUMNS > 0:
                PARTS: gl.constexpr = (call.config.DV + 31) // 32
                clear_value_parts(
                    values.memory, stage, past_end, warpgroup.WARPGROUP, call.config.CONSUMERS,
                    PARTS, values.STAGES,
                )  # fmt: skip
            else:
                clear_values(
                    values.memory.index(stage), past_end, warpgroup.WARPGROUP,
                    call.config.CONSUMERS,
                )  # fmt: skip
    return row_max, row_sum, acc, weights


@gluon.jit
def _second_range(
    call, scoring, warpgroup, rows, storage, tiles, step, row_max, row_sum, acc, weights
):  # fmt: skip
    """Visit the tiles of the second range, which lies at the right of the first one.

    Returns:
        (step, row_max, row_sum, acc, weights, the end of the tiles that are left, as if the last
        one had been visited already).
    """
    end = tiles.end
    full_end = gl.minimum(tiles.second_right_begin, end - 1)
    full_begin = gl.minimum(tiles.second_left_end, full_end)
    for back in range(0, end - 1 - full_end):
        row_max, row_sum, acc, weights = overlapped_step(
            call, scoring, warpgroup, rows, storage, step, row_max, row_sum, acc, weights,
            tiles.at(end - 2 - back), True,
        )  # fmt: skip
        step += 1
    for back in range(0, full_end - full_begin):
        row_max, row_sum, acc, weights = overlapped_step(
            call, scoring, warpgroup, rows, storage, step, row_max, row_sum, acc, weights,
            tiles.at(full_end - 1 - back), False, True,
        )  # fmt: skip
        step += 1
    return step, row_max, row_sum, acc, weights, full_begin + 1


@gluon.jit
def _main_loop(
    call, scoring, warpgroup, rows, storage, tiles, step, row_max, row_sum, acc, weights
):  # fmt: skip
    """Visit all tiles but the last one. Returns (step, row_max, row_sum, acc, weights)."""
    ROW: gl.constexpr = gl.SliceLayout(1, warpgroup.S_LAYOUT)
    # With bounds, unmasked tiles have scores that the function does not change.
    BOUNDS: gl.constexpr = call.config.RANGES > 0
    end = tiles.end
    if call.config.RANGES == 2:
        step, row_max, row_sum, acc, weights, end = _second_range(
            call, scoring, warpgroup, rows, storage, tiles, step, row_max, row_sum, acc, weights
        )
    full_end = gl.minimum(tiles.right_begin, end - 1)
    full_begin = gl.minimum(tiles.left_end, full_end)
    for back in range(0, end - 1 - full_end):
        row_max, row_sum, acc, weights = overlapped_step(
            call, scoring, warpgroup, rows, storage, step, row_max, row_sum, acc, weights,
            tiles.at(end - 2 - back), True,
        )  # fmt: skip
        step += 1
    if call.config.SIGN_SOFTMAX:
        LANES: gl.constexpr = row_sum.type.layout
        row_max = lane_references(row_max, LANES)
    for back in range(0, full_end - full_begin):
        row_max, row_sum, acc, weights = overlapped_step(
            call, scoring, warpgroup, rows, storage, step, row_max, row_sum, acc, weights,
            full_end - 1 - back, False, BOUNDS,
        )  # fmt: skip
        step += 1
    if call.config.SIGN_SOFTMAX:
        row_max = row_references(row_max, ROW)
    if warpgroup.CHECK_FIRST or BOUNDS:
        for back in range(0, full_begin - tiles.begin):
            row_max, row_sum, acc, weights = overlapped_step(
                call, scoring, warpgroup, rows, storage, step, row_max, row_sum, acc, weights,
                full_begin - 1 - back, True,
            )  # fmt: skip
            step += 1
    return step, row_max, row_sum, acc, weights


@gluon.jit
def _last_values(call, warpgroup, storage, step, acc, weights):
    """Multiply by the values of the first tile, the last one visited."""
    values = storage.values
    stage = (step - 1) % values.STAGES
    wait_for_tile(
        values.full, stage, ((step - 1) // values.STAGES) & 1, call.config.GATHERS
    )  # fmt: skip
    acc = value_product(
        warpgroup, values, stage, weights, acc, storage.keys.memory.dtype
    )  # fmt: skip
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(values.empty.index(stage), count=1)
    return acc


@gluon.jit
def consumer(
    call, scoring, source, outputs, storage, q_halves, WARPGROUP: gl.constexpr
):  # fmt: skip
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
            )  # fmt: skip
            store_empty_rows(
                outputs, work.start, token, head, valid, queries.ring.memory.dtype, EMPTY,
                warpgroup.WIDTH_V, call.config.DV, call.config.HAS_LSE and warpgroup.PART <= 0,
            )  # fmt: skip
        if (request >= 0) & (request < call.batch.num_reqs):
            tiles = call.tiles(work)
            q_stage = loaded % queries.ring.STAGES
            q_barrier = queries.barrier(q_stage, WARPGROUP)
            q_tile = _receive_queries(call, queries, source, work, loaded, warpgroup)
            loaded += 1
            rows, v_factor = _row_state(
                call, scoring, queries, q_halves, work, q_stage, warpgroup, q_tile, factor
            )  # fmt: skip
            row_max = gl.full([64], float("-inf"), gl.float32, ROW)
            row_sum = gl.full([64], 0.0, gl.float32, ROW)
            if warpgroup.THRESHOLD > 0:
                row_sum = lane_sums(gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT))
            sink = 0.0  # not used
            if warpgroup.EARLY_SINK:
                sink = gl.load(outputs.sinks + rows.heads, mask=rows.valid, other=0.0)
            acc = gl.zeros([64, warpgroup.COLUMNS], gl.float32, warpgroup.O_LAYOUT)
            if warpgroup.V_COLUMNS > 0:
                # As wide as the scores, whatever the head size.
                acc = gl.zeros([64, PART_KEYS], gl.float32, S_LAYOUT)
            if OWN_QUERIES:
                if tiles.end <= tiles.begin:
                    mbarrier.arrive(queries.ring.empty.index(q_barrier), count=1)
            if tiles.end > tiles.begin:
                row_max, row_sum, acc, weights = _first_tile(
                    call, scoring, warpgroup, rows, storage, work, tiles, step, row_max, row_sum,
                    acc, sink,
                )  # fmt: skip
                step += 1
                step, row_max, row_sum, acc, weights = _main_loop(
                    call, scoring, warpgroup, rows, storage, tiles, step, row_max, row_sum, acc,
                    weights,
                )  # fmt: skip
                if OWN_QUERIES:
                    # The next queries arrive during the rest of this work tile.
                    mbarrier.arrive(queries.ring.empty.index(q_barrier), count=1)
                acc = _last_values(call, warpgroup, storage, step, acc, weights)
            finish_rows(
                call, scoring, warpgroup, rows, outputs, work, row_max, row_sum, acc, v_factor,
                OWN_QUERIES,
            )  # fmt: skip
            if call.config.LOAD_QUERY and not OWN_QUERIES:
                # The next queries arrive here by TMA, after the staged output has been read.
                fence_async_shared()
                mbarrier.arrive(queries.ring.empty.index(q_stage), count=1)
