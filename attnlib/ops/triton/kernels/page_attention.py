"""Decode and prefill over pages that hold their scales (M16).

The kernels have the schedules of `kernels.decode` and `kernels.prefill` and their own loop over
keys (`kernels.page_attend`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnlib.ops.triton.kernels.attend import UNALIGNED, UNSPECIALIZED, aligned, pack_rows
from attnlib.ops.triton.kernels.page_attend import attend_pages, clear_rows, store_parts
from attnlib.ops.triton.kernels.page_formats import PAGE_INT4, PAGE_NVFP4
from attnlib.ops.triton.kernels.schedule import find_request, request_tiles, tiles_per_split
from attnlib.ops.triton.kernels.softmax import LN2, finish_rows

__all__ = ["page_decode_kernel", "page_prefill_kernel"]

_STRIDES = ["stride_ksb", "stride_ksn", "stride_ksh", "stride_vsb", "stride_vsn", "stride_vsh"]


@triton.jit
def _word_pointer(base, offset, VEC: tl.constexpr):
    """Return a byte pointer plus a byte offset as a pointer to 16-bit words."""
    return (base + aligned(offset, VEC)).to(tl.pointer_type(tl.uint16))


@triton.jit
def _scale_pointer(base, offset, KIND: tl.constexpr):
    """Return a pointer to the scales of a head: float32, four float16 as an int64, or bytes."""
    pointer = base + offset
    if KIND == PAGE_INT4:
        pointer = pointer.to(tl.pointer_type(tl.int64))
    elif KIND >= PAGE_NVFP4:
        pointer = pointer.to(tl.pointer_type(tl.uint8))
    return pointer


@triton.jit(do_not_specialize=[*UNSPECIALIZED, *_STRIDES], do_not_specialize_on_alignment=UNALIGNED)
def page_decode_kernel(
    query, key, value, out, lse, query_start_loc, seq_lens, causal_flags, alibi_slopes, sinks, bias,
    k_scale, v_scale, aux0, aux1, aux2, aux3, scale, soft_cap, left, right, chunk, num_reqs,
    num_tokens, stride_qt, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn,
    stride_vh, stride_ot, stride_oh, stride_lt, stride_bt, block_table, stride_table, partials,
    num_splits, waves_per_split, num_heads, stride_ksb, stride_ksn, stride_ksh, stride_vsb,
    stride_vsn, stride_vsh, rows0, columns0, rows1, columns1, rows2, columns2, rows3, columns3,
    SCORE: tl.constexpr, BOUNDS: tl.constexpr, PDL: tl.constexpr, SPLIT: tl.constexpr,
    BALANCED: tl.constexpr, MIN_TILES: tl.constexpr, MAX_SPLITS: tl.constexpr,
    TILE_HEADS: tl.constexpr, TILE_TOKENS: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr,
    DV: tl.constexpr, WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, DV_WORDS: tl.constexpr,
    DV_PAD: tl.constexpr, KIND: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_SINK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_LSE: tl.constexpr, SCALE_LATE: tl.constexpr, VEC_K: tl.constexpr, VEC_V: tl.constexpr,
):  # fmt: skip
    """Compute one split of one request for a block of rows, as `decode_kernel`.

    Grid: (blocks of rows and KV heads, splits, requests + 1).
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    aux = (
        aux0, rows0, columns0, aux1, rows1, columns1, aux2, rows2, columns2, aux3, rows3, columns3,
    )  # fmt: skip
    request = tl.program_id(2)
    split = tl.program_id(1)
    head_block = tl.program_id(0) % HEAD_BLOCKS
    num_kv_heads = num_heads // GROUP
    kv_head = tl.program_id(0) // HEAD_BLOCKS % num_kv_heads
    first_token = tl.program_id(0) // (HEAD_BLOCKS * num_kv_heads) * TILE_TOKENS
    head_offset = head_block * TILE_HEADS
    split_counts = partials
    if SPLIT:
        rows64 = num_tokens.to(tl.int64) * num_heads
        split_counts = partials + rows64 * num_splits * (DV + 1)

    start = tl.load(query_start_loc + request)
    if request == num_reqs:
        # Rows after the last request become 0 (M6).
        if split == 0:
            for tail in range(start + first_token, num_tokens, TILE_TOKENS):
                token, head, valid = pack_rows(
                    tail, num_tokens, head_offset, GROUP, TILE_HEADS, TILE_TOKENS, BLOCK_M
                )
                clear_rows(
                    out, lse, token, kv_head * GROUP + head, valid, stride_ot, stride_oh,
                    stride_lt, BLOCK_M, DV_WORDS, DV_PAD, KIND, HAS_LSE)  # fmt: skip
                if SPLIT:
                    # No splits: the combine kernel leaves the rows alone.
                    zeros = tl.zeros([BLOCK_M], tl.float32)
                    tl.store(split_counts + token, zeros, mask=valid)
        return

    query_len = tl.load(query_start_loc + request + 1) - start
    # The grid covers the longest request of the batch.
    if first_token >= query_len:
        return
    seq_len = tl.load(seq_lens + request)
    causal = 0
    if CAUSAL == 2:
        causal = tl.load(causal_flags + request).to(tl.int32)
    splits_used = 1
    split_begin = 0
    split_end = 0
    if SPLIT:
        first_tile, own_tiles = request_tiles(
            query_start_loc, seq_lens, causal_flags, request, True, left, right, chunk, aux, BOUNDS,
            BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        per_split = tiles_per_split(
            query_start_loc, seq_lens, causal_flags, num_reqs, own_tiles, num_splits,
            waves_per_split, left, right, chunk, aux, BOUNDS, BALANCED, MIN_TILES, MAX_SPLITS, 128,
            BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        splits_used = (own_tiles + per_split - 1) // per_split
        split_begin = (first_tile + split * per_split) * BLOCK_N
        split_end = split_begin + per_split * BLOCK_N
        if split >= tl.maximum(splits_used, 1):
            return

    token, head, valid = pack_rows(
        first_token, query_len, head_offset, GROUP, TILE_HEADS, TILE_TOKENS, BLOCK_M
    )
    head = kv_head * GROUP + head
    row_token = start + token
    kv_head64 = kv_head.to(tl.int64)
    slopes = 0.0
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes + head, mask=valid, other=0.0).to(tl.float32)
    bias_rows = bias
    if HAS_BIAS:
        bias_rows = bias + tl.where(valid, row_token, 0).to(tl.int64) * stride_bt
    last_token = tl.minimum(first_token + TILE_TOKENS, query_len) - 1
    query_offsets = row_token.to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
    PER_SCALE: tl.constexpr = 4 if KIND == PAGE_INT4 else 1
    acc0, acc1, acc2, acc3, row_max, row_sum, unit = attend_pages(
        query, query_offsets, valid, token, first_token, last_token, query_len, seq_len, causal,
        _word_pointer(key, kv_head64 * stride_kh, 2 * VEC_K),
        _word_pointer(value, kv_head64 * stride_vh, 2 * VEC_V),
        _scale_pointer(k_scale, kv_head64 * stride_ksh, KIND),
        _scale_pointer(v_scale, kv_head64 * stride_vsh, KIND),
        block_table + request.to(tl.int64) * stride_table, split_begin, split_end,
        stride_kb // 2, stride_kn // 2, stride_vb // 2, stride_vn // 2, stride_ksb // PER_SCALE,
        stride_ksn // PER_SCALE, stride_vsb // PER_SCALE, stride_vsn // PER_SCALE, scale, soft_cap,
        slopes, bias_rows, left, right, chunk, head, request, aux, SCORE, BOUNDS, SPLIT, True,
        BLOCK_M, BLOCK_N, BLOCK_SIZE, WORDS, WORDS_PAD, DV_WORDS, DV_PAD, KIND, COMPUTE, PTX,
        CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_ALIBI, HAS_BIAS, SCALE_LATE, VEC_K,
        VEC_V)  # fmt: skip

    sink = 0.0
    if HAS_SINK:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32)
    if SPLIT:
        # One program per request tells the combine kernel how many splits there are.
        if tl.program_id(0) // HEAD_BLOCKS % num_kv_heads == 0 and split == 0:
            tl.store(
                split_counts + row_token,
                tl.zeros([BLOCK_M], tl.float32) + splits_used.to(tl.float32),
                mask=valid,
            )
    if splits_used <= 1:
        factor, base2_lse = finish_rows(row_max, row_sum, sink, HAS_SINK)
        offsets = row_token.to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh
        store_parts(
            out, offsets, acc0, acc1, acc2, acc3, factor * unit, valid, DV_WORDS, DV_PAD, KIND
        )
        if HAS_LSE:
            tl.store(lse + row_token.to(tl.int64) * stride_lt + head, base2_lse * LN2, mask=valid)
    if SPLIT:
        if splits_used > 1:
            # The sink counts when the splits are combined (M4).
            factor, base2_lse = finish_rows(row_max, row_sum, sink, False)
            rows = (row_token.to(tl.int64) * num_heads + head) * num_splits + split
            store_parts(
                partials,
                rows * DV,
                acc0,
                acc1,
                acc2,
                acc3,
                factor * unit,
                valid,
                DV_WORDS,
                DV_PAD,
                KIND,
            )
            lses = partials + num_tokens.to(tl.int64) * num_heads * num_splits * DV
            tl.store(lses + rows, base2_lse, mask=valid)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, *_STRIDES], do_not_specialize_on_alignment=UNALIGNED)
