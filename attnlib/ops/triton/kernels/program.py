"""What the programs of the attention kernels begin and end with: their query tile, its cache and
its results.

Work distribution of prefills: one program per query tile and block of heads. The grid comes from
upper bounds (T // TILE_TOKENS tiles, one more for each request, one for the rest); a program finds
its request on the device. Tiles run from the last to the first, so that under a causal mask the
longest rows start first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.arguments import Cache, Partials, Rows, State, Tile
from attnlib.ops.triton.kernels.chunks import aligned, empty_chunks, pack_rows, store_chunks
from attnlib.ops.triton.kernels.page_parts import empty_parts, open_pages, store_parts
from attnlib.ops.triton.kernels.quant import SCALE_FLOAT, load_scale
from attnlib.ops.triton.kernels.schedule import find_request
from attnlib.ops.triton.kernels.softmax import LN2, finish_rows

__all__ = [
    "UNALIGNED",
    "UNSPECIALIZED",
    "apply_scales",
    "clear_rows",
    "count_splits",
    "divide_results",
    "find_tile",
    "load_tile",
    "make_rows",
    "query_length",
    "open_cache",
    "row_scores",
    "store_partials",
    "store_results",
]

UNSPECIALIZED = """
    num_reqs num_tokens left right chunk stride_qt stride_qh stride_kb stride_kn stride_kh
    stride_vb stride_vn stride_vh stride_ot stride_oh stride_lt stride_bt stride_table num_splits
    num_tiles num_heads stride_ksb stride_ksn stride_ksh stride_vsb stride_vsn stride_vsh rows0
    columns0 rows1 columns1 rows2 columns2 rows3 columns3
""".split()
"""Parameters of the attention kernels whose values must not select a compilation, because they
change from step to step."""

UNALIGNED = """
    query_start_loc seq_lens causal_flags block_table alibi_slopes sinks bias k_scale v_scale lse
    aux0 aux1 aux2 aux3
""".split()
"""Pointers whose alignment must not select a compilation: slices of a batch with arbitrary
offsets."""


@triton.jit
def find_tile(batch, num_tiles, CONFIG: tl.constexpr):
    """Return the query tile of this program of a prefill, without what `load_tile` adds.

    For rows after the last request, the number of the request is the number of requests.
    """
    tile = num_tiles - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // CONFIG.HEAD_BLOCKS
    head_offset = tl.program_id(1) % CONFIG.HEAD_BLOCKS * CONFIG.TILE_HEADS
    request = find_request(batch.query_start_loc, tile, batch.num_reqs, CONFIG.TILE_TOKENS, 128)
    start = tl.load(batch.query_start_loc + request)
    first_token = (tile - (start // CONFIG.TILE_TOKENS + request)) * CONFIG.TILE_TOKENS
    return Tile(request, kv_head, head_offset, start, first_token, 0, 0, 0, 0)


@triton.jit
def query_length(tile, batch):
    """Return the query length of the tile's request.

    The tile may have no tokens: the number of tiles is an upper bound, and a request may own one
    tile more than it needs.
    """
    return tl.load(batch.query_start_loc + tile.request + 1) - tile.start


@triton.jit
def load_tile(tile, query_len, batch, CONFIG: tl.constexpr):
    """Return the query tile with the lengths of its request."""
    seq_len = tl.load(batch.seq_lens + tile.request)
    if not CONFIG.PAGED:
        # Packed keys: `seq_lens` holds the start of each request's keys instead.
        seq_len = tl.load(batch.seq_lens + tile.request + 1) - seq_len
    causal = 0
    if CONFIG.CAUSAL == 2:
        causal = tl.load(batch.causal_flags + tile.request).to(tl.int32)
    last_token = tl.minimum(tile.first_token + CONFIG.TILE_TOKENS, query_len) - 1
    return Tile(
        tile.request,
        tile.kv_head,
        tile.head_offset,
        tile.start,
        tile.first_token,
        last_token,
        query_len,
        seq_len,
        causal,
    )


@triton.jit
def make_rows(tile, query_len, CONFIG: tl.constexpr):
    """Return the rows of a tile of a request of `query_len` tokens."""
    token, head, valid = pack_rows(tile.first_token, query_len, tile.head_offset, CONFIG)
    head = tile.kv_head * CONFIG.GROUP + head
    return Rows(token, tile.start + token, head, valid)


@triton.jit
def open_cache(cache, tile, batch, CONFIG: tl.constexpr):
    """Return the keys and values of the tile's request and KV head."""
    table = 0
    if CONFIG.PAGED:
        table = cache.table + tile.request.to(tl.int64) * cache.stride_table
    if CONFIG.PAGE_KIND is not None:
        opened = open_pages(cache, tile.kv_head, table, CONFIG)
    else:
        kv_head64 = tile.kv_head.to(tl.int64)
        key = cache.key + aligned(kv_head64 * cache.stride_kh, CONFIG.VEC_K)
        value = cache.value + aligned(kv_head64 * cache.stride_vh, CONFIG.VEC_V)
        if not CONFIG.PAGED:
            first_key = tl.load(batch.seq_lens + tile.request).to(tl.int64)
            key += aligned(first_key * cache.stride_kn, CONFIG.VEC_K)
            value += aligned(first_key * cache.stride_vn, CONFIG.VEC_V)
        opened = Cache(
            key,
            value,
            table,
            cache.stride_table,
            cache.stride_kb,
            cache.stride_kn,
            cache.stride_kh,
            cache.stride_vb,
            cache.stride_vn,
            cache.stride_vh,
            cache.k_scale,
            cache.v_scale,
            0,
            0,
            0,
            0,
            0,
            0,
        )
    return opened


