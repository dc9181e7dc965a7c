"""Epilogue of a work tile of the Hopper prefill: sums, sinks, log-sum-exps, and stored outputs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import exp2
from attnlib.ops.triton.hopper.kernels.kv_scales import (
    factor_without_keys,
    is_tensor,
    load_kv_scale,
    sums_of_keys,
)
from attnlib.ops.triton.hopper.kernels.prefill_rows import (
    stage_rows,
    store_layout,
    store_rows,
    wide_layout,
    work_rows,
)
from attnlib.ops.triton.hopper.kernels.quantized import WEIGHT_SCALE
from attnlib.ops.triton.hopper.kernels.softmax import LN2, LOG2E
from attnlib.ops.triton.hopper.kernels.value_columns import PART_KEYS, first_columns
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["finish_rows"]


@gluon.jit
def finish_rows(
    call,
    scoring,
    consumer,
    rows,
    outputs,
    work,
    row_max,
    row_sum,
    acc,
    v_factor,
    OWN_QUERIES: gl.constexpr,
):
    """Normalize the accumulator of a work tile and store outputs and LSEs.

    Args:
        row_max, row_sum: of the softmax, as `mainloop.overlapped_step` returns them.
        v_factor: factor of the values of a float8 cache.
        OWN_QUERIES: see `QueryTiles`.
    """
    QUANTIZED: gl.constexpr = call.config.KV_KIND != KV_PLAIN
    K_KIND: gl.constexpr = call.config.K_SCALE_KIND
    V_KIND: gl.constexpr = call.config.V_SCALE_KIND
    kv_head = work.kv_head // call.config.SHARED
    ROW: gl.constexpr = gl.SliceLayout(1, consumer.S_LAYOUT)
    if QUANTIZED:
        row_sum = row_sum * (1.0 / WEIGHT_SCALE)
    if consumer.SUMS:
        columns = gl.arange(0, PART_KEYS, gl.SliceLayout(0, consumer.S_LAYOUT))
        is_sum = (columns == consumer.V_COLUMNS - 8)[None, :]
        row_sum = gl.sum(gl.where(is_sum, acc, 0.0), 1)
    elif consumer.THRESHOLD > 0:
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROW)
    if consumer.V_COLUMNS > 0:
        acc = first_columns(acc, call.config.DV, consumer.O_LAYOUT)
    if is_tensor(K_KIND) or is_tensor(V_KIND):
        if consumer.EARLY_SINK:
            without_keys = rows.last <= rows.first  # the sums have the sink
        else:
            without_keys = row_sum == 0.0
        row_sum = sums_of_keys(row_sum, without_keys, scoring.k_scale, kv_head, K_KIND)
    else:
        without_keys = False  # not used
    finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
    acc_scale = gl.full([64], 1.0, gl.float32, ROW)
    if call.config.HAS_SINK and not consumer.EARLY_SINK:
        # The sink counts in the denominator, once (M4). This is `add_sink`, written out because
        # ptxas allocates registers differently for a call of it.
        sink = gl.load(outputs.sinks + rows.heads, mask=rows.valid, other=0.0)
        sink = sink.to(gl.float32) * LOG2E
        new_max = gl.maximum(row_max, sink)
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
        acc_scale = exp2(row_max - finite_max)
        row_sum = row_sum * acc_scale + exp2(sink - finite_max)
    empty = row_sum == 0.0
    safe_sum = gl.where(empty, 1.0, row_sum)
    if call.config.SPLIT:
        if consumer.PART <= 0:
            base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
            row = work.start + rows.tokens
            call.splits.store_lses(row, rows.heads, rows.valid, work.split, base2)
    elif call.config.HAS_LSE and consumer.PART <= 0:
        natural = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum)) * LN2
        gl.store(outputs.lses(work.start + rows.tokens, rows.heads), natural, mask=rows.valid)
    normalizer = acc_scale / safe_sum
    if QUANTIZED:
        normalizer = normalizer * factor_without_keys(v_factor, without_keys, V_KIND)
    elif scoring.v_scale is not None:
        scale = load_kv_scale(scoring.v_scale, kv_head, V_KIND)
        normalizer *= factor_without_keys(scale, without_keys, V_KIND)
    if consumer.REST_COLUMNS > 0:
        DTYPE: gl.constexpr = rows.tile.dtype
        _store_columns(call, consumer, outputs, work, acc[0], normalizer, DTYPE, 0)
        _store_columns(call, consumer, outputs, work, acc[1], normalizer, DTYPE, consumer.COLUMNS)
    else:
        normalizer = gl.convert_layout(normalizer, gl.SliceLayout(1, consumer.O_LAYOUT))
        if call.config.SPLIT:
            ACC: gl.constexpr = gl.SliceLayout(1, consumer.O_LAYOUT)
            FIRST: gl.constexpr = consumer.PART * consumer.COLUMNS if call.config.SPLIT_V else 0
            token, head, valid = work_rows(call, work, consumer.ROW_BLOCK, ACC)
            part = acc * normalizer[:, None]
            call.splits.store_values(work.start + token, head, valid, work.split, part, FIRST)
        else:
            tile = (acc * normalizer[:, None]).to(rows.tile.dtype)
            _store(call, consumer, rows.tile, outputs, work, tile, OWN_QUERIES)


@gluon.jit
def _store_columns(
    call, consumer, outputs, work, acc, normalizer, DTYPE: gl.constexpr, FIRST: gl.constexpr
):
    """Store one of two accumulators, the columns of the outputs from FIRST on."""
    LAYOUT: gl.constexpr = acc.type.layout
    tile = acc * gl.convert_layout(normalizer, gl.SliceLayout(1, LAYOUT))[:, None]
    if call.config.SPLIT:
        token, head, valid = work_rows(call, work, consumer.ROW_BLOCK, gl.SliceLayout(1, LAYOUT))
        call.splits.store_values(work.start + token, head, valid, work.split, tile, FIRST)
    else:
        tile = tile.to(DTYPE)
        COLUMNS: gl.constexpr = acc.shape[1]
        STORED: gl.constexpr = wide_layout(COLUMNS) if COLUMNS >= 32 else LAYOUT
        tile = gl.convert_layout(tile, STORED)
        token, head, valid = work_rows(call, work, consumer.ROW_BLOCK, gl.SliceLayout(1, STORED))
        offsets = outputs.offsets(work.start + token, head) + FIRST
        store_rows(outputs.pointer, offsets, tile, valid, call.config.DV - FIRST)


@gluon.jit
def _store(call, consumer, staging, outputs, work, tile, OWN_QUERIES: gl.constexpr):
    """Store the outputs [64, COLUMNS] of a work tile; `staging` is the memory of its queries."""
    COLUMNS: gl.constexpr = consumer.COLUMNS
    DV: gl.constexpr = call.config.DV
    if call.config.STAGED_STORE:
        LAYOUT: gl.constexpr = store_layout(COLUMNS)
        stage_rows(staging, tile)
        token, head, valid = work_rows(call, work, consumer.ROW_BLOCK, gl.SliceLayout(1, LAYOUT))
        offsets = outputs.offsets(work.start + token, head)
        store_rows(outputs.pointer, offsets, staging.load(LAYOUT), valid, DV)
    elif OWN_QUERIES and COLUMNS >= 32:
        # Stores of 16 bytes, after an exchange within each warp. The queries' shared memory is not
        # free.
        WIDE: gl.constexpr = wide_layout(COLUMNS)
        token, head, valid = work_rows(call, work, consumer.ROW_BLOCK, gl.SliceLayout(1, WIDE))
        offsets = outputs.offsets(work.start + token, head)
        store_rows(outputs.pointer, offsets, gl.convert_layout(tile, WIDE), valid, DV)
    else:
        LAYOUT: gl.constexpr = consumer.O_LAYOUT
        token, head, valid = work_rows(call, work, consumer.ROW_BLOCK, gl.SliceLayout(1, LAYOUT))
        offsets = outputs.offsets(work.start + token, head)
        if call.config.SPLIT_V:
            FIRST: gl.constexpr = consumer.PART * COLUMNS
            store_rows(outputs.pointer, offsets + FIRST, tile, valid, DV - FIRST)
        else:
            store_rows(outputs.pointer, offsets, tile, valid, DV)
