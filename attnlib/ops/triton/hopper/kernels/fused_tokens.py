"""New tokens of decodes in one launch: their projections, gates, convolved rows, and their norm."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.state_slots import Token, load_gates, new_token
from attnlib.ops.triton.kernels.state_arguments import DECAY_CHANNEL
from attnlib.ops.triton.kernels.step_parts import load_norm, normalized, step_beta, step_decay

__all__ = [
    "has_groups",
    "load_channels",
    "load_norms",
    "load_projections",
    "new_tokens",
    "store_normalized",
]


@gluon.constexpr_function
def has_groups(CONFIG):
    """Whether a program computes whole groups of the norm."""
    size = CONFIG.STATE.ROWS * CONFIG.STATE.PASSES
    return CONFIG.STEP.NORM and CONFIG.STEP.SIZE == size == CONFIG.STATE.DV


@gluon.jit
def load_projections(request, a, b, tokens, head, KEYS: gl.constexpr, CONFIG: gl.constexpr):
    """Return what `_gates` takes of the new tokens: projections, or (decay, beta) as given."""
    STATE: gl.constexpr = CONFIG.STATE
    STEP: gl.constexpr = CONFIG.STEP
    QUERIES: gl.constexpr = STATE.QUERIES
    found = ()
    for number in gl.static_range(QUERIES):
        token = new_token(request, number)
        if STEP.GATES == 0:
            found = found + (load_gates(token, tokens, KEYS, STATE),)
        else:
            x = load_channels(a + token * STEP.A_T, head, KEYS, STATE)
            y = x
            if STEP.HAS_BETA and STEP.GATES != 3:
                y = gl.load(b + token * STEP.B_T + head)
            found = found + ((x, y),)
    return found


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
def new_tokens(rows, projections, rate, shift, KEYS: gl.constexpr, ROWS, CONFIG: gl.constexpr):
    """Return the `Token` of all new tokens and their queries, from convolved `rows`."""
    STATE: gl.constexpr = CONFIG.STATE
    SPAN: gl.constexpr = STATE.ROWS * STATE.PASSES
    QUERIES: gl.constexpr = STATE.QUERIES
    ks = ()
    vs = ()
    decays = ()
    betas = ()
    queries = ()
    for number in gl.static_range(QUERIES):
        row = rows.index(number)
        queries = queries + (row.slice(0, STATE.DK).load(KEYS).to(gl.float32),)
        ks = ks + (row.slice(CONFIG.WIDTH, STATE.DK).load(KEYS),)
        vs = vs + (row.slice(2 * CONFIG.WIDTH, SPAN).load(ROWS),)
        decay, beta = _gates(projections[number], rate, shift, CONFIG)
        decays = decays + (decay,)
        betas = betas + (beta,)
    return Token(ks, vs, decays, betas), queries


@gluon.jit
def load_norms(request, z, weight, head, index, CONFIG: gl.constexpr):
    """Return what `load_norm` returns of each new token, if the program has its group."""
    STEP: gl.constexpr = CONFIG.STEP
    QUERIES: gl.constexpr = CONFIG.STATE.QUERIES
    found = ()
    if has_groups(CONFIG):
        for number in gl.static_range(QUERIES):
            token = new_token(request, number)
            found = found + (load_norm(z, weight, token, head, index, STEP),)
    return found


@gluon.jit
def store_normalized(outputs, norms, request, out, head, index, CONFIG: gl.constexpr):
    """Normalize and store the outputs of the new tokens that exist."""
    STEP: gl.constexpr = CONFIG.STEP
    QUERIES: gl.constexpr = CONFIG.STATE.QUERIES
    for number in gl.static_range(QUERIES):
        if number < request.count:
            x = gl.convert_layout(outputs[number].to(out.dtype.element_ty), index.type.layout)
            gate, factor = norms[number]
            x = normalized(x, gate, factor, STEP)
            place = out + (request.first.to(gl.int64) + number) * STEP.O_T + head * STEP.SIZE
            gl.store(place + index, x.to(out.dtype.element_ty))
