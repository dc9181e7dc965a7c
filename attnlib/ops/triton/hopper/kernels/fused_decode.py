"""Decodes of few tokens in one launch, as `kernels.fused_step`, that copy the state to shared
memory, as `state_decode`.

New tokens are loaded before the state, behind whose bytes they would wait. They are convolved while
the copies are under way, and stay in shared memory and in registers; so do the outputs of a program
that has a whole group of the norm.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels import compat
from attnlib.ops.triton.hopper.kernels import fused_tokens as fused
from attnlib.ops.triton.hopper.kernels import state_memory as memory
from attnlib.ops.triton.hopper.kernels.state_decode import decode_tokens, store_slot
from attnlib.ops.triton.hopper.kernels.state_memory import ROWS_LAYOUT, VECTOR
from attnlib.ops.triton.hopper.kernels.state_slots import clear_rows, new_token, store_outputs
from attnlib.ops.triton.kernels import short_convolution as convolution
from attnlib.ops.triton.kernels import state_requests as requests
from attnlib.ops.triton.kernels.fused_step import FUSED_UNALIGNED, normalize_head, program_channels
from attnlib.ops.triton.kernels.state_arguments import Slots, StateBatch, Tail, Tokens, numbers
from attnlib.ops.triton.kernels.step_parts import load_norm

__all__ = ["fused_decode_kernel"]


@gluon.jit(
    do_not_specialize=["num_reqs", "num_tokens"], do_not_specialize_on_alignment=FUSED_UNALIGNED
)
def fused_decode_kernel(
    x, weight, bias, a, b, rate, gate_bias, z, norm_weight, convolved, decay, beta, skip, out,
    counters, window, window_positions, state, positions, tail_k, tail_v, tail_decay, tail_beta,
    query_start_loc, seq_lens, slots, sources, scale, num_reqs, num_tokens,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Arguments and grid of `fused_step_kernel`, for the layers and steps of
    `copied_decode_kernel`; `convolved` is not used, and gates that the kernel computes are not
    written."""
    STATE: gl.constexpr = CONFIG.STATE
    STEP: gl.constexpr = CONFIG.STEP
    CHANNELS: gl.constexpr = CONFIG.CONVOLUTION
    KEYS: gl.constexpr = memory.key_layout(STATE)
    ROWS: gl.constexpr = gl.SliceLayout(1, memory.state_layout(STATE, 1))
    # [tokens, channels]: each thread has four channels of all tokens.
    BOTH: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, STATE.WARPS], [1, 0])
    COLUMN: gl.constexpr = gl.SliceLayout(0, BOTH)
    TOKEN: gl.constexpr = gl.SliceLayout(1, BOTH)
    compat.wait_on_dependent_grids()
    compat.launch_dependent_grids()
    number = gl.program_id(0)
    head, block = gl.program_id(1) // STATE.BLOCKS, gl.program_id(1) % STATE.BLOCKS
    if number == num_reqs:
        first = gl.load(query_start_loc + num_reqs)
        clear_rows(out, first, num_tokens, head, block, ROWS, STATE)
        return
    request = requests.open_request(StateBatch(query_start_loc, seq_lens, slots, sources), number)
    if request.slot < 0:
        last = request.first + request.count
        clear_rows(out, request.first, last, head, block, ROWS, STATE)
        return
    if request.count <= 0:
        return
    base = requests.load_base(positions, request, head, block, STATE)
    element, index = gl.arange(0, CONFIG.ELEMENTS, COLUMN), gl.arange(0, STEP.WIDTH, COLUMN)
    channels, exist, writes = program_channels(element, head, block, CONFIG)
    place = x + request.first.to(gl.int64) * CHANNELS.X_T + channels[None, :]
    before = window + request.source * CHANNELS.WINDOW + channels[None, :]
    inputs = convolution.Inputs(place, before, request.computed, exist[None, :])
    token = gl.arange(0, STATE.QUERIES, TOKEN)
    position, exists = request.computed + token, token < request.count
    pairs = convolution.load_inputs(inputs, position, exists, CHANNELS)
    tokens = requests.open_head(Tokens(x, x, x, decay, beta), head, STATE)
    new_rows = [new_token(request, query) for query in numbers(STATE.QUERIES)]
    projections = [
        fused.load_projections(row, a, b, tokens, head, KEYS, CONFIG) for row in new_rows
    ]
    taps, speed, shift = (
        fused.load_taps(weight, bias, channels, STATE.WARPS, CHANNELS),
        scale,
        scale,
    )
    if STEP.GATES != 0:
        speed = gl.load(rate + head).to(gl.float32)
        shift = fused.load_channels(gate_bias, head, KEYS, STATE)
    norms = new_rows
    if fused.has_groups(CONFIG):
        norms = [load_norm(z, norm_weight, row, head, index, STEP) for row in new_rows]
    compat.partition_barrier()  # ptxas would put these loads behind the copies
    tails = Tail(tail_k, tail_v, tail_decay, tail_beta)
    tail = requests.open_tail(tails, request.source, head, STATE)
    shared = memory.allocate(tails, STATE)
    memory.copy_tail(shared, request, base, tokens, tail, block, STATE)
    memory.copy_state(shared, state, request.source, head, block, base, STATE)
    # A step of at most D + 1 tokens writes no row that another program reads.
    inputs = convolution.Inputs(place, before, request.computed, writes[None, :])
    given = inputs, window, window_positions, channels, gl.arange(0, 1, TOKEN)
    convolution.write_window(request, request.computed, *given, CHANNELS)
    row = (position % CHANNELS.RING)[:, None] * CHANNELS.C + channels[None, :]
    target, newest = window + request.slot * CHANNELS.WINDOW, pairs[CHANNELS.W - 1][1]
    gl.store(target + row, newest, mask=exists[:, None] & inputs.inside)
    KIND: gl.constexpr = x.dtype.element_ty
    SHAPE: gl.constexpr = [STATE.QUERIES, CONFIG.ELEMENTS]
    rows = gl.allocate_shared_memory(KIND, SHAPE, VECTOR)
    y = convolution.convolve(pairs, taps, CHANNELS).to(KIND)
    held = compat.reinterpret(rows, KIND, SHAPE, ROWS_LAYOUT)
    held.store(y)
    gates = [(each, speed, shift) for each in projections]
    given = [(rows.index(n), gates[n]) for n in numbers(STATE.QUERIES)]
    new = [fused.convolved_token(*each, KEYS, CONFIG) for each in given]
    QUERY: gl.constexpr = memory.query_layout(STATE.DK, STATE.WARPS)
    queries = held.slice(0, STATE.DK, 1).load(QUERY).to(gl.float32)
    outputs = decode_tokens(request, base, new, queries, shared, skip + head, scale, STATE)
    if fused.has_groups(CONFIG):
        fused.store_normalized(outputs, norms, request, out, head, index, CONFIG)
    else:
        store_outputs(outputs, request, out, head, block, ROWS, STATE)
    slots_of = Slots(state, positions, tails)
    store_slot(request, base, new, shared, slots_of, head, block, STATE)
    if STEP.NORM and not fused.has_groups(CONFIG):
        normalize_head(request, out, z, norm_weight, counters, index, head, CONFIG)
