"""Arithmetic that the batch-invariant decode and prefill share, so that their bits are equal (M15).

Keys are summed in segments of a fixed number of tiles. Both kernels visit the tiles of a segment
and the segments of a row from the last to the first.

The decode multiplies K @ Q^T and the prefill Q @ K^T. Each element of both products is the same sum
over the head in the same order. Sums of weights are taken over keys, which threads hold in
different orders. So their order is written out: of the seven bits of a key's number in a tile of
128, bits 6 and 3, which no kernel distributes over threads, are summed in every tile, the others
once per segment.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import exp2
from attnlib.ops.triton.hopper.kernels.softmax import LOG2E

__all__ = [
    "add_column_sums", "add_row_sums", "cap_scores", "column_sums", "fold_sums", "row_sums",
    "softmax_factor", "sum_columns", "sum_rows",
]  # fmt: skip


@gluon.jit
def softmax_factor(factor, HAS_CAP: gl.constexpr):
    """Return the factor of the scores of `cap_scores` to base-2 logits."""
    if HAS_CAP:
        factor = LOG2E
    return factor


@gluon.jit
def cap_scores(scores, factor, soft_cap, HAS_CAP: gl.constexpr):
    """Return scores after the soft cap, in natural units; raw products without one.

    A later product with log2(e) is part of the exponent's multiply-add in masked and unmasked
    tiles.
    """
    if HAS_CAP:
        exp_2x = exp2(scores * factor)
        scores = soft_cap - (2.0 * soft_cap) / (exp_2x + 1.0)
    return scores


@gluon.jit
def row_sums(weights):
    """Sum weights [rows, 128] over bits 6 and 3 of the key: [rows, 4, 8]."""
    ROWS: gl.constexpr = weights.shape[0]
    parts = gl.reshape(weights, [ROWS, 2, 4, 2, 8])
    return gl.sum(gl.sum(parts, 3), 1)


@gluon.jit
def column_sums(weights):
    """Sum weights [128, rows] over bits 6 and 3 of the key: [4, 8, rows]."""
    ROWS: gl.constexpr = weights.shape[1]
    parts = gl.reshape(weights, [2, 4, 2, 8, ROWS])
    return gl.sum(gl.sum(parts, 2), 0)


@gluon.jit
def add_row_sums(sums, acc_scale, weights):
    """Add a tile's weights to the sums [rows, 4, 8] of the tiles before it."""
    LAYOUT: gl.constexpr = sums.type.layout
    scale = gl.convert_layout(acc_scale, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    more = gl.convert_layout(row_sums(weights), LAYOUT)
    return sums * scale[:, None, None] + more


@gluon.jit
def add_column_sums(sums, acc_scale, weights):
    """Add a tile's weights to the sums [4, 8, rows] of the tiles before it."""
    LAYOUT: gl.constexpr = sums.type.layout
    scale = gl.convert_layout(acc_scale, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    more = gl.convert_layout(column_sums(weights), LAYOUT)
    return sums * scale[None, None, :] + more


@gluon.jit
def sum_rows(sums, LAYOUT: gl.constexpr):
    """Sum [rows, 4, 8] over bits 0, 5, 4, 2 and 1 of the key, in this order: [rows]."""
    ROWS: gl.constexpr = sums.shape[0]
    parts = gl.reshape(sums, [ROWS, 2, 2, 2, 2, 2])
    parts = gl.sum(gl.sum(gl.sum(parts, 5), 1), 1)
    return gl.convert_layout(gl.sum(gl.sum(parts, 1), 1), LAYOUT)


@gluon.jit
def sum_columns(sums, LAYOUT: gl.constexpr):
    """Sum [4, 8, rows] over bits 0, 5, 4, 2 and 1 of the key, in this order: [rows]."""
    ROWS: gl.constexpr = sums.shape[2]
    parts = gl.reshape(sums, [2, 2, 2, 2, 2, ROWS])
    parts = gl.sum(gl.sum(gl.sum(parts, 4), 0), 0)
    return gl.convert_layout(gl.sum(gl.sum(parts, 0), 0), LAYOUT)


@gluon.jit
def fold_sums(total_max, total_sum, more_max, more_sum):
    """Add the maximum and the sum of weights of a segment to those of the segments before it.

    Returns:
        (total_max, total_sum, factor of the sums of values before, factor of the segment's).
    """
    new_max = gl.maximum(total_max, more_max)
    # -inf - -inf is NaN: rows without a visible key are measured from 0.
    finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    old = exp2(total_max - finite_max)
    new = exp2(more_max - finite_max)
    return new_max, gl.fma(total_sum, old, more_sum * new), old, new
