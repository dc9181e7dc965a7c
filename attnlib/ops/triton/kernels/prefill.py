"""The prefill kernel, over a paged cache or packed keys and values, by query tiles (`program`)."""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.arguments import Batch, Cache, Logits, Mask, Output, Query
from attnlib.ops.triton.kernels.attend import attend
from attnlib.ops.triton.kernels.program import (
    UNALIGNED,
    UNSPECIALIZED,
    apply_scales,
    clear_rows,
    count_splits,
    divide_results,
    find_tile,
    load_tile,
    make_rows,
    open_cache,
    query_length,
    row_scores,
    store_partials,
    store_results,
)
from attnlib.ops.triton.kernels.schedule import tile_share

__all__ = ["prefill_kernel"]


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def prefill_kernel(
    query, key, value, out, lse, query_start_loc, seq_lens, causal_flags, alibi_slopes, sinks, bias,
    k_scale, v_scale, aux0, aux1, aux2, aux3, scale, soft_cap, left, right, chunk, num_reqs,
    num_tokens, stride_qt, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn,
    stride_vh, stride_ot, stride_oh, stride_lt, stride_bt, block_table, stride_table, partials,
    num_splits, num_heads, num_tiles, stride_ksb, stride_ksn, stride_ksh, stride_vsb, stride_vsn,
    stride_vsh, rows0, columns0, rows1, columns1, rows2, columns2, rows3, columns3,
    SCORE: tl.constexpr, BOUNDS: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute one query tile for a block of heads, or with SPLIT a share of its keys, for
    `combine_kernel`. CONFIG is an `AttentionConfig`.

    Grid: (num_tiles, KV heads * HEAD_BLOCKS, splits).
    """
    aux = (
        aux0, rows0, columns0, aux1, rows1, columns1, aux2, rows2, columns2, aux3, rows3, columns3,
    )  # fmt: skip
    batch = Batch(query_start_loc, seq_lens, causal_flags, num_reqs, num_tokens)
    mask = Mask(left, right, chunk)
    output = Output(out, lse, stride_ot, stride_oh, stride_lt)
    tile = find_tile(batch, num_tiles, CONFIG)
    if tile.request == num_reqs:
        clear_rows(output, make_rows(tile, num_tokens - tile.start, CONFIG), CONFIG)
        if CONFIG.SPLIT:
            parts = divide_results(partials, num_tokens, num_heads, num_splits, 1, CONFIG)
            count_splits(parts, make_rows(tile, num_tokens - tile.start, CONFIG), 0.0, CONFIG)
        return
    query_len = query_length(tile, batch)
    if tile.first_token >= query_len:
        return
    tile = load_tile(tile, query_len, batch, CONFIG)
    cache = Cache(
        key, value, block_table, stride_table, stride_kb, stride_kn, stride_kh, stride_vb,
        stride_vn, stride_vh, k_scale, v_scale, stride_ksb, stride_ksn, stride_ksh, stride_vsb,
        stride_vsn, stride_vsh)  # fmt: skip
    cache = open_cache(cache, tile, batch, CONFIG)
    rows = make_rows(tile, tile.query_len, CONFIG)
    scale, slopes, bias_rows = row_scores(
        rows, tile.kv_head, scale, k_scale, alibi_slopes, bias, stride_bt, CONFIG
    )
    logits = Logits(scale, 0.0, soft_cap, slopes, bias_rows, aux)
    split = 0
    begin = 0
    end = 0
    if CONFIG.SPLIT:
        split = tl.program_id(2)
        begin, end = tile_share(tile, split, num_splits, mask, CONFIG)
    state = attend(
        Query(query, stride_qt, stride_qh), rows, tile, cache, logits, mask, begin, end,
        tile.kv_head * CONFIG.GROUP + tile.head_offset, SCORE, BOUNDS, CONFIG)  # fmt: skip
    state, v_factor = apply_scales(state, k_scale, v_scale, tile.kv_head, CONFIG)
    if CONFIG.SPLIT:
        parts = divide_results(partials, num_tokens, num_heads, num_splits, 1, CONFIG)
        if tile.kv_head == 0 and split == 0:
            count_splits(parts, rows, num_splits.to(tl.float32), CONFIG)
        store_partials(parts, rows, state, split, v_factor, CONFIG)
    else:
        store_results(output, rows, state, sinks, v_factor, CONFIG)
