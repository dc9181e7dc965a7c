"""How the decode kernels over latents divide requests into splits (M12).

The key tiles of all requests form a line that is cut into one range for each CTA, or for each CTA
of a block of query rows (`ranges`). The part of a request in a range is a split. A request with
one split is written to the output, and others to float32 partial results, which
`hopper_combine_kernel` combines.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate
from attnlib.ops.triton.hopper.kernels.decode_call import Split

__all__ = ["LatentConfig", "SplitPlace", "TileKeys", "place_of", "split_at"]


class LatentConfig(NamedTuple):
    """Constants of a decode kernel over latents.

    Attributes:
        HEAD_BLOCKS: blocks of GROUP query heads.
        MANY_TOKENS: requests may have several blocks of TILE_TOKENS query tokens, each of which has
            a CTA for each block of heads.
        GROUP: query heads of a CTA.
        DV: elements of a value.
        ROTARY: elements of a latent after those of the value.
        TILE_TOKENS: query tokens of a request in a CTA, at most.
        BLOCK_SIZE: tokens of a block of the cache.
        ROWS: query rows of a CTA; those after TILE_TOKENS * GROUP do not exist.
        CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK: see `Mask`.
        HAS_CAP, HAS_SINK, HAS_LSE: whether there are a soft cap, sinks and an LSE.
        LEAST: units of work of a range, at least (`ranges.worker_range`).
        CONSUMER_REGISTERS: of a thread in the second consumer warpgroup, if there is one.
        LOADER_REGISTERS: of a thread in the loader warp.
    """

    HEAD_BLOCKS: int
    MANY_TOKENS: bool
    GROUP: int
    DV: int
    ROTARY: int
    TILE_TOKENS: int
    BLOCK_SIZE: int
    ROWS: int
    CAUSAL: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_CHUNK: bool
    HAS_CAP: bool
    HAS_SINK: bool
    HAS_LSE: bool
    LEAST: int
    CONSUMER_REGISTERS: int
    LOADER_REGISTERS: int


@gluon.jit
def split_at(keys, request, block, units, before, position, end):
    """Return the `Split` of a request that begins at `position` in the line.

    Args:
        keys: the `KeyTiles`, in units of work.
        block: of query rows.
        units: of the request.
        before: units before the request.
        end: of the range.
    """
    skipped = position - before
    count = gl.minimum(units - skipped, end - position)
    start = gl.load(keys.batch.query_start_loc + request)
    query_len = gl.load(keys.batch.query_start_loc + request + 1) - start
    seq_len = gl.load(keys.batch.seq_lens + request)
    visited = keys.visited(0, query_len, seq_len, request)
    return Split(request, start, query_len, seq_len, block, skipped, count, visited)


@aggregate
class SplitPlace:
    """Where the results of a split go.

    Fields:
        num_splits: splits of the request. The results of a single one are the output.
        partial_index: index of the partial result. A range has one of a request that began before
            it, and one of a request that ends after it.
    """

    num_splits: Value
    partial_index: Value


@gluon.jit
def place_of(own, before, request_end, position):
    """Return the `SplitPlace` of the split that begins at `position` in the line.

    Args:
        own: the `TileRange` of the CTA.
        before, request_end: the request is at [before, request_end).
    """
    num_splits = (request_end - 1) // own.length - before // own.length + 1
    partial_index = 2 * gl.program_id(0) + (position > own.begin).to(gl.int32)
    return SplitPlace(num_splits, partial_index)


@aggregate
class TileKeys:
    """The keys of a tile of adjacent positions.

    Fields:
        positions: [keys].
        first, last: [rows, 1], visible are the positions in [first, last).
    """

    positions: Value
    first: Value
    last: Value

    @gluon.jit
    def hide(self, scores):
        """Return scores [rows, keys], -inf for keys that are not visible."""
        positions = self.positions[None, :]
        visible = (positions >= self.first) & (positions < self.last)
        return gl.where(visible, scores, float("-inf"))
