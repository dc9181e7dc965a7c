"""The schedule of a decode of shared prefixes, as its kernel reads it (`ops.shared_decode`)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.shared_decode import ITEM_FIELDS, SEGMENT_FIELDS
from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate

__all__ = [
    "LoadedSegment",
    "OwnRange",
    "Schedule",
    "SeenSegment",
    "WorkItem",
]

_ITEM = gl.constexpr(ITEM_FIELDS)
_SEGMENT = gl.constexpr(SEGMENT_FIELDS)


@aggregate
class OwnRange:
    """The range of tiles of a CTA.

    Fields:
        index: number of the range.
        begin, end: positions of the line.
        item, segment: the first work item and segment.
        kv_head: KV head.
    """

    index: Value
    begin: Value
    end: Value
    item: Value
    segment: Value
    kv_head: Value


@aggregate
class LoadedSegment:
    """A segment of keys, as a loader needs it.

    Fields:
        fields: pointer to its fields.
        begin, tiles: its first position of the line, and tiles.
        row, column: of the block table, where its pages begin.
        keys: its keys.
    """

    fields: Value
    begin: Value
    tiles: Value
    row: Value
    column: Value
    keys: Value

    @gluon.jit
    def following(self):
        """Return the segment behind this one. Behind the last one the tensor has other integers."""
        return _loaded_segment(self.fields + _SEGMENT)


@gluon.jit
def _loaded_segment(fields):
    begin = gl.load(fields)
    tiles = gl.load(fields + 1)
    row = gl.load(fields + 2)
    column = gl.load(fields + 3)
    return LoadedSegment(fields, begin, tiles, row, column, gl.load(fields + 4))


@aggregate
class SeenSegment:
    """A segment of keys, as a consumer needs it, and the next one, whose fields are loaded ahead so
    that nothing waits for them.

    Fields:
        fields: pointer to its fields.
        begin, end: positions of the line.
        keys: its keys.
        low, seeing: the first member of the work item that sees it, and how many see it.
        next_tiles, next_keys, next_low, next_seeing: the same of the next one.
    """

    fields: Value
    begin: Value
    end: Value
    keys: Value
    low: Value
    seeing: Value
    next_tiles: Value
    next_keys: Value
    next_low: Value
    next_seeing: Value

    @gluon.jit
    def at(self, position):
        """Return the segment that has a position of the line, this one or a later one."""
        fields = self.fields
        begin = self.begin
        end = self.end
        keys = self.keys
        low = self.low
        seeing = self.seeing
        next_tiles = self.next_tiles
        next_keys = self.next_keys
        next_low = self.next_low
        next_seeing = self.next_seeing
        while position >= end:
            fields += _SEGMENT
            begin = end
            end += next_tiles
            keys = next_keys
            low = next_low
            seeing = next_seeing
            next_tiles, next_keys, next_low, next_seeing = _next_segment(fields)
        return SeenSegment(
            fields, begin, end, keys, low, seeing, next_tiles, next_keys, next_low, next_seeing
        )


@gluon.jit
def _next_segment(fields):
    """Return (tiles, keys, first member, members) of the segment behind the one at `fields`."""
    fields += _SEGMENT
    tiles = gl.load(fields + 1)
    return tiles, gl.load(fields + 4), gl.load(fields + 5), gl.load(fields + 6)


@aggregate
class WorkItem:
    """Query rows of one or two products per KV head.

    Fields:
        fields: pointer to its fields.
        begin, tiles: its first position of the line, and tiles.
        first, num_tokens: its first entry of `Schedule.tokens`, and its query tokens, the members.
        partial_begin: partial result of its first split and member.
        first_token, consecutive: its first query token, and whether the others follow it.
        first_range: the range that has its first tile.
    """

    fields: Value
    begin: Value
    tiles: Value
    first: Value
    num_tokens: Value
    partial_begin: Value
    first_token: Value
    consecutive: Value
    first_range: Value

    @gluon.jit
    def following(self):
        """Return the item behind this one. Behind the last one the tensor has other integers."""
        return _work_item(self.fields + _ITEM)


@gluon.jit
def _work_item(fields):
    begin = gl.load(fields)
    tiles = gl.load(fields + 1)
    first = gl.load(fields + 2)
    num_tokens = gl.load(fields + 3)
    partial_begin = gl.load(fields + 4)
    first_token = gl.load(fields + 5)
    consecutive = gl.load(fields + 6)
    first_range = gl.load(fields + 7)
    return WorkItem(
        fields,
        begin,
        tiles,
        first,
        num_tokens,
        partial_begin,
        first_token,
        consecutive,
        first_range,
    )


@aggregate
class Schedule:
    """The lists of a schedule: int32 [ranges, 4], [segments, SEGMENT_FIELDS], [items, ITEM_FIELDS],
    and the query tokens of each item together."""

    ranges: Value
    segments: Value
    items: Value
    tokens: Value

    @gluon.jit
    def own_range(self, NUM_KV_HEADS: gl.constexpr):
        """Return the `OwnRange` of this CTA."""
        worker = gl.program_id(0)
        index = worker // NUM_KV_HEADS
        fields = self.ranges + 4 * index
        begin = gl.load(fields)
        end = gl.load(fields + 1)
        item = gl.load(fields + 2)
        segment = gl.load(fields + 3)
        return OwnRange(index, begin, end, item, segment, worker % NUM_KV_HEADS)

    @gluon.jit
    def item(self, index):
        """Return the `WorkItem` with a number."""
        return _work_item(self.items + index * _ITEM)

    @gluon.jit
    def loaded_segment(self, index):
        """Return the `LoadedSegment` with a number."""
        return _loaded_segment(self.segments + index * _SEGMENT)

    @gluon.jit
    def seen_segment(self, index):
        """Return the `SeenSegment` with a number."""
        fields = self.segments + index * _SEGMENT
        begin = gl.load(fields)
        end = begin + gl.load(fields + 1)
        keys = gl.load(fields + 4)
        low = gl.load(fields + 5)
        seeing = gl.load(fields + 6)
        next_tiles, next_keys, next_low, next_seeing = _next_segment(fields)
        return SeenSegment(
            fields, begin, end, keys, low, seeing, next_tiles, next_keys, next_low, next_seeing
        )
