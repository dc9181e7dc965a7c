"""What a consumer of the batch-invariant Hopper prefill knows of its rows and of its segments."""

from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate

__all__ = ["InvariantRows", "Totals"]


@aggregate
class Totals:
    """Memory of a consumer for the sums of values of its segments.

    Fields:
        memory: [64, WIDTH_V] float32 in shared memory, or with GLOBAL a pointer to the memory of
            all consumers.
        staging: shared memory for outputs; with GLOBAL for half of their columns.
        GLOBAL: sums are in global memory.
    """

    memory: Value
    staging: Value
    GLOBAL: gl.constexpr


@aggregate
class InvariantRows:
    """The query rows of a consumer during a work tile.

    Fields:
        tile: the queries in shared memory.
        first, last: [64], the keys that a row sees.
        factor: of raw products (`softmax.score_factor`).
        soft_cap: read with HAS_CAP.
        end: end of the visited tiles.
        segment: tiles of a segment.
        CHECK_FIRST: rows may see no key of the tiles at the left.
        HAS_CAP: there is a soft cap.
    """

    tile: Value
    first: Value
    last: Value
    factor: Value
    soft_cap: Value
    end: Value
    segment: Value
    CHECK_FIRST: gl.constexpr
    HAS_CAP: gl.constexpr
