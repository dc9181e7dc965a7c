"""A decode or verification of a state layer in one launch: convolution, gates, recurrence, norm
(decodes that copy states to shared memory: `hopper.kernels.fused_decode`).

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
    load_inputs,
    load_taps,
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
)
from attnlib.ops.triton.kernels.state_rows import clear_tokens
from attnlib.ops.triton.kernels.step_parts import StepConfig, head_gates, normalize_row

__all__ = [
    "FUSED_UNALIGNED",
    "Convolution",
    "FusedConfig",
    "Gates",
    "Places",
    "fused_step_kernel",
    "normalize_head",
    "program_channels",
]


FUSED_UNALIGNED = [*UNALIGNED, "rate", "gate_bias", "norm_weight"]


class FusedConfig(NamedTuple):
    """Constants of the kernel: those of its parts; the first channels of queries, keys and values;
    DK, and the elements of queries, keys and values of a program, as powers of two."""

    STATE: StateConfig
    CONVOLUTION: ConvolutionConfig
    STEP: StepConfig
    Q: int
    K: int
    V: int
    WIDTH: int
    ELEMENTS: int


class Places(NamedTuple):
    """Numbers from 0 on in the layouts of a kernel.

    Attributes:
        token: [TOKENS], of the step.
        zero: [1].
        element: [ELEMENTS], of the queries, keys and values of a program, beside `token`.
        channel: of a decay, beside `token`.
        index: of a group of the norm.
    """

    token: Any
    zero: Any
    element: Any
    channel: Any
    index: Any


class Convolution(NamedTuple):
    """Inputs, weights, outputs and windows of the convolution: pointers."""

    x: Any
    weight: Any
    bias: Any
    out: Any
    window: Any
    positions: Any


class Gates(NamedTuple):
    """Projections, parameters and outputs of the gates: pointers."""

    a: Any
    b: Any
    rate: Any
    bias: Any
    decay: Any
    beta: Any


@triton.jit
def program_channels(element, head, block, CONFIG: tl.constexpr):
    """Return the channels [ELEMENTS] of the queries, keys and values of a program, which exist, and
    whose windows it writes."""
    STATE: tl.constexpr = CONFIG.STATE
    WIDTH: tl.constexpr = CONFIG.WIDTH
    SPAN: tl.constexpr = STATE.ROWS * STATE.PASSES
    GROUP: tl.constexpr = STATE.HV // STATE.HK
    is_value, key, row = element >= 2 * WIDTH, element % WIDTH, element - 2 * WIDTH
    column = block * SPAN + row
    first = tl.where(element < WIDTH, CONFIG.Q, CONFIG.K) + head // GROUP * STATE.DK
    channels = tl.where(is_value, CONFIG.V + head * STATE.DV + column, first + key)
    values = is_value & (row < SPAN) & (column < STATE.DV)
    keys = (element < 2 * WIDTH) & (key < STATE.DK)
    # One program writes the windows of keys that several have.
    shared = tl.where(block + head % GROUP == 0, 2 * WIDTH, 0)
    return channels, values | keys, values | (keys & (element < shared))


@triton.jit
def _prepare_head(request, given, gates, places, head, block, CONFIG: tl.constexpr):
    """Write the queries, keys, values and gates of this program, for all of its threads."""
    CHANNELS: tl.constexpr = CONFIG.CONVOLUTION
    STEP: tl.constexpr = CONFIG.STEP
    exists = places.token < request.count
    channels, exist, writes = program_channels(places.element, head, block, CONFIG)
    x = given.x + request.first.to(tl.int64) * CHANNELS.X_T + channels[None, :]
    window = given.window + request.source * CHANNELS.WINDOW + channels[None, :]
    inputs = Inputs(x, window, request.computed, exist[None, :])
    position = request.computed + places.token
    # All channels at once: their loads are under way together.
    pairs = load_inputs(inputs, position, exists, CHANNELS)
    taps = load_taps(given.weight, given.bias, channels, CHANNELS)
    y = convolve(pairs, taps, CHANNELS)
    row = (request.first + places.token).to(tl.int64)[:, None]
    place = given.out + row * CHANNELS.O_T + channels[None, :]
    tl.store(place, y.to(given.out.dtype.element_ty), mask=exists[:, None] & inputs.inside)
    # A step of at most D + 1 tokens writes no row that another program reads.
    inputs = Inputs(x, window, request.computed, writes[None, :])
    windows = given.window, given.positions
    write_window(request, inputs, *windows, channels, places.zero, CHANNELS)
    if STEP.GATES > 0:
        head_gates(*gates, request.first + places.token, exists, places.channel, head, STEP)
    # Threads read what others of the program have written.
    tl.debug_barrier()


@triton.jit
def normalize_head(request, out, z, weight, counters, index, head, CONFIG: tl.constexpr):
    """Normalize the outputs of a request in the group of a head, if all of them are there."""
    STEP: tl.constexpr = CONFIG.STEP
    PROGRAMS: tl.constexpr = STEP.SIZE // CONFIG.STATE.DV * CONFIG.STATE.BLOCKS
    group = head * CONFIG.STATE.DV // STEP.SIZE
    tl.debug_barrier()
    counter = counters + request.slot * STEP.HV + group
    if tl.atomic_add(counter, 1, sem="acq_rel") == PROGRAMS - 1:
        tl.store(counter, 0)  # as the next launch expects it
        for row in range(0, request.count):
            normalize_row(out, z, weight, request.first + row, group, index, STEP)


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens"], do_not_specialize_on_alignment=FUSED_UNALIGNED
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
    places = Places(
        tl.arange(0, STEP.TOKENS),
        tl.arange(0, 1),
        tl.arange(0, CONFIG.ELEMENTS),
        tl.arange(0, STEP.CHANNELS),
        tl.arange(0, STEP.WIDTH),
    )
    given = Convolution(x, weight, bias, convolved, window, window_positions)
    gates = Gates(a, b, rate, gate_bias, decay, beta)
    _prepare_head(request, given, gates, places, head, block, CONFIG)
    values = skip, out, decay, scale
    compute_request(request, number, base, s, tokens, slots_of, *values, True, STATE)
    if STEP.NORM:
        normalize_head(request, out, z, norm_weight, counters, places.index, head, CONFIG)
