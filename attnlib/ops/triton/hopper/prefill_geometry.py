"""How a Hopper prefill divides the rows and heads of a call into work tiles."""

from __future__ import annotations

from typing import NamedTuple

from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.heuristics.hopper_tiles import (
    HopperTile,
    key_parts,
    padded_width,
)
from attnlib.ops.triton.hopper.sizes import gathers

__all__ = ["PrefillGeometry"]


class PrefillGeometry(NamedTuple):
    """How the rows and heads of a call are divided into work tiles.

    Attributes:
        block_size: positions of a page; 0 for keys without pages.
        shared: work tiles with the same query tokens and KV head, each with other query heads.
        group: query heads of a work tile.
        width, width_v: elements of a row of a tile in shared memory.
        key_parts: parts of a row of queries and keys.
        rest_columns: columns of a second accumulator; 0 for one.
        split: the consumers share rows, and each has a part of the value elements.
        rows: query rows of a work tile.
        tile_tokens: query tokens of a work tile.
        num_tiles: query tiles, an upper bound.
        num_work_tiles: work tiles, an upper bound.
    """

    block_size: int
    shared: int
    group: int
    width: int
    width_v: int
    key_parts: int
    rest_columns: int
    split: bool
    rows: int
    tile_tokens: int
    num_tiles: int
    num_work_tiles: int

    @classmethod
    def of(
        cls, call: AttentionCall, tile: HopperTile, one_head: bool, invariant: bool, unpaged: bool
    ) -> PrefillGeometry:
        """The division of a call; arguments of `prefill_plan.prepare_hopper_prefill`."""
        num_tokens, num_heads, head_size = call.query.shape
        num_kv_heads, head_size_v = call.key.shape[2], call.value.shape[3]
        block_size = 0 if unpaged else call.key.shape[1]
        shared = num_heads // num_kv_heads if one_head else 1
        group = num_heads // num_kv_heads // shared
        width, width_v = padded_width(head_size), padded_width(head_size_v)
        # The batch-invariant kernel and gathered rows keep keys undivided.
        undivided = invariant or gathers(block_size)
        parts = 1 if undivided else key_parts(head_size, call.key.element_size())
        rest = _rest_columns(tile, parts, head_size_v)
        width = width if parts == 1 else 64
        split = max(width, width_v) > 256
        rows = 64 * (1 if split else tile.consumers)
        # Tiles of the batch-invariant kernel begin at fixed positions: two of a request are
        # incomplete.
        incomplete = 2 if invariant else 1
        num_reqs = call.batch.query_start_loc.shape[0] - 1
        num_tiles = num_tokens // (rows // group) + incomplete * num_reqs + 1
        return cls(
            block_size,
            shared,
            group,
            width,
            width_v,
            parts,
            rest,
            split,
            rows,
            rows // group,
            num_tiles,
            num_tiles * num_kv_heads * shared,
        )

    @property
    def loads_queries(self) -> bool:
        """Whether TMA boxes of 64 rows cover the rows of a work tile."""
        group = self.group
        return self.tile_tokens * group == self.rows and (64 % group == 0 or group % 64 == 0)

    @property
    def query_box(self) -> tuple[int, int]:
        """Tokens and heads of a box of queries."""
        return (64 // self.group, self.group) if self.group <= 64 else (1, 64)


def _rest_columns(tile: HopperTile, parts: int, head_size_v: int) -> int:
    """The columns of the second of two accumulators, a power of two; 0 where there is one. `parts`
    is that of keys."""
    if not tile.two_accumulators or parts == 1 or not 128 < head_size_v <= 192:
        return 0
    return max(8, 1 << (head_size_v - 129).bit_length())
