"""Packed latents (`ops.packed_latents`): cache write and attention in plain Triton.

Attention: one program per (query token, block of heads, split), over all positions that the token
sees or over the slots of its list. Elements are converted to float32, multiplied by the scale of
their group and rounded to the dtype of the queries. Workspace and combination as in `decode`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.arguments import (
    Logits,
    Mask,
    Output,
    Query,
    Rows,
    State,
)
from attnlib.ops.triton.kernels.attend import empty_state, load_rows
from attnlib.ops.triton.kernels.chunks import add_chunks, aligned
from attnlib.ops.triton.kernels.mask import visible_span
from attnlib.ops.triton.kernels.program import (
    clear_rows,
    divide_results,
    store_partials,
    store_results,
)
from attnlib.ops.triton.kernels.quant import decode_kv, encode_fp8
from attnlib.ops.triton.kernels.softmax import online_softmax, transform_scores

__all__ = ["packed_latent_kernel", "packed_latent_write_kernel"]

_LATENT: tl.constexpr = tl.constexpr(512)
_ROTARY: tl.constexpr = tl.constexpr(64)
_GROUP: tl.constexpr = tl.constexpr(128)
_GROUPS: tl.constexpr = tl.constexpr(4)


@triton.jit(
    do_not_specialize="""
        stride_t stride_eb stride_en stride_sb stride_sn stride_rb stride_rn
    """.split(),
    do_not_specialize_on_alignment=["slot_mapping"],
)
def packed_latent_write_kernel(
    latents, elements, scales, rotary, slot_mapping, stride_t, stride_eb, stride_en, stride_sb,
    stride_sn, stride_rb, stride_rn, BLOCK_SIZE: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Quantize and store one token. Grid: (tokens,).

    VEC: elements of which the offsets of latents are multiples.
    """
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    # A negative slot writes nothing (P4).
    if slot >= 0:
        block, within = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        groups = tl.arange(0, _GROUPS)
        lanes = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        source = latents + aligned(token.to(tl.int64) * stride_t, VEC)
        x = tl.load(source + lanes).to(tl.float32)
        # The maximum may drop NaN, so it is looked for by itself.
        has_nan = tl.max((x != x).to(tl.int32), 1) > 0
        largest = tl.max(tl.where(x != x, 0.0, tl.abs(x)), 1)
        limit = tl.full([_GROUPS], 448.0, tl.float32)
        scale = tl.maximum(tl.math.div_rn(largest, limit), 2.0**-126)
        scale = tl.where(has_nan, float("nan"), scale)
        divisor, x = tl.broadcast(scale[:, None], x)
        number = encode_fp8(tl.math.div_rn(x, divisor), False)
        place = aligned(block * stride_eb + within * stride_en, 16)
        tl.store(elements + place + lanes, number)
        place = aligned(block * stride_sb + within * stride_sn, 4)
        tl.store(scales + place + groups, scale)
        last = tl.arange(0, _ROTARY)
        y = tl.load(source + _LATENT + last).to(tl.bfloat16)
        place = aligned(block * stride_rb + within * stride_rn, 8)
        tl.store(rotary + place + last, y)


class LatentCache(NamedTuple):
    """The parts of packed latents, their strides, and the block table of one request."""

    elements: Any
    scales: Any
    rotary: Any
    table: Any
    stride_eb: Any
    stride_en: Any
    stride_sb: Any
    stride_sn: Any
    stride_rb: Any
    stride_rn: Any


@triton.jit
def _find_request(token, query_start_loc, num_reqs):
    """Return the request of a token; the number of requests for tokens after the last one."""
    request = 0
    for base in range(1, num_reqs + 1, 128):
        lanes = base + tl.arange(0, 128)
        starts = tl.load(query_start_loc + lanes, mask=lanes <= num_reqs, other=0)
        request += tl.sum(((lanes <= num_reqs) & (starts <= token)).to(tl.int32), 0)
    return request


