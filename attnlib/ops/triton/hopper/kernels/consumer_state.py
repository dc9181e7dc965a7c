"""What a consumer warpgroup of the Hopper prefill is, and what it knows of its query rows."""

from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate

__all__ = ["BOUNDED", "Consumer", "RowState"]

BOUNDED = gl.constexpr(2)
"""Value of HAS_CAP for `bounded_softmax`; True for `online_softmax`."""


@aggregate
class Consumer:
    """Constants of a consumer warpgroup.

    Fields:
        WARPGROUP: its number.
        ROW_BLOCK: its block of 64 rows.
        PART: its part of the value elements, if the consumers share the rows; -1 for all.
        WIDTH_V: value elements of a row, padded.
        COLUMNS: value elements of its accumulator.
        ELEMENTS: elements of a head that Q @ K^T reads.
        S_LAYOUT, O_LAYOUT: layouts of the scores and of the output.
        REST_COLUMNS, REST_LAYOUT: columns and layout of the second accumulator
            (`two_accumulators`); 0 columns for one accumulator.
        V_COLUMNS: columns of P @ V with values in parts (`value_columns`); 0 if they are undivided.
        V_OFFSET: of these values in shared memory, in bytes.
        SUMS: columns of the accumulator are sums of weights, and `row_sum` stays as it is.
        CHECK_FIRST: rows may see no key of the tiles at the left.
        THRESHOLD: that of `softmax.online_softmax`, or the lead of `softmax_by_sign`.
        EARLY_SINK: the sum of weights begins with that of the sink (M4).
    """

    WARPGROUP: gl.constexpr
    ROW_BLOCK: gl.constexpr
    PART: gl.constexpr
    WIDTH_V: gl.constexpr
    COLUMNS: gl.constexpr
    ELEMENTS: gl.constexpr
    S_LAYOUT: gl.constexpr
    O_LAYOUT: gl.constexpr
    REST_COLUMNS: gl.constexpr
    REST_LAYOUT: gl.constexpr
    V_COLUMNS: gl.constexpr
    V_OFFSET: gl.constexpr
    SUMS: gl.constexpr
    CHECK_FIRST: gl.constexpr
    THRESHOLD: gl.constexpr
    EARLY_SINK: gl.constexpr


@aggregate
class RowState:
    """The query rows of a consumer during a work tile.

    Fields:
        tile: the queries in shared memory, or their first part.
        operand: the queries as operand of WGMMA, or a tuple of their parts.
        slopes: `slopes.slope_operand`; read with a KEY_SLOPE.
        first, last: [64], the keys that a row sees.
        tokens, positions, heads: [64], token in the request, position and query head of a row.
        valid: [64], whether the row exists.
        request: number of the request.
        factor: of raw products (`softmax.score_factor`).
        k_factor: [64], factor of the products of a row over a float8 cache.
    """

    tile: Value
    operand: Value
    slopes: Value
    first: Value
    last: Value
    tokens: Value
    positions: Value
    heads: Value
    valid: Value
    request: Value
    factor: Value
    k_factor: Value
