"""Packed latents (`ops.packed_latents`): cache write and attention in plain Triton.

Attention: one program per (query token, block of heads, split), over all positions that the token
sees or over the slots of its list. Elements are converted to float32, multiplied by the scale of
their group and rounded to the dtype of the queries. Workspace and combination as in `decode`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.attend import aligned, load_queries, store_rows
from attnlib.ops.triton.kernels.mask import visible_span
from attnlib.ops.triton.kernels.quant import decode_kv, encode_fp8
from attnlib.ops.triton.kernels.softmax import (
    LN2,
    finish_rows,
    online_softmax,
    transform_scores,
)

__all__ = ["packed_latent_kernel", "packed_latent_write_kernel"]

_LATENT: tl.constexpr = tl.constexpr(512)
_ROTARY: tl.constexpr = tl.constexpr(64)
_GROUP: tl.constexpr = tl.constexpr(128)
_GROUPS: tl.constexpr = tl.constexpr(4)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def packed_latent_write_kernel(
    latents, elements, scales, rotary, slot_mapping, stride_t, stride_eb, stride_en, stride_sb,
    stride_sn, stride_rb, stride_rn, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Quantize and store one token. Grid: (tokens,)."""
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    # A negative slot writes nothing (P4).
    if slot >= 0:
        block, within = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        groups = tl.arange(0, _GROUPS)
        lanes = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        source = latents + token.to(tl.int64) * stride_t
        x = tl.load(source + lanes).to(tl.float32)
        # The maximum may drop NaN, so it is looked for by itself.
        has_nan = tl.max((x != x).to(tl.int32), 1) > 0
        largest = tl.max(tl.where(x != x, 0.0, tl.abs(x)), 1)
        limit = tl.full([_GROUPS], 448.0, tl.float32)
        scale = tl.maximum(tl.math.div_rn(largest, limit), 2.0**-126)
        scale = tl.where(has_nan, float("nan"), scale)
        divisor, x = tl.broadcast(scale[:, None], x)
        number = encode_fp8(tl.math.div_rn(x, divisor), False)
        tl.store(elements + block * stride_eb + within * stride_en + lanes, number)
        tl.store(scales + block * stride_sb + within * stride_sn + groups, scale)
        last = tl.arange(0, _ROTARY)
        y = tl.load(source + _LATENT + last).to(tl.bfloat16)
        tl.store(rotary + block * stride_rb + within * stride_rn + last, y)


