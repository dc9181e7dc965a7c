"""Merging the pieces of a request that the Hopper decode cut: by the decode itself, or by a kernel after it.

The decode does it where pieces are few: its last CTA to finish a piece of a request merges them all, which spares a launch
and the wait for it. A request in many pieces wants many programs, and gets them from `join_pieces`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnlib.ops.triton.hopper.kernels.compat import exp2
from attnlib.ops.triton.hopper.kernels.softmax import LN2, meet_sink
from attnlib.ops.triton.kernels.softmax import finish_rows

__all__ = ["clear_rows", "join_here", "join_pieces", "pieces_at_once"]


@gluon.constexpr_function
def pieces_at_once(rows, width):
    """How many partial results of [rows, width] a warpgroup loads together: as many as 64 registers of a thread hold, at most 16."""
    return max(1, min(16, 64 * 128 // (rows * width)))


@gluon.jit
def join_here(partials, partial_lses, sinks, out, lse, first_place, num_pieces, start, query_len, kv_head, rows, stride_ot,
              stride_oh, stride_lt, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DV: gl.constexpr,
              WIDTH_V: gl.constexpr, ROWS: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr):  # fmt: skip
    """Merge the pieces of a request for the query heads of one KV head, by one warpgroup, once all of them are there.

    The first piece lies at `first_place`; each of the others is the first one of its part, which follow each other.
    """
    LANES: gl.constexpr = min(32, WIDTH_V // 4)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    STEP: gl.constexpr = pieces_at_once(ROWS, WIDTH_V)
    row = gl.arange(0, ROWS, ROW)
    lanes = gl.arange(0, WIDTH_V, gl.SliceLayout(0, LAYOUT))
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    valid = (row < rows) & (token < query_len)
    mask = valid[:, None] & (lanes < DV)[None, :]
    acc = gl.zeros([ROWS, WIDTH_V], gl.float32, LAYOUT)
    peak = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    total = gl.zeros([ROWS], gl.float32, ROW)
    for base in range(0, num_pieces, STEP):
        parts = ()
        values = ()
        for i in gl.static_range(STEP):
            # Others wrote these: past L1, which may hold what was there before.
            place = (first_place // 2 + (base + i) * NUM_KV_HEADS) * 2
            if i == 0:
                place = gl.where(base == 0, first_place, place)
            live = base + i < num_pieces
            at = place * rows + row
            parts = parts + (
                gl.load(
                    partial_lses + at, mask=valid & live, other=float("-inf"), cache_modifier=".cg"
                ),
            )
            values = values + (
                gl.load(
                    partials + (at * DV)[:, None] + lanes[None, :],
                    mask=mask & live,
                    other=0.0,
                    cache_modifier=".cg",
                ),
            )
        top = peak
        for i in gl.static_range(STEP):
            top = gl.maximum(top, parts[i])
        anchor = gl.where(top == float("-inf"), 0.0, top)
        decay = exp2(peak - anchor)
        acc = acc * decay[:, None]
        total = total * decay
        for i in gl.static_range(STEP):
            weight = exp2(parts[i] - anchor)
            acc += weight[:, None] * values[i]
            total += weight
        peak = top
    anchor = gl.where(peak == float("-inf"), 0.0, peak)
    decay = gl.full([ROWS], 1.0, gl.float32, ROW)
    if HAS_SINK:
        anchor, decay, total = meet_sink(peak, total, gl.load(sinks + head, mask=valid, other=0.0))
    empty = total == 0.0
    safe = gl.where(empty, 1.0, total)
    places = (start + token).to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
    gl.store(
        out + places[:, None] + lanes[None, :],
        (acc * (decay / safe)[:, None]).to(out.dtype.element_ty),
        mask=mask,
    )
    if HAS_LSE:
        base2 = gl.where(empty, float("-inf"), anchor + gl.log2(safe))
        gl.store(lse + (start + token).to(gl.int64) * stride_lt + head, base2 * LN2, mask=valid)


@gluon.jit
def clear_rows(out, lse, query_start_loc, num_reqs, num_tokens, stride_ot, stride_oh, stride_lt, NUM_KV_HEADS: gl.constexpr,
               GROUP: gl.constexpr, DV: gl.constexpr, WIDTH_V: gl.constexpr, HEADS: gl.constexpr, HAS_LSE: gl.constexpr):  # fmt: skip
    """Rows after the last request become 0, their LSEs -inf (M6). Each CTA clears some, by one warpgroup; HEADS is at least GROUP."""
    LANES: gl.constexpr = min(32, WIDTH_V // 4)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [4, 1], [1, 0])
    within = gl.arange(0, HEADS, gl.SliceLayout(1, LAYOUT))
    lanes = gl.arange(0, WIDTH_V, gl.SliceLayout(0, LAYOUT))
    inside = within < GROUP
    num_rows = gl.load(query_start_loc + num_reqs)
    for pair in range(
        num_rows * NUM_KV_HEADS + gl.program_id(0), num_tokens * NUM_KV_HEADS, gl.num_programs(0)
    ):
        token = pair // NUM_KV_HEADS
        head = pair % NUM_KV_HEADS * GROUP + within
        places = token.to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
        nothing = gl.zeros([HEADS, WIDTH_V], gl.float32, LAYOUT).to(out.dtype.element_ty)
        gl.store(
            out + places[:, None] + lanes[None, :],
            nothing,
            mask=inside[:, None] & (lanes < DV)[None, :],
        )
        if HAS_LSE:
            gl.store(lse + token.to(gl.int64) * stride_lt + head, gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT)),
                     mask=inside)  # fmt: skip


@triton.jit(
    do_not_specialize=["num_reqs", "rows", "stride_ot", "stride_oh", "stride_lt"],
    do_not_specialize_on_alignment=["sinks", "lse", "query_start_loc", "pieces", "partial_lses"],
)
def join_pieces(partials, partial_lses, pieces, query_start_loc, sinks, out, lse, num_reqs, rows, stride_ot, stride_oh,
                stride_lt, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr,
                DV_PAD: tl.constexpr, STEP: tl.constexpr, HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr):  # fmt: skip
    """Merge the pieces of HEADS query heads of one token and KV head; rows after the last request become 0 (M6).
    Grid: (T, KV heads, blocks of HEADS in a group)."""
    gdc_wait()
    gdc_launch_dependents()
    token = tl.program_id(0)
    kv_head = tl.program_id(1)
    within = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    head = kv_head * GROUP + within
    inside = within < GROUP
    num_rows = tl.load(query_start_loc + num_reqs)
    note = tl.load(pieces + token * NUM_KV_HEADS + kv_head)
    lanes = tl.arange(0, DV_PAD)
    offsets = (
        token.to(tl.int64) * stride_ot + head.to(tl.int64)[:, None] * stride_oh + lanes[None, :]
    )
    mask = inside[:, None] & (lanes < DV)[None, :]
    if token >= num_rows:
        tl.store(
            out + offsets, tl.zeros([HEADS, DV_PAD], tl.float32).to(out.dtype.element_ty), mask=mask
        )
        if HAS_LSE:
            tl.store(
                lse + token.to(tl.int64) * stride_lt + head,
                tl.full([HEADS], float("-inf"), tl.float32),
                mask=inside,
            )
        return
    count = note & 255
    if count <= 1:
        return
    row = (note >> 8 & 63) + within
    place = note >> 14
    acc = tl.zeros([HEADS, DV_PAD], tl.float32)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    for base in range(0, count, STEP):
        piece = base + tl.arange(0, STEP)
        live = (piece < count)[:, None] & inside[None, :]
        at = (
            tl.where(piece == 0, place, (place // 2 + piece * NUM_KV_HEADS) * 2)[:, None] * rows
            + row[None, :]
        )
        parts = tl.load(partial_lses + at, mask=live, other=float("-inf"))
        values = tl.load(partials + at[:, :, None] * DV + lanes[None, None, :],
                         mask=live[:, :, None] & (lanes < DV)[None, None, :], other=0.0)  # fmt: skip
        top = tl.maximum(peak, tl.max(parts, 0))
        anchor = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(parts - anchor[None, :])
        decay = tl.exp2(peak - anchor)
        acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * values, 0)
        total = total * decay + tl.sum(weights, 0)
        peak = top
    sink = tl.zeros([HEADS], tl.float32)
    if HAS_SINK:
        sink += tl.load(sinks + head, mask=inside, other=0.0)
    factor, base2_lse = finish_rows(peak, total, sink, HAS_SINK)
    tl.store(out + offsets, (acc * factor[:, None]).to(out.dtype.element_ty), mask=mask)
    if HAS_LSE:
        tl.store(
            lse + token.to(tl.int64) * stride_lt + head, base2_lse * 0.6931471805599453, mask=inside
        )
