"""The work of a CTA over selected latents with up to 64 query heads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate
from attnlib.ops.triton.hopper.kernels.latent_tiles import TILE
from attnlib.ops.triton.hopper.kernels.selected_lists import (
    ListedKeys,
    Slots,
    VisibleKeys,
    count_slots,
)

__all__ = ["ListWork", "list_work"]


@aggregate
class ListWork:
    """The work of a CTA.

    Fields:
        entries: pointer to the list.
        token: its query token.
        head_offset: its first head.
        exists: whether the token belongs to a request.
        begin, end: its slots of the list, up to the last one with a visible position.
        has_holes: whether slots before the end select nothing.
        first, last: visible are the positions in [first, last).
        pairs: pairs of tiles A and B.
        split: its split of the list.
        SELECT: positions of an entry.
    """

    entries: Value
    token: Value
    head_offset: Value
    exists: Value
    begin: Value
    end: Value
    has_holes: Value
    first: Value
    last: Value
    pairs: Value
    split: Value
    SELECT: gl.constexpr

    @gluon.jit
    def slots(self):
        """Return the `Slots` of the CTA."""
        return Slots(self.entries, self.begin, self.end, self.SELECT)

    @gluon.jit
    def visible(self, table):
        """Return the `VisibleKeys` of the token; `table` is the block table of its request."""
        return VisibleKeys(table, self.exists, self.first, self.last)

    @gluon.jit
    def keys(self, slot, columns):
        """Return the `ListedKeys` of a tile from `slot` on."""
        slots = slot + columns
        return ListedKeys(self.slots(), self.visible(None), slot, slots, self.has_holes)


@gluon.jit
def list_work(lists, HEADS: gl.constexpr, HEAD_BLOCKS: gl.constexpr):
    """Return the `ListWork` of this CTA and the block table of its request."""
    token = gl.program_id(0) // HEAD_BLOCKS
    head_offset = gl.program_id(0) % HEAD_BLOCKS * HEADS
    split = gl.program_id(1)
    visible = lists.visible_keys(token)
    slots = lists.slots(token, split, 2 * TILE)
    used, has_holes = count_slots(slots.entries, lists.num_entries, visible, lists.SELECT)
    end = gl.minimum(slots.end, used)
    pairs = gl.maximum(end - slots.begin + 2 * TILE - 1, 0) // (2 * TILE)
    work = ListWork(
        slots.entries,
        token,
        head_offset,
        visible.exists,
        slots.begin,
        end,
        has_holes,
        visible.first,
        visible.last,
        pairs,
        split,
        lists.SELECT,
    )
    return work, visible.table