@triton.jit
def _positions(
    entries, start, end, first, last, SELECT: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Return the positions [BLOCK_N] from key slot `start` on; -1 where nothing is visible."""
    slots = start + tl.arange(0, BLOCK_N)
    if SELECT == 0:
        position = slots
        exists = slots < end
    else:
        entry = tl.load(entries + slots // SELECT, mask=slots < end, other=-1)
        # Compared before a product that could overflow.
        exists = (entry >= 0) & (entry < (last + SELECT - 1) // SELECT)
        position = tl.where(exists, entry, 0) * SELECT + slots % SELECT
    return tl.where(exists & (position >= first) & (position < last), position, -1)


@triton.jit(
    do_not_specialize=[
        "left", "right", "chunk", "num_reqs", "num_tokens", "num_heads", "num_entries",
        "num_splits", "stride_lists", "stride_table", "stride_qt", "stride_qh", "stride_eb",
        "stride_en", "stride_sb", "stride_sn", "stride_rb", "stride_rn", "stride_ot", "stride_oh",
        "stride_lt",
    ],
    do_not_specialize_on_alignment=[
        "query_start_loc", "seq_lens", "block_table", "indices", "sinks", "lse",
    ],
)  # fmt: skip
def packed_latent_kernel(
    query, elements, scales, rotary, out, partials, query_start_loc, seq_lens, block_table, indices,
    sinks, lse, scale, soft_cap, left, right, chunk, num_reqs, num_tokens, num_heads, num_entries,
    num_splits, stride_lists, stride_table, stride_qt, stride_qh, stride_eb, stride_en, stride_sb,
    stride_sn, stride_rb, stride_rn, stride_ot, stride_oh, stride_lt, SELECT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr,
    KV_KIND: tl.constexpr, COMPUTE: tl.constexpr, SPLIT: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Compute one split of one query token for HEADS heads.

    SELECT is the number of positions of a list's entry, or 0 for all positions.
    Grid: (tokens, blocks of heads, splits).
    """
    token = tl.program_id(0)
    split = tl.program_id(2)
    token64 = token.to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    valid = head < num_heads
    request = 0
    for base in range(1, num_reqs + 1, 128):
        lanes = base + tl.arange(0, 128)
        starts = tl.load(query_start_loc + lanes, mask=lanes <= num_reqs, other=0)
        request += tl.sum(((lanes <= num_reqs) & (starts <= token)).to(tl.int32), 0)
    exists = request < num_reqs
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1, mask=exists, other=0) - start
    seq_len = tl.load(seq_lens + request, mask=exists, other=0)
    first, last = visible_span(
        seq_len - query_len + token - start, seq_len, 0, left, right, chunk, CAUSAL, HAS_LEFT,
        HAS_RIGHT, HAS_CHUNK)  # fmt: skip
    first = tl.maximum(first, 0)
    # Tokens after the last request see nothing (M6).
    last = tl.where(exists, last, 0)
    entries = indices
    if SELECT > 0:
        entries = indices + token64 * stride_lists
    last_request = tl.maximum(num_reqs - 1, 0)
    table = block_table + tl.minimum(request, last_request).to(tl.int64) * stride_table
    begin = 0
    end = last
    capacity = last
    if SELECT > 0:
        end = tl.where(exists, num_entries * SELECT, 0)
        capacity = num_entries * SELECT
    else:
        begin = first // BLOCK_N * BLOCK_N
    if SPLIT:
        tiles = (tl.maximum(capacity - begin, 0) + BLOCK_N - 1) // BLOCK_N
        per_split = (tiles + num_splits - 1) // num_splits
        begin += split * per_split * BLOCK_N
        end = tl.minimum(end, begin + per_split * BLOCK_N)

    query_offsets = token64 * stride_qt + head.to(tl.int64) * stride_qh
    q0, q1, _ = load_queries(
        query, query_offsets, valid, _LATENT + _ROTARY, _LATENT, _ROTARY, _LATENT, _LATENT, COMPUTE,
        1)  # fmt: skip
    acc = tl.zeros([HEADS, _LATENT], tl.float32)
    row_max = tl.full([HEADS], float("-inf"), tl.float32)
    row_sum = tl.zeros([HEADS], tl.float32)
    lanes0 = tl.arange(0, _LATENT)
    lanes1 = tl.arange(0, _ROTARY)
    for slot in range(begin, end, BLOCK_N):
        keys = _positions(entries, slot, end, first, last, SELECT, BLOCK_N)
        inside = keys >= 0
        place = tl.where(inside, keys, 0)
        blocks = tl.load(table + place // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        within = (place % BLOCK_SIZE).to(tl.int64)
        raw = tl.load(
            elements
            + aligned(blocks * stride_eb + within * stride_en, 16)[:, None]
            + lanes0[None, :],
            mask=inside[:, None],
            other=0.0,
        )
        factors = tl.load(
            scales + aligned(blocks * stride_sb + within * stride_sn, 4)[:, None]
            + tl.arange(0, _GROUPS)[None, :],
            mask=inside[:, None],
            other=0.0,
        )  # fmt: skip
        numbers = decode_kv(raw, KV_KIND, tl.float32)
        numbers = tl.reshape(numbers, [BLOCK_N, _GROUPS, _GROUP]) * factors[:, :, None]
        k0 = tl.reshape(numbers, [BLOCK_N, _LATENT]).to(COMPUTE)
        k1 = tl.load(
            rotary + aligned(blocks * stride_rb + within * stride_rn, 8)[:, None] + lanes1[None, :],
            mask=inside[:, None],
            other=0.0,
        ).to(COMPUTE)
        qk = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        qk = tl.dot(q1, tl.trans(k1), qk, input_precision="ieee")
        scores = transform_scores(
            qk, scale, soft_cap, 0.0, 0, keys, 0.0, head, request, None, None, HAS_CAP, False, False
        )
        scores = tl.where(inside[None, :], scores, float("-inf"))
        weights, acc_scale, row_max, row_sum = online_softmax(
            scores, scale, row_max, row_sum, True, False
        )
        acc = tl.dot(weights.to(COMPUTE), k0, acc * acc_scale[:, None], input_precision="ieee")

    sink = tl.full([HEADS], float("-inf"), tl.float32)
    if HAS_SINK:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32)
        sink = tl.where(exists, sink, float("-inf"))
    if SPLIT:
        # The sink counts when the splits are combined (M4).
        factor, base2_lse = finish_rows(row_max, row_sum, sink, False)
        places = (token64 * num_heads + head) * num_splits + split
        store_rows(partials, places * _LATENT, acc, factor, valid, _LATENT, 0, _LATENT, 1)
        rows64 = num_tokens.to(tl.int64) * num_heads
        lses = partials + rows64 * num_splits * _LATENT
        tl.store(lses + places, base2_lse, mask=valid)
        # Rows after the last request have no splits: the combine kernel leaves them alone.
        used = tl.where(exists, num_splits, 0).to(tl.float32)
        tl.store(lses + rows64 * num_splits + token64, used)
    if not SPLIT or not exists:
        factor, base2_lse = finish_rows(row_max, row_sum, sink, HAS_SINK)
        offsets = token64 * stride_ot + head.to(tl.int64) * stride_oh
        store_rows(out, offsets, acc, factor, valid, _LATENT, 0, _LATENT, 1)
        if HAS_LSE:
            tl.store(lse + token64 * stride_lt + head, base2_lse * LN2, mask=valid)
