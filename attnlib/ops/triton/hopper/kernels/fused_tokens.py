"""New tokens of decodes in one launch: their projections, gates, convolved rows, and their norm."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.state_memory import value_layout
from attnlib.ops.triton.hopper.kernels.state_slots import Token, load_gates
from attnlib.ops.triton.kernels import short_convolution as convolution
from attnlib.ops.triton.kernels.step_parts import normalized, step_beta, step_decay

__all__ = [
    "convolved_token",
    "has_groups",
    "load_channels",
    "load_projections",
    "load_taps",
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
def load_taps(weight, bias, channels, WARPS: gl.constexpr, CONFIG: gl.constexpr):
    """Return what `short_convolution.load_taps` does: four taps by one load."""
    if CONFIG.W == 4 and not CONFIG.HAS_BIAS:
        TAPS: gl.constexpr = gl.BlockedLayout([4, 4], [32, 1], [WARPS, 1], [1, 0])
        channel = gl.convert_layout(channels, gl.SliceLayout(1, TAPS))[:, None]
        tap = gl.arange(0, 4, gl.SliceLayout(0, TAPS))[None, :] * CONFIG.W_W
        x = gl.load(weight + channel * CONFIG.W_C + tap, mask=channel < CONFIG.C, other=0.0)
        even, odd = gl.split(gl.reshape(x, [x.shape[0], 2, 2]))
        pairs = gl.split(even), gl.split(odd)
        found = pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]
        taps = [gl.convert_layout(tap, channels.type.layout) for tap in found]
    else:
        taps = convolution.load_taps(weight, bias, channels, CONFIG)
    return taps


@gluon.jit
def load_channels(base, head, KEYS: gl.constexpr, STATE: gl.constexpr):
    """Return the number of a head, or its channels [DK] where decays have them."""
    if STATE.DECAY == "channel":
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
def convolved_token(row, gates, KEYS: gl.constexpr, CONFIG: gl.constexpr):
    """Return the `Token` of a new token, from its convolved channels and arguments of `_gates`."""
    STATE: gl.constexpr = CONFIG.STATE
    k = row.slice(CONFIG.WIDTH, STATE.DK).load(KEYS)
    v = row.slice(2 * CONFIG.WIDTH, STATE.ROWS * STATE.PASSES).load(value_layout(STATE))
    decay, beta = _gates(*gates, CONFIG)
    return Token(k, v, decay, beta)


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
