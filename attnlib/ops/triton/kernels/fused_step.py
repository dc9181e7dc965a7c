"""A decode or verification of a state layer in one launch: convolution, gates, recurrence, norm.

Programs are those of `state_step`. Each writes the convolved channels and the gates that it needs
to memory, and reads them back after a barrier. Programs that need the same channels write the same
bits, so their order does not matter. The last program of a group of the norm normalizes it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.short_convolution import (
    ConvolutionConfig,
    Inputs,
    convolve,
    write_window,
)
from attnlib.ops.triton.kernels.state_arguments import (
    UNALIGNED,
    Slots,
    StateBatch,
    StateConfig,
    Tail,
    Tokens,
)
from attnlib.ops.triton.kernels.state_program import compute_request, load_first
from attnlib.ops.triton.kernels.state_requests import (
    load_base,
    open_request,
    value_columns,
)
from attnlib.ops.triton.kernels.state_rows import clear_tokens
from attnlib.ops.triton.kernels.step_parts import StepConfig, head_gates, normalize_row

__all__ = ["FusedConfig", "fused_step_kernel"]


class FusedConfig(NamedTuple):
    """Constants of the kernel: those of its parts; the first channels of queries, keys and values;
    and DK as a power of two."""

    STATE: StateConfig
    CONVOLUTION: ConvolutionConfig
    STEP: StepConfig
    Q: int
    K: int
    V: int
    WIDTH: int


class Convolution(NamedTuple):
    """Inputs, weights, outputs and windows of the convolution: pointers."""

    x: Any
    weight: Any
    bias: Any
    out: Any
    window: Any
    positions: Any


@triton.jit
def _convolve_channels(request, given, channels, exist, writes, CONFIG: tl.constexpr):
    """Convolve the new tokens of a request in channels [N]; with `writes`, keep their window."""
    inside = exist[None, :]
    token = tl.arange(0, CONFIG.TOKENS)
    exists = token < request.count
    inputs = Inputs(
        given.x + request.first.to(tl.int64) * CONFIG.X_T + channels[None, :],
        given.window + request.source * CONFIG.WINDOW + channels[None, :],
        request.computed,
        inside,
    )
    position = request.computed + token
    y = convolve(inputs, position, exists, given.weight, given.bias, channels, CONFIG)
    row = (request.first + token).to(tl.int64)[:, None]
    place = given.out + row * CONFIG.O_T + channels[None, :]
    tl.store(place, y.to(given.out.dtype.element_ty), mask=exists[:, None] & inside)
    if writes:
        # A step of at most D + 1 tokens writes no row that another program reads.
        write_window(request, inputs, given.window, given.positions, channels, CONFIG)


@triton.jit
def _convolve_head(request, given, head, block, CONFIG: tl.constexpr):
    """Convolve the queries, keys and values of this program."""
    STATE: tl.constexpr = CONFIG.STATE
    CHANNELS: tl.constexpr = CONFIG.CONVOLUTION
    GROUP: tl.constexpr = STATE.HV // STATE.HK
    WIDTH: tl.constexpr = CONFIG.WIDTH
    key, key_head = tl.arange(0, WIDTH), head // GROUP
    exist = key < STATE.DK
    is_first = (block == 0) & (head % GROUP == 0)
    first = key_head * STATE.DK + key
    _convolve_channels(request, given, CONFIG.Q + first, exist, is_first, CHANNELS)
    _convolve_channels(request, given, CONFIG.K + first, exist, is_first, CHANNELS)
    columns = value_columns(block, STATE)
    values = CONFIG.V + head * STATE.DV + columns
    _convolve_channels(request, given, values, columns < STATE.DV, True, CHANNELS)


@triton.jit
def _normalize(request, out, z, weight, counters, head, CONFIG: tl.constexpr):
    """Normalize the outputs of a request in the group of a head, if all of them are there."""
    STEP: tl.constexpr = CONFIG.STEP
    PROGRAMS: tl.constexpr = STEP.SIZE // CONFIG.STATE.DV * CONFIG.STATE.BLOCKS
    group = head * CONFIG.STATE.DV // STEP.SIZE
    tl.debug_barrier()
    counter = counters + request.slot * STEP.HV + group
    if tl.atomic_add(counter, 1, sem="acq_rel") == PROGRAMS - 1:
        tl.store(counter, 0)  # as the next launch expects it
        for row in range(0, request.count):
            normalize_row(out, z, weight, request.first + row, group, STEP)


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens"],
    do_not_specialize_on_alignment=[*UNALIGNED, "rate", "gate_bias", "norm_weight"],
)
def fused_step_kernel(
    x,
    weight,
    bias,
    a,
    b,
    rate,
    gate_bias,
    z,
    norm_weight,
    convolved,
    decay,
    beta,
    skip,
    out,
    counters,
    window,
    window_positions,
    state,
    positions,
    tail_k,
    tail_v,
    tail_decay,
    tail_beta,
    query_start_loc,
    seq_lens,
    slots,
    sources,
    scale,
    num_reqs,
    num_tokens,
    CONFIG: tl.constexpr,
):
    """Compute a step of one request, of at most D + 1 tokens, for ROWS * PASSES rows of one head.

    CONFIG is a `FusedConfig`. Grid: (requests + 1, HV * BLOCKS). The last programs clear the rows
    after the last request.
    """
    STATE: tl.constexpr = CONFIG.STATE
    STEP: tl.constexpr = CONFIG.STEP
    number = tl.program_id(0)
    head, block = tl.program_id(1) // STATE.BLOCKS, tl.program_id(1) % STATE.BLOCKS
    if number == num_reqs:
        first = tl.load(query_start_loc + num_reqs)
        clear_tokens(out, first, num_tokens, head, block, STATE)
        return
    request = open_request(StateBatch(query_start_loc, seq_lens, slots, sources), number)
    if request.slot < 0:
        clear_tokens(out, request.first, request.first + request.count, head, block, STATE)
        return
    if request.count <= 0:
        return
    base = load_base(positions, request, head, block, STATE)
    # Before the convolution, which takes as long as the state is under way.
    tokens = Tokens(convolved + CONFIG.Q, convolved + CONFIG.K, convolved + CONFIG.V, decay, beta)
    slots_of = Slots(state, positions, Tail(tail_k, tail_v, tail_decay, tail_beta))
    s = load_first(request, base, tokens, slots_of, True, STATE)
    given = Convolution(x, weight, bias, convolved, window, window_positions)
    _convolve_head(request, given, head, block, CONFIG)
    if STEP.GATES > 0:
        token = tl.arange(0, STEP.TOKENS)
        row, exists = request.first + token, token < request.count
        head_gates(a, b, rate, gate_bias, decay, beta, row, exists, head, STEP)
    # Threads read what others of the program have written.
    tl.debug_barrier()
    values = skip, out, decay, scale
    compute_request(request, number, base, s, tokens, slots_of, *values, True, STATE)
    if STEP.NORM:
        _normalize(request, out, z, norm_weight, counters, head, CONFIG)
