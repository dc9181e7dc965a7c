"""The batch-invariant kernel: decodes, paged prefills and packed keys by one tile (M8, M15).

The bits of a row must depend on its own query, keys and position only. So

- tiles have one shape for all batches of a layer, whatever their sizes and lengths;
- keys are summed in segments of SEGMENT keys, from positions that are multiples of SEGMENT. Each
  segment starts from zero, and segments are added one after the other (`fold`), by a program that
  has all of them or by `invariant_combine_kernel`. So it makes no difference whether the segments
  of a request are computed by one program or by several;
- every tile of keys is masked, and a tile without a visible key leaves a row unchanged. So the
  other rows of a query tile make no difference.

Work distribution: one program per query tile, block of heads and, with SPLIT, segment.

Workspace with SPLIT: sums of values [tokens, heads, splits, DV], row maxima and sums of weights
[tokens, heads, splits] each, and the number of segments of each token's tile [tokens].
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.attend import (
    UNALIGNED,
    UNSPECIALIZED,
    aligned,
    attend_tile,
    load_blocks,
    load_queries,
    pack_rows,
    scale_rows,
    store_rows,
)
from attnlib.ops.triton.kernels.mask import visible_span
from attnlib.ops.triton.kernels.quant import load_scale
from attnlib.ops.triton.kernels.schedule import find_request
from attnlib.ops.triton.kernels.softmax import LN2, finish_rows

__all__ = ["invariant_combine_kernel", "invariant_kernel"]


@triton.jit
def _fold(total, more, old, new):
    """Return total * old + more * new, [M, N] by [M]. The order of the roundings is explicit, so
    that no compilation of this sum differs from another one."""
    old = tl.broadcast_to(old[:, None], total.shape)
    return tl.fma(total, old, more * new[:, None])


@triton.jit
def _fold_weights(row_max, row_sum, more_max, more_sum):
    """Add the maximum and the sum of a segment to those of the segments before it, all [M].

    Returns:
        (row_max, row_sum, factor of the sums of values before, factor of the segment's).
    """
    new_max = tl.maximum(row_max, more_max)
    # -inf - -inf is NaN: rows without a visible key are measured from 0.
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    old = tl.exp2(row_max - finite_max)
    new = tl.exp2(more_max - finite_max)
    return new_max, tl.fma(row_sum, old, more_sum * new), old, new


@triton.jit(
    do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=[*UNALIGNED, "partials"]
)
def invariant_kernel(
    query, key, value, out, lse, query_start_loc, seq_lens, causal_flags, alibi_slopes, sinks, bias,
    k_scale, v_scale, aux0, aux1, aux2, aux3, scale, soft_cap, left, right, chunk, num_reqs,
    num_tokens, stride_qt, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn,
    stride_vh, stride_ot, stride_oh, stride_lt, stride_bt, block_table, stride_table, partials,
    num_tiles, num_splits, num_heads, rows0, columns0, rows1, columns1, rows2, columns2, rows3,
    columns3, SCORE: tl.constexpr, BOUNDS: tl.constexpr, PAGED: tl.constexpr, SPLIT: tl.constexpr,
    SEGMENT: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_TOKENS: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D0: tl.constexpr,
    D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, KV_KIND: tl.constexpr,
    COMPUTE: tl.constexpr, CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_CHUNK: tl.constexpr, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_SINK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_LSE: tl.constexpr, K_SCALE_KIND: tl.constexpr,
    V_SCALE_KIND: tl.constexpr, SCALE_LATE: tl.constexpr, LATENT: tl.constexpr,
    VEC_Q: tl.constexpr, VEC_K: tl.constexpr, VEC_V: tl.constexpr, VEC_O: tl.constexpr,
):  # fmt: skip
    """Compute one query tile for a block of heads; with SPLIT, over one segment of its keys.

    Grid: (num_tiles, KV heads * HEAD_BLOCKS, num_splits). Without SPLIT, num_splits is 1.
    """
    tile = num_tiles - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    head_offset = tl.program_id(1) % HEAD_BLOCKS * TILE_HEADS
    split = tl.program_id(2)
    split_counts = partials
    if SPLIT:
        rows64 = num_tokens.to(tl.int64) * num_heads
        split_counts = partials + rows64 * num_splits * (DV + 2)
    request = find_request(query_start_loc, tile, num_reqs, TILE_TOKENS, 128)
    start = tl.load(query_start_loc + request)
    first_token = (tile - (start // TILE_TOKENS + request)) * TILE_TOKENS

    if request == num_reqs:
        # Rows after the last request become 0 (M6).
        if split == 0:
            token, head, valid = pack_rows(
                first_token, num_tokens - start, head_offset, GROUP, TILE_HEADS, TILE_TOKENS,
                BLOCK_M)  # fmt: skip
            head = kv_head * GROUP + head
            token64 = (start + token).to(tl.int64)
            zeros = tl.zeros([BLOCK_M], tl.float32)
            offsets = token64 * stride_ot + head.to(tl.int64) * stride_oh
            store_rows(
                out, offsets, tl.zeros([BLOCK_M, DV0], tl.float32), zeros, valid, DV, 0, DV0, VEC_O
            )
            if DV1 > 0:
                store_rows(
                    out, offsets, tl.zeros([BLOCK_M, DV1], tl.float32), zeros, valid, DV, DV0, DV1,
                    VEC_O)  # fmt: skip
            if HAS_LSE:
                tl.store(lse + token64 * stride_lt + head, zeros - float("inf"), mask=valid)
            if SPLIT:
                # No segments: the combine kernel leaves the rows alone.
                tl.store(split_counts + start + token, zeros, mask=valid)
        return

    query_len = tl.load(query_start_loc + request + 1) - start
    # The number of tiles is an upper bound: a request may own one tile more than it needs.
    if first_token >= query_len:
        return
    kv_head64 = kv_head.to(tl.int64)
    key += aligned(kv_head64 * stride_kh, VEC_K)
    value += aligned(kv_head64 * stride_vh, VEC_V)
    if PAGED:
        seq_len = tl.load(seq_lens + request)
        table = block_table + request.to(tl.int64) * stride_table
    else:
        # Packed keys: `seq_lens` holds the start of each request's keys instead.
        first_key = tl.load(seq_lens + request)
        seq_len = tl.load(seq_lens + request + 1) - first_key
        key += aligned(first_key.to(tl.int64) * stride_kn, VEC_K)
        value += aligned(first_key.to(tl.int64) * stride_vn, VEC_V)
        table = block_table
    aux = (
        aux0, rows0, columns0, aux1, rows1, columns1, aux2, rows2, columns2, aux3, rows3, columns3,
    )  # fmt: skip
    causal = 0
    if CAUSAL == 2:
        causal = tl.load(causal_flags + request).to(tl.int32)

    # Tiles in [first, last) have a key that is visible to some row.
    origin = seq_len - query_len
    last_token = tl.minimum(first_token + TILE_TOKENS, query_len) - 1
    first, _ = visible_span(
        origin + first_token, seq_len, causal, left, right, chunk, CAUSAL, HAS_LEFT, HAS_RIGHT,
        HAS_CHUNK)  # fmt: skip
    _, last = visible_span(
        origin + last_token, seq_len, causal, left, right, chunk, CAUSAL, HAS_LEFT, HAS_RIGHT,
        HAS_CHUNK)  # fmt: skip
    if BOUNDS is not None:
        low, high, _, _ = BOUNDS(origin + first_token, origin + last_token, seq_len, request, aux)
        first = tl.maximum(first, low)
        last = tl.minimum(last, high)
    begin = tl.maximum(first, 0) // BLOCK_N * BLOCK_N
    first_segment = begin // SEGMENT
    end_segment = tl.maximum((last + SEGMENT - 1) // SEGMENT, first_segment + 1)
    num_segments = end_segment - first_segment
    if SPLIT:
        if split >= num_segments:
            return
        first_segment += split
        end_segment = first_segment + 1

    token, head, valid = pack_rows(
        first_token, query_len, head_offset, GROUP, TILE_HEADS, TILE_TOKENS, BLOCK_M
    )
    head = kv_head * GROUP + head
    token64 = (start + token).to(tl.int64)
    slopes = 0.0
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes + head, mask=valid, other=0.0).to(tl.float32)
    bias_rows = bias
    if HAS_BIAS:
        bias_rows = bias + tl.where(valid, token64, 0) * stride_bt
    query_offsets = token64 * stride_qt + head.to(tl.int64) * stride_qh
    END0: tl.constexpr = DV if LATENT else D
    START1: tl.constexpr = DV if LATENT else D0
    q0, q1, row_factors = load_queries(
        query, query_offsets, valid, D, D0, D1, END0, START1, COMPUTE, VEC_Q
    )
    positions = origin + token
    row_first, row_last = visible_span(
        positions, seq_len, causal, left, right, chunk, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK
    )
    qk_scale = scale_rows(scale * load_scale(k_scale, kv_head, K_SCALE_KIND), row_factors)
    factor = qk_scale * 1.4426950408889634
    # The scale of the values is applied to each segment, whoever adds the segments.
    v_factor = load_scale(v_scale, kv_head, V_SCALE_KIND)

    acc0 = tl.zeros([BLOCK_M, DV0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, DV1 if DV1 > 0 else 1], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for segment in range(first_segment, end_segment):
        part0 = tl.zeros([BLOCK_M, DV0], tl.float32)
        part1 = tl.zeros([BLOCK_M, DV1 if DV1 > 0 else 1], tl.float32)
        part_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        part_sum = tl.zeros([BLOCK_M], tl.float32)
        part_begin = tl.maximum(begin, segment * SEGMENT)
        part_end = tl.minimum(last, segment * SEGMENT + SEGMENT)
        blocks = load_blocks(table, part_begin, first, last, BLOCK_SIZE, BLOCK_N, PAGED)
        for tile_start in range(part_begin, part_end, BLOCK_N):
            next_blocks = load_blocks(
                table, tile_start + BLOCK_N, first, part_end, BLOCK_SIZE, BLOCK_N, PAGED
            )
            part0, part1, part_max, part_sum = attend_tile(
                part0, part1, part_max, part_sum, q0, q1, key, value, blocks, tile_start, first,
                last, row_first, row_last, stride_kb, stride_kn, stride_vb, stride_vn, qk_scale,
                factor, soft_cap, slopes, positions, bias_rows, origin, head, request, aux, SCORE,
                True, PAGED, BLOCK_SIZE, BLOCK_N, D, D0, D1, DV, DV0, DV1, KV_KIND, COMPUTE,
                HAS_CAP, HAS_ALIBI, HAS_BIAS, SCALE_LATE, LATENT, VEC_K, VEC_V)  # fmt: skip
            blocks = next_blocks
        part0 = part0 * v_factor
        if DV1 > 0:
            part1 = part1 * v_factor
        if SPLIT:
            if num_segments > 1:
                # The sink counts when the segments are added (M4).
                rows = (token64 * num_heads + head) * num_splits + split
                ones = tl.full([BLOCK_M], 1.0, tl.float32)
                store_rows(partials, rows * DV, part0, ones, valid, DV, 0, DV0, 1)
                if DV1 > 0:
                    store_rows(partials, rows * DV, part1, ones, valid, DV, DV0, DV1, 1)
                maxima = partials + num_tokens.to(tl.int64) * num_heads * num_splits * DV
                sums = maxima + num_tokens.to(tl.int64) * num_heads * num_splits
                tl.store(maxima + rows, part_max, mask=valid)
                tl.store(sums + rows, part_sum, mask=valid)
        row_max, row_sum, old, new = _fold_weights(row_max, row_sum, part_max, part_sum)
        acc0 = _fold(acc0, part0, old, new)
        if DV1 > 0:
            acc1 = _fold(acc1, part1, old, new)

    if SPLIT:
        # One program per tile tells the combine kernel how many segments there are.
        if (kv_head == 0) & (split == 0):
            tl.store(
                split_counts + start + token,
                tl.zeros([BLOCK_M], tl.float32) + num_segments.to(tl.float32),
                mask=valid,
            )
        if num_segments > 1:
            return
    sink = 0.0
    if HAS_SINK:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32)
    normalizer, base2_lse = finish_rows(row_max, row_sum, sink, HAS_SINK)
    offsets = token64 * stride_ot + head.to(tl.int64) * stride_oh
    store_rows(out, offsets, acc0, normalizer, valid, DV, 0, DV0, VEC_O)
    if DV1 > 0:
        store_rows(out, offsets, acc1, normalizer, valid, DV, DV0, DV1, VEC_O)
    if HAS_LSE:
        tl.store(lse + token64 * stride_lt + head, base2_lse * LN2, mask=valid)


@triton.jit(
    do_not_specialize=[
        "num_splits", "num_tokens", "num_heads", "stride_ot", "stride_oh", "stride_lt",
    ],
    do_not_specialize_on_alignment=["sinks", "lse"],
)  # fmt: skip
def invariant_combine_kernel(
    partials, sinks, out, lse, num_splits, num_tokens, num_heads, stride_ot, stride_oh, stride_lt,
    HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Add the segments of one row in their order, COLUMNS of the values.

    Grid: (tokens, heads, blocks of COLUMNS).
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    rows64 = num_tokens.to(tl.int64) * num_heads
    maxima = partials + rows64 * num_splits * DV
    sums = maxima + rows64 * num_splits
    num_segments = tl.load(sums + rows64 * num_splits + token).to(tl.int32)
    if num_segments <= 1:
        # The attention kernel has written the output.
        return
    row = (token.to(tl.int64) * num_heads + head) * num_splits
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    one = tl.arange(0, 1)
    acc = tl.zeros([1, COLUMNS], tl.float32)
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    for base in range(0, num_segments, STEP):
        # Unrolled, so that the loads of several segments overlap. Rows past the last segment have
        # no key and leave the sums unchanged.
        for i in tl.static_range(STEP):
            index = row + base + i
            live = base + i + one < num_segments
            part = tl.load(
                partials + index * DV + columns[None, :],
                mask=live[:, None] & (columns < DV)[None, :],
                other=0.0,
            )
            part_max = tl.load(maxima + index + one, mask=live, other=float("-inf"))
            part_sum = tl.load(sums + index + one, mask=live, other=0.0)
            row_max, row_sum, old, new = _fold_weights(row_max, row_sum, part_max, part_sum)
            acc = _fold(acc, part, old, new)
    sink = tl.zeros([1], tl.float32)
    if HAS_SINK:
        sink += tl.load(sinks + head).to(tl.float32)
    normalizer, base2_lse = finish_rows(row_max, row_sum, sink, HAS_SINK)
    offsets = token.to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh + columns
    result = (acc * normalizer[:, None]).to(out.dtype.element_ty)
    tl.store(out + offsets[None, :], result, mask=(columns < DV)[None, :])
    if HAS_LSE:
        if tl.program_id(2) == 0:
            tl.store(lse + token.to(tl.int64) * stride_lt + head + one, base2_lse * LN2)
