"""A decode or verification of a state layer in one launch: convolution, gates, recurrence, norm
(decodes that copy states to shared memory: `hopper.kernels.fused_decode`).

Programs are those of `state_step`. Each writes the convolved channels and the gates that it needs
to memory, and reads them back after a barrier. Programs that need the same channels write the same
bits, so their order does not matter. The last program of a group of the norm normalizes it.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from attnlib.ops.triton.kernels import short_convolution as convolution
from attnlib.ops.triton.kernels import state_arguments as arguments
from attnlib.ops.triton.kernels.state_program import compute_request, load_first
from attnlib.ops.triton.kernels.state_requests import load_base, open_request
from attnlib.ops.triton.kernels.state_rows import clear_tokens
from attnlib.ops.triton.kernels.step_parts import StepConfig, head_gates, normalize_row

__all__ = [
    "FUSED_UNALIGNED",
    "FusedConfig",
    "fused_step_kernel",
    "normalize_head",
    "program_channels",
]


FUSED_UNALIGNED = [*arguments.UNALIGNED, "rate", "gate_bias", "norm_weight"]


class FusedConfig(NamedTuple):
    """Constants of the kernel: those of its parts; the first channels of queries, keys and values;
    DK, and the elements of queries, keys and values of a program, as powers of two."""

    STATE: arguments.StateConfig
    CONVOLUTION: convolution.ConvolutionConfig
    STEP: StepConfig
    Q: int
    K: int
    V: int
    WIDTH: int
    ELEMENTS: int


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
    x, weight, bias, a, b, rate, gate_bias, z, norm_weight, convolved, decay, beta, skip, out,
    counters, window, window_positions, state, positions, tail_k, tail_v, tail_decay, tail_beta,
    query_start_loc, seq_lens, slots, sources, scale, num_reqs, num_tokens,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute a step of one request, of at most D + 1 tokens, for ROWS * PASSES rows of one head.

    CONFIG is a `FusedConfig`. Grid: (requests + 1, HV * BLOCKS). The last programs clear the rows
    after the last request.
    """
    STATE: tl.constexpr = CONFIG.STATE
    CHANNELS: tl.constexpr = CONFIG.CONVOLUTION
    STEP: tl.constexpr = CONFIG.STEP
    number = tl.program_id(0)
    head, block = tl.program_id(1) // STATE.BLOCKS, tl.program_id(1) % STATE.BLOCKS
    if number == num_reqs:
        first = tl.load(query_start_loc + num_reqs)
        clear_tokens(out, first, num_tokens, head, block, STATE)
        return
    request = open_request(arguments.StateBatch(query_start_loc, seq_lens, slots, sources), number)
    if request.slot < 0:
        clear_tokens(out, request.first, request.first + request.count, head, block, STATE)
        return
    if request.count <= 0:
        return
    base = load_base(positions, request, head, block, STATE)
    # Before the convolution, which takes as long as the state is under way.
    tokens = arguments.Tokens(
        convolved + CONFIG.Q, convolved + CONFIG.K, convolved + CONFIG.V, decay, beta
    )
    slots_of = arguments.Slots(
        state, positions, arguments.Tail(tail_k, tail_v, tail_decay, tail_beta)
    )
    s = load_first(request, base, tokens, slots_of, True, STATE)
    token, element = tl.arange(0, STEP.TOKENS), tl.arange(0, CONFIG.ELEMENTS)
    exists = token < request.count
    channels, exist, writes = program_channels(element, head, block, CONFIG)
    inputs = convolution.Inputs(
        x + request.first.to(tl.int64) * CHANNELS.X_T + channels[None, :],
        window + request.source * CHANNELS.WINDOW + channels[None, :],
        request.computed,
        exist[None, :],
    )
    # All channels at once: their loads are under way together.
    pairs = convolution.load_inputs(inputs, request.computed + token, exists, CHANNELS)
    taps = convolution.load_taps(weight, bias, channels, CHANNELS)
    y = convolution.convolve(pairs, taps, CHANNELS)
    row = (request.first + token).to(tl.int64)[:, None]
    place = convolved + row * CHANNELS.O_T + channels[None, :]
    tl.store(place, y.to(convolved.dtype.element_ty), mask=exists[:, None] & inputs.inside)
    # A step of at most D + 1 tokens writes no row that another program reads.
    inputs = convolution.Inputs(inputs.x, inputs.window, request.computed, writes[None, :])
    written = inputs, window, window_positions, channels, tl.arange(0, 1)
    convolution.write_window(request, request.end, *written, CHANNELS)
    if STEP.GATES > 0:
        given = a, b, rate, gate_bias, decay, beta, request.first + token, exists
        head_gates(*given, tl.arange(0, STEP.CHANNELS), head, STEP)
    # Threads read what others of the program have written.
    tl.debug_barrier()
    results = arguments.Results(skip, out, decay, scale)
    compute_request(request, number, base, s, tokens, slots_of, results, True, STATE)
    if STEP.NORM:
        index = tl.arange(0, STEP.WIDTH)
        normalize_head(request, out, z, norm_weight, counters, index, head, CONFIG)
