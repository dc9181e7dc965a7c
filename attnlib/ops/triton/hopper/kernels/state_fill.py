"""The state after a chunk that a decode fills: the tokens of the chunk, one after the other."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels import state_memory as memory
from attnlib.ops.triton.hopper.kernels.compat import reinterpret
from attnlib.ops.triton.hopper.kernels.state_memory import PART_KEYS, ROWS_LAYOUT
from attnlib.ops.triton.hopper.kernels.state_products import fill_by_products
from attnlib.ops.triton.hopper.kernels.state_slots import Token, store_state
from attnlib.ops.triton.kernels.state_arguments import numbers

__all__ = ["fill_chunk"]


@gluon.constexpr_function
def _passes(CONFIG):
    """How often a program goes through the chunk: a thread has at most 128 numbers of the state."""
    numbers = CONFIG.ROWS * CONFIG.PASSES * CONFIG.DK // (32 * CONFIG.WARPS)
    return max(1, numbers // 128)


@gluon.jit
def _go_forward(s, token, CONFIG: gl.constexpr):
    """Return parts [rows, 32] of the state after a `Token` whose keys, and decays per channel, are
    parts [32]; decays are factors."""
    PARTS: gl.constexpr = len(s)
    k, norm, u = token.k, 1.0, token.v.to(gl.float32)
    if CONFIG.NORM:
        squares = k[0] * k[0]
        for part in gl.static_range(1, PARTS):
            squares = gl.fma(k[part], k[part], squares)
        norm = gl.rsqrt(gl.sum(squares, 0) + CONFIG.EPS)
    if CONFIG.DECAY == "channel":
        decayed = [s[part] * token.decay[part][None, :] for part in numbers(PARTS)]
    else:
        decayed = [x * token.decay for x in s]
    if CONFIG.DELTA:
        seen = decayed[0] * k[0][None, :]
        for part in gl.static_range(1, PARTS):
            seen = gl.fma(decayed[part], k[part][None, :], seen)
        u = gl.fma(gl.sum(seen, 1), -norm, u)
    u = u * (token.beta * norm)
    return [gl.fma(u[:, None], k[part][None, :], decayed[part]) for part in numbers(PARTS)]


@gluon.jit
def _load_token(
    shared, new, count, step, first: gl.constexpr, LAYOUT: gl.constexpr, CONFIG: gl.constexpr
):
    """Return the token of a step for the value rows from `first` on, as `_go_forward` takes it.
    `count` tokens are in the tail."""
    TAIL: gl.constexpr = memory.tail_rows(CONFIG)
    PART: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    ROWS: gl.constexpr = CONFIG.ROWS * CONFIG.PASSES // _passes(CONFIG)
    # From the oldest one in row count - 1 on; row TAIL - 1 comes after row 0.
    row = (count + TAIL - 1 - step) % TAIL
    group, number = row // CONFIG.GROUP, row % CONFIG.GROUP
    decay, beta = memory.gates(shared, group, number, memory.key_layout(CONFIG), CONFIG)
    if CONFIG.DECAY == "channel":
        decay = memory.row_parts(shared.decays.index(row), PART)
    else:
        decay = gl.exp(gl.where(row == TAIL - 1, new.decay, decay))
    if CONFIG.HAS_BETA:
        beta = gl.where(row == TAIL - 1, new.beta, beta)
    values = shared.value_rows.index(row).slice(first, ROWS)
    v = values.load(gl.SliceLayout(1, LAYOUT))
    return Token(memory.row_parts(shared.key_rows.index(row), PART), v, decay, beta)


@gluon.jit
def fill_chunk(shared, new, count, state, slot, head, block, CONFIG: gl.constexpr):
    """Store the state after the chunk that begins `count` tokens before the `new` one, and ends
    with it or before it."""
    UNIT: gl.constexpr = CONFIG.UNIT
    TAIL: gl.constexpr = memory.tail_rows(CONFIG)
    PART: gl.constexpr = PART_KEYS
    PARTS: gl.constexpr = CONFIG.DK // PART
    TIMES: gl.constexpr = _passes(CONFIG)
    ROWS: gl.constexpr = CONFIG.ROWS * CONFIG.PASSES // TIMES
    LAYOUT: gl.constexpr = memory.state_layout(CONFIG, TIMES)
    shared.key_rows.index(TAIL - 1).store(new.k)
    shared.value_rows.index(TAIL - 1).store(new.v)
    if CONFIG.D == 0 and CONFIG.DECAY != "channel" and shared.key_rows.dtype == gl.bfloat16:
        fill_by_products(shared, new, state, slot, head, block, CONFIG)
        return
    if CONFIG.DECAY == "channel":
        COPY: gl.constexpr = memory.copy_layout(CONFIG.DK, 4, CONFIG.WARPS)
        shared.decays.index(TAIL - 1).store(new.decay)
        SHAPE: gl.constexpr = [TAIL, CONFIG.DK]
        rows = reinterpret(shared.decays, gl.float32, SHAPE, ROWS_LAYOUT)
        rows.store(gl.exp(rows.load(COPY)))
    for time in gl.static_range(TIMES):
        rows = shared.state.slice(time * ROWS, ROWS)
        s = [rows.slice(part * PART, PART, 1).load(LAYOUT) for part in numbers(PARTS)]
        for step in range(0, UNIT):
            token = _load_token(shared, new, count, step, time * ROWS, LAYOUT, CONFIG)
            s = _go_forward(s, token, CONFIG)
        store_state(s, state, slot, head, block, time * ROWS, LAYOUT, CONFIG)
