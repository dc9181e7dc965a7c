"""Lists of selected positions, one for each query token, for the Hopper kernels (M11).

An entry of a list selects SELECT adjacent positions. Slots number the positions of a list: slot s
is position s % SELECT of entry s // SELECT. Entries that select nothing may come before others.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate

__all__ = [
    "UNALIGNED",
    "UNSPECIALIZED",
    "KeyLists",
    "ListedKeys",
    "Slots",
    "SelectedConfig",
    "VisibleKeys",
    "count_slots",
]

UNSPECIALIZED = [
    *("left", "right", "chunk", "num_reqs", "num_tokens", "num_heads", "num_entries", "num_splits"),
    *("stride_lists", "stride_table", "stride_qt", "stride_qh", "stride_kb", "stride_kn"),
    *("stride_ot", "stride_oh", "stride_lt"),
]
"""Parameters whose values must not select a compilation, because they change from step to step."""
UNALIGNED = ["query_start_loc", "seq_lens", "block_table", "indices", "sinks", "lse"]
"""Pointers whose alignment must not select a compilation."""


class SelectedConfig(NamedTuple):
    """Constants of a kernel over selected latents.

    Attributes:
        SELECT: positions of an entry.
        BLOCK_SIZE: tokens of a block of the cache.
        HEADS: query heads of a CTA.
        HEAD_BLOCKS: CTAs of a token and split.
        DV: elements of a value.
        ROTARY: elements of a latent after those of the value.
        SPLIT: lists are divided into splits, which another kernel combines.
        CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK: see `Mask`.
        HAS_CAP, HAS_SINK, HAS_LSE: whether there are a soft cap, sinks and an LSE.
        REGISTERS: of a thread in all warps but the first four.
        RUNNING: weights are relative to the running maxima, else to those of the first tile.
        REPEAT: attend only to lists whose outputs are NaN.
    """

    SELECT: int
    BLOCK_SIZE: int
    HEADS: int
    HEAD_BLOCKS: int
    DV: int
    ROTARY: int
    SPLIT: bool
    CAUSAL: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_CHUNK: bool
    HAS_CAP: bool
    HAS_SINK: bool
    HAS_LSE: bool
    REGISTERS: int
    RUNNING: bool = True
    REPEAT: bool = False


@aggregate
class VisibleKeys:
    """The positions that a query token may see.

    Fields:
        table: pointer to the block table of its request.
        exists: whether it belongs to a request.
        first, last: visible are the positions in [first, last).
    """

    table: Value
    exists: Value
    first: Value
    last: Value


@aggregate
class Slots:
    """Slots [begin, end) of a list.

    Fields:
        entries: pointer to the list.
        SELECT: positions of an entry.
    """

    entries: Value
    begin: Value
    end: Value
    SELECT: gl.constexpr

    @gluon.jit
    def load(self, slots):
        """Return the entries of slots; -1 from the end on."""
        return gl.load(self.entries + slots // self.SELECT, mask=slots < self.end, other=-1)

    @gluon.jit
    def positions_of(self, entry, slots, visible):
        """Return the positions of slots with known entries; -1 where an entry selects nothing
        that is visible."""
        if self.SELECT == 1:
            position = entry
            exists = entry >= 0
        else:
            # Compared before a product that could overflow.
            exists = (entry >= 0) & (entry < (visible.last + self.SELECT - 1) // self.SELECT)
            position = gl.where(exists, entry, 0) * self.SELECT + slots % self.SELECT
        seen = exists & (position >= visible.first) & (position < visible.last)
        return gl.where(seen, position, -1)

    @gluon.jit
    def positions(self, slots, visible):
        """`positions_of` with entries that are loaded here."""
        return self.positions_of(self.load(slots), slots, visible)


@aggregate
class ListedKeys:
    """The keys of a tile of a list.

    Fields:
        list: the `Slots` up to the last one with a visible position.
        visible: the `VisibleKeys` of the token.
        first_slot, slots: the slots of the tile, the first one and all [keys].
        has_holes: whether slots before the end of the list select nothing.
    """

    list: Value
    visible: Value
    first_slot: Value
    slots: Value
    has_holes: Value

    @gluon.jit
    def hide(self, scores):
        """Return scores [rows, keys], -inf for keys that are not visible."""
        if self.has_holes:
            positions = self.list.positions(self.slots, self.visible)
            scores = gl.where((positions >= 0)[None, :], scores, float("-inf"))
        else:
            if self.first_slot + self.slots.shape[0] > self.list.end:
                scores = gl.where((self.slots < self.list.end)[None, :], scores, float("-inf"))
        return scores


@aggregate
class KeyLists:
    """The lists of a call and the requests of its tokens.

    Fields:
        batch: the `Batch`.
        mask: the `Mask` of the layer.
        indices: the lists, [tokens, ..., entries].
        num_entries: entries of a list.
        num_splits: splits of each list.
        stride_lists: elements from list to list.
        SELECT, SPLIT: see `SelectedConfig`.
    """

    batch: Value
    mask: Value
    indices: Value
    num_entries: Value
    num_splits: Value
    stride_lists: Value
    SELECT: gl.constexpr
    SPLIT: gl.constexpr

    @gluon.jit
    def slots(self, token, split, STEP: gl.constexpr):
        """Return the `Slots` of a token and split.

        Args:
            STEP: slots of a step of the CTA; splits begin at multiples of it.
        """
        entries = self.indices + token.to(gl.int64) * self.stride_lists
        begin = 0
        end = self.num_entries * self.SELECT
        if self.SPLIT:
            # The same splits for all lists, because the combine kernel knows one number per token.
            steps = (self.num_entries * self.SELECT + STEP - 1) // STEP
            per_split = (steps + self.num_splits - 1) // self.num_splits
            begin = split * per_split * STEP
            end = gl.minimum(end, begin + per_split * STEP)
        return Slots(entries, begin, end, self.SELECT)

    @gluon.jit
    def visible_keys(self, token):
        """Return the `VisibleKeys` of a token."""
        REQUESTS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        request = 0
        for base in range(1, self.batch.num_reqs + 1, 128):
            lanes = base + gl.arange(0, 128, REQUESTS)
            inside = lanes <= self.batch.num_reqs
            starts = gl.load(self.batch.query_start_loc + lanes, mask=inside, other=0)
            request += gl.sum((inside & (starts <= token)).to(gl.int32), 0)
        # Tokens after the last request have no keys: their rows become 0 (M6).
        exists = request < self.batch.num_reqs
        start = gl.load(self.batch.query_start_loc + request)
        query_len = gl.load(self.batch.query_start_loc + request + 1, mask=exists, other=0) - start
        seq_len = gl.load(self.batch.seq_lens + request, mask=exists, other=0)
        first, last = self.mask.span(seq_len - query_len + token - start, seq_len)
        table = self.batch.table(request)
        return VisibleKeys(table, exists, gl.maximum(first, 0), gl.where(exists, last, 0))


@gluon.jit
def count_slots(entries, num_entries, visible, SELECT: gl.constexpr):
    """Return the slots of a list up to the last entry with a visible position, and whether there is
    a slot before it without one."""
    LANES: gl.constexpr = 2048
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    low = visible.first // SELECT
    high = (visible.last + SELECT - 1) // SELECT
    furthest = gl.zeros([LANES], gl.int32, layout)
    complete = gl.zeros([LANES], gl.int32, layout)
    # Tokens after the last request have no list.
    num_entries = gl.where(visible.exists, num_entries, 0)
    for base in range(0, num_entries, LANES):
        lanes = base + gl.arange(0, LANES, layout)
        entry = gl.load(entries + lanes, mask=lanes < num_entries, other=-1)
        used = (entry >= 0) & (entry >= low) & (entry < high)
        furthest = gl.maximum(furthest, gl.where(used, lanes + 1, 0))
        if SELECT == 1:
            complete += used.to(gl.int32)
        else:
            inside = (entry >= 0) & (entry >= (visible.first + SELECT - 1) // SELECT)
            complete += (inside & (entry < visible.last // SELECT)).to(gl.int32)
    count = gl.max(furthest, 0)
    return count * SELECT, gl.sum(complete, 0) < count
