"""How the decode kernels over latents divide requests into splits (M12).

The key tiles of all requests form a line that is cut into one range for each CTA, or for each CTA
of a block of query rows (`ranges`). The part of a request in a range is a split. A request with
one split is written to the output, and others to float32 partial results, which
`hopper_combine_kernel` combines. With WHOLE, a CTA has all keys that a block of query rows of each
request sees.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate
from attnlib.ops.triton.hopper.kernels.decode_call import Split
from attnlib.ops.triton.hopper.kernels.query_tiles import find_tile
from attnlib.ops.triton.hopper.kernels.ranges import TileRange
from attnlib.ops.triton.hopper.kernels.schedule import KeyTiles
from attnlib.ops.triton.kernels.quant import KV_PLAIN, SCALE_FLOAT

__all__ = [
    "MOST_BLOCKS",
    "BlockTiles",
    "LatentConfig",
    "SplitPlace",
    "TileKeys",
    "place_of",
    "row_block",
    "split_at",
    "tile_tokens",
    "whole_block",
]

MOST_BLOCKS: gl.constexpr = gl.constexpr(1024)
"""Blocks of query tokens of a request, at most."""


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
        LOADER_REGISTERS: of a thread in a warp that loads latents.
        KV_KIND: elements of the cache, one of `KV_*`.
        K_SCALE_KIND, V_SCALE_KIND: scales of a quantized cache, of `SCALE_*`.
        GROUP_SCALES: each quarter of the value elements of a latent has a float32 scale, and the
            elements after those of the values are bfloat16.
        WORKERS: consumer warpgroups of a CTA with up to 32 ROWS each.
        SHARES: the workers of a CTA attend to the same latents with ROWS query rows each, and not
            to ranges of their own.
        STAGES, ROTARY_STAGES: quarters of tiles in the ring of a worker, and their other elements.
        IN_FLIGHT: quarters of a ring in flight, at most; with CONVERTS, 0 without prefetches.
        CONVERTS: four warps convert an 8-bit cache in shared memory to 16 bits, as which KV_KIND
            and GROUP_SCALES describe it: to the dtype of the queries, or with HALVED to float16.
        STORED_KIND, STORED_GROUPS: the same of the cache itself, with CONVERTS.
        HALVED: see `LatentTiles`; with CONVERTS.
        WHOLE: no request is divided into splits: each block of query rows has one CTA, which reads
            the keys that these rows see.
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
    KV_KIND: int = KV_PLAIN.value
    K_SCALE_KIND: int = SCALE_FLOAT.value
    V_SCALE_KIND: int = SCALE_FLOAT.value
    GROUP_SCALES: bool = False
    WORKERS: int = 1
    SHARES: bool = False
    STAGES: int = 11
    ROTARY_STAGES: int = 3
    IN_FLIGHT: int = 4
    CONVERTS: bool = False
    STORED_KIND: int = KV_PLAIN.value
    STORED_GROUPS: bool = False
    HALVED: bool = False
    WHOLE: bool = False


@aggregate
class BlockTiles:
    """The key tiles of one block of query tokens of each request, as `KeyTiles` has those of all.

    Fields:
        batch, mask: `Batch` and `Mask`.
        first_token: of the block in a request.
        TILE_TOKENS: query tokens of the block.
        BLOCK_N: keys of a tile.
    """

    batch: Value
    mask: Value
    first_token: Value
    TILE_TOKENS: gl.constexpr
    BLOCK_N: gl.constexpr

    @gluon.jit
    def visited(self, first_token, query_len, seq_len, request):
        """Return the `VisitedTiles` of the query tokens of the block from its `first_token` on."""
        tiles = KeyTiles(self.batch, self.mask, None, None, self.TILE_TOKENS, self.BLOCK_N)
        return tiles.visited(self.first_token + first_token, query_len, seq_len, request)

    @gluon.jit
    def count(self, request, mask):
        """Return how many tiles the block visits, for one request or a vector of requests: at least
        1 if it has query tokens there, else 0."""
        _, query_len, seq_len = self.batch.lengths(request, mask)
        visited = self.visited(0, query_len, seq_len, request)
        tiles = gl.maximum(visited.end - visited.begin, 1)
        return gl.where(self.first_token < query_len, tiles, 0)


@gluon.constexpr_function
def tile_tokens(config):
    """Return the query tokens of a request in all of its blocks, at most."""
    return config.TILE_TOKENS * (MOST_BLOCKS.value if config.MANY_TOKENS else 1)


@gluon.jit
def row_block(token_blocks, CONFIG: gl.constexpr):
    """Return (block of query rows of the CTA, blocks of a request)."""
    blocks = CONFIG.HEAD_BLOCKS
    if CONFIG.MANY_TOKENS:
        blocks = CONFIG.HEAD_BLOCKS * token_blocks
    return gl.program_id(0) % blocks, blocks


@gluon.jit
def whole_block(batch, mask, BLOCK_N: gl.constexpr, CONFIG: gl.constexpr):
    """Return (block of query rows, its `BlockTiles`, the `TileRange` of all of them) of a CTA with
    WHOLE. Blocks after the last request, which have none, are counted from there on."""
    request, _, first_token, head_block = find_tile(
        gl.program_id(0),
        batch.query_start_loc,
        batch.num_reqs,
        gl.num_programs(0) // CONFIG.HEAD_BLOCKS,
        CONFIG.HEAD_BLOCKS,
        CONFIG.HEAD_BLOCKS,
        CONFIG.TILE_TOKENS,
    )
    block = first_token // CONFIG.TILE_TOKENS * CONFIG.HEAD_BLOCKS + head_block
    keys = BlockTiles(batch, mask, first_token, CONFIG.TILE_TOKENS, BLOCK_N)
    count = keys.count(request, request < batch.num_reqs)
    # Triton 3.6 does not compile ranges whose fields are constants.
    zero = request * 0
    return block, keys, TileRange(zero, count, count, None, request, zero)


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
def place_of(own, before, request_end, position, worker):
    """Return the `SplitPlace` of the split that begins at `position` in the line.

    Args:
        own: the `TileRange` of the worker.
        before, request_end: the request is at [before, request_end).
        worker: number of the worker, or of the CTA where its workers share a range.
    """
    num_splits = (request_end - 1) // own.length - before // own.length + 1
    partial_index = 2 * worker + (position > own.begin).to(gl.int32)
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
