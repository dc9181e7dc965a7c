"""Exchanges between the GPUs of one host by writes into each other's memory.

Every rank has a buffer of the same layout that the others can write. 4 bytes of data travel in a
word of 8, with the number of the exchange: a word is written at once, so whoever reads the number
has the data, and a transfer takes one way between GPUs, without fences and flags.

Each program has its own words in the buffers, whatever the sizes of a call, and counts its
exchanges in memory, for replays of a CUDA graph: older words have lower numbers. Programs with low
ids start first and wait for programs with the same id only, so they need not all run at once. An
exchange of queries and one of results alternate, so that words are written again only after they
have been read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnlib.ops.triton.kernels.chunks import aligned
from attnlib.ops.triton.kernels.softmax import LN2, LOG2E

__all__ = ["merge_words_kernel", "share_words_kernel"]

_POLLS: tl.constexpr = tl.constexpr(1 << 30)
"""Reads of words, of about a microsecond each, after which another rank is taken for lost."""


@triton.jit
def _numbered(x, number):
    """Words of the 4 bytes `x`."""
    return (number.to(tl.int64) << 32) | (x.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _behind(words, number):
    """Whether a word is older, in numbers that wrap around."""
    return (words >> 32).to(tl.int32) - number < 0


@triton.jit
def _stop_if(lost, ON_GPU: tl.constexpr):
    """An error of CUDA instead of a wrong result."""
    if ON_GPU:
        tl.inline_asm_elementwise(
            "{ .reg .pred lost; setp.ne.s32 lost, $1, 0; @lost trap; mov.b32 $0, $1; }",
            "=r,r",
            [lost.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _received(words, number, ON_GPU: tl.constexpr):
    """The 4 bytes of words, [rows, lanes], once all of them have arrived."""
    found = tl.load(words, volatile=True)
    late = tl.max(_behind(found, number).to(tl.int32))
    polls = tl.full((), 0, tl.int32)
    while (late != 0) & (polls < _POLLS):
        found = tl.load(words, volatile=True)
        late = tl.max(_behind(found, number).to(tl.int32))
        polls += 1
    _stop_if(late, ON_GPU)
    return found.to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "rank"])
def share_words_kernel(
    own,
    shared,
    words,
    counts,
    distances,
    num_rows,
    rank,
    WORLD: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    ON_GPU: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gather rows `[num_rows, SIZE]` of all ranks as `[num_rows, WORLD, SIZE]`, in 4 bytes each.

    Grid: (blocks of rows * blocks of lanes * ranks), the other rank of a program fastest.
    `distances` are those from this rank's buffer to the others, in bytes.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block, peer = tl.program_id(0) // WORLD, tl.program_id(0) % WORLD
    number = tl.load(counts + tl.program_id(0)) + 1
    blocks: tl.constexpr = (SIZE + LANES - 1) // LANES
    rows, lanes = tl.arange(0, ROWS), tl.arange(0, LANES)
    row = (block // blocks * ROWS + rows).to(tl.int64)
    lane = block % blocks * LANES + lanes
    mask = (row < num_rows)[:, None] & (lane < SIZE)[None, :]
    x = tl.load(own + aligned(row * SIZE, VEC)[:, None] + lane[None, :], mask=mask, other=0)
    if peer != rank:
        inside = rows[:, None] * LANES + lanes[None, :]
        distance = aligned(tl.load(distances + peer) // 8, 8)
        mine = (block * WORLD + rank).to(tl.int64) * (ROWS * LANES)
        tl.store(words + distance + mine + inside, _numbered(x, number))
        theirs = (block * WORLD + peer).to(tl.int64) * (ROWS * LANES)
        x = _received(words + theirs + inside, number, ON_GPU)
        tl.store(counts + tl.program_id(0), number)
    offsets = aligned((row * WORLD + peer) * SIZE, VEC)
    tl.store(shared + offsets[:, None] + lane[None, :], x, mask=mask)


@triton.jit
def _first_half(x, KIND: tl.constexpr):
    """The elements of even index in 4 bytes, or all of float32."""
    if KIND == "fp32":
        found = x.to(tl.float32, bitcast=True)
    elif KIND == "bf16":
        found = (x << 16).to(tl.float32, bitcast=True)
    else:
        found = (x & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return found


@triton.jit
def _second_half(x, KIND: tl.constexpr):
    """The elements of odd index."""
    if KIND == "bf16":
        found = (x & -65536).to(tl.float32, bitcast=True)
    else:
        found = (x >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return found


@triton.jit(
    do_not_specialize="""
        num_heads per_kv rank stride_pt stride_ph stride_qt stride_ot stride_oh stride_lo
    """.split(),
)
def merge_words_kernel(
    partial,
    partial_lse,
    out,
    lse,
    sinks,
    words,
    lse_words,
    counts,
    distances,
    num_heads,
    per_kv,
    rank,
    stride_pt,
    stride_ph,
    stride_qt,
    stride_ot,
    stride_oh,
    stride_lo,
    HAS_SINK: tl.constexpr,
    WORLD: tl.constexpr,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    WORDS: tl.constexpr,
    HEADS: tl.constexpr,
    VEC: tl.constexpr,
    ON_GPU: tl.constexpr,
    PDL: tl.constexpr,
):
    """Send the partial states of the other ranks' heads, and merge those of the own heads, in the
    order of the ranks. Grid: (tokens * blocks of heads). `partial` is in 4 bytes, SIZE for a
    head; a program has WORDS and HEADS words for each rank."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program, blocks = tl.program_id(0), tl.cdiv(num_heads, BLOCK_H)
    number = tl.load(counts + program) + 1
    token = (program // blocks).to(tl.int64)
    rows, lanes = tl.arange(0, BLOCK_H), tl.arange(0, LANES)
    head = (program % blocks * BLOCK_H + rows).to(tl.int64)
    live = head < num_heads
    mask = live[:, None] & (lanes < SIZE)[None, :]
    inside = rows[:, None] * LANES + lanes[None, :]
    slot = program.to(tl.int64) * WORLD
    # The heads of rank 0 in `partial`.
    first = head // per_kv * WORLD * per_kv + head % per_kv
    for peer in tl.static_range(WORLD):
        if peer != rank:
            theirs = first + peer * per_kv
            offsets = aligned(token * stride_pt + theirs * stride_ph, VEC)
            x = tl.load(partial + offsets[:, None] + lanes[None, :], mask=mask, other=0)
            part = tl.load(partial_lse + token * stride_qt + theirs, mask=live, other=0.0)
            distance = aligned(tl.load(distances + peer) // 8, 8)
            target = words + distance + (slot + rank) * WORDS
            tl.store(target + inside, _numbered(x, number))
            target = lse_words + distance + (slot + rank) * HEADS
            tl.store(target + rows, _numbered(part.to(tl.int32, bitcast=True), number))

    minus_inf = float("-inf")
    top = tl.full((BLOCK_H,), minus_inf, tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    even = tl.zeros((BLOCK_H, LANES), tl.float32)
    odd = tl.zeros((BLOCK_H, LANES), tl.float32)
    for peer in tl.static_range(WORLD):
        if peer == rank:
            own = first + peer * per_kv
            offsets = aligned(token * stride_pt + own * stride_ph, VEC)
            x = tl.load(partial + offsets[:, None] + lanes[None, :], mask=mask, other=0)
            part = tl.load(partial_lse + token * stride_qt + own, mask=live, other=minus_inf)
        else:
            source = words + (slot + peer) * WORDS
            x = _received(source + inside, number, ON_GPU)
            source = lse_words + (slot + peer) * HEADS
            found = _received(source + rows[:, None], number, ON_GPU)
            part = tl.reshape(found, (BLOCK_H,)).to(tl.float32, bitcast=True)
        # Some kernels report +inf for rows without a key; it counts as -inf.
        part = tl.where(live & (part != float("inf")), part, minus_inf)
        new_top = tl.maximum(top, part)
        finite_top = tl.where(new_top == minus_inf, 0.0, new_top)
        keep, weight = tl.exp2((top - finite_top) * LOG2E), tl.exp2((part - finite_top) * LOG2E)
        # A state without keys may hold anything, and 0 * NaN is NaN.
        seen = (weight != 0.0)[:, None]
        even = even * keep[:, None] + tl.where(seen, _first_half(x, KIND) * weight[:, None], 0.0)
        if KIND != "fp32":
            added = tl.where(seen, _second_half(x, KIND) * weight[:, None], 0.0)
            odd = odd * keep[:, None] + added
        total, top = total * keep + weight, new_top
    if HAS_SINK:
        part = tl.load(sinks + head, mask=live, other=minus_inf).to(tl.float32)
        part = tl.where(part == float("inf"), float("nan"), part)
        new_top = tl.maximum(top, part)
        finite_top = tl.where(new_top == minus_inf, 0.0, new_top)
        keep, weight = tl.exp2((top - finite_top) * LOG2E), tl.exp2((part - finite_top) * LOG2E)
        even, odd = even * keep[:, None], odd * keep[:, None]
        total, top = total * keep + weight, new_top
    safe_total = tl.where(total == 0.0, 1.0, total)
    target = out + (token * stride_ot + head * stride_oh)[:, None]
    even = (even / safe_total[:, None]).to(out.dtype.element_ty)
    if KIND == "fp32":
        tl.store(target + lanes[None, :], even, mask=mask)
    else:
        odd = (odd / safe_total[:, None]).to(out.dtype.element_ty)
        both = tl.arange(0, 2 * LANES)
        mask = live[:, None] & (both < 2 * SIZE)[None, :]
        tl.store(target + both[None, :], tl.interleave(even, odd), mask=mask)
    merged = tl.where(total == 0.0, minus_inf, top + tl.log2(safe_total) * LN2)
    tl.store(lse + token * stride_lo + head, merged, mask=live)
    tl.store(counts + program, number)
