"""Copy the keys and values of all requests from pages to packed rows of 16-bit elements."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.chunks import aligned
from attnlib.ops.triton.kernels.hadamard import turned_back
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

__all__ = ["NO_SCALES", "CopiedSide", "convert_cache_kernel"]

NO_SCALES: tl.constexpr = tl.constexpr(-1)
"""KIND of pages without scales, which hold float8 or 16-bit elements."""


class CopiedSide(NamedTuple):
    """Constants of the keys or of the values.

    Attributes:
        SIZE, PAD: head size, and the power of two from it on.
        VEC: elements of which the offsets of rows in the cache are multiples.
        KIND: the format (`page_formats`), or NO_SCALES.
        PTX: as in `page_formats.unpack`.
        WORDS, WORDS_PAD: words of a head, and the power of two from them on; with scales.
        SIGNS: heads are rotated and become plain ones: the signs, as in `hadamard.turned_back`; of
            sizes that are powers of two. Else 0.
    """

    SIZE: int
    PAD: int
    VEC: int
    KIND: int = NO_SCALES.value
    PTX: int = 0
    WORDS: int = 0
    WORDS_PAD: int = 0
    SIGNS: int = 0


@triton.jit
def _store_rows(out, offsets, columns, elements, valid, D: tl.constexpr):
    """Store elements [TOKENS, N] in these columns of rows of D elements."""
    mask = valid[:, None] & (columns < D)[None, :]
    tl.store(
        out + offsets[:, None] + columns[None, :], elements.to(out.dtype.element_ty), mask=mask
    )


@triton.jit
def _store_head(out, offsets, elements, valid, SIDE: tl.constexpr):
    """Store heads [TOKENS, N], rotated back where they are rotated."""
    columns = tl.arange(0, elements.shape[1])
    if SIDE.SIGNS:
        elements = turned_back(elements, columns, SIDE.SIGNS, SIDE.SIZE, out.dtype.element_ty)
    _store_rows(out, offsets, columns, elements, valid, SIDE.SIZE)


@triton.jit
def _unpack_head(cache, scales, out, offsets, scale_offsets, targets, valid, SIDE: tl.constexpr):
    """Convert a head of TOKENS tokens, with scales in the page (`page_formats`)."""
    OUT: tl.constexpr = tl.float32 if SIDE.SIGNS else out.dtype.element_ty
    KIND: tl.constexpr = SIDE.KIND
    WORDS: tl.constexpr = SIDE.WORDS
    WORDS_PAD: tl.constexpr = SIDE.WORDS_PAD
    words = load_words(
        cache.to(tl.pointer_type(tl.uint16)), offsets // 2, valid, WORDS, WORDS_PAD, True
    )
    x0, x1, x2, x3 = unpack(words, KIND, tl.float16, SIDE.PTX)
    if KIND == PAGE_INT4:
        factors = load_scales(scales.to(tl.pointer_type(tl.int64)), scale_offsets // 4, valid, True)
        columns = tl.arange(0, WORDS_PAD)
        x0 = scaled(x0, scale_of_part(factors, 0, KIND)[:, None], OUT)
        x1 = scaled(x1, scale_of_part(factors, 1, KIND)[:, None], OUT)
        x2 = scaled(x2, scale_of_part(factors, 2, KIND)[:, None], OUT)
        x3 = scaled(x3, scale_of_part(factors, 3, KIND)[:, None], OUT)
        if SIDE.SIGNS:
            joined = tl.permute(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (0, 2, 3, 1))
            elements = tl.reshape(joined, [valid.shape[0], 4 * WORDS_PAD])
            _store_head(out, targets, elements, valid, SIDE)
        else:
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
        _store_head(out, targets, tl.reshape(joined, [valid.shape[0], 4 * WORDS_PAD]), valid, SIDE)
    else:
        factors = load_scales(scales, scale_offsets, valid, True)[:, None]
        joined = tl.join(scaled(x0, factors, OUT), scaled(x1, factors, OUT))
        _store_head(out, targets, tl.reshape(joined, [valid.shape[0], 2 * WORDS_PAD]), valid, SIDE)


@triton.jit
def _load_head(cache, offsets, valid, SIDE: tl.constexpr):
    """Load a head of TOKENS tokens, [TOKENS, PAD]."""
    columns = tl.arange(0, SIDE.PAD)
    mask = valid[:, None] & (columns < SIDE.SIZE)[None, :]
    return tl.load(cache + offsets[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit(
    do_not_specialize="""
        num_reqs num_rows stride_table stride_kb stride_kn stride_kh stride_vb stride_vn
        stride_vh stride_ksb stride_ksn stride_ksh stride_vsb stride_vsn stride_vsh
    """.split(),
    do_not_specialize_on_alignment=["seq_lens", "block_table", "starts", "k_scale", "v_scale"],
)
def convert_cache_kernel(
    key, value, k_scale, v_scale, key_out, value_out, starts, seq_lens, block_table, num_reqs,
    num_rows, stride_table, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_ksb, stride_ksn, stride_ksh, stride_vsb, stride_vsn, stride_vsh,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Copy request after request without padding. Any grid: programs take tiles in turn.

    Args:
        key, value: the caches, [B, N, Hkv, stored size], of float8 or 16-bit elements, or of
            formats with k_scale and v_scale, [B, N, Hkv, scales]. Strides of bytes are even.
        key_out, value_out: [num_rows, Hkv, D] and [num_rows, Hkv, DV], of 16-bit elements, which
            hold float8 exactly. Rows past `num_rows` are not written.
        starts: int32 [num_reqs + 1], written: the first row of each request, and the end.
        KEYS, VALUES: a `CopiedSide` each, both with scales or both without.
    """
    D: tl.constexpr = KEYS.SIZE
    DV: tl.constexpr = VALUES.SIZE
    program, programs = tl.program_id(0), tl.num_programs(0)
    tokens = tl.arange(0, TOKENS)
    first = 0
    skipped = 0
    for request in range(num_reqs):
        seq_len = tl.load(seq_lens + request)
        if program == 0:
            tl.store(starts + request, first)
        tiles = (seq_len + TOKENS - 1) // TOKENS * NUM_KV_HEADS
        table = block_table + request * stride_table.to(tl.int64)
        # The tiles of all requests and heads form one line, of which each program takes every n-th.
        for item in range((program + programs - skipped % programs) % programs, tiles, programs):
            head = item % NUM_KV_HEADS
            tile = item // NUM_KV_HEADS
            positions = tile * TOKENS + tokens
            valid = (positions < seq_len) & (first + positions < num_rows)
            blocks = tl.load(table + positions // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
            inside = positions % BLOCK_SIZE
            rows = (first + positions).to(tl.int64) * NUM_KV_HEADS + head
            keys = key + aligned(head * stride_kh, KEYS.VEC)
            values = value + aligned(head * stride_vh, VALUES.VEC)
            key_offsets = aligned(blocks * stride_kb + inside * stride_kn, KEYS.VEC)
            value_offsets = aligned(blocks * stride_vb + inside * stride_vn, VALUES.VEC)
            if KEYS.KIND == NO_SCALES:
                # Both loads are issued before the program waits for one of them.
                x = _load_head(keys, key_offsets, valid, KEYS)
                y = _load_head(values, value_offsets, valid, VALUES)
                _store_rows(key_out, rows * D, tl.arange(0, KEYS.PAD), x, valid, D)
                _store_rows(value_out, rows * DV, tl.arange(0, VALUES.PAD), y, valid, DV)
            else:
                _unpack_head(
                    keys, k_scale + head * stride_ksh, key_out, key_offsets,
                    blocks * stride_ksb + inside * stride_ksn, rows * D, valid, KEYS)  # fmt: skip
                _unpack_head(
                    values, v_scale + head * stride_vsh, value_out, value_offsets,
                    blocks * stride_vsb + inside * stride_vsn, rows * DV, valid, VALUES
                )  # fmt: skip
        skipped += tiles
        first += seq_len
    if program == 0:
        tl.store(starts + num_reqs, first)
