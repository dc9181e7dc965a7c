"""The work of a CTA over two key streams: a window of own keys, then compressed entries (M17).

Slots number the keys of a query token: slots below OWN are the keys of its window, those from OWN
on are entries, in the order of its list, or all of them. OWN is a multiple of the tile, so that a
tile belongs to one stream.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate, prefetch_l1
from attnlib.ops.triton.hopper.kernels.latent_tiles import TILE

__all__ = [
    "StreamConfig",
    "StreamInputs",
    "StreamKeys",
    "StreamWork",
    "stream_work",
    "token_of_cta",
]


class StreamConfig(NamedTuple):
    """Constants of the kernel over two key streams.

    Attributes:
        OWN: slots of the own keys, a multiple of the tile.
        BLOCK_SIZE, ENTRY_BLOCK: tokens of a block of the cache, entries of a block of theirs.
        LISTED: each query token has a list of entries; else it sees all that `entry_counts` has.
        HEADS: query heads of a CTA.
        HEAD_BLOCKS: CTAs of a token and split.
        DV: elements of a latent.
        SPLIT: slots are divided into splits, which another kernel combines.
        CAUSAL, HAS_RIGHT: see `Mask`; there is a window to the left.
        HAS_CAP, HAS_SINK, HAS_LSE: whether there are a soft cap, sinks and an LSE.
        REGISTERS: of a thread in all warps but the first four.
        EARLY: queries and lists are read before the request of the token is known.
    """

    OWN: int
    BLOCK_SIZE: int
    ENTRY_BLOCK: int
    LISTED: bool
    HEADS: int
    HEAD_BLOCKS: int
    DV: int
    SPLIT: bool
    CAUSAL: bool
    HAS_RIGHT: bool
    HAS_CAP: bool
    HAS_SINK: bool
    HAS_LSE: bool
    REGISTERS: int
    EARLY: bool


@aggregate
class StreamKeys:
    """The visible keys of a tile.

    Fields:
        seen: [keys].
    """

    seen: Value

    @gluon.jit
    def hide(self, scores):
        """Return scores [rows, keys], -inf for keys that are not visible."""
        return gl.where(self.seen[None, :], scores, float("-inf"))


@aggregate
class StreamWork:
    """The work of a CTA.

    Fields:
        entries: pointer to the list of the token; None without LISTED.
        num_listed: entries of a list; without LISTED, at least the visible ones.
        token: the query token.
        head_offset: its first head.
        exists: whether the token belongs to a request.
        first, last: its own visible positions are those in [first, last).
        count: entries that it may see.
        begin: the first slot.
        pairs: pairs of tiles from there on.
        split: its split of the slots.
        OWN, LISTED: see `StreamConfig`.
    """

    entries: Value
    num_listed: Value
    token: Value
    head_offset: Value
    exists: Value
    first: Value
    last: Value
    count: Value
    begin: Value
    pairs: Value
    split: Value
    OWN: gl.constexpr
    LISTED: gl.constexpr

    @gluon.jit
    def positions(self, slot, lanes):
        """Return the positions of a tile in its stream, -1 for those that are not visible.

        Args:
            slot: the first slot of the tile.
            lanes: [keys], 0 to TILE - 1.
        """
        if slot < self.OWN:
            position = self.first + slot + lanes
            seen = position < self.last
        else:
            index = slot - self.OWN + lanes
            if self.LISTED:
                position = gl.load(self.entries + index, mask=index < self.num_listed, other=-1)
            else:
                position = index
            seen = (position >= 0) & (position < self.count)
        return gl.where(seen, position, -1)

    @gluon.jit
    def keys(self, slot, lanes):
        """Return the `StreamKeys` of a tile."""
        return StreamKeys(self.positions(slot, lanes) >= 0)


@aggregate
class StreamInputs:
    """The two caches of a call.

    Fields:
        key, entry: pointers to the own latents and the entries.
        table, entry_table: pointers to the blocks of the token's request.
        stride_kb, stride_kn: elements from block to block and from position to position.
        stride_eb, stride_en: likewise, of the entries.
        OWN, BLOCK_SIZE, ENTRY_BLOCK: see `StreamConfig`.
    """

    key: Value
    entry: Value
    table: Value
    entry_table: Value
    stride_kb: Value
    stride_kn: Value
    stride_eb: Value
    stride_en: Value
    OWN: gl.constexpr
    BLOCK_SIZE: gl.constexpr
    ENTRY_BLOCK: gl.constexpr

    @gluon.jit
    def blocks(self, slot, position):
        """Return the blocks of the positions of a tile that begins at `slot`; 0 for -1."""
        exists = position >= 0
        known = gl.maximum(position, 0)
        if slot < self.OWN:
            blocks = gl.load(self.table + known // self.BLOCK_SIZE, mask=exists, other=0)
        else:
            places = self.entry_table + known // self.ENTRY_BLOCK
            blocks = gl.load(places, mask=exists, other=0)
        return blocks

    @gluon.jit
    def latents(self, slot, position, block):
        """Return the memory of the stream of a tile, and the element offsets of its positions in
        known blocks."""
        known = gl.maximum(position, 0)
        if slot < self.OWN:
            base = self.key
            offsets = block.to(gl.int64) * self.stride_kb
            offsets += (known % self.BLOCK_SIZE).to(gl.int64) * self.stride_kn
        else:
            base = self.entry
            offsets = block.to(gl.int64) * self.stride_eb
            offsets += (known % self.ENTRY_BLOCK).to(gl.int64) * self.stride_en
        return base, offsets


@gluon.jit
def token_of_cta(CONFIG: gl.constexpr):
    """Return the query token of this CTA and its first head."""
    program = gl.program_id(0)
    return program // CONFIG.HEAD_BLOCKS, program % CONFIG.HEAD_BLOCKS * CONFIG.HEADS


@gluon.jit
def _prefetch_list(entries, begin, end):
    """Prefetch elements [begin, end) of a list, up to 1024: they are read after the request of the
    token is known. Lanes outside prefetch elements 0 or end - 1."""
    LINE: gl.constexpr = 32
    index = begin + LINE * gl.arange(0, 32, gl.BlockedLayout([1], [32], [4], [0]))
    prefetch_l1(entries + gl.maximum(gl.minimum(index, end - 1), 0))


@gluon.jit
def stream_work(lists, entry_counts, CONFIG: gl.constexpr):
    """Return the `StreamWork` of this CTA and the block table of its request.

    Args:
        lists: the `KeyLists` of the own keys, with the lists of entries.
        entry_counts: pointer to the visible entries of each token.
    """
    token, head_offset = token_of_cta(CONFIG)
    split = gl.program_id(1)
    # The same splits for all tokens, because the combine kernel knows one number per token. Triton
    # 3.6 does not compile the kernel where `begin` is a constant.
    steps = (CONFIG.OWN + lists.num_entries + 2 * TILE - 1) // (2 * TILE)
    per_split = (steps + lists.num_splits - 1) // lists.num_splits
    begin = split * per_split * (2 * TILE)
    end = begin + per_split * (2 * TILE)
    entries = None
    if CONFIG.LISTED:
        entries = lists.indices + token.to(gl.int64) * lists.stride_lists
        if CONFIG.EARLY:
            last = gl.minimum(end - CONFIG.OWN, lists.num_entries)
            _prefetch_list(entries, begin - CONFIG.OWN, last)
    visible = lists.visible_keys(token)
    count = gl.load(entry_counts + token, mask=visible.exists, other=0)
    slots = CONFIG.OWN + lists.num_entries
    if not CONFIG.LISTED:
        slots = CONFIG.OWN + gl.minimum(lists.num_entries, count)
    end = gl.minimum(slots, end)
    pairs = gl.where(visible.exists, gl.maximum(end - begin + 2 * TILE - 1, 0) // (2 * TILE), 0)
    work = StreamWork(
        entries,
        lists.num_entries,
        token,
        head_offset,
        visible.exists,
        visible.first,
        visible.last,
        count,
        begin,
        pairs,
        split,
        CONFIG.OWN,
        CONFIG.LISTED,
    )
    return work, visible.table
