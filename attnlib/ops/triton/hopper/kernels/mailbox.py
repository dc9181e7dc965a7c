"""Work tiles of the Hopper prefill, and a mailbox of two slots in shared memory that holds them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate, partition_barrier

__all__ = ["Mailbox", "TileRanges", "WorkTile"]

_FIRST_TILE_FIELD: gl.constexpr = gl.constexpr(6)
_SPLIT_FIELD: gl.constexpr = gl.constexpr(6)  # there are no tiles with splits


@aggregate
class TileRanges:
    """The key tiles of a work tile, in one or two ranges (`query_tiles.bounded_tiles`).

    Tiles are numbered as if those between the ranges did not exist; `at` gives their true numbers.

    Fields:
        begin, end: tiles [begin, end) are visited.
        left_end, right_begin: tiles of the first range between them need no mask.
        second_left_end, second_right_begin: tiles of the second range between them need no mask.
        second_begin: the first tile of the second range.
        gap: tiles between the ranges.
        RANGES: 2 if there may be two ranges.
    """

    begin: Value
    left_end: Value
    right_begin: Value
    end: Value
    second_left_end: Value
    second_right_begin: Value
    second_begin: Value
    gap: Value
    RANGES: gl.constexpr

    @gluon.jit
    def at(self, number):
        """Return the number of a tile in the request."""
        tile = number
        if self.RANGES == 2:
            tile = gl.where(number < self.second_begin, number, number + self.gap)
        return tile


@aggregate
class WorkTile:
    """A query tile of one request and one KV head.

    Fields:
        request: `num_reqs` for rows after the last request, and -1 after the last work tile.
        start: first query row of the request.
        first_token: token of the request that the tile begins at.
        kv_head: KV head, times the work tiles that share one.
        query_len, seq_len: of the request.
        split: its share of the keys; 0 without SPLIT.
        tiles: `TileRanges`; they are published with bounds only.
    """

    request: Value
    start: Value
    first_token: Value
    kv_head: Value
    query_len: Value
    seq_len: Value
    split: Value
    tiles: Value


@gluon.jit
def _read_field(memory, index):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(memory.index(index).load(layout), 0)


@gluon.jit
def _read_tiles(memory, slot, RANGES: gl.constexpr, FIELDS: gl.constexpr):
    """Return the fields of `TileRanges` of a slot; 0 for those that were not published."""
    begin = 0
    left_end = 0
    right_begin = 0
    end = 0
    left_b = 0
    right_b = 0
    after_gap = 0
    gap = 0
    if RANGES > 0:
        first = slot * FIELDS + _FIRST_TILE_FIELD
        begin = _read_field(memory, first)
        left_end = _read_field(memory, first + 1)
        right_begin = _read_field(memory, first + 2)
        end = _read_field(memory, first + 3)
    if RANGES == 2:
        left_b = _read_field(memory, first + 4)
        right_b = _read_field(memory, first + 5)
        after_gap = _read_field(memory, first + 6)
        gap = _read_field(memory, first + 7)
    return begin, left_end, right_begin, end, left_b, right_b, after_gap, gap


@aggregate
class Mailbox:
    """Two slots, so that the key loader can publish a work tile during the one before it.

    Fields:
        memory: int32 fields in shared memory, [2 * FIELDS, 1].
        full: mbarriers [2, 1] that complete when a slot holds a work tile; one arrival.
        empty: mbarriers [2, 1] that complete when all readers have copied it.
        FIELDS: fields of a slot.
        RANGES: ranges of keys that the bounds of the score function return; 0 without bounds.
        SPLIT: work tiles have a share of the keys; not with RANGES.
    """

    memory: Value
    full: Value
    empty: Value
    FIELDS: gl.constexpr
    RANGES: gl.constexpr
    SPLIT: gl.constexpr

    @gluon.jit
    def _write(self, index, value):
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        self.memory.index(index).store(gl.full([1], 0, gl.int32, layout) + value)

    @gluon.jit
    def publish(self, number, work):
        """Publish work tile number `number` to the consumers and the value loader.

        A `request` of -1 ends their loops.
        """
        slot = number % 2
        # Wait until all readers have copied the tile that the slot held before. The parity is
        # inverted, so that the first use of each slot does not wait.
        mbarrier.wait(self.empty.index(slot), ((number // 2) & 1) ^ 1)
        first = slot * self.FIELDS
        self._write(first, work.request)
        self._write(first + 1, work.start)
        self._write(first + 2, work.first_token)
        self._write(first + 3, work.kv_head)
        self._write(first + 4, work.query_len)
        self._write(first + 5, work.seq_len)
        if self.SPLIT:
            self._write(first + _SPLIT_FIELD, work.split)
        if self.RANGES > 0:
            self._write(first + _FIRST_TILE_FIELD, work.tiles.begin)
            self._write(first + _FIRST_TILE_FIELD + 1, work.tiles.left_end)
            self._write(first + _FIRST_TILE_FIELD + 2, work.tiles.right_begin)
            self._write(first + _FIRST_TILE_FIELD + 3, work.tiles.end)
        if self.RANGES == 2:
            self._write(first + _FIRST_TILE_FIELD + 4, work.tiles.second_left_end)
            self._write(first + _FIRST_TILE_FIELD + 5, work.tiles.second_right_begin)
            self._write(first + _FIRST_TILE_FIELD + 6, work.tiles.second_begin)
            self._write(first + _FIRST_TILE_FIELD + 7, work.tiles.gap)
        if gl.num_warps() > 1:
            # All warps have written their fields.
            partition_barrier()
        mbarrier.arrive(self.full.index(slot), count=1)

    @gluon.jit
    def receive(self, number, ALL_WARPS: gl.constexpr = False):
        """Wait for work tile number `number`, copy it, and release its slot.

        With ALL_WARPS, all warps of the partition have copied it before it is released.
        """
        slot = number % 2
        mbarrier.wait(self.full.index(slot), (number // 2) & 1)
        request = _read_field(self.memory, slot * self.FIELDS)
        start = _read_field(self.memory, slot * self.FIELDS + 1)
        first_token = _read_field(self.memory, slot * self.FIELDS + 2)
        kv_head = _read_field(self.memory, slot * self.FIELDS + 3)
        query_len = _read_field(self.memory, slot * self.FIELDS + 4)
        seq_len = _read_field(self.memory, slot * self.FIELDS + 5)
        split = 0
        if self.SPLIT:
            split = _read_field(self.memory, slot * self.FIELDS + _SPLIT_FIELD)
        begin, left_end, right_begin, end, left_b, right_b, after_gap, gap = _read_tiles(
            self.memory, slot, self.RANGES, self.FIELDS
        )
        if ALL_WARPS:
            partition_barrier()
        mbarrier.arrive(self.empty.index(slot), count=1)
        tiles = TileRanges(
            begin, left_end, right_begin, end, left_b, right_b, after_gap, gap, self.RANGES
        )
        return WorkTile(request, start, first_token, kv_head, query_len, seq_len, split, tiles)
