"""Rounds of partial results that the second kernel of the batch-invariant decode adds."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import (
    Value,
    aggregate,
    exp2,
)

__all__ = [
    "RoundMemory",
    "RowTotals",
    "SplitHeader",
    "SplitPartials",
    "SplitTile",
    "add_round",
    "load_header",
]


@gluon.jit
def _divide(number, divisor, reciprocal):
    """Return number // divisor, in fewer instructions than an integer division."""
    quotient = (number.to(gl.float32) * reciprocal).to(gl.int32)
    rest = number - quotient * divisor
    quotient = gl.where(rest < 0, quotient - 1, quotient)
    return gl.where(rest >= divisor, quotient + 1, quotient)


@gluon.jit
def _maximum(left, right):
    return gl.maximum(left, right)


@gluon.jit
def _shared_value(memory, number: gl.constexpr):
    """Return an element of a vector in shared memory, to all lanes."""
    value = memory.slice(number, 1).load(gl.BlockedLayout([1], [32], [1], [0]))
    return gl.sum(value, 0)


@aggregate
class SplitHeader:
    """Where the partial results of a token and KV head are, as the decode kernel has written it.

    Fields:
        rest: segments to be added; 0 if the output is written.
        first_segment: number of the first visited segment.
        first_row: the token's first row.
        worker: the CTA that began the request.
        line_end: the position of the line that tile 0 has.
        per_range: positions of a range.
        tiles, most_tiles: tiles of a segment, and of the longest ones of the request.
    """

    rest: Value
    first_segment: Value
    first_row: Value
    worker: Value
    line_end: Value
    per_range: Value
    tiles: Value
    most_tiles: Value


@gluon.jit
def load_header(header):
    rest = gl.load(header)
    first_segment = gl.load(header + 1)
    first_row = gl.load(header + 2)
    worker = gl.load(header + 3)
    line_end = gl.load(header + 4)
    per_range = gl.load(header + 5)
    tiles = gl.load(header + 6)
    return SplitHeader(
        rest, first_segment, first_row, worker, line_end, per_range, tiles, gl.load(header + 7)
    )


@aggregate
class SplitPartials:
    """Partial results: sums of values [index, DV], maxima and sums of weights [index]. A CTA has
    `slots` + 1 slots of `rows` rows."""

    values: Value
    maxima: Value
    sums: Value
    slots: Value
    rows: Value


@aggregate
class RoundMemory:
    """Shared memory [STEP] for what each lane of a round tells all others: index and factors."""

    indices: Value
    olds: Value
    news: Value
    addends: Value


@aggregate
class RowTotals:
    """Sums of values [COLUMNS], maximum and sum of weights of a row."""

    values: Value
    row_max: Value
    row_sum: Value


@aggregate
class SplitTile:
    """What a program adds: COLUMNS of the values of a KV head.

    Fields:
        columns, inside: elements of a value, and whether they exist.
        lane: 0 to STEP - 1.
        reciprocal: of the positions of a range.
        kv_head: KV head.
    """

    columns: Value
    inside: Value
    lane: Value
    reciprocal: Value
    kv_head: Value
    NUM_KV_HEADS: gl.constexpr
    DV: gl.constexpr
    STEP: gl.constexpr

    @gluon.jit
    def index(self, header, partials, slot, AHEAD: gl.constexpr, row):
        """Return the indices of the partial results in slots `slot` + AHEAD."""
        # The range that has the segment's end, moved to the end of a longest one.
        first = header.first_segment
        end = (first + slot + (1 + AHEAD)) * header.tiles
        end = (end + header.most_tiles - 1) & -header.most_tiles
        owner = _divide(header.line_end - end, header.per_range, self.reciprocal)
        slots = (owner * self.NUM_KV_HEADS + self.kv_head) * (partials.slots + 1)
        return (slots + slot + AHEAD) * partials.rows + row


@gluon.jit
def add_round(tile, header, partials, memory, totals, base, row):
    """Return `RowTotals` after the partial results of STEP segments, from number `base` on.

    Each of the first STEP lanes has one segment and computes its address and factors, which depend
    on the maxima only. Then all lanes add the values of one segment after the other.
    """
    STEP: gl.constexpr = tile.STEP
    COLUMNS: gl.constexpr = tile.columns.shape[0]
    LAYOUT: gl.constexpr = tile.columns.type.layout
    lane = tile.lane
    total = totals.values
    total_sum = totals.row_sum
    # The segment of a lane and the one that is added before it.
    slot = header.rest - 1 - base - lane
    live = slot >= 0
    index = tile.index(header, partials, slot, 0, row)
    before = tile.index(header, partials, slot, 1, row)
    # Segments past the last one have no key and leave the sums unchanged.
    part_max = gl.load(partials.maxima + index, mask=live, other=float("-inf"))
    part_sum = gl.load(partials.sums + index, mask=live, other=0.0)
    # A lane after the last segment has the maximum of all: its factor must not be 0.
    is_before = (slot >= -1) & (lane > 0)
    max_before = gl.load(partials.maxima + before, mask=is_before, other=float("-inf"))
    memory.indices.store(index)
    # All loads of a round are issued before the first result is used.
    values = ()
    for i in gl.static_range(STEP):
        pointers = partials.values + _shared_value(memory.indices, i) * tile.DV + tile.columns
        mask = tile.inside & (base + i < header.rest)
        values = values + (gl.load(pointers, mask=mask, other=0.0),)
    # `segments.fold_sums`, of all segments of the round at once.
    max_before = gl.where(lane == 0, totals.row_max, max_before)
    max_before = gl.associative_scan(max_before, 0, _maximum)
    new_max = gl.maximum(max_before, part_max)
    finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    new = exp2(part_max - finite_max)
    memory.olds.store(exp2(max_before - finite_max))
    memory.news.store(new)
    memory.addends.store(part_sum * new)
    for i in gl.static_range(STEP):
        old = _shared_value(memory.olds, i)
        more = values[i] * _shared_value(memory.news, i) + 0.0
        total = gl.fma(total, gl.full([COLUMNS], old, gl.float32, LAYOUT), more)
        total_sum = gl.fma(total_sum, old, _shared_value(memory.addends, i))
    return RowTotals(total, gl.maximum(totals.row_max, gl.max(part_max, 0)), total_sum)
