"""Merge the partial results of decodes with shared prefixes.

Work distribution: one warp per token and query head, several heads per CTA. The layout keeps each
row in its warp, so that no values are exchanged through shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import (
    exp2,
    launch_dependent_grids,
    prefetch_l1,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.softmax import LN2, add_sink

__all__ = ["hopper_merge_rows_kernel"]


@gluon.jit(
    do_not_specialize=["num_tokens", "stride_ot", "stride_oh", "stride_lt"],
    do_not_specialize_on_alignment=["sinks", "lse", "partial_lse", "starts", "entries"],
)
def hopper_merge_rows_kernel(
    partial_out, partial_lse, starts, entries, sinks, out, lse, num_tokens, stride_ot, stride_oh,
    stride_lt, NUM_HEADS: gl.constexpr, HEADS: gl.constexpr, DV: gl.constexpr,
    DV_PAD: gl.constexpr, STEP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Merge the states of HEADS heads of one token, which is also the number of warps.

    Grid: (rows of `out`, blocks of HEADS). Rows from `num_tokens` on become 0, with an LSE of -inf
    (M6).

    Args:
        partial_out: float32 [P, NUM_HEADS, DV].
        partial_lse: float32 [P, NUM_HEADS], base-2 log-sum-exps; -inf means no keys.
        starts: int32 [num_tokens + 1]; token t has entries [starts[t], starts[t + 1]).
        entries: int32, rows of the partial results, grouped by token.
        STEP: partial results of a row that are loaded at a time.
    """
    LANES: gl.constexpr = min(32, DV_PAD // 4)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [HEADS, 1], [1, 0])
    ROWS: gl.constexpr = HEADS * (32 // LANES)
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    token = gl.program_id(0)
    # Copied from the host, and not written by the kernel that this one may overlap with.
    first = gl.load(starts + gl.minimum(token, num_tokens))
    end = gl.load(starts + gl.minimum(token + 1, num_tokens))
    prefetch_l1(entries + first)
    head = gl.program_id(1) * ROWS + gl.arange(0, ROWS, ROW)
    inside = head < NUM_HEADS
    lanes = gl.arange(0, DV_PAD, gl.SliceLayout(0, LAYOUT))
    mask = inside[:, None] & (lanes < DV)[None, :]
    acc = gl.zeros([ROWS, DV_PAD], gl.float32, LAYOUT)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    row_sum = gl.zeros([ROWS], gl.float32, ROW)
    wait_on_dependent_grids()
    launch_dependent_grids()
    for base in range(first, end, STEP):
        # All loads are issued before the first result is used, to overlap their latency.
        lses = ()
        values = ()
        for i in gl.static_range(STEP):
            live = base + i < end
            entry = gl.load(entries + base + i, mask=live, other=0)
            index = entry.to(gl.int64) * NUM_HEADS + head
            lses = lses + (gl.load(partial_lse + index, mask=inside & live, other=float("-inf")),)
            values = values + (
                gl.load(
                    partial_out + (index * DV)[:, None] + lanes[None, :],
                    mask=mask & live,
                    other=0.0,
                ),
            )
        new_max = row_max
        for i in gl.static_range(STEP):
            new_max = gl.maximum(new_max, lses[i])
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
        keep = exp2(row_max - finite_max)
        acc = acc * keep[:, None]
        row_sum = row_sum * keep
        for i in gl.static_range(STEP):
            weight = exp2(lses[i] - finite_max)
            # A state without keys may hold anything, and 0 * NaN is NaN.
            acc += gl.where((weight == 0.0)[:, None], 0.0, weight[:, None] * values[i])
            row_sum += weight
        row_max = new_max
    finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
    acc_scale = gl.full([ROWS], 1.0, gl.float32, ROW)
    if HAS_SINK:
        # Rows without a request have no sink.
        sink = gl.load(sinks + head, mask=inside & (first < end), other=float("-inf"))
        finite_max, acc_scale, row_sum = add_sink(row_max, row_sum, sink)
    empty = row_sum == 0.0
    safe_sum = gl.where(empty, 1.0, row_sum)
    offsets = token.to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
    gl.store(
        out + offsets[:, None] + lanes[None, :],
        (acc * (acc_scale / safe_sum)[:, None]).to(out.dtype.element_ty),
        mask=mask,
    )
    if HAS_LSE:
        base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
        gl.store(lse + token.to(gl.int64) * stride_lt + head, base2 * LN2, mask=inside)
