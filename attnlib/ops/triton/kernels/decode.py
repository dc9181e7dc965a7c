"""Decode over the paged cache: few query tokens per request, so that reading keys and values once
dominates the time.

Work distribution: one program per (block of heads and tokens, split, request), and one more request
for the rows after the last one. The keys of a long request are split over several programs. The
combine kernel combines their partial results (float32, in the workspace). A request that needs one
split is written directly. Splits follow Flash-Decoding, the row packing follows FlashAttention's
GQA packing.

Workspace: partial outputs [tokens, heads, splits, DV], their base-2 LSEs [tokens, heads, splits],
and the number of splits of each token's request [tokens].
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnlib.ops.triton.kernels.arguments import (
    Batch,
    Cache,
    Logits,
    Mask,
    Output,
    Query,
    Rows,
    Tile,
)
from attnlib.ops.triton.kernels.attend import attend
from attnlib.ops.triton.kernels.chunks import pack_rows
from attnlib.ops.triton.kernels.program import (
    UNALIGNED,
    UNSPECIALIZED,
    apply_scales,
    clear_rows,
    count_splits,
    divide_results,
    load_tile,
    make_rows,
    open_cache,
    query_length,
    row_scores,
    store_partials,
    store_results,
)
from attnlib.ops.triton.kernels.schedule import request_tiles, tiles_per_split
from attnlib.ops.triton.kernels.softmax import LN2, finish_rows

__all__ = ["combine_kernel", "decode_kernel"]


@triton.jit
def _find_tile(batch, num_heads, CONFIG: tl.constexpr):
    """Return the rows of this program, without what `load_tile` adds."""
    request = tl.program_id(2)
    num_kv_heads = num_heads // CONFIG.GROUP
    kv_head = tl.program_id(0) // CONFIG.HEAD_BLOCKS % num_kv_heads
    head_offset = tl.program_id(0) % CONFIG.HEAD_BLOCKS * CONFIG.TILE_HEADS
    first_token = tl.program_id(0) // (CONFIG.HEAD_BLOCKS * num_kv_heads) * CONFIG.TILE_TOKENS
    start = tl.load(batch.query_start_loc + request)
    return Tile(request, kv_head, head_offset, start, first_token, 0, 0, 0, 0)


@triton.jit
def _clear_rest(output, tile, batch, partials, CONFIG: tl.constexpr):
    """Clear the rows after the last request (M6)."""
    for tail in range(tile.start + tile.first_token, batch.num_tokens, CONFIG.TILE_TOKENS):
        token, head, valid = pack_rows(tail, batch.num_tokens, tile.head_offset, CONFIG)
        rows = Rows(token, token, tile.kv_head * CONFIG.GROUP + head, valid)
        clear_rows(output, rows, CONFIG)
        if CONFIG.SPLIT:
            count_splits(partials, rows, 0.0, CONFIG)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def decode_kernel(
    query, key, value, out, lse, query_start_loc, seq_lens, causal_flags, alibi_slopes, sinks, bias,
    k_scale, v_scale, aux0, aux1, aux2, aux3, scale, soft_cap, left, right, chunk, num_reqs,
    num_tokens, stride_qt, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn,
    stride_vh, stride_ot, stride_oh, stride_lt, stride_bt, block_table, stride_table, partials,
    num_splits, waves_per_split, num_heads, stride_ksb, stride_ksn, stride_ksh, stride_vsb,
    stride_vsn, stride_vsh, rows0, columns0, rows1, columns1, rows2, columns2, rows3, columns3,
    SCORE: tl.constexpr, BOUNDS: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute one split of one request for a block of rows. CONFIG is an `AttentionConfig`.

    Grid: (blocks of rows and KV heads, splits, requests + 1).
    """
    if CONFIG.PDL:
        # This grid may start while the previous one drains, and the next one may start now.
        # Nothing is read before the wait.
        gdc_wait()
        gdc_launch_dependents()
    aux = (
        aux0, rows0, columns0, aux1, rows1, columns1, aux2, rows2, columns2, aux3, rows3, columns3,
    )  # fmt: skip
    batch = Batch(query_start_loc, seq_lens, causal_flags, num_reqs, num_tokens)
    mask = Mask(left, right, chunk)
    output = Output(out, lse, stride_ot, stride_oh, stride_lt)
    parts = divide_results(partials, num_tokens, num_heads, num_splits, 1, CONFIG)
    split = tl.program_id(1)
    tile = _find_tile(batch, num_heads, CONFIG)
    if tile.request == num_reqs:
        if split == 0:
            _clear_rest(output, tile, batch, parts, CONFIG)
        return

    query_len = query_length(tile, batch)
    # The grid covers the longest request of the batch.
    if tile.first_token >= query_len:
        return
    tile = load_tile(tile, query_len, batch, CONFIG)
    splits_used = 1
    split_begin = 0
    split_end = 0
    if CONFIG.SPLIT:
        # Every program computes the same split size from the lengths; programs past the request's
        # last split have no work.
        first_tile, own_tiles = request_tiles(batch, tile.request, True, mask, aux, BOUNDS, CONFIG)
        per_split = tiles_per_split(
            batch, own_tiles, num_splits, waves_per_split, mask, aux, BOUNDS, 128, CONFIG
        )
        splits_used = (own_tiles + per_split - 1) // per_split
        split_begin = (first_tile + split * per_split) * CONFIG.BLOCK_N
        split_end = split_begin + per_split * CONFIG.BLOCK_N
        if split >= tl.maximum(splits_used, 1):
            return

    rows = make_rows(tile, tile.query_len, CONFIG)
    scale, slopes, bias_rows = row_scores(
        rows, tile.kv_head, scale, k_scale, alibi_slopes, bias, stride_bt, CONFIG
    )
    logits = Logits(scale, 0.0, soft_cap, slopes, bias_rows, aux)
    cache = Cache(
        key, value, block_table, stride_table, stride_kb, stride_kn, stride_kh, stride_vb,
        stride_vn, stride_vh, k_scale, v_scale, stride_ksb, stride_ksn, stride_ksh, stride_vsb,
        stride_vsn, stride_vsh)  # fmt: skip
    cache = open_cache(cache, tile, batch, CONFIG)
    state = attend(
        Query(query, stride_qt, stride_qh), rows, tile, cache, logits, mask, split_begin, split_end,
        0, SCORE, BOUNDS, CONFIG)  # fmt: skip

    state, v_factor = apply_scales(state, k_scale, v_scale, tile.kv_head, CONFIG)
    if CONFIG.SPLIT:
        # One program per tile tells the combine kernel how many splits there are.
        if tile.kv_head == 0 and split == 0:
            count_splits(parts, rows, splits_used.to(tl.float32), CONFIG)
    if splits_used <= 1:
        store_results(output, rows, state, sinks, v_factor, CONFIG)
    if CONFIG.SPLIT:
        if splits_used > 1:
            store_partials(parts, rows, state, split, v_factor, CONFIG)


