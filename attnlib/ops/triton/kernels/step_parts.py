"""Gates before a recurrence and the norm after it, for launches of their own and for `fused_step`.

The bits of both must be equal, so each has one function, with elementwise operations and sums of
pairs only, whose order no layout of a tensor changes.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

__all__ = [
    "GATES",
    "StepConfig",
    "gated_norm_kernel",
    "head_gates",
    "load_norm",
    "normalize_row",
    "normalized",
    "state_gates_kernel",
    "step_beta",
    "step_decay",
]

GATES = {"given": 0, "softplus": 1, "bounded": 2, "mamba2": 3}
"""`StepForm.gates` -> GATES of `StepConfig`."""


class StepConfig(NamedTuple):
    """Constants of what surrounds a recurrence, see `StepForm`. Heads are dense in all tensors.

    Attributes:
        HV, DK, CHANNELS: state heads; the elements of a decay and their power of two, 1 for decays
            per head.
        TOKENS: tokens of a program.
        GATES, LOW, HIGH, BETA, HAS_BETA: the formula (`GATES`), its bounds, and the factor of beta.
        NORM, SIZE, WIDTH, EPS: whether there is a norm, its elements and their power of two.
        HAS_Z, GATE_FIRST, SIGMOID: the output gate.
        A_T, B_T, Z_T, O_T: strides of tokens.
        WEIGHT_G: stride of groups of the weight of the norm, 0 if they share it.
    """

    HV: int
    DK: int
    CHANNELS: int
    TOKENS: int
    GATES: int
    LOW: float
    HIGH: float
    BETA: float
    HAS_BETA: bool
    NORM: bool
    SIZE: int
    WIDTH: int
    EPS: float
    HAS_Z: bool
    GATE_FIRST: bool
    SIGMOID: bool
    A_T: int
    B_T: int
    Z_T: int
    O_T: int
    WEIGHT_G: int


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)), to the precision of float32 also where it is small."""
    small = tl.exp(-tl.abs(x))
    # log(1 + e) = 2 artanh(s) for s = e / (2 + e), at most 1/3: eight terms of its series.
    s = small / (2.0 + small)
    square = s * s
    series = square * (1.0 / 15.0) + 1.0 / 13.0
    series = series * square + 1.0 / 11.0
    series = series * square + 1.0 / 9.0
    series = series * square + 1.0 / 7.0
    series = series * square + 1.0 / 5.0
    series = series * square + 1.0 / 3.0
    return tl.maximum(x, 0.0) + 2.0 * s * (series * square + 1.0)


@triton.jit
def step_decay(x, rate, STEP: tl.constexpr):
    """Return the log decay of a projection with its bias, and the step size that it comes from."""
    if STEP.GATES == 2:
        size = x
        g = _sigmoid(rate * x) * STEP.LOW
    else:
        size = _softplus(x)
        if STEP.GATES == 3:
            size = tl.minimum(tl.maximum(size, STEP.LOW), STEP.HIGH)
        g = -rate * size
    return g, size


@triton.jit
def step_beta(y, STEP: tl.constexpr):
    """Return the beta of a projection."""
    return _sigmoid(y.to(tl.float32)) * STEP.BETA


@triton.jit
def head_gates(a, b, rate, bias, decay, beta, token, exists, channel, head, STEP: tl.constexpr):
    """Write the log decays and betas of tokens [N] of one head, from projections `a` and `b`;
    `channel` counts to CHANNELS."""
    inside = exists[:, None] & (channel < STEP.DK)[None, :]
    token = token.to(tl.int64)
    place = token[:, None] * STEP.A_T + head * STEP.DK + channel[None, :]
    x = tl.load(a + place, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + head * STEP.DK + channel, mask=channel < STEP.DK, other=0.0)
    x = x + shift.to(tl.float32)[None, :]
    rate = tl.load(rate + head).to(tl.float32)
    row = (token * STEP.HV + head)[:, None]
    g, size = step_decay(x, rate, STEP)
    if STEP.GATES == 3:
        tl.store(beta + row + channel[None, :], size, mask=inside)
    tl.store(decay + row * STEP.DK + channel[None, :], g, mask=inside)
    if STEP.HAS_BETA and STEP.GATES != 3:
        y = tl.load(b + token * STEP.B_T + head, mask=exists, other=0.0)
        tl.store(beta + token * STEP.HV + head, step_beta(y, STEP), mask=exists)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["rate", "bias"])
def state_gates_kernel(a, b, rate, bias, decay, beta, num_tokens, CONFIG: tl.constexpr):
    """Write the gates of a tile of tokens of one head. Grid: (tiles, HV)."""
    token = tl.program_id(0) * CONFIG.TOKENS + tl.arange(0, CONFIG.TOKENS)
    exists, channel = token < num_tokens, tl.arange(0, CONFIG.CHANNELS)
    head_gates(a, b, rate, bias, decay, beta, token, exists, channel, tl.program_id(1), CONFIG)


@triton.jit
def _gated(x, z, SIGMOID: tl.constexpr):
    """Return x act(z). A zero stays zero: rows of no request have any z (T3)."""
    gate = _sigmoid(z)
    if not SIGMOID:
        gate = gate * z
    return tl.where(x == 0.0, x, x * gate)


@triton.jit
def load_norm(z, weight, token, group, index, STEP: tl.constexpr):
    """Return the output gates of one group of a token, and its weights, [WIDTH] as stored."""
    inside = index < STEP.SIZE
    factor = tl.load(weight + group * STEP.WEIGHT_G + index, mask=inside, other=0.0)
    gate = factor
    if STEP.HAS_Z:
        place = z + token.to(tl.int64) * STEP.Z_T + group * STEP.SIZE + index
        gate = tl.load(place, mask=inside, other=0.0)
    return gate, factor


@triton.jit
def normalized(x, gate, factor, STEP: tl.constexpr):
    """Return the normalized outputs x [WIDTH], which are rounded, of what `load_norm` returns."""
    LEVELS: tl.constexpr = STEP.WIDTH.bit_length() - 1
    WIDTH: tl.constexpr = STEP.WIDTH
    x, gate = x.to(tl.float32), gate.to(tl.float32)
    if STEP.HAS_Z and STEP.GATE_FIRST:
        x = _gated(x, gate, STEP.SIGMOID)
    sums = x * x
    for level in tl.static_range(LEVELS):
        sums = tl.sum(tl.reshape(sums, [WIDTH >> (level + 1), 2]), axis=1)
    x = x * (1.0 / tl.sqrt_rn(tl.sum(sums, 0) / STEP.SIZE + STEP.EPS)) * factor.to(tl.float32)
    if STEP.HAS_Z and not STEP.GATE_FIRST:
        x = _gated(x, gate, STEP.SIGMOID)
    return x


@triton.jit
def normalize_row(out, z, weight, token, group, index, STEP: tl.constexpr):
    """Normalize one group of the outputs of one token in place; `index` counts to WIDTH."""
    inside = index < STEP.SIZE
    place = out + token.to(tl.int64) * STEP.O_T + group * STEP.SIZE + index
    # Other programs may have written these outputs, so they are not read from the L1 cache.
    x = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
    gate, factor = load_norm(z, weight, token, group, index, STEP)
    x = normalized(x, gate, factor, STEP)
    tl.store(place, x.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["weight"])
def gated_norm_kernel(out, z, weight, CONFIG: tl.constexpr):
    """Normalize one group of the outputs of one token. Grid: (tokens, groups)."""
    index = tl.arange(0, CONFIG.WIDTH)
    normalize_row(out, z, weight, tl.program_id(0), tl.program_id(1), index, CONFIG)
