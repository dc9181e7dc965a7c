"""The loop over keys in pages that hold their scales (M16), for decode and prefill.

In place of two chunks of a head size (`kernels.attend`) there are two or four parts of a head
(`kernels.page_formats`), and scales per token: those of the keys multiply the scores, those of the
values the weights; those of 4-bit floats multiply the elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.attend import aligned, load_blocks, query_powers, scale_rows
from attnlib.ops.triton.kernels.mask import visible_span
from attnlib.ops.triton.kernels.page_formats import (
    PAGE_INT4,
    PAGE_NVFP4,
    element_step,
    first_element,
    load_element_scales,
    load_scales,
    load_words,
    scale_of_part,
    scaled,
    unpack,
)
from attnlib.ops.triton.kernels.softmax import online_softmax, transform_scores

__all__ = ["attend_pages", "clear_rows", "store_parts"]


@triton.jit
def _load_part(
    query, offsets, valid, PART: tl.constexpr, WORDS: tl.constexpr, WORDS_PAD: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Load the elements of one part of queries, [BLOCK_M, WORDS_PAD]; 0 where there are none."""
    lanes = tl.arange(0, WORDS_PAD)
    FIRST: tl.constexpr = first_element(PART, WORDS, KIND)
    elements = FIRST + lanes * element_step(KIND)
    mask = valid[:, None] & (lanes < WORDS)[None, :]
    return tl.load(query + offsets[:, None] + elements[None, :], mask=mask, other=0.0)


