"""The arguments of the portable attention kernels as objects.

An entry kernel takes flat runtime arguments, which every launcher can pass, and its constants as
one `AttentionConfig`, which the host builds by name. It collects the runtime arguments in the named
tuples below. Functions of a score are constants of their own, because Triton's cache on disk knows
a tuple by its text only.

Named tuples and not Triton's aggregates: both compile for every target with Triton 3.6 and 3.9, but
the interpreter does not find the methods of an aggregate, and without methods it does nothing that
a tuple cannot do. In device code the fields of a configuration are plain Python values. Triton 3.6
does not accept these in a shape or in a tuple: bind them to a constexpr first. Nor can a function
return a tuple that holds None there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = [
    "AttentionConfig",
    "Batch",
    "Cache",
    "Logits",
    "Mask",
    "Output",
    "Partials",
    "Query",
    "Rows",
    "State",
    "Tile",
    "View",
    "Work",
]


class AttentionConfig(NamedTuple):
    """Constants of the portable attention kernels; a kernel ignores those that it does not have.

    Attributes:
        BLOCK_M, BLOCK_N: rows and keys of a tile.
        TILE_HEADS, TILE_TOKENS: query heads and query tokens that share the rows of a tile.
        HEAD_BLOCKS: tiles that the query heads of a KV head take.
        GROUP: query heads per KV head.
        BLOCK_SIZE: tokens per block of the cache.
        PAGED: keys are in a paged cache; else they are packed.
        D, DV: head sizes of keys and values.
        D0, D1, DV0, DV1: the chunks of a head (`chunks`).
        LATENT: values are the first DV elements of the keys (P10).
        KV_KIND, COMPUTE: elements of the cache, dtype of the products.
        K_SCALE_KIND, V_SCALE_KIND: scales of the cache (`quant`).
        CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK: the mask (`mask`).
        HAS_CAP, HAS_ALIBI, HAS_BIAS, HAS_SINK, HAS_LSE: features of the call.
        SCALE_LATE: the softmax scale is applied in the exponent (`softmax.online_softmax`).
        VEC_Q, VEC_K, VEC_V, VEC_O: elements of which the offsets of rows are multiples; for pages,
            16-bit words.
        RANGES, EXACT: bounds of a score function (`launch.score.range_constants`).
        ONE_LOOP: all tiles are masked, in one loop, for decodes.
        SPLIT, BALANCED, MIN_TILES, MAX_SPLITS: how keys are split over programs (`schedule`).
        SEGMENT: keys of a segment of the batch-invariant kernel.
        PDL: the kernel starts before the previous one has ended.
        PAGE_KIND, V_PAGE_KIND: `PAGE_*` constants of keys and values in pages that hold their
            scales (M16), or None.
        NUMBER, V_NUMBER: PTX code or device functions of open formats (P16), and NUMBER_KEYS what
            identifies the code of functions, which Triton's cache knows by name only in CONFIG.
        WORDS, WORDS_PAD, DV_WORDS, DV_PAD, PTX: words of their heads (`page_parts`).
        SELECT, QUERY_BLOCK, LIST_HEADS, LIST_LANES: lists of selected keys (`selected`).
        X, NUM_KV_HEADS, SPARSE, STRIPES_PER_QUERY_HEAD: the cache of PagedAttention and its
            block-sparse patterns (`packed`).
    """

    BLOCK_M: int
    BLOCK_N: int
    TILE_HEADS: int
    TILE_TOKENS: int
    HEAD_BLOCKS: int
    GROUP: int
    COMPUTE: Any
    BLOCK_SIZE: int = 1
    PAGED: bool = True
    D: int = 0
    D0: int = 0
    D1: int = 0
    DV: int = 0
    DV0: int = 0
    DV1: int = 0
    LATENT: bool = False
    KV_KIND: int = 0
    K_SCALE_KIND: int = 0
    V_SCALE_KIND: int = 0
    CAUSAL: int = 0
    HAS_LEFT: bool = False
    HAS_RIGHT: bool = False
    HAS_CHUNK: bool = False
    HAS_CAP: bool = False
    HAS_ALIBI: bool = False
    HAS_BIAS: bool = False
    HAS_SINK: int = False
    HAS_LSE: bool = False
    SCALE_LATE: bool = False
    VEC_Q: int = 1
    VEC_K: int = 1
    VEC_V: int = 1
    VEC_O: int = 1
    RANGES: int = 0
    EXACT: bool = False
    ONE_LOOP: bool = False
    SPLIT: bool = False
    BALANCED: bool = False
    MIN_TILES: int = 1
    MAX_SPLITS: int = 1
    SEGMENT: int = 0
    PDL: bool = False
    PAGE_KIND: int | None = None
    V_PAGE_KIND: int | None = None
    NUMBER: Any = None
    V_NUMBER: Any = None
    NUMBER_KEYS: tuple[str, ...] = ()
    WORDS: int = 0
    WORDS_PAD: int = 0
    DV_WORDS: int = 0
    DV_PAD: int = 0
    PTX: int = 0
    SELECT: int = 0
    QUERY_BLOCK: int = 1
    LIST_HEADS: int = 0
    LIST_LANES: int = 1
    X: int = 0
    NUM_KV_HEADS: int = 0
    SPARSE: bool = False
    STRIPES_PER_QUERY_HEAD: bool = True


class Batch(NamedTuple):
    """Lengths of the requests. Without a block table, `seq_lens` has the starts of their keys."""

    query_start_loc: Any
    seq_lens: Any
    causal_flags: Any
    num_reqs: Any
    num_tokens: Any


class Mask(NamedTuple):
    """Numbers of the mask: keys to the left and to the right, and the size of chunks."""

    left: Any
    right: Any
    chunk: Any


class Query(NamedTuple):
    """The queries: pointer, strides of tokens and heads."""

    base: Any
    stride_t: Any
    stride_h: Any


class Cache(NamedTuple):
    """Keys and values: of all requests and heads as passed by the host, of one request and KV head
    after `open_cache`. Scales and their strides are those of pages (M16)."""

    key: Any
    value: Any
    table: Any
    stride_table: Any
    stride_kb: Any
    stride_kn: Any
    stride_kh: Any
    stride_vb: Any
    stride_vn: Any
    stride_vh: Any
    k_scale: Any
    v_scale: Any
    stride_ksb: Any
    stride_ksn: Any
    stride_ksh: Any
    stride_vsb: Any
    stride_vsn: Any
    stride_vsh: Any


class Tile(NamedTuple):
    """One query tile: its request, KV head and tokens, all scalars.

    Attributes:
        request: number of the request.
        kv_head: KV head.
        head_offset: its first query head, within the group.
        start: the request's first token in the batch.
        first_token, last_token: of the tile, within the request.
        query_len, seq_len: of the request.
        causal: whether the request is causal, where requests differ.
    """

    request: Any
    kv_head: Any
    head_offset: Any
    start: Any
    first_token: Any
    last_token: Any
    query_len: Any
    seq_len: Any
    causal: Any


class Rows(NamedTuple):
    """The rows of a tile, [BLOCK_M]: token in the request, token in the batch, query head, and
    whether the row exists."""

    token: Any
    row: Any
    head: Any
    valid: Any


class Logits(NamedTuple):
    """What turns products into logits.

    Attributes:
        scale: softmax scale times the scale of the keys; a number, or one of each row.
        factor: with SCALE_LATE, `scale` times log2(e).
        soft_cap: the soft cap.
        slopes: ALiBi slope of each row.
        bias_rows: pointer to the query bias of each row.
        aux: tensors of the score function, three values each.
    """

    scale: Any
    factor: Any
    soft_cap: Any
    slopes: Any
    bias_rows: Any
    aux: Any


class View(NamedTuple):
    """The keys that the rows of a tile see.

    Attributes:
        origin: position of the request's first query token.
        positions: position of each row.
        row_first, row_last: the keys of each row, a half-open interval.
    """

    origin: Any
    positions: Any
    row_first: Any
    row_last: Any


class Work(NamedTuple):
    """What all key tiles of a program share.

    Attributes:
        queries: the loaded queries, in chunks or parts.
        rows: `Rows`.
        request: number of the request.
        cache: opened `Cache`.
        logits: `Logits`, with the scale and factor of each row.
        view: `View`.
    """

    queries: Any
    rows: Any
    request: Any
    cache: Any
    logits: Any
    view: Any


class State(NamedTuple):
    """The running softmax: weighted sums of values, whose form depends on the elements (`chunks`,
    `page_parts`), largest logit of each row, and sum of its weights."""

    sums: Any
    row_max: Any
    row_sum: Any


class Output(NamedTuple):
    """Outputs and LSEs: pointers, strides of tokens and heads, stride of the LSE's tokens."""

    out: Any
    lse: Any
    stride_t: Any
    stride_h: Any
    stride_lt: Any


class Partials(NamedTuple):
    """Partial results: values [tokens, heads, splits, DV], then numbers of each split, then the
    number of splits of each token, to which `counts` points."""

    base: Any
    counts: Any
    num_tokens: Any
    num_heads: Any
    num_splits: Any
