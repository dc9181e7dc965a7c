"""What the Hopper decode kernels take, as objects: constants, tensors with their strides, splits.

Entry kernels have flat runtime arguments, from which they build these objects, and one
`DecodeConfig`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate
from attnlib.ops.triton.hopper.kernels.softmax import LN2
from attnlib.ops.triton.kernels.quant import KV_PLAIN, SCALE_FLOAT

__all__ = [
    "UNALIGNED",
    "UNSPECIALIZED",
    "Caches",
    "DecodeCall",
    "DecodeConfig",
    "Outputs",
    "Partials",
    "Queries",
    "Split",
]

UNSPECIALIZED = [
    *("left", "right", "chunk", "num_reqs", "num_tokens", "num_blocks", "rows", "stride_qt"),
    *("stride_qh", "stride_ot", "stride_oh", "stride_lt", "stride_table", "early", "rows0"),
    *("columns0", "rows1", "columns1", "rows2", "columns2", "rows3", "columns3"),
    *("stride_latents", "stride_kb", "stride_kn", "stride_kh", "stride_vb", "stride_vn"),
    *("stride_vh", "stride_token", "token_blocks"),
]
"""Parameters whose values must not select a compilation, because they change from step to step."""

UNALIGNED = [
    *("lse", "sinks", "k_scale", "v_scale", "query_start_loc", "seq_lens", "block_table"),
    *("partial_lses", "split_headers", "counters", "aux0", "aux1", "aux2", "aux3"),
]
"""Pointers whose alignment must not select a compilation: slices of a batch or of the workspace
with arbitrary offsets."""


class DecodeConfig(NamedTuple):
    """Constants of a decode kernel. `ops.triton.hopper.decode_plan` chooses them.

    Attributes:
        NUM_KV_HEADS: KV heads.
        GROUP: query heads of a KV head.
        D, DV: head sizes of keys and values.
        WIDTH, WIDTH_V: padded head sizes, the elements of a row of a tile.
        TILE_TOKENS: query tokens of a request that fit in ROWS.
        BLOCK_N: keys of a tile.
        BLOCK_SIZE: positions of a page.
        ROWS: query rows of a tile, the N of WGMMA; at least 8.
        STAGES: stages of the rings of keys and values.
        CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK: as in `schedule.Mask`.
        HAS_CAP, HAS_SINK, HAS_LSE: whether there is a soft cap, sinks, and an LSE to write.
        K_KIND, V_KIND: elements of the keys and of the values, of `KV_*`.
        K_SCALE_KIND, V_SCALE_KIND: scales of the cache, of `SCALE_*`.
        PACKED: the cache has the layout of vLLM's PagedAttention (`cache_tiles`).
        COMBINE_IN_KERNEL: the CTA that ends a request's last split combines all of them.
        SPLITS_PER_LOAD: splits that it loads at a time.
        WORKERS: consumers of a CTA, each with loaders, rings and splits of its own; 1 or 2.
        EVEN_RANGES: ranges are those of `ranges.even_worker_range`, and not of `worker_range`.
        QUERY_WARP: a warp of its own prepares the queries of a split while the consumer works on
            the previous one, and one warp loads keys and values; for two workers.
        GATHERS: the rows of the caches are copied one by one, and not by TMA; for one worker.
        K_SIGNS, V_SIGNS: where the kernel rotates queries, and outputs back: the signs of a
            `KVRotation` as `rotation` reads them; else 0.
        SPARE_STAGES: `DecodeTile.spare`.
        HALF_ROWS: the kernel rotates, and requests have query rows in the first 4 of 8 ROWS only.
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
    ROWS: int
    STAGES: int
    CAUSAL: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_CHUNK: bool
    HAS_CAP: bool
    HAS_SINK: bool
    HAS_LSE: bool
    K_KIND: int = KV_PLAIN.value
    V_KIND: int = KV_PLAIN.value
    K_SCALE_KIND: int = SCALE_FLOAT.value
    V_SCALE_KIND: int = SCALE_FLOAT.value
    PACKED: bool = False
    COMBINE_IN_KERNEL: bool = False
    SPLITS_PER_LOAD: int = 1
    WORKERS: int = 1
    EVEN_RANGES: bool = False
    QUERY_WARP: bool = False
    GATHERS: bool = False
    K_SIGNS: int = 0
    V_SIGNS: int = 0
    SPARE_STAGES: int = 0
    HALF_ROWS: bool = False


