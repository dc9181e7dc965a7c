"""Exchanges between the GPUs of one host by writes into each other's memory.

Every rank has a buffer of the same layout that the others can write. 4 bytes of data travel in a
word of 8, with the number of the exchange: a word is written at once, so whoever reads the number
has the data, and a transfer takes one way between GPUs, without fences and flags.

Each program has words of its own in the buffers and counts its exchanges in memory, those that
ended and those that began, for replays of a CUDA graph: a word with another number is an older one.
An older word has the same number only after 2**32 exchanges of smaller heads, which leave it as it
is. Programs with low ids start first and wait for those of the same rows only, so not all need run
at once.

Odd and even exchanges have words of their own, so that words are written again only after they have
been read: a rank begins exchange n + 2 of a program after n + 1, for which the other rank has begun
its own n + 1, and thus ended the kernel of its n. This holds on one stream. On two, both kernels
may have the same number, and the later one finds it begun.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.chunks import aligned
from attnlib.ops.triton.kernels.peer_waits import (
    QUERIES,
    RESULTS,
    TWICE,
    begun,
    overlap,
    stop_if,
    waited,
)
from attnlib.ops.triton.kernels.softmax import LN2, LOG2E
from attnlib.ops.triton.kernels.word_states import (
    Splits,
    combined_words,
    load_words,
    store_merged,
)

__all__ = ["merge_words_kernel", "share_words_kernel"]


@triton.jit
def _numbered(x, number):
    """Words of the 4 bytes `x`."""
    return (number.to(tl.int64) << 32) | (x.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _words_of(slot, number):
    """Which words of a program and rank an exchange uses: those of odd numbers follow the even."""
    return slot.to(tl.int64) * 2 + (number & 1)


@triton.jit
def _late(words, number, others=0):
    """Whether a word has not arrived, or `others` is not 0 in any thread: an int32."""
    return tl.max(((words >> 32).to(tl.int32) != number).to(tl.int32) | others)


@triton.jit
def _late_states(words, lses, number):
    """`_late` of states and LSEs. Each warp loads all LSEs and may see one before another does; the
    maximum of the states passes between warps and takes that along: all leave a loop together."""
    return _late(words, number, _late(lses, number))


@triton.jit(do_not_specialize=["num_rows", "rank"])
def share_words_kernel(
    own,
    shared,
    words,
    counts,
    distances,
    waits,
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
    `distances` are those from this rank's buffer to the others, in bytes. `waits` as in
    `PeerBuffers`.
    """
    block, peer = tl.program_id(0) // WORLD, tl.program_id(0) % WORLD
    counter = counts + 2 * tl.program_id(0)
    overlap(counter, distances + peer, PDL)
    number = tl.load(counter) + 1
    blocks: tl.constexpr = (SIZE + LANES - 1) // LANES
    rows, lanes = tl.arange(0, ROWS), tl.arange(0, LANES)
    row = (block // blocks * ROWS + rows).to(tl.int64)
    lane = block % blocks * LANES + lanes
    mask = (row < num_rows)[:, None] & (lane < SIZE)[None, :]
    x = tl.load(own + aligned(row * SIZE, VEC)[:, None] + lane[None, :], mask=mask, other=0)
    if peer != rank:
        inside = rows[:, None] * LANES + lanes[None, :]
        distance = aligned(tl.load(distances + peer) // 8, 8)
        mine = _words_of(block * WORLD + rank, number) * (ROWS * LANES)
        tl.store(words + distance + mine + inside, _numbered(x, number))
        beside = begun(counter + 1, number, ON_GPU)
        source = words + _words_of(block * WORLD + peer, number) * (ROWS * LANES) + inside
        found = tl.load(source, volatile=True)
        late, polls = _late(found, number), tl.full((), 0, tl.int32)
        began, too_long = polls.to(tl.int64), polls.to(tl.int64)
        while (late != 0) & (too_long == 0):
            found = tl.load(source, volatile=True)
            late = _late(found, number)
            polls, began, too_long = waited(polls, began, waits, ON_GPU)
        stop_if(beside, QUERIES + TWICE, rank, number, waits, ON_GPU)
        stop_if(late, QUERIES, peer, number, waits, ON_GPU)
        tl.store(counter, number)
        x = found.to(tl.int32)
    offsets = aligned((row * WORLD + peer) * SIZE, VEC)
    tl.store(shared + offsets[:, None] + lane[None, :], x, mask=mask)


@triton.jit(
    do_not_specialize="""
        num_heads per_kv rank stride_pt stride_ph stride_qt stride_ot stride_oh stride_lo
        num_reqs split_rows
    """.split(),
    do_not_specialize_on_alignment=["split_lses", "headers", "starts"],
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
    waits,
    split_values,
    split_lses,
    headers,
    starts,
    num_heads,
    per_kv,
    rank,
    stride_pt,
    stride_ph,
    stride_qt,
    stride_ot,
    stride_oh,
    stride_lo,
    num_reqs,
    split_rows,
    HAS_SINK: tl.constexpr,
    WORLD: tl.constexpr,
    WORLD_PAD: tl.constexpr,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    WORDS: tl.constexpr,
    VEC: tl.constexpr,
    STEP: tl.constexpr,
    ON_GPU: tl.constexpr,
    PDL: tl.constexpr,
):
    """Send the partial states of the other ranks' heads, and merge those of an own head.

    Grid: (tokens * heads). `partial` is in 4 bytes, SIZE for a head. A program has WORDS words for
    an exchange with each rank and one for the LSE, and serves all ranks at once: loads overlap.
    With STEP, states of several splits are in parts, those of `SplitStates`.
    """
    program = tl.program_id(0)
    counter = counts + 2 * program
    overlap(counter, distances, PDL)
    number = tl.load(counter) + 1
    token, head = (program // num_heads).to(tl.int64), program % num_heads
    peer, lanes = tl.arange(0, WORLD_PAD), tl.arange(0, LANES)
    exists, own = peer < WORLD, peer == rank
    # The heads of the ranks for which this head is the `head`-th of their own.
    theirs = head // per_kv * WORLD * per_kv + peer * per_kv + head % per_kv
    whole = partial + aligned(token * stride_pt + theirs * stride_ph, VEC)
    whole_lse = partial_lse + token * stride_qt + theirs
    if STEP:
        kv_heads, num_rows = num_heads // per_kv, tl.load(starts + num_reqs)
        header = tl.load(headers + token * kv_heads + head // per_kv)
        if (token < num_rows) & ((header & 511) > 1):
            splits = Splits(split_values, split_lses, header, split_rows, kv_heads)
            within = theirs % (WORLD * per_kv)
            x, part = combined_words(splits, within, exists, SIZE, LANES, STEP, KIND)
        else:
            is_row = exists & (token + 0 * peer < num_rows)
            x, part = load_words(whole, whole_lse, is_row, SIZE, LANES)
    else:
        x, part = load_words(whole, whole_lse, exists, SIZE, LANES)
    part = part.to(tl.int32, bitcast=True)
    distance = aligned(tl.load(distances + peer, mask=exists, other=0) // 8, 8)
    sent, mine = exists & ~own, _words_of(program * WORLD + rank, number)
    target = words + (distance + mine * WORDS)[:, None] + lanes[None, :]
    tl.store(target, _numbered(x, number), mask=sent[:, None])
    tl.store(lse_words + distance + mine, _numbered(part, number), mask=sent)
    beside = begun(counter + 1, number, ON_GPU)
    from_each = _words_of(program * WORLD + peer, number)
    source = words + (from_each * WORDS)[:, None] + lanes[None, :]
    lse_source, none = lse_words + from_each, _numbered(tl.full((), 0, tl.int32), number)
    found = tl.load(source, mask=sent[:, None], other=none, volatile=True)
    found_lse = tl.load(lse_source, mask=sent, other=none, volatile=True)
    late, polls = _late_states(found, found_lse, number), tl.full((), 0, tl.int32)
    began, too_long = polls.to(tl.int64), polls.to(tl.int64)
    while (late != 0) & (too_long == 0):
        found = tl.load(source, mask=sent[:, None], other=none, volatile=True)
        found_lse = tl.load(lse_source, mask=sent, other=none, volatile=True)
        late = _late_states(found, found_lse, number)
        polls, began, too_long = waited(polls, began, waits, ON_GPU)
    stop_if(beside, RESULTS + TWICE, rank, number, waits, ON_GPU)
    if late != 0:
        of_rank = tl.max(((found >> 32).to(tl.int32) != number).to(tl.int32), 1)
        of_rank |= ((found_lse >> 32).to(tl.int32) != number).to(tl.int32)
        lost = tl.min(tl.where(of_rank != 0, peer, WORLD_PAD))
        stop_if(late, RESULTS, lost, number, waits, ON_GPU)
    tl.store(counter, number)
    x = tl.where(own[:, None], x, found.to(tl.int32))
    part = tl.where(own, part, found_lse.to(tl.int32)).to(tl.float32, bitcast=True)
    minus_inf = float("-inf")  # some kernels report +inf for rows without a key
    part = tl.where(exists & (part != float("inf")), part, minus_inf)
    top, sink = tl.max(part, 0), minus_inf
    if HAS_SINK:
        sink = tl.load(sinks + head).to(tl.float32)
        sink = tl.where(sink == float("inf"), float("nan"), sink)
        top = tl.maximum(top, sink)
    top = tl.where(top == minus_inf, 0.0, top)
    weight = tl.exp2((part - top) * LOG2E)
    total = tl.sum(weight, 0)
    if HAS_SINK:
        total += tl.exp2((sink - top) * LOG2E)
    safe_total = tl.where(total == 0.0, 1.0, total)
    target = out + token * stride_ot + head * stride_oh
    store_merged(target, x, weight, safe_total, SIZE, LANES, KIND)
    merged = tl.where(total == 0.0, minus_inf, top + tl.log2(safe_total) * LN2)
    tl.store(lse + token * stride_lo + head, merged)
