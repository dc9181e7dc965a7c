"""Slots of decodes of state layers on Hopper: the new token, and what a step writes."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels import state_memory as memory
from attnlib.ops.triton.hopper.kernels.state_memory import PART_KEYS

__all__ = [
    "Token",
    "clear_rows",
    "copy_slot",
    "held_token",
    "load_gates",
    "load_queries",
    "load_token",
    "new_token",
    "store_outputs",
    "store_state",
    "store_token",
]


class Token(NamedTuple):
    """The inputs of a token for one head: k [DK] and v [ROWS * PASSES] as stored, the decay, a
    number or [DK], and beta."""

    k: Any
    v: Any
    decay: Any
    beta: Any


@gluon.jit
def new_token(request, number: gl.constexpr):
    """Return the row of a new token in the batch; that of the last one, if there are not as many,
    which no token before it depends on."""
    token = request.first.to(gl.int64)
    if number > 0:
        token = token + gl.minimum(request.count - 1, number)
    return token


@gluon.jit
def load_gates(token, tokens, KEYS: gl.constexpr, CONFIG: gl.constexpr):
    """Return (decay, beta) of a row of the batch."""
    place = tokens.decay + token * CONFIG.G_T
    if CONFIG.DECAY == "channel":
        decay = gl.load(place + gl.arange(0, CONFIG.DK, KEYS))
    else:
        decay = gl.load(place)
    beta = 1.0
    if CONFIG.HAS_BETA:
        beta = gl.load(tokens.beta + token * CONFIG.B_T)
    return decay, beta


@gluon.jit
def held_token(shared, group, number, CONFIG: gl.constexpr):
    """Return the `Token` in row GROUP * group + number of the tail in shared memory."""
    KEYS: gl.constexpr = memory.key_layout(CONFIG)
    row = group * CONFIG.GROUP + number
    k = shared.key_rows.index(row).load(KEYS)
    v = shared.value_rows.index(row).load(memory.value_layout(CONFIG))
    decay, beta = memory.gates(shared, group, number, KEYS, CONFIG)
    return Token(k, v, decay, beta)


@gluon.jit
def load_token(request, number: gl.constexpr, tokens, block, CONFIG: gl.constexpr):
    """Return the `Token` of a new token, see `new_token`."""
    SPAN: gl.constexpr = CONFIG.ROWS * CONFIG.PASSES
    KEYS: gl.constexpr = memory.key_layout(CONFIG)
    row = block * SPAN + gl.arange(0, SPAN, memory.value_layout(CONFIG))
    token = new_token(request, number)
    k = gl.load(tokens.k + token * CONFIG.K_T + gl.arange(0, CONFIG.DK, KEYS))
    v = gl.load(tokens.v + token * CONFIG.V_T + row)
    decay, beta = load_gates(token, tokens, KEYS, CONFIG)
    return Token(k, v, decay, beta)


@gluon.jit
def load_queries(request, tokens, CONFIG: gl.constexpr):
    """Return the queries [QUERIES, DK] of the new tokens in float32."""
    LAYOUT: gl.constexpr = memory.query_layout(CONFIG.DK, CONFIG.WARPS)
    number = gl.arange(0, CONFIG.QUERIES, gl.SliceLayout(1, LAYOUT))
    token = request.first.to(gl.int64) + gl.minimum(number, request.count - 1)
    place = tokens.q + token[:, None] * CONFIG.Q_T
    key = gl.arange(0, CONFIG.DK, gl.SliceLayout(0, LAYOUT))
    return gl.load(place + key[None, :]).to(gl.float32)


@gluon.jit
def store_outputs(outputs, request, out, head, block, ROWS: gl.constexpr, CONFIG: gl.constexpr):
    """Store the outputs of the new tokens that exist."""
    SPAN: gl.constexpr = CONFIG.ROWS * CONFIG.PASSES
    place = out + head * CONFIG.O_H + block * SPAN + gl.arange(0, SPAN, ROWS)
    for number in gl.static_range(len(outputs)):
        if number < request.count:
            row = place + (request.first.to(gl.int64) + number) * CONFIG.O_T
            gl.store(row, outputs[number].to(out.dtype.element_ty))


@gluon.jit
def store_state(s, state, slot, head, block, first, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """Store parts [rows, 32] of the state from row `first` of this program on."""
    SPAN: gl.constexpr = CONFIG.ROWS * CONFIG.PASSES
    row = gl.arange(0, s[0].shape[0], gl.SliceLayout(1, LAYOUT)) * CONFIG.DK
    base = state + slot * CONFIG.STATE + (head * CONFIG.DV + block * SPAN + first) * CONFIG.DK
    place = base + row[:, None] + gl.arange(0, PART_KEYS, gl.SliceLayout(0, LAYOUT))[None, :]
    for part in gl.static_range(len(s)):
        gl.store(place + part * PART_KEYS, s[part])


@gluon.jit
def store_token(token, position, tail, head, block, CONFIG: gl.constexpr):
    """Store a `Token` in a tail, what programs and heads share once."""
    SPAN: gl.constexpr = CONFIG.ROWS * CONFIG.PASSES
    ring, key = position % CONFIG.RING, gl.arange(0, CONFIG.DK, memory.key_layout(CONFIG))
    values = tail.v + ring * (CONFIG.HV * CONFIG.DV) + block * SPAN
    gl.store(values + gl.arange(0, SPAN, memory.value_layout(CONFIG)), token.v)
    if block == 0:
        if CONFIG.HAS_BETA:
            gl.store(tail.beta + ring * CONFIG.HV, token.beta)
        if CONFIG.DECAY == "channel":
            gl.store(tail.decay + ring * (CONFIG.HV * CONFIG.DK) + key, token.decay)
        elif CONFIG.DECAY != "constant":
            gl.store(tail.decay + ring * CONFIG.HV, token.decay)
        if head % (CONFIG.HV // CONFIG.HK) == 0:
            gl.store(tail.k + ring * (CONFIG.HK * CONFIG.DK) + key, token.k)


@gluon.jit
def copy_slot(shared, request, base, kept, state, target, head, block, CONFIG: gl.constexpr):
    """Write what a fork keeps of its source: the state at `kept`, if it is that at `base`, and the
    tail from there on."""
    PARTS: gl.constexpr = CONFIG.DK // PART_KEYS
    LAYOUT: gl.constexpr = memory.state_layout(CONFIG, 1)
    if (base > 0) & (kept == base):
        for part in gl.static_range(PARTS):
            x = shared.state.slice(part * PART_KEYS, PART_KEYS, 1).load(LAYOUT)
            store_state(
                (x,), state + part * PART_KEYS, request.slot, head, block, 0, LAYOUT, CONFIG
            )
    for row in range(0, request.computed - kept):
        token = held_token(shared, row // CONFIG.GROUP, row % CONFIG.GROUP, CONFIG)
        store_token(token, request.computed - 1 - row, target, head, block, CONFIG)


@gluon.jit
def clear_rows(out, first, last, head, block, ROWS: gl.constexpr, CONFIG: gl.constexpr):
    """Store zeros in the outputs of tokens from `first` to before `last`."""
    SPAN: gl.constexpr = CONFIG.ROWS * CONFIG.PASSES
    place = out + head * CONFIG.O_H + block * SPAN + gl.arange(0, SPAN, ROWS)
    zeros = gl.zeros([SPAN], out.dtype.element_ty, ROWS)
    for token in range(first, last):
        gl.store(place + token.to(gl.int64) * CONFIG.O_T, zeros)
