"""Sums over the segments of a work tile of the batch-invariant Hopper prefill (M15).

Two accumulators and the scores of a tile do not fit in registers: the sum of the segments is in
shared memory, or in global memory for values of more than 128 elements.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.segments import fold_sums, sum_rows

__all__ = ["add_segment", "by_thread"]


@gluon.constexpr_function
def by_thread(width):
    """Return the layout of float32 sums [64, width], in which each thread of a warpgroup accesses
    16 bytes at a time without bank conflicts."""
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    columns = [[0, 8 << bit] for bit in range((width // 8).bit_length() - 1)]
    return gl.SharedLinearLayout([[0, 1], [8, 0], *lanes, *columns, [16, 0], [32, 0]])


@gluon.jit
def add_segment(
    total_tile,
    acc,
    total_max,
    total_sum,
    row_max,
    sums,
    first,
    last,
    O_LAYOUT: gl.constexpr,
    GLOBAL: gl.constexpr,
):
    """Add a complete segment to those before it.

    Args:
        total_tile: memory of the sums of values, shared, or global with GLOBAL; a thread reads what
            it has written.
        first: whether no segment is before it.
        last: whether none follows, so that the sum needs not be stored.

    Returns:
        (sums of values, total_max, total_sum).
    """
    ROW: gl.constexpr = row_max.type.layout
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    total_max, total_sum, old, new = fold_sums(total_max, total_sum, row_max, sum_rows(sums, ROW))
    # A sum of -0.0 becomes 0.0, as in the decode.
    acc = acc * gl.convert_layout(new, O_ROW)[:, None] + 0.0
    if GLOBAL:
        # Two elements of a thread after those of the threads before it: the accesses of a warp are
        # 256 consecutive bytes.
        rows = gl.arange(0, 64, O_ROW)
        columns = gl.arange(0, acc.shape[1], gl.SliceLayout(0, O_LAYOUT))
        rows = rows // 16 * 64 + rows // 8 % 2 * 256 + rows % 8 * 8
        columns = columns // 8 * 512 + columns % 8
        pointers = total_tile + rows[:, None] + columns[None, :]
    if not first:
        if GLOBAL:
            before = gl.load(pointers)
        else:
            before = total_tile.load(O_LAYOUT)
        factors = gl.convert_layout(old, O_ROW)[:, None]
        acc = gl.fma(before, gl.broadcast(factors, before)[0], acc)
    if not last:
        if GLOBAL:
            gl.store(pointers, acc)
        else:
            total_tile.store(acc)
    return acc, total_max, total_sum
