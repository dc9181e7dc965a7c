"""The loop over keys that decode, paged prefill and varlen prefill share.

A program owns BLOCK_M rows. A row is one query head of one query token. The heads of a KV head's
group are adjacent (GQA packing), so that all of them use a tile of keys and values once it is
loaded. Key tiles start at multiples of BLOCK_N from position 0 of the request.

A head size that is not a power of two is cut in two powers of two (96 = 64 + 32), which wastes
less than padding to the next one. Names that end in 0 and 1 denote the two chunks; a second chunk
of size 0 does not exist.

LATENT: the values are the first DV elements of the keys (P10). The chunks of a key are then its
values and the rest, and the tile of values is the first chunk, which is loaded once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.mask import visible_span
from attnlib.ops.triton.kernels.quant import decode_kv
from attnlib.ops.triton.kernels.softmax import online_softmax, transform_scores

__all__ = [
    "UNALIGNED", "UNSPECIALIZED", "aligned", "attend", "attend_tile", "load_blocks", "load_queries",
    "pack_rows", "query_powers", "scale_rows", "store_rows",
]  # fmt: skip

UNSPECIALIZED = [
    "num_reqs", "num_tokens", "left", "right", "chunk", "stride_qt", "stride_qh", "stride_kb",
    "stride_kn", "stride_kh", "stride_vb", "stride_vn", "stride_vh", "stride_ot", "stride_oh",
    "stride_lt", "stride_bt", "stride_table", "num_splits", "num_tiles", "num_heads",
    "rows0", "columns0", "rows1", "columns1", "rows2", "columns2", "rows3", "columns3",
]  # fmt: skip
"""Parameters of the attention kernels whose values must not select a compilation, because they
change from step to step."""

UNALIGNED = [
    "query_start_loc", "seq_lens", "causal_flags", "block_table", "alibi_slopes", "sinks", "bias",
    "k_scale", "v_scale", "lse", "aux0", "aux1", "aux2", "aux3",
]  # fmt: skip
"""Pointers whose alignment must not select a compilation: slices of a batch with arbitrary
offsets."""


@triton.jit
def aligned(offset, VEC: tl.constexpr):
    """Return an offset that the launcher has checked, marked as a multiple of VEC elements."""
    # Shifting the low bits out and back tells the compiler. A hint (`tl.multiple_of`) does not
    # survive inlining.
    if VEC == 16:
        offset = (offset >> 4) << 4
    elif VEC == 8:
        offset = (offset >> 3) << 3
    elif VEC == 4:
        offset = (offset >> 2) << 2
    return offset


@triton.jit
def pack_rows(
    first_token, query_len, head_offset, GROUP: tl.constexpr, TILE_HEADS: tl.constexpr,
    TILE_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return (token in the request, head in the group, whether the row exists) of each row."""
    rows = tl.arange(0, BLOCK_M)
    token = first_token + rows // TILE_HEADS
    head = head_offset + rows % TILE_HEADS
    return token, head, (rows < TILE_TOKENS * TILE_HEADS) & (token < query_len) & (head < GROUP)


@triton.jit
def _load_query_chunk(
    query, offsets, valid, SIZE: tl.constexpr, START: tl.constexpr, CHUNK: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Load rows of queries [BLOCK_M, CHUNK] from element START on; 0 where there are none."""
    lanes = START + tl.arange(0, CHUNK)
    offsets = aligned(offsets, VEC)
    return tl.load(
        query + offsets[:, None] + lanes[None, :],
        mask=valid[:, None] & (lanes < SIZE)[None, :],
        other=0.0,
    )


@triton.jit
def query_powers(largest):
    """Return (power, 1 / power) that bring rows of these largest magnitudes into float16's range.

    The power is 1 for rows with infinities or NaN. The Hopper kernels have the same function in
    Gluon (`hopper/kernels/quantized.py`), which cannot call this one.
    """
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    exponent = tl.where(exponent == 255, 141, tl.maximum(exponent, 15))
    power = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    return power, ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_rows(qk_scale, row_factors):
    """Return the scale of the products: a number, or one of each row [BLOCK_M].

    `row_factors` is a result of `load_queries`.
    """
    if len(row_factors.shape) == 1:
        qk_scale = qk_scale * row_factors
        # Not 0: the product of 0 and a hidden score, -inf, is NaN. Other scales keep their sign.
        qk_scale = tl.where(tl.abs(qk_scale) < 2.0**-105, 2.0**-105, qk_scale)
    return qk_scale


@triton.jit
def load_queries(
    query, offsets, valid, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    END0: tl.constexpr, START1: tl.constexpr, COMPUTE: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Load rows of queries as COMPUTE: elements [0, END0) and [START1, D).

    float16 has a smaller range than bfloat16: where it replaces bfloat16 (over a float8 cache),
    each row is multiplied by a power of two. Rows and elements that do not exist are 0.

    Returns:
        (chunk [BLOCK_M, D0], chunk [BLOCK_M, D1] if D1 is above 0, factors of the products for
        `scale_rows`: those of the rows [BLOCK_M], or 1).
    """
    q0 = _load_query_chunk(query, offsets, valid, END0, 0, D0, VEC)
    q1 = q0
    if D1 > 0:
        q1 = _load_query_chunk(query, offsets, valid, D, START1, D1, VEC)
    row_factors = tl.full([], 1.0, tl.float32)
    if (COMPUTE == tl.float16) and (q0.dtype != tl.float16):
        q0 = q0.to(tl.float32)
        q1 = q1.to(tl.float32)
        largest = tl.max(tl.abs(q0), 1)
        if D1 > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(q1), 1))
        power, row_factors = query_powers(largest)
        q0 *= power[:, None]
        q1 *= power[:, None]
    return q0.to(COMPUTE), q1.to(COMPUTE), row_factors


