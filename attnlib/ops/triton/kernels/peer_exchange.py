"""Exchanges between the GPUs of one host by writes into each other's memory.

Every rank has a buffer of the same layout that the others can write. A program writes its part into
the buffers of the others, sets its flag there, and waits for the flags of the same program of the
others. Programs with low ids start first and wait for programs with the same id only, so they need
not all run at once.

A flag holds how often its program has run on that rank, which every program counts in memory, for
replays of a CUDA graph. The two kernels alternate on every rank, and a buffer is written again only
after all ranks have read it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnlib.ops.triton.kernels.chunks import aligned
from attnlib.ops.triton.kernels.softmax import LN2, LOG2E

__all__ = ["merge_from_peers_kernel", "share_heads_kernel"]


_POLLS: tl.constexpr = tl.constexpr(1 << 31)
"""Reads of a flag, of about a microsecond each, after which another rank is taken for lost."""


@triton.jit
def _set_flag(flag, number):
    tl.atomic_xchg(flag, number, sem="release", scope="sys")


@triton.jit
def _wait_for_flag(flag, number, ON_GPU: tl.constexpr):
    # At least, in numbers that wrap around: the other rank may be one exchange ahead.
    missing = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - number
    polls = tl.full((), 0, tl.int64)
    while (missing < 0) & (polls < _POLLS):
        missing = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - number
        polls += 1
    if ON_GPU:  # an error of CUDA instead of a wrong result
        tl.inline_asm_elementwise(
            "{ .reg .pred lost; setp.lt.s32 lost, $1, 0; @lost trap; mov.b32 $0, $1; }",
            "=r,r",
            [missing],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(do_not_specialize=["num_rows", "rank"])
def share_heads_kernel(
    own,
    shared,
    flags,
    counts,
    distances,
    num_rows,
    rank,
    WORLD: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    FLAGS: tl.constexpr,
    ON_GPU: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gather rows `[num_rows, SIZE]` of all ranks as `[num_rows, WORLD, SIZE]`.

    Grid: (blocks of rows * blocks of lanes * ranks), the rank to which a program writes fastest.
    `distances` are those from this rank's buffer to the others, in bytes.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program, peer = tl.program_id(0) // WORLD, tl.program_id(0) % WORLD
    number = tl.load(counts + tl.program_id(0)) + 1
    blocks: tl.constexpr = (SIZE + LANES - 1) // LANES
    row = (program // blocks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    lane = program % blocks * LANES + tl.arange(0, LANES)
    mask = (row < num_rows)[:, None] & (lane < SIZE)[None, :]
    offsets = aligned(row * SIZE, VEC)[:, None] + lane[None, :]
    x = tl.load(own + offsets, mask=mask)
    distance = tl.load(distances + peer)
    item: tl.constexpr = shared.dtype.element_ty.primitive_bitwidth // 8
    offsets = aligned(distance // item + (row * WORLD + rank) * SIZE, VEC)
    tl.store(shared + offsets[:, None] + lane[None, :], x, mask=mask)
    if peer != rank:
        tl.debug_barrier()
        _set_flag(flags + distance // 4 + rank * FLAGS + program, number)
        _wait_for_flag(flags + peer * FLAGS + program, number, ON_GPU)
    tl.store(counts + tl.program_id(0), number)


@triton.jit(
    do_not_specialize="""
        num_tokens num_heads per_kv rank stride_pt stride_ph stride_qt stride_ot stride_oh stride_lo
    """.split(),
)
def merge_from_peers_kernel(
    partial,
    partial_lse,
    out,
    lse,
    sinks,
    received,
    received_lse,
    flags,
    counts,
    distances,
    num_tokens,
    num_heads,
    per_kv,
    rank,
    stride_pt,
    stride_ph,
    stride_qt,
    stride_ot,
    stride_oh,
    stride_lo,
    HAS_STATE: tl.constexpr,
    HAS_SINK: tl.constexpr,
    WORLD: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FLAGS: tl.constexpr,
    VEC_P: tl.constexpr,
    VEC_R: tl.constexpr,
    VEC_O: tl.constexpr,
    ON_GPU: tl.constexpr,
    PDL: tl.constexpr,
):
    """Send the partial states of the other ranks' heads, and merge those of the own heads, in the
    order of the ranks, into the state in `out` and `lse` if HAS_STATE. Grid: (tokens * blocks of
    heads). `received` is `[WORLD, num_tokens, num_heads, DV]`, and `received_lse` its LSEs."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program, blocks = tl.program_id(0), tl.cdiv(num_heads, BLOCK_H)
    number = tl.load(counts + program) + 1
    token = (program // blocks).to(tl.int64)
    head = (program % blocks * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    live, lanes = head < num_heads, tl.arange(0, DV_PAD)
    mask = live[:, None] & (lanes < DV)[None, :]
    minus_inf = float("-inf")
    item: tl.constexpr = received.dtype.element_ty.primitive_bitwidth // 8
    first = head // per_kv * WORLD * per_kv + head % per_kv  # of the first rank, in `partial`
    here = (rank * num_tokens + token) * num_heads + head  # what this rank sends, in `received`
    for peer in tl.static_range(WORLD):
        if peer != rank:
            distance, theirs = tl.load(distances + peer), first + peer * per_kv
            offsets = aligned(token * stride_pt + theirs * stride_ph, VEC_P)
            x = tl.load(partial + offsets[:, None] + lanes[None, :], mask=mask)
            offsets = aligned(distance // item + here * DV, VEC_R)
            tl.store(received + offsets[:, None] + lanes[None, :], x, mask=mask)
            x_lse = tl.load(partial_lse + token * stride_qt + theirs, mask=live)
            tl.store(received_lse + distance // 4 + here, x_lse, mask=live)
    tl.debug_barrier()
    for peer in tl.static_range(WORLD):
        if peer != rank:
            distance = tl.load(distances + peer)
            _set_flag(flags + distance // 4 + rank * FLAGS + program, number)

    offsets = aligned(token * stride_ot + head * stride_oh, VEC_O)
    target = out + offsets[:, None] + lanes[None, :]
    top = tl.full((BLOCK_H,), minus_inf, tl.float32)
    acc = tl.zeros((BLOCK_H, DV_PAD), tl.float32)
    if HAS_STATE:
        top = tl.load(lse + token * stride_lo + head, mask=live, other=minus_inf)
        top = tl.where(top == float("inf"), minus_inf, top)
        acc = tl.load(target, mask=mask, other=0.0).to(tl.float32)
        # A state without keys may hold anything, and 0 * NaN is NaN.
        acc = tl.where((top == minus_inf)[:, None], 0.0, acc)
    total = tl.where(top == minus_inf, 0.0, 1.0)
    for peer in tl.static_range(WORLD):
        if peer == rank:
            own = first + peer * per_kv
            source = aligned(token * stride_pt + own * stride_ph, VEC_P)
            x = tl.load(partial + source[:, None] + lanes[None, :], mask=mask, other=0.0)
            part = tl.load(partial_lse + token * stride_qt + own, mask=live, other=minus_inf)
        else:
            _wait_for_flag(flags + peer * FLAGS + program, number, ON_GPU)
            slot = (peer * num_tokens + token) * num_heads + head
            source = aligned(slot * DV, VEC_R)
            # The flag orders these loads; a line of L1 may be older than it.
            x = tl.load(
                received + source[:, None] + lanes[None, :],
                mask=mask,
                other=0.0,
                cache_modifier=".cg",
            )
            part = tl.load(received_lse + slot, mask=live, other=minus_inf, cache_modifier=".cg")
        finite_part = tl.where(part == float("inf"), minus_inf, part)
        new_top = tl.maximum(top, finite_part)
        finite_top = tl.where(new_top == minus_inf, 0.0, new_top)
        keep = tl.exp2((top - finite_top) * LOG2E)
        weight = tl.exp2((finite_part - finite_top) * LOG2E)
        added = tl.where(weight[:, None] == 0.0, 0.0, x.to(tl.float32) * weight[:, None])
        acc, total, top = acc * keep[:, None] + added, total * keep + weight, new_top
    if HAS_SINK:
        part = tl.load(sinks + head, mask=live, other=minus_inf).to(tl.float32)
        part = tl.where(part == float("inf"), float("nan"), part)
        new_top = tl.maximum(top, part)
        finite_top = tl.where(new_top == minus_inf, 0.0, new_top)
        keep, weight = tl.exp2((top - finite_top) * LOG2E), tl.exp2((part - finite_top) * LOG2E)
        acc, total, top = acc * keep[:, None], total * keep + weight, new_top
    safe_total = tl.where(total == 0.0, 1.0, total)
    tl.store(target, (acc / safe_total[:, None]).to(out.dtype.element_ty), mask=mask)
    merged = tl.where(total == 0.0, minus_inf, top + tl.log2(safe_total) * LN2)
    tl.store(lse + token * stride_lo + head, merged, mask=live)
    tl.store(counts + program, number)
