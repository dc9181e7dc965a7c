"""New tokens of decodes in one launch: their projections, gates, convolved rows, and their norm."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.state_slots import Token, load_gates
from attnlib.ops.triton.kernels.state_arguments import DECAY_CHANNEL
from attnlib.ops.triton.kernels.step_parts import normalized, step_beta, step_decay

__all__ = [
    "convolved_token",
    "has_groups",
    "load_channels",
    "load_projections",
    "store_normalized",
]


@gluon.constexpr_function
def has_groups(CONFIG):
    """Whether a program computes whole groups of the norm."""
    size = CONFIG.STATE.ROWS * CONFIG.STATE.PASSES
    return CONFIG.STEP.NORM and CONFIG.STEP.SIZE == size == CONFIG.STATE.DV


@gluon.jit
def load_projections(token, a, b, tokens, head, KEYS: gl.constexpr, CONFIG: gl.constexpr):
    """Return what `_gates` takes of a new token: projections, or (decay, beta) as given."""
    STATE: gl.constexpr = CONFIG.STATE
    STEP: gl.constexpr = CONFIG.STEP
    if STEP.GATES == 0:
        x, y = load_gates(token, tokens, KEYS, STATE)
    else:
        x = load_channels(a + token * STEP.A_T, head, KEYS, STATE)
        y = x
        if STEP.HAS_BETA and STEP.GATES != 3:
            y = gl.load(b + token * STEP.B_T + head)
    return x, y


@gluon.jit
def load_channels(base, head, KEYS: gl.constexpr, STATE: gl.constexpr):
    """Return the number of a head, or its channels [DK] where decays have them."""
    if STATE.DECAY == DECAY_CHANNEL:
        x = gl.load(base + head * STATE.DK + gl.arange(0, STATE.DK, KEYS))
    else:
        x = gl.load(base + head)
    return x


@gluon.jit
def _gates(projections, rate, shift, CONFIG: gl.constexpr):
    """Return (decay, beta) of a token."""
    STEP: gl.constexpr = CONFIG.STEP
    decay, beta = projections
    if STEP.GATES != 0:
        decay, size = step_decay(decay.to(gl.float32) + shift.to(gl.float32), rate, STEP)
        if STEP.GATES == 3:
            beta = size
        elif STEP.HAS_BETA:
            beta = step_beta(beta, STEP)
        else:
            beta = 1.0
    return decay, beta


@gluon.jit
def convolved_token(row, gates, KEYS: gl.constexpr, ROWS: gl.constexpr, CONFIG: gl.constexpr):
    """Return the `Token` of a new token and its query, from its convolved channels and arguments of
    `_gates`."""
    STATE: gl.constexpr = CONFIG.STATE
    query = row.slice(0, STATE.DK).load(KEYS).to(gl.float32)
    k = row.slice(CONFIG.WIDTH, STATE.DK).load(KEYS)
    v = row.slice(2 * CONFIG.WIDTH, STATE.ROWS * STATE.PASSES).load(ROWS)
    decay, beta = _gates(*gates, CONFIG)
    return Token(k, v, decay, beta), query


@gluon.jit
def store_normalized(outputs, norms, request, out, head, index, CONFIG: gl.constexpr):
    """Normalize and store the outputs of the new tokens that exist."""
    STEP: gl.constexpr = CONFIG.STEP
    for number in gl.static_range(len(outputs)):
        if number < request.count:
            x = gl.convert_layout(outputs[number].to(out.dtype.element_ty), index.type.layout)
            gate, factor = norms[number]
            x = normalized(x, gate, factor, STEP)
            place = out + (request.first.to(gl.int64) + number) * STEP.O_T + head * STEP.SIZE
            gl.store(place + index, x.to(out.dtype.element_ty))