@aggregate
class Queries:
    """Queries [num_tokens, query heads, D]; the last dimension is contiguous."""

    pointer: Value
    stride_token: Value
    stride_head: Value
    num_tokens: Value


@aggregate
class Outputs:
    """Outputs [tokens, query heads, DV], natural-log LSEs [tokens, query heads] or None, and the
    sinks of query heads or None. Strides are those of tokens, heads, and tokens of the LSEs."""

    pointer: Value
    lse: Value
    sinks: Value
    stride_token: Value
    stride_head: Value
    stride_lse: Value

    @gluon.jit
    def offsets(self, token, head):
        """Return the offsets of output rows in elements; `token` counts in the batch."""
        tokens = token.to(gl.int64) * self.stride_token
        return tokens + head.to(gl.int64) * self.stride_head

    @gluon.jit
    def lses(self, token, head):
        """Return pointers to the LSEs of rows."""
        return self.lse + token.to(gl.int64) * self.stride_lse + head

    @gluon.jit
    def store_lses(self, token, head, base2, mask):
        """Store the LSEs of rows, given in base 2."""
        gl.store(self.lses(token, head), base2 * LN2, mask=mask)


@aggregate
class Partials:
    """Results of the splits of requests that have several, with index 2 * worker or 2 * worker + 1.

    Fields:
        values: float32 outputs, [2 * workers, rows, DV].
        lses: float32 base-2 LSEs, [2 * workers, rows].
        headers: int32 [tokens, KV heads] for `hopper_combine_kernel`.
        counters: int32 zeros of the CTAs, for splits that are combined in the kernel.
        rows: query heads of a group times the largest query length.
    """

    values: Value
    lses: Value
    headers: Value
    counters: Value
    rows: Value


@aggregate
class Caches:
    """The key and the value cache: TMA descriptors, or pointers with strides of blocks, rows and
    heads in bytes where rows are gathered."""

    keys: Value
    values: Value
    stride_kb: Value
    stride_kn: Value
    stride_kh: Value
    stride_vb: Value
    stride_vn: Value
    stride_vh: Value


@aggregate
class DecodeCall:
    """What the partitions of `hopper_decode_kernel` share.

    Fields:
        caches, queries, outputs, partials: `Caches` and the other objects above.
        keys: `schedule.KeyTiles`.
        k_scale, v_scale: scales of quantized caches, as `SCALE_KIND` of each says.
        scale, soft_cap: of the softmax.
        early: `BatchTensors.early`.
        SCORE: score function; None without one.
        config: `DecodeConfig`.
    """

    caches: Value
    keys: Value
    queries: Value
    outputs: Value
    partials: Value
    k_scale: Value
    v_scale: Value
    scale: Value
    soft_cap: Value
    early: Value
    SCORE: gl.constexpr
    config: Value


@aggregate
class Split:
    """The key tiles of a request and KV head that one worker computes.

    Fields:
        request, kv_head: request and KV head.
        start: the request's first query row.
        query_len, seq_len: its query tokens and keys.
        skipped: tiles of the request before the split.
        count: tiles of the split.
        visited: `VisitedTiles` of the request.
    """

    request: Value
    start: Value
    query_len: Value
    seq_len: Value
    kv_head: Value
    skipped: Value
    count: Value
    visited: Value

    @gluon.jit
    def first(self):
        """Return the number of the first tile of the split."""
        return self.visited.begin + self.skipped
