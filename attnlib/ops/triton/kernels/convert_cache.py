"""Copy the keys and values of all requests from pages to packed rows of 16-bit elements."""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.page_formats import (
    PAGE_INT4,
    PAGE_NVFP4,
    load_element_scales,
    load_scales,
    load_words,
    scale_of_part,
    scaled,
    unpack,
)

__all__ = ["NO_SCALES", "convert_cache_kernel"]

NO_SCALES: tl.constexpr = tl.constexpr(-1)
"""KIND of pages without scales, which hold float8 or 16-bit elements."""


@triton.jit
def _store_rows(out, offsets, columns, elements, valid, D: tl.constexpr):
    """Store elements [TOKENS, N] in these columns of rows of D elements."""
    mask = valid[:, None] & (columns < D)[None, :]
    tl.store(
        out + offsets[:, None] + columns[None, :], elements.to(out.dtype.element_ty), mask=mask
    )


@triton.jit
def _unpack_head(
    cache, scales, out, offsets, scale_offsets, targets, valid, D: tl.constexpr,
    WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Convert a head of TOKENS tokens, with scales in the page (`page_formats`)."""
    OUT: tl.constexpr = out.dtype.element_ty
    words = load_words(
        cache.to(tl.pointer_type(tl.uint16)), offsets // 2, valid, WORDS, WORDS_PAD, True
    )
    x0, x1, x2, x3 = unpack(words, KIND, tl.float16, PTX)
    if KIND == PAGE_INT4:
        factors = load_scales(scales.to(tl.pointer_type(tl.int64)), scale_offsets // 4, valid, True)
        columns = tl.arange(0, WORDS_PAD)
        x0 = scaled(x0, scale_of_part(factors, 0, KIND)[:, None], OUT)
        x1 = scaled(x1, scale_of_part(factors, 1, KIND)[:, None], OUT)
        x2 = scaled(x2, scale_of_part(factors, 2, KIND)[:, None], OUT)
        x3 = scaled(x3, scale_of_part(factors, 3, KIND)[:, None], OUT)
        _store_rows(out, targets, columns, x0, valid, WORDS)
        _store_rows(out + WORDS, targets, columns, x1, valid, WORDS)
        _store_rows(out + 2 * WORDS, targets, columns, x2, valid, WORDS)
        _store_rows(out + 3 * WORDS, targets, columns, x3, valid, WORDS)
    elif KIND >= PAGE_NVFP4:
        factors = load_element_scales(
            scales.to(tl.pointer_type(tl.uint8)), scale_offsets, valid, WORDS, WORDS_PAD, KIND, True
        )
        x0, x1 = scaled(x0, factors, OUT), scaled(x1, factors, OUT)
        x2, x3 = scaled(x2, factors, OUT), scaled(x3, factors, OUT)
        # Word i holds the elements 4 i to 4 i + 3.
        joined = tl.join(tl.join(x0, x2), tl.join(x1, x3))
        elements = tl.reshape(joined, [valid.shape[0], 4 * WORDS_PAD])
        _store_rows(out, targets, tl.arange(0, 4 * WORDS_PAD), elements, valid, D)
    else:
        factors = load_scales(scales, scale_offsets, valid, True)[:, None]
        joined = tl.join(scaled(x0, factors, OUT), scaled(x1, factors, OUT))
        elements = tl.reshape(joined, [valid.shape[0], 2 * WORDS_PAD])
        _store_rows(out, targets, tl.arange(0, 2 * WORDS_PAD), elements, valid, D)


@triton.jit
def _copy_rows(
    cache, scales, out, blocks, positions, first, valid, stride_b, stride_n, stride_h, stride_sb,
    stride_sn, stride_sh, NUM_KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Convert all heads of TOKENS tokens to rows `first`, `first + 1`, ... of `out`."""
    rows = (first + tl.arange(0, TOKENS)).to(tl.int64) * NUM_KV_HEADS
    offsets = blocks * stride_b + positions * stride_n
    for head in range(NUM_KV_HEADS):
        targets = (rows + head) * D
        if KIND == NO_SCALES:
            columns = tl.arange(0, D_PAD)
            mask = valid[:, None] & (columns < D)[None, :]
            source = cache + head * stride_h + offsets[:, None] + columns[None, :]
            _store_rows(out, targets, columns, tl.load(source, mask=mask, other=0.0), valid, D)
        else:
            scale_offsets = blocks * stride_sb + positions * stride_sn
            _unpack_head(
                cache + head * stride_h, scales + head * stride_sh, out, offsets, scale_offsets,
                targets, valid, D, WORDS, WORDS_PAD, KIND, PTX)  # fmt: skip


@triton.jit(
    do_not_specialize=["num_reqs", "num_rows", "stride_table"],
    do_not_specialize_on_alignment=["seq_lens", "block_table", "starts", "k_scale", "v_scale"],
)
def convert_cache_kernel(
    key, value, k_scale, v_scale, key_out, value_out, starts, seq_lens, block_table, num_reqs,
    num_rows, stride_table, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_ksb, stride_ksn, stride_ksh, stride_vsb, stride_vsn, stride_vsh,
    NUM_KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, DV_WORDS: tl.constexpr,
    DV_WORDS_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Copy request after request without padding. Any grid: programs take tiles in turn.

    Args:
        key, value: the caches, [B, N, Hkv, stored size], of float8 or 16-bit elements, or of a
            format KIND (`page_formats`) with k_scale and v_scale, [B, N, Hkv, scales]. Strides of
            bytes are even.
        key_out, value_out: [num_rows, Hkv, D] and [num_rows, Hkv, DV], of 16-bit elements, which
            hold float8 exactly. Rows past `num_rows` are not written.
        starts: int32 [num_reqs + 1], written: the first row of each request, and the end.
        PTX: as in `page_formats.unpack`.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    tokens = tl.arange(0, TOKENS)
    first = 0
    skipped = 0
    for request in range(num_reqs):
        seq_len = tl.load(seq_lens + request)
        if program == 0:
            tl.store(starts + request, first)
        tiles = (seq_len + TOKENS - 1) // TOKENS
        table = block_table + request * stride_table.to(tl.int64)
        # The tiles of all requests form one line, of which each program takes every n-th one.
        for tile in range((program + programs - skipped % programs) % programs, tiles, programs):
            positions = tile * TOKENS + tokens
            valid = (positions < seq_len) & (first + positions < num_rows)
            blocks = tl.load(table + positions // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
            row = first + tile * TOKENS
            _copy_rows(
                key, k_scale, key_out, blocks, positions % BLOCK_SIZE, row, valid, stride_kb,
                stride_kn, stride_kh, stride_ksb, stride_ksn, stride_ksh, NUM_KV_HEADS, D, D_PAD,
                WORDS, WORDS_PAD, KIND, PTX, TOKENS)  # fmt: skip
            _copy_rows(
                value, v_scale, value_out, blocks, positions % BLOCK_SIZE, row, valid, stride_vb,
                stride_vn, stride_vh, stride_vsb, stride_vsn, stride_vsh, NUM_KV_HEADS, DV, DV_PAD,
                DV_WORDS, DV_WORDS_PAD, KIND, PTX, TOKENS)  # fmt: skip
        skipped += tiles
        first += seq_len
    if program == 0:
        tl.store(starts + num_reqs, first)
