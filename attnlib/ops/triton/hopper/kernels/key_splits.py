"""Prefills whose keys are divided over work tiles: shares of the key tiles, and partial results.

Where few query tiles see many keys, several CTAs share the keys of one. Each writes the normalized
values and the base-2 LSE of its share, and `kernels.decode.combine_kernel` combines them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate
from attnlib.ops.triton.hopper.kernels.prefill_rows import store_rows
from attnlib.ops.triton.hopper.kernels.schedule import VisitedTiles

__all__ = ["KeySplits", "key_splits"]


@aggregate
class KeySplits:
    """The splits of a launch and the memory of their results, as `combine_kernel` reads it.

    Fields:
        count: splits of every work tile.
        values: float32 [tokens, query heads, count, DV].
        lses: float32 base-2 LSEs [tokens, query heads, count].
        counts: float32 [tokens], `count`, or 0 for rows that are complete.
        NUM_HEADS, DV: query heads and head size of the values.
    """

    count: Value
    values: Value
    lses: Value
    counts: Value
    NUM_HEADS: gl.constexpr
    DV: gl.constexpr

    @gluon.jit
    def share(self, visited, split):
        """Return the tiles of a split of the `VisitedTiles` of a query tile; none for some splits
        of few tiles."""
        size = (visited.end - visited.begin + self.count - 1) // self.count
        begin = gl.minimum(visited.begin + split * size, visited.end)
        end = gl.minimum(begin + size, visited.end)
        left_end = gl.minimum(gl.maximum(visited.left_end, begin), end)
        right_begin = gl.minimum(gl.maximum(visited.right_begin, begin), end)
        return VisitedTiles(begin, left_end, right_begin, end)

    @gluon.jit
    def place(self, row, head, split):
        """Return the number of the result of a query row (of the batch) and head."""
        return (row.to(gl.int64) * self.NUM_HEADS + head) * self.count + split

    @gluon.jit
    def store_counts(self, row, head, valid, count):
        """Tell the combine kernel how many splits the rows have, once for all heads."""
        LAYOUT: gl.constexpr = row.type.layout
        counts = gl.full([row.shape[0]], 0, gl.float32, LAYOUT) + count
        gl.store(self.counts + row, counts, mask=valid & (head == 0))

    @gluon.jit
    def store_lses(self, row, head, valid, split, base2):
        """Store the base-2 LSEs of rows, and the number of splits with those of the first one."""
        gl.store(self.lses + self.place(row, head, split), base2, mask=valid)
        if split == 0:
            self.store_counts(row, head, valid, self.count)

    @gluon.jit
    def store_values(self, row, head, valid, split, tile, FIRST: gl.constexpr):
        """Store normalized values [64, W], elements FIRST to FIRST + W of a row."""
        offsets = self.place(row, head, split) * self.DV + FIRST
        store_rows(self.values, offsets, tile, valid, self.DV - FIRST)


@gluon.jit
def key_splits(partials, count, num_tokens, CONFIG: gl.constexpr):
    """Return the `KeySplits` of a launch with SPLIT."""
    NUM_HEADS: gl.constexpr = CONFIG.NUM_KV_HEADS * CONFIG.SHARED * CONFIG.GROUP
    DV: gl.constexpr = CONFIG.DV
    rows = num_tokens.to(gl.int64) * NUM_HEADS * count
    lses = partials + rows * DV
    return KeySplits(count, partials, lses, lses + rows, NUM_HEADS, DV)
