"""Epilogue of a work tile of the batch-invariant Hopper prefill."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import exp2, partition_barrier, reinterpret
from attnlib.ops.triton.hopper.kernels.prefill_rows import store_layout, store_rows, work_rows
from attnlib.ops.triton.hopper.kernels.softmax import LN2, LOG2E

__all__ = ["finish_rows", "known_rows"]


@gluon.jit
def known_rows(call, work, BLOCK: gl.constexpr, layout: gl.constexpr):
    """`prefill_rows.work_rows`, for query tiles that may begin before the first token."""
    token, head, valid = work_rows(call, work, BLOCK, layout)
    return token, head, valid & (token >= 0)


@gluon.jit
def _halves(tile):
    """Return the first and the second half of the columns of a tile in registers."""
    parts = gl.reshape(tile, [tile.shape[0], 2, tile.shape[1] // 2])
    left, right = gl.split(gl.permute(parts, (0, 2, 1)))
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile.shape[1] // 2, 16])
    return gl.convert_layout(left, LAYOUT), gl.convert_layout(right, LAYOUT)


@gluon.jit
def _store_staged(call, outputs, work, staged, tile, COLUMN: gl.constexpr, WARPGROUP: gl.constexpr):
    """Store output rows through shared memory, so that stores are 16 bytes wide.

    Args:
        staged: shared memory of the warpgroup, [64, width].
        tile: [64, width], the elements of the output from COLUMN on.
    """
    LAYOUT: gl.constexpr = store_layout(staged.shape[1])
    partition_barrier()
    staged.store(tile)
    partition_barrier()
    token, head, valid = known_rows(call, work, WARPGROUP, gl.SliceLayout(1, LAYOUT))
    offsets = outputs.offsets(work.start + token, head)
    content = staged.load(LAYOUT)
    # All warps have loaded before the memory is used again.
    partition_barrier()
    store_rows(outputs.pointer + COLUMN, offsets, content, valid, call.config.DV - COLUMN)


@gluon.jit
def finish_rows(
    call,
    outputs,
    totals,
    work,
    token,
    head,
    valid,
    total_max,
    total_sum,
    acc,
    DTYPE: gl.constexpr,
    WARPGROUP: gl.constexpr,
):
    """Normalize the sums of a work tile and store outputs [64, WIDTH_V] of DTYPE, and LSEs."""
    O_LAYOUT: gl.constexpr = acc.type.layout
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    WIDTH_V: gl.constexpr = acc.shape[1]
    finite_max = gl.where(total_max == float("-inf"), 0.0, total_max)
    acc_scale = gl.full([64], 1.0, gl.float32, total_max.type.layout)
    if call.config.HAS_SINK:
        # The sink counts in the denominator, once (M4).
        sink = gl.load(outputs.sinks + head, mask=valid, other=0.0).to(gl.float32) * LOG2E
        new_max = gl.maximum(total_max, sink)
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
        acc_scale = exp2(total_max - finite_max)
        total_sum = gl.fma(total_sum, acc_scale, exp2(sink - finite_max))
    empty = total_sum == 0.0
    safe_sum = gl.where(empty, 1.0, total_sum)
    if call.config.HAS_LSE:
        natural = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum)) * LN2
        gl.store(outputs.lses(work.start + token, head), natural, mask=valid)
    normalizer = gl.convert_layout(acc_scale / safe_sum, O_ROW)
    tile = (acc * normalizer[:, None]).to(DTYPE)
    if call.config.STAGED_STORE and totals.GLOBAL:
        # Memory for all columns does not fit.
        left, right = _halves(tile)
        _store_staged(call, outputs, work, totals.staging, left, 0, WARPGROUP)
        _store_staged(call, outputs, work, totals.staging, right, WIDTH_V // 2, WARPGROUP)
    elif call.config.STAGED_STORE:
        # In the memory of the sums.
        O_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, WIDTH_V], DTYPE)
        staged = reinterpret(totals.memory, DTYPE, [64, WIDTH_V], O_SHARED)
        _store_staged(call, outputs, work, staged, tile, 0, WARPGROUP)
    else:
        token, head, valid = known_rows(call, work, WARPGROUP, O_ROW)
        offsets = outputs.offsets(work.start + token, head)
        store_rows(outputs.pointer, offsets, tile, valid, call.config.DV)