@triton.jit
def _load_parts(
    query, offsets, valid, WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, KIND: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Load the parts of queries as COMPUTE, with powers of two for float16 as in `load_queries`.

    Returns:
        (two parts, four of 4-bit formats; factors of the products for `scale_rows`).
    """
    q0 = _load_part(query, offsets, valid, 0, WORDS, WORDS_PAD, KIND)
    q1 = _load_part(query, offsets, valid, 1, WORDS, WORDS_PAD, KIND)
    q2 = q0
    q3 = q1
    if KIND >= PAGE_INT4:
        q2 = _load_part(query, offsets, valid, 2, WORDS, WORDS_PAD, KIND)
        q3 = _load_part(query, offsets, valid, 3, WORDS, WORDS_PAD, KIND)
    row_factors = tl.full([], 1.0, tl.float32)
    if (COMPUTE == tl.float16) and (q0.dtype != tl.float16):
        q0 = q0.to(tl.float32)
        q1 = q1.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(q0), 1), tl.max(tl.abs(q1), 1))
        if KIND >= PAGE_INT4:
            q2 = q2.to(tl.float32)
            q3 = q3.to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(q2), 1))
            largest = tl.maximum(largest, tl.max(tl.abs(q3), 1))
        power, row_factors = query_powers(largest)
        q0 *= power[:, None]
        q1 *= power[:, None]
        q2 *= power[:, None]
        q3 *= power[:, None]
    return q0.to(COMPUTE), q1.to(COMPUTE), q2.to(COMPUTE), q3.to(COMPUTE), row_factors


@triton.jit
def _store_part(
    out, offsets, acc, factor, valid, PART: tl.constexpr, WORDS: tl.constexpr,
    WORDS_PAD: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Store one part of the outputs, `acc * factor` row by row."""
    lanes = tl.arange(0, WORDS_PAD)
    FIRST: tl.constexpr = first_element(PART, WORDS, KIND)
    elements = FIRST + lanes * element_step(KIND)
    mask = valid[:, None] & (lanes < WORDS)[None, :]
    x = (acc * factor[:, None]).to(out.dtype.element_ty)
    tl.store(out + offsets[:, None] + elements[None, :], x, mask=mask)


@triton.jit
def store_parts(
    out, offsets, acc0, acc1, acc2, acc3, factor, valid, WORDS: tl.constexpr,
    WORDS_PAD: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    _store_part(out, offsets, acc0, factor, valid, 0, WORDS, WORDS_PAD, KIND)
    _store_part(out, offsets, acc1, factor, valid, 1, WORDS, WORDS_PAD, KIND)
    if KIND >= PAGE_INT4:
        _store_part(out, offsets, acc2, factor, valid, 2, WORDS, WORDS_PAD, KIND)
        _store_part(out, offsets, acc3, factor, valid, 3, WORDS, WORDS_PAD, KIND)


@triton.jit
def clear_rows(
    out, lse, tokens, heads, valid, stride_ot, stride_oh, stride_lt, BLOCK_M: tl.constexpr,
    DV_WORDS: tl.constexpr, DV_PAD: tl.constexpr, KIND: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Write the result of rows after the last request: 0, and an LSE of -inf (M6)."""
    zeros = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    offsets = tokens.to(tl.int64) * stride_ot + heads.to(tl.int64) * stride_oh
    store_parts(out, offsets, acc, acc, acc, acc, zeros, valid, DV_WORDS, DV_PAD, KIND)
    if HAS_LSE:
        tl.store(lse + tokens.to(tl.int64) * stride_lt + heads, zeros - float("inf"), mask=valid)


@triton.jit
def _key_positions(
    blocks, start, stride_block, stride_key, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Return the offsets [BLOCK_N] of a tile's tokens, in 64 bits (P6)."""
    lanes = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        within = start % BLOCK_SIZE + lanes
    else:
        within = ((start + lanes).to(tl.uint32) % BLOCK_SIZE).to(tl.int32)
    return aligned(blocks.to(tl.int64) * stride_block + within.to(tl.int64) * stride_key, VEC)


@triton.jit
def _largest_scale(scales, KIND: tl.constexpr):
    """Return the largest scale of a tile's values."""
    largest = scale_of_part(scales, 0, KIND)
    if KIND == PAGE_INT4:
        largest = tl.maximum(largest, scale_of_part(scales, 1, KIND))
        largest = tl.maximum(largest, scale_of_part(scales, 2, KIND))
        largest = tl.maximum(largest, scale_of_part(scales, 3, KIND))
    return tl.max(largest, 0)


@triton.jit
def _weigh(
    weights, scales, inverse, v, acc, acc_scale, PART: tl.constexpr, KIND: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Add the weighted values of one part to its accumulator."""
    p = weights
    if KIND < PAGE_NVFP4:
        p = weights * (scale_of_part(scales, PART, KIND) * inverse)[None, :]
    return tl.dot(p.to(COMPUTE), v, acc * acc_scale[:, None], input_precision="ieee")


@triton.jit
def _attend_tile(
    acc0, acc1, acc2, acc3, row_max, row_sum, v_scale_max, q0, q1, q2, q3, key, value, k_scale,
    v_scale, blocks, start, first, last, row_first, row_last, stride_kb, stride_kn, stride_vb,
    stride_vn, stride_ksb, stride_ksn, stride_vsb, stride_vsn, qk_scale, soft_cap, slopes,
    positions, bias_rows, bias_start, heads, request, aux, SCORE: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr,
    WORDS_PAD: tl.constexpr, DV_WORDS: tl.constexpr, DV_PAD: tl.constexpr, KIND: tl.constexpr,
    COMPUTE: tl.constexpr, PTX: tl.constexpr, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_BIAS: tl.constexpr, SCALE_LATE: tl.constexpr, VEC_K: tl.constexpr, VEC_V: tl.constexpr,
):  # fmt: skip
    """Add the key tile at `start` to the accumulators."""
    keys = start + tl.arange(0, BLOCK_N)
    inside = (keys >= first) & (keys < last)
    offsets = _key_positions(blocks, start, stride_kb, stride_kn, BLOCK_SIZE, BLOCK_N, VEC_K)
    words = load_words(key, offsets, inside, WORDS, WORDS_PAD, MASKED)
    offsets = _key_positions(blocks, start, stride_ksb, stride_ksn, BLOCK_SIZE, BLOCK_N, 1)
    k0, k1, k2, k3 = unpack(words, KIND, COMPUTE, PTX)
    if KIND >= PAGE_NVFP4:
        factors = load_element_scales(k_scale, offsets, inside, WORDS, WORDS_PAD, KIND, MASKED)
        k0 = scaled(k0, factors, COMPUTE)
        k1 = scaled(k1, factors, COMPUTE)
        k2 = scaled(k2, factors, COMPUTE)
        k3 = scaled(k3, factors, COMPUTE)
        qk = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        qk = tl.dot(q1, tl.trans(k1), qk, input_precision="ieee")
        qk = tl.dot(q2, tl.trans(k2), qk, input_precision="ieee")
        qk = tl.dot(q3, tl.trans(k3), qk, input_precision="ieee")
    else:
        scales = load_scales(k_scale, offsets, inside, MASKED)
        qk = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        if KIND == PAGE_INT4:
            qk *= scale_of_part(scales, 0, KIND)[None, :]
            product = tl.dot(q1, tl.trans(k1), input_precision="ieee")
            qk += product * scale_of_part(scales, 1, KIND)[None, :]
            product = tl.dot(q2, tl.trans(k2), input_precision="ieee")
            qk += product * scale_of_part(scales, 2, KIND)[None, :]
            product = tl.dot(q3, tl.trans(k3), input_precision="ieee")
            qk += product * scale_of_part(scales, 3, KIND)[None, :]
        else:
            qk = tl.dot(q1, tl.trans(k1), qk, input_precision="ieee")
            qk *= scale_of_part(scales, 0, KIND)[None, :]

    if SCALE_LATE:
        scores = qk
    else:
        bias = 0.0
        if HAS_BIAS:
            # The bias covers the query span only; hidden keys have no column of their own.
            bias_mask = (keys[None, :] >= bias_start) & (keys[None, :] >= row_first[:, None])
            bias_mask = bias_mask & (keys[None, :] < row_last[:, None])
            bias = tl.load(
                bias_rows[:, None] + (keys - bias_start)[None, :], mask=bias_mask, other=0.0
            )
        scores = transform_scores(
            qk, qk_scale, soft_cap, slopes, positions, keys, bias, heads, request, aux, SCORE,
            HAS_CAP, HAS_ALIBI, HAS_BIAS)  # fmt: skip
    if MASKED:
        visible = (keys[None, :] >= row_first[:, None]) & (keys[None, :] < row_last[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    weights, acc_scale, row_max, row_sum = online_softmax(
        scores, qk_scale * 1.4426950408889634, row_max, row_sum, MASKED or SCORE is not None,
        SCALE_LATE)  # fmt: skip

    offsets = _key_positions(blocks, start, stride_vb, stride_vn, BLOCK_SIZE, BLOCK_N, VEC_V)
    words = load_words(value, offsets, inside, DV_WORDS, DV_PAD, MASKED)
    offsets = _key_positions(blocks, start, stride_vsb, stride_vsn, BLOCK_SIZE, BLOCK_N, 1)
    v0, v1, v2, v3 = unpack(words, KIND, COMPUTE, PTX)
    if KIND >= PAGE_NVFP4:
        factors = load_element_scales(v_scale, offsets, inside, DV_WORDS, DV_PAD, KIND, MASKED)
        v0 = scaled(v0, factors, COMPUTE)
        v1 = scaled(v1, factors, COMPUTE)
        v2 = scaled(v2, factors, COMPUTE)
        v3 = scaled(v3, factors, COMPUTE)
        scales = 0.0
        inverse = 1.0
        new_max = v_scale_max
    else:
        # Accumulators are in units of the largest scale so far, so that weights times scales are at
        # most 1 and in the range of float16.
        scales = load_scales(v_scale, offsets, inside, MASKED)
        new_max = tl.maximum(v_scale_max, _largest_scale(scales, KIND))
        inverse = 1.0 / tl.where(new_max > 0.0, new_max, 1.0)
        acc_scale *= v_scale_max * inverse
    acc0 = _weigh(weights, scales, inverse, v0, acc0, acc_scale, 0, KIND, COMPUTE)
    acc1 = _weigh(weights, scales, inverse, v1, acc1, acc_scale, 1, KIND, COMPUTE)
    if KIND >= PAGE_INT4:
        acc2 = _weigh(weights, scales, inverse, v2, acc2, acc_scale, 2, KIND, COMPUTE)
        acc3 = _weigh(weights, scales, inverse, v3, acc3, acc_scale, 3, KIND, COMPUTE)
    return acc0, acc1, acc2, acc3, row_max, row_sum, new_max


@triton.jit
def attend_pages(
    query, query_offsets, valid, token, first_token, last_token, query_len, seq_len, causal, key,
    value, k_scale, v_scale, table, split_begin, split_end, stride_kb, stride_kn, stride_vb,
    stride_vn, stride_ksb, stride_ksn, stride_vsb, stride_vsn, qk_scale, soft_cap, slopes,
    bias_rows, left, right, chunk, heads, request, aux, SCORE: tl.constexpr, BOUNDS: tl.constexpr,
    SPLIT: tl.constexpr, ONE_LOOP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WORDS: tl.constexpr, WORDS_PAD: tl.constexpr,
    DV_WORDS: tl.constexpr, DV_PAD: tl.constexpr, KIND: tl.constexpr, COMPUTE: tl.constexpr,
    PTX: tl.constexpr, CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_CHUNK: tl.constexpr, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_BIAS: tl.constexpr, SCALE_LATE: tl.constexpr, VEC_K: tl.constexpr, VEC_V: tl.constexpr,
):  # fmt: skip
    """Compute attention of the packed rows over their visible keys, without normalization.

    The arguments are those of `kernels.attend.attend`. With ONE_LOOP every tile is masked;
    otherwise the tiles that all rows see come first and are not.

    Returns:
        (acc0, acc1, acc2, acc3, row_max, row_sum, unit of the accumulators); acc2 and acc3 are used
        by 4-bit formats.
    """
    q0, q1, q2, q3, row_factors = _load_parts(
        query, query_offsets, valid, WORDS, WORDS_PAD, KIND, COMPUTE
    )
    qk_scale = scale_rows(qk_scale, row_factors)
    origin = seq_len - query_len
    positions = origin + token
    row_first, row_last = visible_span(
        positions, seq_len, causal, left, right, chunk, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK
    )
    first, all_last = visible_span(
        origin + first_token, seq_len, causal, left, right, chunk, CAUSAL, HAS_LEFT, HAS_RIGHT,
        HAS_CHUNK)  # fmt: skip
    all_first, last = visible_span(
        origin + last_token, seq_len, causal, left, right, chunk, CAUSAL, HAS_LEFT, HAS_RIGHT,
        HAS_CHUNK)  # fmt: skip
    if BOUNDS is not None:
        low, high, same_low, same_high = BOUNDS(
            origin + first_token, origin + last_token, seq_len, request, aux
        )
        first = tl.maximum(first, low)
        last = tl.minimum(last, high)
        # Outside of this range the function is applied, which only masked tiles do.
        all_first = tl.maximum(all_first, same_low)
        all_last = tl.minimum(all_last, same_high)
    begin = first // BLOCK_N * BLOCK_N
    end = last
    if SPLIT:
        begin = tl.maximum(begin, split_begin)
        end = tl.minimum(end, split_end)
    WIDE: tl.constexpr = DV_PAD if KIND >= PAGE_INT4 else 1
    acc0 = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    acc1 = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    acc2 = tl.zeros([BLOCK_M, WIDE], tl.float32)
    acc3 = tl.zeros([BLOCK_M, WIDE], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    v_scale_max = 1.0 if KIND >= PAGE_NVFP4 else 0.0

    masked_begin = begin
    if not ONE_LOOP:
        # Tiles in [full_begin, full_end) are entirely visible to all rows. They come first; a
        # second loop computes the masked tiles at both ends.
        FULL_SCORE: tl.constexpr = None if BOUNDS is not None else SCORE
        if HAS_BIAS:
            all_last = tl.minimum(all_last, origin)
        top = tl.maximum(begin, (end + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
        full_begin = tl.minimum(
            tl.maximum((all_first + BLOCK_N - 1) // BLOCK_N * BLOCK_N, begin), top
        )
        full_end = tl.maximum(tl.minimum(all_last, end) // BLOCK_N * BLOCK_N, full_begin)
        blocks = load_blocks(table, full_begin, first, full_end, BLOCK_SIZE, BLOCK_N, True)
        for start in range(full_begin, full_end, BLOCK_N):
            next_blocks = load_blocks(
                table, start + BLOCK_N, first, full_end, BLOCK_SIZE, BLOCK_N, True
            )
            acc0, acc1, acc2, acc3, row_max, row_sum, v_scale_max = _attend_tile(
                acc0, acc1, acc2, acc3, row_max, row_sum, v_scale_max, q0, q1, q2, q3, key, value,
                k_scale, v_scale, blocks, start, first, last, row_first, row_last, stride_kb,
                stride_kn, stride_vb, stride_vn, stride_ksb, stride_ksn, stride_vsb, stride_vsn,
                qk_scale, soft_cap, slopes, positions, bias_rows, origin, heads, request, aux,
                FULL_SCORE, False, BLOCK_SIZE, BLOCK_N, WORDS, WORDS_PAD, DV_WORDS, DV_PAD, KIND,
                COMPUTE, PTX, HAS_CAP, HAS_ALIBI, False, SCALE_LATE, VEC_K, VEC_V)  # fmt: skip
            blocks = next_blocks
        # The loop variable counts as if the unmasked tiles did not exist.
        skipped = full_end - full_begin
        end = top - skipped
        masked_begin = tl.where(full_begin > begin, begin, full_end)
    blocks = load_blocks(table, masked_begin, first, last, BLOCK_SIZE, BLOCK_N, True)
    for unshifted in range(begin, end, BLOCK_N):
        start = unshifted
        after = unshifted + BLOCK_N
        if not ONE_LOOP:
            start = tl.where(unshifted < full_begin, unshifted, unshifted + skipped)
            after = tl.where(after < full_begin, after, after + skipped)
        # The next tile's blocks are loaded one step ahead, so that the loads of its keys and
        # values never wait for the block table.
        next_blocks = load_blocks(table, after, first, last, BLOCK_SIZE, BLOCK_N, True)
        acc0, acc1, acc2, acc3, row_max, row_sum, v_scale_max = _attend_tile(
            acc0, acc1, acc2, acc3, row_max, row_sum, v_scale_max, q0, q1, q2, q3, key, value,
            k_scale, v_scale, blocks, start, first, last, row_first, row_last, stride_kb,
            stride_kn, stride_vb, stride_vn, stride_ksb, stride_ksn, stride_vsb, stride_vsn,
            qk_scale, soft_cap, slopes, positions, bias_rows, origin, heads, request, aux, SCORE,
            True, BLOCK_SIZE, BLOCK_N, WORDS, WORDS_PAD, DV_WORDS, DV_PAD, KIND, COMPUTE, PTX,
            HAS_CAP, HAS_ALIBI, HAS_BIAS, SCALE_LATE, VEC_K, VEC_V)  # fmt: skip
        blocks = next_blocks
    return acc0, acc1, acc2, acc3, row_max, row_sum, v_scale_max