def page_prefill_kernel(
    query, key, value, out, lse, query_start_loc, seq_lens, causal_flags, alibi_slopes, sinks, bias,
    k_scale, v_scale, aux0, aux1, aux2, aux3, scale, soft_cap, left, right, chunk, num_reqs,
    num_tokens, stride_qt, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn,
    stride_vh, stride_ot, stride_oh, stride_lt, stride_bt, block_table, stride_table, num_tiles,
    stride_ksb, stride_ksn, stride_ksh, stride_vsb, stride_vsn, stride_vsh, rows0, columns0, rows1,
    columns1, rows2, columns2, rows3, columns3, SCORE: tl.constexpr, BOUNDS: tl.constexpr,
    TILE_HEADS: tl.constexpr, TILE_TOKENS: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr,
    DV: tl.constexpr, WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, DV_WORDS: tl.constexpr,
    DV_PAD: tl.constexpr, KIND: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_SINK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_LSE: tl.constexpr, SCALE_LATE: tl.constexpr, VEC_K: tl.constexpr, VEC_V: tl.constexpr,
):  # fmt: skip
    """Compute one query tile for a block of heads, as `prefill_kernel`.

    Grid: (num_tiles, KV heads * HEAD_BLOCKS).
    """
    tile = num_tiles - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    head_offset = tl.program_id(1) % HEAD_BLOCKS * TILE_HEADS
    request = find_request(query_start_loc, tile, num_reqs, TILE_TOKENS, 128)
    start = tl.load(query_start_loc + request)
    first_token = (tile - (start // TILE_TOKENS + request)) * TILE_TOKENS
    if request == num_reqs:
        # Rows after the last request become 0 (M6).
        token, head, valid = pack_rows(
            first_token, num_tokens - start, head_offset, GROUP, TILE_HEADS, TILE_TOKENS, BLOCK_M
        )
        clear_rows(
            out, lse, start + token, kv_head * GROUP + head, valid, stride_ot, stride_oh, stride_lt,
            BLOCK_M, DV_WORDS, DV_PAD, KIND, HAS_LSE)  # fmt: skip
        return
    query_len = tl.load(query_start_loc + request + 1) - start
    # The number of tiles is an upper bound: a request may own one tile more than it needs.
    if first_token >= query_len:
        return
    seq_len = tl.load(seq_lens + request)
    aux = (
        aux0, rows0, columns0, aux1, rows1, columns1, aux2, rows2, columns2, aux3, rows3, columns3,
    )  # fmt: skip
    causal = 0
    if CAUSAL == 2:
        causal = tl.load(causal_flags + request).to(tl.int32)
    token, head, valid = pack_rows(
        first_token, query_len, head_offset, GROUP, TILE_HEADS, TILE_TOKENS, BLOCK_M
    )
    head = kv_head * GROUP + head
    token64 = (start + token).to(tl.int64)
    kv_head64 = kv_head.to(tl.int64)
    slopes = 0.0
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes + head, mask=valid, other=0.0).to(tl.float32)
    bias_rows = bias
    if HAS_BIAS:
        bias_rows = bias + tl.where(valid, token64, 0) * stride_bt
    last_token = tl.minimum(first_token + TILE_TOKENS, query_len) - 1
    query_offsets = token64 * stride_qt + head.to(tl.int64) * stride_qh
    PER_SCALE: tl.constexpr = 4 if KIND == PAGE_INT4 else 1
    acc0, acc1, acc2, acc3, row_max, row_sum, unit = attend_pages(
        query, query_offsets, valid, token, first_token, last_token, query_len, seq_len, causal,
        _word_pointer(key, kv_head64 * stride_kh, 2 * VEC_K),
        _word_pointer(value, kv_head64 * stride_vh, 2 * VEC_V),
        _scale_pointer(k_scale, kv_head64 * stride_ksh, KIND),
        _scale_pointer(v_scale, kv_head64 * stride_vsh, KIND),
        block_table + request.to(tl.int64) * stride_table, 0, 0,
        stride_kb // 2, stride_kn // 2, stride_vb // 2, stride_vn // 2, stride_ksb // PER_SCALE,
        stride_ksn // PER_SCALE, stride_vsb // PER_SCALE, stride_vsn // PER_SCALE, scale, soft_cap,
        slopes, bias_rows, left, right, chunk, head, request, aux, SCORE, BOUNDS, False, False,
        BLOCK_M, BLOCK_N, BLOCK_SIZE, WORDS, WORDS_PAD, DV_WORDS, DV_PAD, KIND, COMPUTE, PTX,
        CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_ALIBI, HAS_BIAS, SCALE_LATE, VEC_K,
        VEC_V)  # fmt: skip
    sink = 0.0
    if HAS_SINK:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32)
    factor, base2_lse = finish_rows(row_max, row_sum, sink, HAS_SINK)
    offsets = token64 * stride_ot + head.to(tl.int64) * stride_oh
    store_parts(out, offsets, acc0, acc1, acc2, acc3, factor * unit, valid, DV_WORDS, DV_PAD, KIND)
    if HAS_LSE:
        tl.store(lse + token64 * stride_lt + head, base2_lse * LN2, mask=valid)
