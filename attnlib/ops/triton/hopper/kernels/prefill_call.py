"""What the Hopper prefill kernels take, as objects: constants, batch, queries, scores.

Entry kernels have flat runtime arguments, from which they build these objects, and one
`PrefillConfig`.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import (
    Value,
    aggregate,
    launch_dependent_grids,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.mailbox import TileRanges
from attnlib.ops.triton.hopper.kernels.schedule import KeyTiles, Mask
from attnlib.ops.triton.kernels.quant import KV_PLAIN, SCALE_FLOAT

__all__ = ["UNALIGNED", "UNSPECIALIZED", "PrefillCall", "PrefillConfig", "Scoring", "mask_of"]

UNSPECIALIZED = [
    *("left", "right", "chunk", "num_reqs", "num_tokens", "num_tiles", "concurrent", "l2_heads"),
    *("num_blocks", "stride_qt", "stride_qh", "stride_ot", "stride_oh", "stride_lt"),
    *("stride_table", "rows0", "columns0", "rows1", "columns1", "rows2", "columns2", "rows3"),
    *("columns3", "stride_kb", "stride_kn", "stride_kh", "stride_vb", "stride_vn", "stride_vh"),
    "num_splits",
]
"""Parameters whose values must not select a compilation, because they change from step to step."""

UNALIGNED = [
    *("lse", "sinks", "k_scale", "v_scale", "query_start_loc", "seq_lens", "block_table"),
    *("aux0", "aux1", "aux2", "aux3"),
]
"""Pointers whose alignment must not select a compilation: slices of a batch with arbitrary
offsets."""


class PrefillConfig(NamedTuple):
    """Constants of a prefill kernel. `ops.triton.hopper.prefill_plan` chooses them.

    Attributes:
        NUM_KV_HEADS: KV heads.
        SHARED: work tiles with the same query tokens and KV head, each with other query heads.
        GROUP: query heads of a work tile.
        D, DV: head sizes of keys and values.
        WIDTH, WIDTH_V: elements of a row of a tile in shared memory.
        TILE_TOKENS: query tokens of a work tile.
        BLOCK_N: keys of a tile.
        BLOCK_SIZE: positions of a page; 0 for keys without pages.
        STAGES, Q_STAGES: stages of the rings of keys and values, and of queries.
        CONSUMERS: consumer warpgroups.
        LOAD_QUERY: queries are loaded by TMA; otherwise the consumers load them.
        PERSISTENT: the grid may be smaller than the number of work tiles.
        STAGED_STORE: outputs are stored through the shared memory of the queries.
        CONSUMER_REGISTERS, PRODUCER_REGISTERS: registers per thread.
        CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK: limits of the mask (`schedule.Mask`).
        HAS_CAP: True with a soft cap; `mainloop.BOUNDED` if it bounds the logits.
        HAS_SINK, HAS_LSE: whether there are sinks, and an LSE to write.
        KV_KIND: elements of the cache, one of `KV_*`.
        K_SCALE_KIND, V_SCALE_KIND: scales of the cache, of `SCALE_*`.
        RANGES: ranges of keys that the bounds of the score function return; 0 without bounds.
        EXACT: the bounds replace the score function.
        RAW_SCORE: the score function takes raw products instead of scores.
        GATHERS: rows of the cache are copied one by one, and not by TMA.
        SPLIT_V: the consumers share 64 query rows, and each has a part of the value elements.
        KEY_PARTS: queries and keys are kept in as many parts of WIDTH elements.
        VALUE_PARTS: parts of 32 elements of the values of up to 127 elements (`value_columns`), or
            0; only with tiles of 128 keys, a 16-bit cache, and without GATHERS.
        REST_COLUMNS: columns of the second accumulator (`two_accumulators`); 0 for one accumulator.
        RARELY: two consumers, too, rescale what was accumulated only where a maximum rises by more
            than a threshold.
        SIGN_SOFTMAX: unmasked tiles use `softmax_by_sign`.
        BYTE_STAGES: stages of the rings of a float8 cache.
        CONVERTER_WARPS, CONVERTER_REGISTERS: of the partition that converts a float8 cache.
        QUERY_REGISTERS: consumers keep the queries in registers, beside a converter.
        SPLIT: the keys of a query tile are divided over work tiles (`key_splits`); only over
            16-bit caches with pages that TMA reads, without RANGES.
    """

    NUM_KV_HEADS: int
    GROUP: int
    D: int
    DV: int
    WIDTH: int
    WIDTH_V: int
    TILE_TOKENS: int
    BLOCK_N: int
    BLOCK_SIZE: int
    STAGES: int
    Q_STAGES: int
    CONSUMERS: int
    LOAD_QUERY: bool
    PERSISTENT: bool
    STAGED_STORE: bool
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    CAUSAL: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_CHUNK: bool
    HAS_CAP: Any
    HAS_SINK: bool
    HAS_LSE: bool
    SHARED: int = 1
    KV_KIND: int = KV_PLAIN.value
    K_SCALE_KIND: int = SCALE_FLOAT.value
    V_SCALE_KIND: int = SCALE_FLOAT.value
    RANGES: int = 0
    EXACT: bool = False
    RAW_SCORE: bool = False
    GATHERS: bool = False
    SPLIT_V: bool = False
    KEY_PARTS: int = 1
    VALUE_PARTS: int = 0
    REST_COLUMNS: int = 0
    RARELY: bool = False
    SIGN_SOFTMAX: bool = False
    BYTE_STAGES: int = 0
    CONVERTER_WARPS: int = 0
    CONVERTER_REGISTERS: int = 0
    QUERY_REGISTERS: bool = False
    SPLIT: bool = False


@gluon.jit
def mask_of(left, right, chunk, CONFIG: gl.constexpr):
    """Return the `Mask` of a configuration."""
    return Mask(
        left, right, chunk, CONFIG.CAUSAL, CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, CONFIG.HAS_CHUNK
    )


@aggregate
class PrefillCall:
    """The batch of a launch, as all warps of a CTA see it.

    Fields:
        batch: `Batch`. For keys without pages, its `seq_lens` [num_reqs + 1] and block table are
            the first key of each request and the end.
        num_tokens: query tokens.
        num_tiles: query tiles, an upper bound.
        l2_heads: KV heads that are worked on at a time (`query_tiles.find_tile`).
        counters: two int32 zeros of a persistent grid.
        concurrent: 1 to run next to the previous kernel, 0 to wait for it first.
        mask: `Mask`.
        aux: tensors of the score function, in a tuple.
        BOUNDS: function of the keys that the score function shows, or None.
        splits: `KeySplits`; None without SPLIT.
        config: `PrefillConfig`.
    """

    batch: Value
    num_tokens: Value
    num_tiles: Value
    l2_heads: Value
    counters: Value
    concurrent: Value
    mask: Value
    aux: Value
    BOUNDS: gl.constexpr
    splits: Value
    config: Value

    @gluon.jit
    def begin(self):
        """Wait for the previous kernel, which may have written the queries, the cache or the
        lengths, or read the output (PDL); not with `concurrent`."""
        if self.concurrent == 0:
            wait_on_dependent_grids()
            launch_dependent_grids()

    @gluon.jit
    def tiles(self, work):
        """Return the `TileRanges` of a work tile that has been published."""
        if self.config.RANGES > 0:
            return work.tiles
        else:
            keys = KeyTiles(
                None, self.mask, None, None, self.config.TILE_TOKENS, self.config.BLOCK_N
            )
            found = keys.visited(work.first_token, work.query_len, work.seq_len, work.request)
            if self.config.SPLIT:
                found = self.splits.share(found, work.split)
            return TileRanges(
                found.begin, found.left_end, found.right_begin, found.end, 0, 0, 0, 0, 0
            )


@aggregate
class Scoring:
    """How raw products become logits.

    Fields:
        scale: softmax scale.
        soft_cap: read with HAS_CAP.
        k_scale, v_scale: scales of a float8 cache or of its 16-bit copies; None for numbers that
            are part of `scale`.
        SCORE: score function, or None.
        KEY_SLOPE: it adds this times the key's position, and terms that are equal for all keys;
            None for other functions.
        column_tile: operand of the product that adds the slopes (`slopes.column_numbers`).
    """

    scale: Value
    soft_cap: Value
    k_scale: Value
    v_scale: Value
    SCORE: gl.constexpr
    KEY_SLOPE: gl.constexpr
    column_tile: Value