@triton.jit(
    do_not_specialize="""
        num_splits num_tokens num_heads stride_ot stride_oh stride_lt
    """.split(),
    do_not_specialize_on_alignment=["sinks", "lse"],
)
def combine_kernel(
    partials, sinks, out, lse, num_splits, num_tokens, num_heads, stride_ot, stride_oh, stride_lt,
    HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one row, STEP at a time. Grid: (tokens, heads)."""
    if PDL:
        # Nothing may be read before the decode kernel has ended.
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0)
    head = tl.program_id(1)
    rows64 = num_tokens.to(tl.int64) * num_heads
    lses = partials + rows64 * num_splits * DV
    splits_used = tl.load(lses + rows64 * num_splits + token).to(tl.int32)
    if splits_used <= 1:
        # The decode kernel has written the output.
        return
    row = (token.to(tl.int64) * num_heads + head) * num_splits
    lanes = tl.arange(0, DV_PAD)
    acc = tl.zeros([DV_PAD], tl.float32)
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    for base in range(0, splits_used, STEP):
        splits = base + tl.arange(0, STEP)
        live = splits < splits_used
        split_lses = tl.load(lses + row + splits, mask=live, other=float("-inf"))
        values = tl.load(
            partials + (row + splits)[:, None] * DV + lanes[None, :],
            mask=live[:, None] & (lanes < DV)[None, :],
            other=0.0,
        )
        new_max = tl.maximum(row_max, tl.max(split_lses, 0))
        # -inf - -inf is NaN: splits without a visible key are measured from 0.
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(split_lses - finite_max)
        acc_scale = tl.exp2(row_max - finite_max)
        acc = acc * acc_scale + tl.sum(weights[:, None] * values, 0)
        row_sum = row_sum * acc_scale + tl.sum(weights, 0)
        row_max = new_max
    sink = tl.zeros([1], tl.float32)
    if HAS_SINK:
        if HAS_SINK == 2:  # one for each token and head
            sinks += token.to(tl.int64) * num_heads
        sink += tl.load(sinks + head).to(tl.float32)
    factor, base2_lse = finish_rows(row_max, row_sum, sink, HAS_SINK)
    offsets = token.to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh + lanes
    tl.store(out + offsets, (acc * factor).to(out.dtype.element_ty), mask=lanes < DV)
    if HAS_LSE:
        one = tl.arange(0, 1)
        tl.store(lse + token.to(tl.int64) * stride_lt + head + one, base2_lse * LN2)