@triton.jit
def load_blocks(
    table, start, first, last, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PAGED: tl.constexpr
):
    """Load the physical blocks of the key tile at `start`.

    One block per key, or a single one if a tile never crosses a block border. Entries of keys
    outside [first, last) are not read (P3).
    """
    if PAGED:
        if BLOCK_SIZE % BLOCK_N == 0:
            blocks = tl.load(table + start // BLOCK_SIZE, mask=start < last, other=0)
        else:
            keys = start + tl.arange(0, BLOCK_N)
            inside = (keys >= first) & (keys < last)
            # Unsigned, because positions are not negative: the division is then a shift.
            columns = (keys.to(tl.uint32) // BLOCK_SIZE).to(tl.int32)
            blocks = tl.load(table + columns, mask=inside, other=0)
    else:
        blocks = 0
    return blocks


@triton.jit
def _key_offsets(
    blocks, start, stride_block, stride_key, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGED: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Return the element offsets [BLOCK_N] of a tile's keys, in 64 bits (P6)."""
    # Factors are widened directly before the multiplication: a product of two widened 32-bit
    # numbers is one instruction.
    lanes = tl.arange(0, BLOCK_N)
    if PAGED:
        if BLOCK_SIZE % BLOCK_N == 0:
            within = start % BLOCK_SIZE + lanes
        else:
            within = ((start + lanes).to(tl.uint32) % BLOCK_SIZE).to(tl.int32)
        offsets = blocks.to(tl.int64) * stride_block + within.to(tl.int64) * stride_key
    else:
        offsets = (start + lanes).to(tl.int64) * stride_key
    return aligned(offsets, VEC)


@triton.jit
def _load_chunk(
    base, offsets, inside, SIZE: tl.constexpr, START: tl.constexpr, CHUNK: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Load [BLOCK_N, CHUNK] of keys or values.

    Masked tiles read nothing outside the visible keys and hold 0 there (P5).
    """
    lanes = START + tl.arange(0, CHUNK)
    pointers = base + offsets[:, None] + lanes[None, :]
    if MASKED and START + CHUNK > SIZE:
        tile = tl.load(pointers, mask=inside[:, None] & (lanes < SIZE)[None, :], other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=inside[:, None], other=0.0)
    elif START + CHUNK > SIZE:
        tile = tl.load(pointers, mask=(lanes < SIZE)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _add_tile(
    scores, acc0, acc1, row_max, row_sum, k0, value_base, blocks, start, inside, stride_vb,
    stride_vn, factor, SCORE: tl.constexpr, MASKED: tl.constexpr, PAGED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr,
    DV1: tl.constexpr, KV_KIND: tl.constexpr, COMPUTE: tl.constexpr, SCALE_LATE: tl.constexpr,
    LATENT: tl.constexpr, VEC_V: tl.constexpr,
):  # fmt: skip
    """Add the values of a tile, weighted by its masked scores."""
    weights, acc_scale, row_max, row_sum = online_softmax(
        scores, factor, row_max, row_sum, MASKED or SCORE is not None, SCALE_LATE
    )

    weights = weights.to(COMPUTE)
    if LATENT:
        acc0 = tl.dot(weights, k0, acc0 * acc_scale[:, None], input_precision="ieee")
    else:
        offsets_v = _key_offsets(
            blocks, start, stride_vb, stride_vn, BLOCK_SIZE, BLOCK_N, PAGED, VEC_V
        )
        v0 = decode_kv(
            _load_chunk(value_base, offsets_v, inside, DV, 0, DV0, MASKED), KV_KIND, COMPUTE
        )
        acc0 = tl.dot(weights, v0, acc0 * acc_scale[:, None], input_precision="ieee")
    if DV1 > 0:
        v1 = decode_kv(
            _load_chunk(value_base, offsets_v, inside, DV, DV0, DV1, MASKED), KV_KIND, COMPUTE
        )
        acc1 = tl.dot(weights, v1, acc1 * acc_scale[:, None], input_precision="ieee")
    return acc0, acc1, row_max, row_sum


@triton.jit
def attend_tile(
    acc0, acc1, row_max, row_sum, q0, q1, key_base, value_base, blocks, start, first, last,
    row_first, row_last, stride_kb, stride_kn, stride_vb, stride_vn, qk_scale, factor, soft_cap,
    slopes, positions, bias_rows, bias_start, heads, request, aux, SCORE: tl.constexpr,
    MASKED: tl.constexpr, PAGED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, D0: tl.constexpr,
    D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, KV_KIND: tl.constexpr,
    COMPUTE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_BIAS: tl.constexpr,
    SCALE_LATE: tl.constexpr, LATENT: tl.constexpr, VEC_K: tl.constexpr, VEC_V: tl.constexpr,
):  # fmt: skip
    """Add the key tile at `start` to the accumulators."""
    keys = start + tl.arange(0, BLOCK_N)
    inside = (keys >= first) & (keys < last)
    offsets_k = _key_offsets(blocks, start, stride_kb, stride_kn, BLOCK_SIZE, BLOCK_N, PAGED, VEC_K)
    END0: tl.constexpr = DV if LATENT else D
    START1: tl.constexpr = DV if LATENT else D0
    k0 = decode_kv(_load_chunk(key_base, offsets_k, inside, END0, 0, D0, MASKED), KV_KIND, COMPUTE)
    qk = tl.dot(q0, tl.trans(k0), input_precision="ieee")
    if D1 > 0:
        k1 = decode_kv(
            _load_chunk(key_base, offsets_k, inside, D, START1, D1, MASKED), KV_KIND, COMPUTE
        )
        qk = tl.dot(q1, tl.trans(k1), qk, input_precision="ieee")

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
    return _add_tile(
        scores, acc0, acc1, row_max, row_sum, k0, value_base, blocks, start, inside, stride_vb,
        stride_vn, factor, SCORE, MASKED, PAGED, BLOCK_SIZE, BLOCK_N, DV, DV0, DV1, KV_KIND,
        COMPUTE, SCALE_LATE, LATENT, VEC_V)  # fmt: skip


@triton.jit
def _skip(index, at, count):
    """Return an index as if the `count` elements from `at` on did not exist."""
    return tl.where(index < at, index, index + count)


@triton.jit
def attend(
    query, query_offsets, valid, token, first_token, last_token, query_len, seq_len, causal,
    key_base, value_base, table, split_begin, split_end, stride_kb, stride_kn, stride_vb, stride_vn,
    qk_scale, soft_cap, slopes, bias_rows, left, right, chunk, heads, bound_head, request, aux,
    SCORE: tl.constexpr, BOUNDS: tl.constexpr, RANGES: tl.constexpr, EXACT: tl.constexpr,
    SPLIT: tl.constexpr,
    ONE_LOOP: tl.constexpr, PAGED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr,
    DV0: tl.constexpr, DV1: tl.constexpr, KV_KIND: tl.constexpr, COMPUTE: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_BIAS: tl.constexpr,
    SCALE_LATE: tl.constexpr, LATENT: tl.constexpr, VEC_Q: tl.constexpr, VEC_K: tl.constexpr,
    VEC_V: tl.constexpr,
):  # fmt: skip
    """Compute attention of the packed rows over their visible keys, without normalization.

    Only tiles with a visible key are visited; with SPLIT, only those in [split_begin, split_end).
    SCORE is a score function (`kernels.score`) or None, and BOUNDS its bounds or None: in decodes
    `bound_keys`, with RANGES 0, and in prefills `bound_ranges`, with the number of their ranges.
    `bound_head` is the query head of a tile with one head. With EXACT, the bounds of each row
    replace the function, and SCORE is not called.

    Returns:
        (acc0, acc1, row_max, row_sum).
    """
    END0: tl.constexpr = DV if LATENT else D
    START1: tl.constexpr = DV if LATENT else D0
    q0, q1, row_factors = load_queries(
        query, query_offsets, valid, D, D0, D1, END0, START1, COMPUTE, VEC_Q
    )
    qk_scale = scale_rows(qk_scale, row_factors)

    origin = seq_len - query_len
    positions = origin + token
    row_first, row_last = visible_span(
        positions, seq_len, causal, left, right, chunk, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK
    )
    CALLED: tl.constexpr = None if EXACT else SCORE
    if EXACT:
        row_low, row_high, _, _ = BOUNDS(positions, positions, seq_len, heads, request, aux)
        row_first = tl.maximum(row_first, row_low)
        row_last = tl.minimum(row_last, row_high)
    # Tiles in [first, last) have a key that is visible to some row; keys in [all_first, all_last)
    # are visible to all rows.
    first_position = origin + first_token
    last_position = origin + last_token
    first, all_last = visible_span(
        first_position, seq_len, causal, left, right, chunk, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK
    )
    all_first, last = visible_span(
        last_position, seq_len, causal, left, right, chunk, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK
    )
    if BOUNDS is not None:
        if RANGES == 0:
            low, high, same_low, same_high = BOUNDS(
                first_position, last_position, seq_len, request, aux
            )
        elif RANGES == 1:
            low, high, same_low, same_high = BOUNDS(
                first_position, last_position, seq_len, bound_head, request, aux
            )
        else:
            low, high, same_low, same_high, low_b, high_b, same_low_b, same_high_b = BOUNDS(
                first_position, last_position, seq_len, bound_head, request, aux
            )
            first_b = tl.maximum(first, low_b)
            last_b = tl.minimum(last, high_b)
            all_first_b = tl.maximum(all_first, same_low_b)
            all_last_b = tl.minimum(all_last, same_high_b)
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

    acc0 = tl.zeros([BLOCK_M, DV0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, DV1 if DV1 > 0 else 1], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    factor = qk_scale * 1.4426950408889634

    if ONE_LOOP:
        # Decode: every tile is masked, which keeps short runs of tiles in one software pipeline.
        blocks = load_blocks(table, begin, first, last, BLOCK_SIZE, BLOCK_N, PAGED)
        for start in range(begin, end, BLOCK_N):
            # The next tile's blocks are loaded one step ahead, so that the loads of its keys and
            # values never wait for the block table.
            next_blocks = load_blocks(
                table, start + BLOCK_N, first, end, BLOCK_SIZE, BLOCK_N, PAGED
            )
            acc0, acc1, row_max, row_sum = attend_tile(
                acc0, acc1, row_max, row_sum, q0, q1, key_base, value_base, blocks, start, first,
                last, row_first, row_last, stride_kb, stride_kn, stride_vb, stride_vn, qk_scale,
                factor, soft_cap, slopes, positions, bias_rows, origin, heads, request, aux, SCORE,
                True, PAGED, BLOCK_SIZE, BLOCK_N, D, D0, D1, DV, DV0, DV1, KV_KIND, COMPUTE,
                HAS_CAP, HAS_ALIBI, HAS_BIAS, SCALE_LATE, LATENT, VEC_K, VEC_V)  # fmt: skip
            blocks = next_blocks
    else:
        # Prefill: tiles in [full_begin, full_end) are entirely visible to all rows and need no
        # mask. They come first; the masked tiles at both ends follow.
        FULL_SCORE: tl.constexpr = None if BOUNDS is not None else SCORE
        if HAS_BIAS:
            # Tiles with a bias count as masked, so that unmasked tiles need not load it.
            all_last = tl.minimum(all_last, origin)
        top = tl.maximum(begin, (end + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
        full_begin = tl.minimum(
            tl.maximum((all_first + BLOCK_N - 1) // BLOCK_N * BLOCK_N, begin), top
        )
        full_end = tl.maximum(tl.minimum(all_last, end) // BLOCK_N * BLOCK_N, full_begin)
        full_stop = full_end
        full_limit = full_end
        if RANGES == 2:
            # The tiles of the second range, from the end of the first one on. Loop variables count
            # as if the tiles between the ranges did not exist.
            begin_b = tl.maximum(first_b // BLOCK_N * BLOCK_N, top)
            top_b = tl.maximum(begin_b, (last_b + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
            if HAS_BIAS:
                all_last_b = tl.minimum(all_last_b, origin)
            full_begin_b = tl.minimum(
                tl.maximum((all_first_b + BLOCK_N - 1) // BLOCK_N * BLOCK_N, begin_b), top_b
            )
            full_end_b = tl.maximum(tl.minimum(all_last_b, last_b) // BLOCK_N * BLOCK_N,
                                    full_begin_b)  # fmt: skip
            skipped_b = full_end_b - full_begin_b
            full_stop += skipped_b
            first = tl.minimum(first, first_b)
            last = tl.maximum(last, last_b)
            end = last
            full_limit = last
        full_start = full_begin
        if RANGES == 2:
            full_start = _skip(full_begin, full_end, full_begin_b - full_end)
        blocks = load_blocks(table, full_start, first, full_limit, BLOCK_SIZE, BLOCK_N, PAGED)
        for unshifted in range(full_begin, full_stop, BLOCK_N):
            start = unshifted
            after = unshifted + BLOCK_N
            if RANGES == 2:
                start = _skip(start, full_end, full_begin_b - full_end)
                after = _skip(after, full_end, full_begin_b - full_end)
            next_blocks = load_blocks(table, after, first, full_limit, BLOCK_SIZE, BLOCK_N, PAGED)
            acc0, acc1, row_max, row_sum = attend_tile(
                acc0, acc1, row_max, row_sum, q0, q1, key_base, value_base, blocks, start, first,
                last, row_first, row_last, stride_kb, stride_kn, stride_vb, stride_vn, qk_scale,
                factor, soft_cap, slopes, positions, bias_rows, origin, heads, request, aux,
                FULL_SCORE, False, PAGED, BLOCK_SIZE, BLOCK_N, D, D0, D1, DV, DV0, DV1, KV_KIND,
                COMPUTE, HAS_CAP, HAS_ALIBI, False, SCALE_LATE, LATENT, VEC_K, VEC_V)  # fmt: skip
            blocks = next_blocks
        # One loop for the masked tiles of all ends, which halves the code: the loop variable
        # counts as if the unmasked tiles did not exist.
        skipped = full_end - full_begin
        masked_first = tl.where(full_begin > begin, begin, full_end)
        masked_end = top - skipped
        if RANGES == 2:
            masked_end += top_b - begin_b - skipped_b
            masked_first = _skip(masked_first, top, begin_b - top)
            masked_first = _skip(masked_first, full_begin_b, skipped_b)
        blocks = load_blocks(table, masked_first, first, end, BLOCK_SIZE, BLOCK_N, PAGED)
        for unshifted in range(begin, masked_end, BLOCK_N):
            start = tl.where(unshifted < full_begin, unshifted, unshifted + skipped)
            after = unshifted + BLOCK_N
            after = tl.where(after < full_begin, after, after + skipped)
            if RANGES == 2:
                start = _skip(_skip(start, top, begin_b - top), full_begin_b, skipped_b)
                after = _skip(_skip(after, top, begin_b - top), full_begin_b, skipped_b)
            next_blocks = load_blocks(table, after, first, end, BLOCK_SIZE, BLOCK_N, PAGED)
            acc0, acc1, row_max, row_sum = attend_tile(
                acc0, acc1, row_max, row_sum, q0, q1, key_base, value_base, blocks, start, first,
                last, row_first, row_last, stride_kb, stride_kn, stride_vb, stride_vn, qk_scale,
                factor, soft_cap, slopes, positions, bias_rows, origin, heads, request, aux,
                CALLED, True, PAGED, BLOCK_SIZE, BLOCK_N, D, D0, D1, DV, DV0, DV1, KV_KIND, COMPUTE,
                HAS_CAP, HAS_ALIBI, HAS_BIAS, SCALE_LATE, LATENT, VEC_K, VEC_V)  # fmt: skip
            blocks = next_blocks
    return acc0, acc1, row_max, row_sum


@triton.jit
def store_rows(
    out, offsets, acc, factor, valid, SIZE: tl.constexpr, START: tl.constexpr, CHUNK: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Store one chunk of the outputs, `acc * factor` row by row."""
    lanes = START + tl.arange(0, CHUNK)
    offsets = aligned(offsets, VEC)
    mask = valid[:, None] & (lanes < SIZE)[None, :]
    tl.store(
        out + offsets[:, None] + lanes[None, :],
        (acc * factor[:, None]).to(out.dtype.element_ty),
        mask=mask,
    )
