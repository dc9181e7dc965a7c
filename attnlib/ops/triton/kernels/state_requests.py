"""Requests of a step of a state layer: positions, heads, tails and the columns of programs."""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.state_arguments import Request, Tail, Tokens

__all__ = [
    "first_kept",
    "first_written",
    "kept_state",
    "load_base",
    "open_head",
    "open_request",
    "open_tail",
    "part_columns",
    "pass_columns",
    "store_positions",
    "value_columns",
]


@triton.jit
def open_request(batch, request):
    """Return the `Request`."""
    first = tl.load(batch.query_start_loc + request)
    count = tl.load(batch.query_start_loc + request + 1) - first
    end = tl.load(batch.seq_lens + request)
    slot = tl.load(batch.slots + request).to(tl.int64)
    source = tl.load(batch.sources + request).to(tl.int64)
    return Request(slot, source, first, count, end - count, end)


@triton.jit
def load_base(positions, request, head, block, CONFIG: tl.constexpr):
    """Return the position of the stored state of the source, 0 for a first step (T1)."""
    low = request.computed
    # Without tokens that can be taken back, a slot continues from the first new token only.
    if (CONFIG.D > 0) & (request.computed > 0):
        place = request.source * CONFIG.POSITIONS + (head * CONFIG.COPIES + block) * 2
        low = tl.load(positions + place)
        # A slot that cannot continue from here has any number there: the loop must end anyway.
        low = tl.minimum(tl.maximum(low, request.computed - CONFIG.D), request.computed)
    return tl.maximum(low, 0) // CONFIG.UNIT * CONFIG.UNIT


@triton.jit
def first_kept(request, CONFIG: tl.constexpr):
    """Return the first position that the next step may continue from (T10)."""
    return tl.maximum(request.computed, request.end - CONFIG.D)


@triton.jit
def kept_state(request, CONFIG: tl.constexpr):
    """Return the position of the state that the step stores."""
    return first_kept(request, CONFIG) // CONFIG.UNIT * CONFIG.UNIT


@triton.jit
def first_written(request, CONFIG: tl.constexpr):
    """Return the first position whose inputs the step writes to the tail: those since the state
    that it keeps, without the ones that the slot has."""
    first = kept_state(request, CONFIG)
    if request.source == request.slot:
        first = tl.maximum(first, request.computed)
    return first


@triton.jit
def store_positions(positions, request, head, block, CONFIG: tl.constexpr):
    """Store the positions that the slot can continue from (T8): the copies of this program."""
    BLOCKS: tl.constexpr = CONFIG.BLOCKS
    COPIES: tl.constexpr = CONFIG.COPIES
    low = first_kept(request, CONFIG)
    base = positions + request.slot * CONFIG.POSITIONS + head * (2 * CONFIG.COPIES)
    tl.store(base + 2 * block, low)
    tl.store(base + 2 * block + 1, request.end)
    if block == 0:
        for other in tl.static_range(BLOCKS, COPIES):
            tl.store(base + 2 * other, low)
            tl.store(base + 2 * other + 1, request.end)


@triton.jit
def open_head(tokens, head, CONFIG: tl.constexpr):
    """Return the `Tokens` of one state head."""
    key_head = head // (CONFIG.HV // CONFIG.HK)
    decay = tokens.decay + head * CONFIG.G_H
    return Tokens(
        tokens.q + key_head * CONFIG.Q_H,
        tokens.k + key_head * CONFIG.K_H,
        tokens.v + head * CONFIG.V_H,
        decay,
        tokens.beta + head * CONFIG.B_H,
    )


@triton.jit
def open_tail(tail, slot, head, CONFIG: tl.constexpr):
    """Return the `Tail` of one slot and state head."""
    key_head = head // (CONFIG.HV // CONFIG.HK)
    width = 1
    if CONFIG.DECAY == "channel":
        width = CONFIG.DK
    return Tail(
        tail.k + slot * CONFIG.TAIL_K + key_head * CONFIG.DK,
        tail.v + slot * CONFIG.TAIL_V + head * CONFIG.DV,
        tail.decay + slot * CONFIG.TAIL_G + head * width,
        tail.beta + slot * CONFIG.TAIL_B + head,
    )


@triton.jit
def value_columns(block, CONFIG: tl.constexpr):
    """Return the value rows of a program, [ROWS * PASSES]."""
    SPAN: tl.constexpr = CONFIG.ROWS * CONFIG.PASSES
    return block * SPAN + tl.arange(0, SPAN)


@triton.jit
def pass_columns(block, number, CONFIG: tl.constexpr):
    """Return the value rows of a pass of a program, [ROWS]."""
    return (block * CONFIG.PASSES + number) * CONFIG.ROWS + tl.arange(0, CONFIG.ROWS)


@triton.jit
def part_columns(part: tl.constexpr, CONFIG: tl.constexpr):
    """Return the channels of a part of the keys, [PART]."""
    return part * CONFIG.PART + tl.arange(0, CONFIG.PART)
