"""Single tokens of a state layer: from the step and from the tail, in every warp of a program."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = ["Row", "channels_of", "load_held", "load_new", "spread", "store_row", "value_rows"]


class Row(NamedTuple):
    """The inputs of one token for one head, the same in every warp.

    Attributes:
        k: [1, WARPS, WIDTH] as stored.
        v: [1, WARPS, LANES] as stored, the value rows of each warp.
        decay, beta: [1, 1, 1] or a number; decays per channel are [1, WARPS, WIDTH].
    """

    k: Any
    v: Any
    decay: Any
    beta: Any


@triton.jit
def spread(x):
    """Return a number as a tensor [1, 1, 1]."""
    return tl.full([1, 1, 1], 0, tl.int32) + x


@triton.jit
def channels_of(CONFIG: tl.constexpr):
    """Return the channels of a key, [1, WARPS, WIDTH]: the same in every warp, and at least those
    of a part of the state."""
    WIDTH: tl.constexpr = max(triton.next_power_of_2(CONFIG.DK), CONFIG.PART)
    return tl.broadcast_to(tl.arange(0, WIDTH)[None, None, :], [1, CONFIG.WARPS, WIDTH])


@triton.jit
def value_rows(block, CONFIG: tl.constexpr):
    """Return the value rows of each warp, [1, WARPS, LANES]: again and again if they are few."""
    SPAN: tl.constexpr = CONFIG.ROWS * CONFIG.PASSES
    ROWS: tl.constexpr = SPAN // CONFIG.WARPS
    LANES: tl.constexpr = max(ROWS, 32)
    lane = tl.arange(0, LANES)[None, None, :]
    return block * SPAN + tl.arange(0, CONFIG.WARPS)[None, :, None] * ROWS + lane % ROWS


@triton.jit
def _load_row(tokens, k, v, decay, beta, exists, block, CONFIG: tl.constexpr):
    """Return a `Row` from pointers to its inputs; without one it is 0. `exists` is [1, 1, 1]."""
    channels, values = channels_of(CONFIG), value_rows(block, CONFIG)
    inside = exists & (channels < CONFIG.DK)
    keys = tl.load(k + channels, mask=inside, other=0.0)
    if CONFIG.DECAY == "channel":
        g = tl.load(decay + channels, mask=inside, other=0.0)
    elif CONFIG.DECAY == "constant":
        g = tl.load(tokens.decay + spread(0), mask=exists, other=0.0)
    else:
        g = tl.load(decay + spread(0), mask=exists, other=0.0)
    factor = 1.0
    if CONFIG.HAS_BETA:
        factor = tl.load(beta + spread(0), mask=exists, other=0.0)
    return Row(keys, tl.load(v + values, mask=exists & (values < CONFIG.DV), other=0.0), g, factor)


@triton.jit
def load_new(request, tokens, block, CONFIG: tl.constexpr):
    """Return the `Row` of the new token."""
    token = request.first.to(tl.int64)
    return _load_row(
        tokens,
        tokens.k + token * CONFIG.K_T,
        tokens.v + token * CONFIG.V_T,
        tokens.decay + token * CONFIG.G_T,
        tokens.beta + token * CONFIG.B_T,
        spread(request.count) > 0,
        block,
        CONFIG,
    )


@triton.jit
def load_held(position, base, tokens, tail, block, CONFIG: tl.constexpr):
    """Return the `Row` of the token at a position of the tail; 0 before position `base`."""
    width = 1
    if CONFIG.DECAY == "channel":
        width = CONFIG.DK
    ring = tl.maximum(position, 0) % CONFIG.RING
    return _load_row(
        tokens,
        tail.k + ring * (CONFIG.HK * CONFIG.DK),
        tail.v + ring * (CONFIG.HV * CONFIG.DV),
        tail.decay + ring * (CONFIG.HV * width),
        tail.beta + ring * CONFIG.HV,
        spread(position) >= base,
        block,
        CONFIG,
    )


@triton.jit
def store_row(row, ring, tail, head, block, CONFIG: tl.constexpr):
    """Store a `Row` in a tail, what programs and heads share once."""
    channels, values = channels_of(CONFIG), value_rows(block, CONFIG)
    once = (channels < CONFIG.DK) & (tl.arange(0, CONFIG.WARPS) == 0)[None, :, None]
    tl.store(tail.v + ring * (CONFIG.HV * CONFIG.DV) + values, row.v, mask=values < CONFIG.DV)
    if block == 0:
        if CONFIG.HAS_BETA:
            tl.store(tail.beta + ring * CONFIG.HV + spread(0), row.beta)
        if CONFIG.DECAY == "channel":
            decays = tail.decay + ring * (CONFIG.HV * CONFIG.DK)
            tl.store(decays + channels, row.decay, mask=once)
        elif CONFIG.DECAY != "constant":
            tl.store(tail.decay + ring * CONFIG.HV + spread(0), row.decay)
        if head % (CONFIG.HV // CONFIG.HK) == 0:
            tl.store(tail.k + ring * (CONFIG.HK * CONFIG.DK) + channels, row.k, mask=once)
