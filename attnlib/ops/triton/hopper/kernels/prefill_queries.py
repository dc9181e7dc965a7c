"""The query rows of a consumer warpgroup: waiting for them, their operands, spans and factors."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnlib.ops.triton.hopper.kernels.compat import partition_barrier
from attnlib.ops.triton.hopper.kernels.consumer_state import RowState
from attnlib.ops.triton.hopper.kernels.kv_scales import is_tensor, load_kv_scale, valid_factor
from attnlib.ops.triton.hopper.kernels.prefill_products import keep_queries, query_pieces
from attnlib.ops.triton.hopper.kernels.prefill_rows import aligned_offset, store_layout, work_rows
from attnlib.ops.triton.hopper.kernels.quantized import WEIGHT_SCALE, halve_queries
from attnlib.ops.triton.hopper.kernels.slopes import slope_operand
from attnlib.ops.triton.hopper.kernels.softmax import score_factor
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["receive_queries", "row_state"]


@gluon.jit
def receive_queries(call, queries, source, work, loaded, warpgroup):
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
        token, head, valid = work_rows(call, work, warpgroup.ROW_BLOCK, gl.SliceLayout(1, LAYOUT))
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
    elif call.config.REST_COLUMNS > 0:
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, warpgroup.S_LAYOUT, 2)
        return query_pieces(
            queries, number, warpgroup.ELEMENTS, OPERAND, call.config.QUERY_REGISTERS
        )
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
def row_state(call, scoring, queries, q_halves, work, stage, warpgroup, tile, factor):
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
        if is_tensor(call.config.K_SCALE_KIND):
            k_factor = valid_factor(k_factor)
        else:
            # Masked scores are -inf, and -inf * 0 would be NaN.
            k_factor = gl.where(k_factor < 2.0**-105, 2.0**-105, k_factor)
        v_factor = load_kv_scale(scoring.v_scale, kv_head, call.config.V_SCALE_KIND) / WEIGHT_SCALE
    elif scoring.k_scale is not None:
        # Copies of a float8 cache, whose scale is not a number.
        k_scaled = scoring.scale * load_kv_scale(scoring.k_scale, kv_head, call.config.K_SCALE_KIND)
        factor = score_factor(valid_factor(k_scaled), scoring.soft_cap, call.config.HAS_CAP)
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
        tile,
        operand,
        slopes,
        row_first,
        row_last,
        token,
        positions,
        head,
        valid,
        work.request,
        factor,
        k_factor,
    )
    return rows, v_factor