@triton.jit
def row_scores(rows, kv_head, scale, k_scale, alibi_slopes, bias, stride_bt, CONFIG: tl.constexpr):
    """Return (scale of the products, ALiBi slope and pointer to the query bias of each row)."""
    if CONFIG.PAGE_KIND is None:
        factor = load_scale(k_scale, kv_head, CONFIG.K_SCALE_KIND)
        if CONFIG.K_SCALE_KIND != SCALE_FLOAT:
            # `apply_scales` makes NaN of the rows that see a key; -inf * NaN would hide no key.
            factor = tl.where(factor == factor, factor, 1.0)
        scale = scale * factor
    slopes = 0.0
    if CONFIG.HAS_ALIBI:
        slopes = tl.load(alibi_slopes + rows.head, mask=rows.valid, other=0.0).to(tl.float32)
    bias_rows = 0.0
    if CONFIG.HAS_BIAS:
        bias_rows = bias + tl.where(rows.valid, rows.row, 0).to(tl.int64) * stride_bt
    return scale, slopes, bias_rows


@triton.jit
def apply_scales(state, k_scale, v_scale, kv_head, CONFIG: tl.constexpr):
    """Return (softmax, factor of its sums of values) under the scales of a KV head.

    The scale of the values is constant, so it is applied to their sums. An invalid scale makes NaN
    of the rows that see a key through it (M9), and leaves those without a key (M5). Scales in pages
    are applied by the loop.
    """
    row_sum = state.row_sum
    v_factor = 1.0
    if CONFIG.PAGE_KIND is None:
        v_factor = load_scale(v_scale, kv_head, CONFIG.V_SCALE_KIND)
        if CONFIG.V_SCALE_KIND != SCALE_FLOAT:
            v_factor = tl.where(row_sum == 0.0, 1.0, v_factor)
        if CONFIG.K_SCALE_KIND != SCALE_FLOAT:
            invalid = load_scale(k_scale, kv_head, CONFIG.K_SCALE_KIND) * 0.0  # 0 or NaN
            row_sum = tl.where(row_sum == 0.0, 0.0, row_sum + invalid)
    return State(state.sums, state.row_max, row_sum), v_factor


