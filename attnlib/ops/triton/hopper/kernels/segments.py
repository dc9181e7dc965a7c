"""Arithmetic that the batch-invariant decode and prefill share, so that their bits are equal (M15).

Keys are summed in segments of tiles, whose number follows from the position of the query
(`segment_tiles`). Both kernels visit the tiles of a segment and the segments of a row from the last
to the first.

The decode multiplies K @ Q^T and the prefill Q @ K^T. Each element of both products is the same sum
over the head in the same order. Sums of weights are taken over keys, which threads hold in
different orders. So their order is written out: of the seven bits of a key's number in a tile of
128, bits 6 and 3, which no kernel distributes over threads, and bit 0, which the decode distributes
over lanes, are summed in every tile, the others once per segment. A tile of 64 has no bit 6.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import exp2
from attnlib.ops.triton.hopper.kernels.softmax import LOG2E

__all__ = [
    "add_column_sums",
    "add_row_sums",
    "cap_scores",
    "column_sums",
    "fold_sums",
    "query_rows",
    "row_sums",
    "segment_bits",
    "segment_range",
    "segment_table",
    "segment_tiles",
    "softmax_factor",
    "sum_columns",
    "sum_rows",
]


@gluon.constexpr_function
def query_rows(width_v, group):
    """Return the rows of query tiles of the prefill, or a multiple of them: with narrow heads in
    groups that fill tiles of 192, 384."""
    return 384 if width_v <= 64 and 64 % group == 0 else 128


@gluon.constexpr_function
def segment_table(width_v, block_n):
    """Return (the position before which queries have these segments, their keys) of each entry.

    The key of a kernel in Triton's cache has the source of this function, and not the values of
    variables that it reads: kernels of two tables would add in other orders (M15).
    """
    if width_v > 128:  # the sums do not fit in shared memory
        return ((1024, 256), (4096, 2048), (0, 4096))
    if block_n != 128:  # queries of such layers see few keys, which need not be divided
        return ((0, 4096),)
    if width_v <= 64:  # as many bytes of keys and values as below
        return ((1024, 128), (8192, 1024), (0, 2048))
    # The first entry saves additions of short prefills; the second gives decodes of 1024 keys eight
    # CTAs per head.
    return ((768, 256), (1024, 128), (8192, 512), (0, 1024))


@gluon.constexpr_function
def _segments(width_v, group, block_n):
    """Return (the first position of the next entry, tiles of a segment) of each entry of the table.

    Positions are rounded up to query tiles of the prefill.
    """
    segments, tokens = segment_table(width_v, block_n), query_rows(width_v, group) // group
    return tuple((-(-position // tokens) * tokens, keys // block_n) for position, keys in segments)


@gluon.constexpr_function
def _logarithms(width_v, group, block_n):
    """Return `_segments` with base-2 logarithms of the tiles."""
    entries = _segments(width_v, group, block_n)
    return tuple((position, tiles.bit_length() - 1) for position, tiles in entries)


@gluon.jit
def segment_bits(position, WIDTH_V: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr):
    """Return the base-2 logarithm of the key tiles of a segment for queries at `position`.

    All queries of a query tile of the prefill have the same number. Short segments let a decode of
    few keys use many multiprocessors; long ones cost prefills less.
    """
    ENTRIES: gl.constexpr = _logarithms(WIDTH_V, GROUP, BLOCK_N)
    bits = position * 0 + ENTRIES[0][1]
    for number in gl.static_range(1, len(ENTRIES)):
        bits = gl.where(position < ENTRIES[number - 1][0], bits, ENTRIES[number][1])
    return bits


@gluon.jit
def segment_tiles(position, WIDTH_V: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr):
    """Return the key tiles of a segment for queries at `position`, a power of 2."""
    return 1 << segment_bits(position, WIDTH_V, BLOCK_N, GROUP)


@gluon.jit
def segment_range(
    query_len, seq_len, WIDTH_V: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr
):
    """Return the least and the most tiles of a segment of the queries of a decode.

    Ends of the longest segments are ends of all, because lengths are powers of 2. A decode has too
    few queries to have segments of three lengths.
    """
    first = segment_tiles(seq_len - query_len, WIDTH_V, BLOCK_N, GROUP)
    last = segment_tiles(seq_len - 1, WIDTH_V, BLOCK_N, GROUP)
    return gl.minimum(first, last), gl.maximum(first, last)


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
    """Sum weights [rows, 128 or 64] over bits 3, 6 and 0 of the key: [rows, 4, 4]."""
    ROWS: gl.constexpr = weights.shape[0]
    if weights.shape[1] == 64:
        found = gl.sum(gl.reshape(weights, [ROWS, 4, 2, 4, 2]), 2)
    else:
        parts = gl.reshape(weights, [ROWS, 2, 4, 2, 4, 2])
        found = gl.sum(gl.sum(parts, 3), 1)
    return gl.sum(found, 3)


@gluon.jit
def column_sums(weights):
    """Sum weights [128 or 64, rows] over bits 3, 6 and 0 of the key: [4, 4, rows]."""
    ROWS: gl.constexpr = weights.shape[1]
    if weights.shape[0] == 64:
        found = gl.sum(gl.reshape(weights, [4, 2, 4, 2, ROWS]), 1)
    else:
        parts = gl.reshape(weights, [2, 4, 2, 4, 2, ROWS])
        found = gl.sum(gl.sum(parts, 2), 0)
    return gl.sum(found, 2)


@gluon.jit
def add_row_sums(sums, acc_scale, more):
    """Add the `row_sums` of a tile to the sums [rows, 4, 4] of the tiles before it."""
    LAYOUT: gl.constexpr = sums.type.layout
    scale = gl.convert_layout(acc_scale, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    more = gl.convert_layout(more, LAYOUT)
    return sums * scale[:, None, None] + more


@gluon.jit
def add_column_sums(sums, acc_scale, more):
    """Add the `column_sums` of a tile to the sums [4, 4, rows] of the tiles before it."""
    LAYOUT: gl.constexpr = sums.type.layout
    scale = gl.convert_layout(acc_scale, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    more = gl.convert_layout(more, LAYOUT)
    return sums * scale[None, None, :] + more


@gluon.jit
def sum_rows(sums, LAYOUT: gl.constexpr):
    """Sum [rows, 4, 4] over bits 5, 4, 2 and 1 of the key, in this order: [rows]."""
    ROWS: gl.constexpr = sums.shape[0]
    parts = gl.reshape(sums, [ROWS, 2, 2, 2, 2])
    parts = gl.sum(gl.sum(parts, 1), 1)
    return gl.convert_layout(gl.sum(gl.sum(parts, 1), 1), LAYOUT)


@gluon.jit
def sum_columns(sums, LAYOUT: gl.constexpr):
    """Sum [4, 4, rows] over bits 5, 4, 2 and 1 of the key, in this order: [rows]."""
    ROWS: gl.constexpr = sums.shape[2]
    parts = gl.reshape(sums, [2, 2, 2, 2, ROWS])
    parts = gl.sum(gl.sum(parts, 0), 0)
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
