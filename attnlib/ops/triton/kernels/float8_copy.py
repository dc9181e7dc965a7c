"""Copy float8 keys and values from pages: keys as rows, values transposed."""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.chunks import aligned

__all__ = ["float8_copy_kernel"]


@triton.jit(
    do_not_specialize="""
        num_reqs num_rows stride_table stride_kb stride_kn stride_kh stride_vb stride_vn
        stride_vh stride_ksb stride_ksn stride_ksh stride_vsb stride_vsn stride_vsh
    """.split(),
    do_not_specialize_on_alignment=["seq_lens", "block_table", "starts", "k_scale", "v_scale"],
)
def float8_copy_kernel(
    key, value, k_scale, v_scale, key_out, value_out, starts, seq_lens, block_table, num_reqs,
    num_rows, stride_table, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_ksb, stride_ksn, stride_ksh, stride_vsb, stride_vsn, stride_vsh,
    NUM_KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, VEC_K: tl.constexpr, VEC_V: tl.constexpr,
):  # fmt: skip
    """Copy request after request. Any grid: programs take tiles in turn.

    Args:
        key, value: the caches, [B, N, Hkv, D] and [B, N, Hkv, DV], of 8-bit elements. Scales and
            their strides are None.
        key_out: [num_rows, Hkv, D], rows of all requests without padding.
        value_out: [Hkv * DV, columns], `columns` as `value_columns` has them, in the order of
            `float8_prefill`. The columns of a tile after the last key are 0.
        starts: int32 [num_reqs + 1], written: the first row of each request, and the end.
        D, DV: powers of two.
        TOKENS: keys of a tile, a multiple of 16.
        VEC_K, VEC_V: bytes of which the offsets of rows are multiples.
    """
    columns = (num_rows + 144 * num_reqs + 143) // 16 * 16
    cache_k = key.to(tl.pointer_type(tl.uint8))
    cache_v = value.to(tl.pointer_type(tl.uint8))
    rows_out = key_out.to(tl.pointer_type(tl.uint8))
    columns_out = value_out.to(tl.pointer_type(tl.uint8))
    program, programs = tl.program_id(0), tl.num_programs(0)
    tokens = tl.arange(0, TOKENS)
    # The key at each position of 16: 4 t + 2 a + r holds 8 a + 2 t + r.
    inner = tokens % 16
    ordered = tokens // 16 * 16 + inner % 4 // 2 * 8 + inner // 4 * 2 + inner % 2
    elements = tl.arange(0, D)
    elements_v = tl.arange(0, DV)
    first = 0
    skipped = 0
    for request in range(num_reqs):
        seq_len = tl.load(seq_lens + request)
        if program == 0:
            tl.store(starts + request, first)
        tiles = (seq_len + TOKENS - 1) // TOKENS * NUM_KV_HEADS
        table = block_table + request * stride_table.to(tl.int64)
        # `float8_prefill.value_column`
        column = first // 16 * 16 + request * 144
        # The tiles of all requests and heads form one line, of which each program takes every n-th.
        for item in range((program + programs - skipped % programs) % programs, tiles, programs):
            head = item % NUM_KV_HEADS
            tile = item // NUM_KV_HEADS
            position = tile * TOKENS + tokens
            valid = (position < seq_len) & (first + position < num_rows)
            block = tl.load(table + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
            offset_k = block * stride_kb + position % BLOCK_SIZE * stride_kn + head * stride_kh
            offset_k = aligned(offset_k, VEC_K)
            keys = tl.load(
                cache_k + offset_k[:, None] + elements[None, :], mask=valid[:, None], other=0
            )
            position_v = tile * TOKENS + ordered
            valid_v = (position_v < seq_len) & (first + position_v < num_rows)
            block_v = tl.load(table + position_v // BLOCK_SIZE, mask=valid_v, other=0).to(tl.int64)
            offset_v = block_v * stride_vb + position_v % BLOCK_SIZE * stride_vn + head * stride_vh
            offset_v = aligned(offset_v, VEC_V)
            values = tl.load(
                cache_v + offset_v[:, None] + elements_v[None, :], mask=valid_v[:, None], other=0
            )
            row = (first + position).to(tl.int64) * NUM_KV_HEADS + head
            tl.store(rows_out + (row * D)[:, None] + elements[None, :], keys, mask=valid[:, None])
            line = (head * DV + elements_v).to(tl.int64) * columns
            target = column + tile * TOKENS + tokens
            tl.store(
                columns_out + line[:, None] + target[None, :],
                tl.trans(values),
                mask=(target < columns)[None, :],
            )
        skipped += tiles
        first += seq_len
    if program == 0:
        tl.store(starts + num_reqs, first)