@triton.jit
def load_sink(sinks, rows, CONFIG: tl.constexpr):
    """Return the sink of each row, or 0."""
    sink = 0.0
    if CONFIG.HAS_SINK:
        if CONFIG.HAS_SINK == 2:  # one for each token and head
            sinks += rows.row.to(tl.int64) * (CONFIG.NUM_KV_HEADS * CONFIG.GROUP)
        sink = tl.load(sinks + rows.head, mask=rows.valid, other=0.0).to(tl.float32)
    return sink


@triton.jit
def _store_sums(out, offsets, sums, factor, valid, VEC: tl.constexpr, CONFIG: tl.constexpr):
    if CONFIG.PAGE_KIND is None:
        store_chunks(out, offsets, sums, factor, valid, VEC, CONFIG)
    else:
        store_parts(out, offsets, sums, factor, valid, CONFIG)


@triton.jit
def clear_rows(output, rows, CONFIG: tl.constexpr):
    """Write the result of rows after the last request: 0, and an LSE of -inf (M6)."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    zeros = tl.zeros([BLOCK_M], tl.float32)
    offsets = rows.row.to(tl.int64) * output.stride_t + rows.head.to(tl.int64) * output.stride_h
    if CONFIG.PAGE_KIND is None:
        sums = empty_chunks(CONFIG)
    else:
        sums = empty_parts(CONFIG)
    _store_sums(output.out, offsets, sums, zeros, rows.valid, CONFIG.VEC_O, CONFIG)
    if CONFIG.HAS_LSE:
        lse = output.lse + rows.row.to(tl.int64) * output.stride_lt + rows.head
        tl.store(lse, zeros - float("inf"), mask=rows.valid)


@triton.jit
def store_results(output, rows, state, sinks, v_factor, CONFIG: tl.constexpr):
    """Normalize the sums of the rows and store them, and their LSEs."""
    sink = load_sink(sinks, rows, CONFIG)
    factor, base2_lse = finish_rows(state.row_max, state.row_sum, sink, CONFIG.HAS_SINK)
    offsets = rows.row.to(tl.int64) * output.stride_t + rows.head.to(tl.int64) * output.stride_h
    _store_sums(
        output.out, offsets, state.sums, factor * v_factor, rows.valid, CONFIG.VEC_O, CONFIG
    )
    if CONFIG.HAS_LSE:
        lse = output.lse + rows.row.to(tl.int64) * output.stride_lt + rows.head
        tl.store(lse, base2_lse * LN2, mask=rows.valid)


@triton.jit
def divide_results(
    partials, num_tokens, num_heads, num_splits, NUMBERS: tl.constexpr, CONFIG: tl.constexpr
):
    """Return the partial results of a kernel, which have NUMBERS of each split besides values."""
    base = 0
    counts = 0
    if CONFIG.SPLIT:
        rows64 = num_tokens.to(tl.int64) * num_heads
        base = partials
        counts = partials + rows64 * num_splits * (CONFIG.DV + NUMBERS)
    return Partials(base, counts, num_tokens, num_heads, num_splits)


@triton.jit
def count_splits(partials, rows, count, CONFIG: tl.constexpr):
    """Tell the combine kernel how many splits the tokens of the rows have. With 0 or 1 it leaves
    their results alone."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    counts = tl.zeros([BLOCK_M], tl.float32) + count
    tl.store(partials.counts + rows.row, counts, mask=rows.valid)


@triton.jit
def store_partials(partials, rows, state, split, v_factor, CONFIG: tl.constexpr):
    """Store the normalized sums and the LSEs of one split. The sink counts when the splits are
    combined (M4)."""
    DV: tl.constexpr = CONFIG.DV
    factor, base2_lse = finish_rows(state.row_max, state.row_sum, 0.0, False)
    places = (rows.row.to(tl.int64) * partials.num_heads + rows.head) * partials.num_splits + split
    _store_sums(partials.base, places * DV, state.sums, factor * v_factor, rows.valid, 1, CONFIG)
    rows64 = partials.num_tokens.to(tl.int64) * partials.num_heads
    lses = partials.base + rows64 * partials.num_splits * DV
    tl.store(lses + places, base2_lse, mask=rows.valid)