@triton.jit
def _positions(entries, start, end, first, last, CONFIG: tl.constexpr):
    """Return the positions [BLOCK_N] from key slot `start` on; -1 where nothing is visible."""
    slots = start + tl.arange(0, CONFIG.BLOCK_N)
    if CONFIG.SELECT == 0:
        position = slots
        exists = slots < end
    else:
        SELECT: tl.constexpr = CONFIG.SELECT
        entry = tl.load(entries + slots // SELECT, mask=slots < end, other=-1)
        # Compared before a product that could overflow.
        exists = (entry >= 0) & (entry < (last + SELECT - 1) // SELECT)
        position = tl.where(exists, entry, 0) * SELECT + slots % SELECT
    return tl.where(exists & (position >= first) & (position < last), position, -1)


@triton.jit
def _load_latents(cache, keys, inside, CONFIG: tl.constexpr):
    """Load latents at these positions as COMPUTE; returns (values, rotary parts)."""
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    place = tl.where(inside, keys, 0)
    blocks = tl.load(cache.table + place // CONFIG.BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    within = (place % CONFIG.BLOCK_SIZE).to(tl.int64)
    mask = inside[:, None]
    offsets = aligned(blocks * cache.stride_eb + within * cache.stride_en, 16)
    lanes = tl.arange(0, _LATENT)
    raw = tl.load(cache.elements + offsets[:, None] + lanes[None, :], mask=mask, other=0.0)
    offsets = aligned(blocks * cache.stride_sb + within * cache.stride_sn, 4)
    groups = tl.arange(0, _GROUPS)
    factors = tl.load(cache.scales + offsets[:, None] + groups[None, :], mask=mask, other=0.0)
    numbers = decode_kv(raw, CONFIG.KV_KIND, tl.float32)
    numbers = tl.reshape(numbers, [BLOCK_N, _GROUPS, _GROUP]) * factors[:, :, None]
    k0 = tl.reshape(numbers, [BLOCK_N, _LATENT]).to(CONFIG.COMPUTE)
    offsets = aligned(blocks * cache.stride_rb + within * cache.stride_rn, 8)
    lanes = tl.arange(0, _ROTARY)
    k1 = tl.load(cache.rotary + offsets[:, None] + lanes[None, :], mask=mask, other=0.0)
    return k0, k1.to(CONFIG.COMPUTE)


@triton.jit
def _attend_latents(state, queries, cache, keys, rows, request, logits, CONFIG: tl.constexpr):
    """Return the softmax with the latents at these positions."""
    inside = keys >= 0
    k0, k1 = _load_latents(cache, keys, inside, CONFIG)
    qk = tl.dot(queries[0], tl.trans(k0), input_precision="ieee")
    qk = tl.dot(queries[1], tl.trans(k1), qk, input_precision="ieee")
    scores = transform_scores(
        qk, logits, rows.token, keys, 0.0, rows.head, request, None, False, CONFIG
    )
    scores = tl.where(inside[None, :], scores, float("-inf"))
    weights, acc_scale, row_max, row_sum = online_softmax(
        scores, logits.scale, state.row_max, state.row_sum, True, False
    )
    weights = weights.to(CONFIG.COMPUTE)
    sums = add_chunks(state.sums, weights, acc_scale, k0, None, None, inside, True, CONFIG)
    return State(sums, row_max, row_sum)


@triton.jit(
    do_not_specialize="""
        left right chunk num_reqs num_tokens num_heads num_entries num_splits stride_lists
        stride_table stride_qt stride_qh stride_eb stride_en stride_sb stride_sn stride_rb
        stride_rn stride_ot stride_oh stride_lt
    """.split(),
    do_not_specialize_on_alignment="""
        query_start_loc seq_lens block_table indices sinks lse
    """.split(),
)
def packed_latent_kernel(
    query, elements, scales, rotary, out, partials, query_start_loc, seq_lens, block_table, indices,
    sinks, lse, scale, soft_cap, left, right, chunk, num_reqs, num_tokens, num_heads, num_entries,
    num_splits, stride_lists, stride_table, stride_qt, stride_qh, stride_eb, stride_en, stride_sb,
    stride_sn, stride_rb, stride_rn, stride_ot, stride_oh, stride_lt, CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute one split of one query token for BLOCK_M heads.

    CONFIG is an `AttentionConfig` whose latents are of 512 and 64 elements. SELECT is the number of
    positions of a list's entry, or 0 for all positions. Grid: (tokens, blocks of heads, splits).
    """
    token = tl.program_id(0)
    split = tl.program_id(2)
    request = _find_request(token, query_start_loc, num_reqs)
    exists = request < num_reqs
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1, mask=exists, other=0) - start
    seq_len = tl.load(seq_lens + request, mask=exists, other=0)
    position = seq_len - query_len + token - start
    first, last = visible_span(position, seq_len, 0, Mask(left, right, chunk), CONFIG)
    first = tl.maximum(first, 0)
    # Tokens after the last request see nothing (M6).
    last = tl.where(exists, last, 0)
    entries = indices
    if CONFIG.SELECT > 0:
        entries = indices + token.to(tl.int64) * stride_lists
        begin = 0
        end = tl.where(exists, num_entries * CONFIG.SELECT, 0)
        capacity = num_entries * CONFIG.SELECT
    else:
        begin = first // CONFIG.BLOCK_N * CONFIG.BLOCK_N
        end = last
        capacity = last
    if CONFIG.SPLIT:
        tiles = (tl.maximum(capacity - begin, 0) + CONFIG.BLOCK_N - 1) // CONFIG.BLOCK_N
        per_split = (tiles + num_splits - 1) // num_splits
        begin += split * per_split * CONFIG.BLOCK_N
        end = tl.minimum(end, begin + per_split * CONFIG.BLOCK_N)

    lanes = tl.arange(0, CONFIG.BLOCK_M)
    head = tl.program_id(1) * CONFIG.BLOCK_M + lanes
    rows = Rows(lanes * 0 + position, lanes * 0 + token, head, head < num_heads)
    queries, scale, _ = load_rows(Query(query, stride_qt, stride_qh), rows, scale, CONFIG)
    logits = Logits(scale, 0.0, soft_cap, 0.0, None, None)
    last_request = tl.maximum(num_reqs - 1, 0)
    table = block_table + tl.minimum(request, last_request).to(tl.int64) * stride_table
    cache = LatentCache(
        elements, scales, rotary, table, stride_eb, stride_en, stride_sb, stride_sn, stride_rb,
        stride_rn)  # fmt: skip
    state = empty_state(CONFIG)
    for slot in range(begin, end, CONFIG.BLOCK_N):
        keys = _positions(entries, slot, end, first, last, CONFIG)
        state = _attend_latents(state, queries, cache, keys, rows, request, logits, CONFIG)

    if CONFIG.SPLIT:
        parts = divide_results(partials, num_tokens, num_heads, num_splits, 1, CONFIG)
        store_partials(parts, rows, state, split, 1.0, CONFIG)
        # Rows after the last request have no splits: the combine kernel leaves them alone.
        used = tl.where(exists, num_splits, 0).to(tl.float32)
        tl.store(parts.counts + token, used)
    output = Output(out, lse, stride_ot, stride_oh, stride_lt)
    if not exists:
        clear_rows(output, rows, CONFIG)
    if not CONFIG.SPLIT:
        if exists:
            store_results(output, rows, state, sinks, 1.0, CONFIG)
