"""Decodes of few tokens in one launch, as `kernels.fused_step`, that copy the state to shared
memory, as `state_decode`.

New tokens are loaded before the state, behind whose bytes they would wait. They are convolved while
the copies are under way, and stay in shared memory and in registers; so do the outputs of a program
that has a whole group of the norm.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import partition_barrier, reinterpret
from attnlib.ops.triton.hopper.kernels.state_decode import (
    decode_tokens,
    store_outputs,
    store_slot,
)
from attnlib.ops.triton.hopper.kernels.state_memory import (
    ROWS_LAYOUT,
    VECTOR,
    allocate,
    copy_state,
    copy_tail,
    key_layout,
    state_layout,
)
from attnlib.ops.triton.hopper.kernels.state_slots import (
    Token,
    clear_rows,
    load_gates,
    new_token,
)
from attnlib.ops.triton.kernels.fused_step import (
    FUSED_UNALIGNED,
    normalize_head,
    program_channels,
)
from attnlib.ops.triton.kernels.short_convolution import (
    Inputs,
    convolve,
    load_inputs,
    load_taps,
    write_window,
)
from attnlib.ops.triton.kernels.state_arguments import (
    DECAY_CHANNEL,
    Slots,
    StateBatch,
    Tail,
    Tokens,
)
from attnlib.ops.triton.kernels.state_requests import (
    load_base,
    open_head,
    open_request,
    open_tail,
)
from attnlib.ops.triton.kernels.step_parts import load_norm, normalized, step_beta, step_decay

__all__ = ["fused_decode_kernel"]


@gluon.constexpr_function
def _channel_layout(CONFIG):
    """[tokens, channels]: each thread has four channels of all tokens."""
    return gl.BlockedLayout([1, 4], [1, 32], [1, CONFIG.STATE.WARPS], [1, 0])


@gluon.constexpr_function
def _has_groups(CONFIG):
    """Whether a program computes whole groups of the norm."""
    size = CONFIG.STATE.ROWS * CONFIG.STATE.PASSES
    return CONFIG.STEP.NORM and CONFIG.STEP.SIZE == size == CONFIG.STATE.DV


@gluon.jit
def _load_projections(request, a, b, tokens, head, KEYS: gl.constexpr, CONFIG: gl.constexpr):
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
            x = _load_channels(a + token * STEP.A_T, head, KEYS, STATE)
            y = x
            if STEP.HAS_BETA and STEP.GATES != 3:
                y = gl.load(b + token * STEP.B_T + head)
            found = found + ((x, y),)
    return found


@gluon.jit
def _load_channels(base, head, KEYS: gl.constexpr, STATE: gl.constexpr):
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
def _new_tokens(rows, projections, rate, shift, KEYS: gl.constexpr, ROWS, CONFIG: gl.constexpr):
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
def _load_norms(request, z, weight, head, index, CONFIG: gl.constexpr):
    """Return what `load_norm` returns of each new token, if the program has its group."""
    STEP: gl.constexpr = CONFIG.STEP
    QUERIES: gl.constexpr = CONFIG.STATE.QUERIES
    found = ()
    if _has_groups(CONFIG):
        for number in gl.static_range(QUERIES):
            token = new_token(request, number)
            found = found + (load_norm(z, weight, token, head, index, STEP),)
    return found


@gluon.jit
def _store_normalized(outputs, norms, request, out, head, index, CONFIG: gl.constexpr):
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


@gluon.jit(
    do_not_specialize=["num_reqs", "num_tokens"], do_not_specialize_on_alignment=FUSED_UNALIGNED
)
def fused_decode_kernel(
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
    CONFIG: gl.constexpr,
):
    """Arguments and grid of `fused_step_kernel`, for the layers and steps of
    `copied_decode_kernel`; `convolved` is not used, and gates that the kernel computes are not
    written."""
    STATE: gl.constexpr = CONFIG.STATE
    STEP: gl.constexpr = CONFIG.STEP
    CHANNELS: gl.constexpr = CONFIG.CONVOLUTION
    KEYS: gl.constexpr = key_layout(STATE)
    LAYOUT: gl.constexpr = state_layout(STATE, 1)
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    BOTH: gl.constexpr = _channel_layout(CONFIG)
    COLUMN: gl.constexpr = gl.SliceLayout(0, BOTH)
    TOKEN: gl.constexpr = gl.SliceLayout(1, BOTH)
    number = gl.program_id(0)
    head, block = gl.program_id(1) // STATE.BLOCKS, gl.program_id(1) % STATE.BLOCKS
    if number == num_reqs:
        first = gl.load(query_start_loc + num_reqs)
        clear_rows(out, first, num_tokens, head, block, ROWS, STATE)
        return
    request = open_request(StateBatch(query_start_loc, seq_lens, slots, sources), number)
    if request.slot < 0:
        last = request.first + request.count
        clear_rows(out, request.first, last, head, block, ROWS, STATE)
        return
    if request.count <= 0:
        return
    base = load_base(positions, request, head, block, STATE)
    element, index = gl.arange(0, CONFIG.ELEMENTS, COLUMN), gl.arange(0, STEP.WIDTH, COLUMN)
    channels, exist, writes = program_channels(element, head, block, CONFIG)
    place = x + request.first.to(gl.int64) * CHANNELS.X_T + channels[None, :]
    held = window + request.source * CHANNELS.WINDOW + channels[None, :]
    inputs = Inputs(place, held, request.computed, exist[None, :])
    token = gl.arange(0, STATE.QUERIES, TOKEN)
    position, exists = request.computed + token, token < request.count
    pairs = load_inputs(inputs, position, exists, CHANNELS)
    tokens = open_head(Tokens(x, x, x, decay, beta), head, STATE)
    projections = _load_projections(request, a, b, tokens, head, KEYS, CONFIG)
    norms = _load_norms(request, z, norm_weight, head, index, CONFIG)
    partition_barrier()  # ptxas would put these loads behind the copies
    tails = Tail(tail_k, tail_v, tail_decay, tail_beta)
    tail = open_tail(tails, request.source, head, STATE)
    shared = allocate(tails, STATE)
    copy_tail(shared, request, base, tokens, tail, block, STATE)
    copy_state(shared, state, request.source, head, block, base, STATE)
    # What waits for new tokens also waits for these, so that no copy waits.
    taps, speed, shift = load_taps(weight, bias, channels, CHANNELS), scale, scale
    if STEP.GATES != 0:
        speed = gl.load(rate + head).to(gl.float32)
        shift = _load_channels(gate_bias, head, KEYS, STATE)
    # A step of at most D + 1 tokens writes no row that another program reads.
    inputs = Inputs(place, held, request.computed, writes[None, :])
    zero = gl.arange(0, 1, TOKEN)
    write_window(request, inputs, window, window_positions, channels, zero, CHANNELS)
    KIND: gl.constexpr = x.dtype.element_ty
    SHAPE: gl.constexpr = [STATE.QUERIES, CONFIG.ELEMENTS]
    rows = gl.allocate_shared_memory(KIND, SHAPE, VECTOR)
    reinterpret(rows, KIND, SHAPE, ROWS_LAYOUT).store(convolve(pairs, taps, CHANNELS).to(KIND))
    new, queries = _new_tokens(rows, projections, speed, shift, KEYS, ROWS, CONFIG)
    given = skip, scale, head
    outputs = decode_tokens(request, base, new, queries, shared, *given, LAYOUT, STATE)
    if _has_groups(CONFIG):
        _store_normalized(outputs, norms, request, out, head, index, CONFIG)
    else:
        store_outputs(outputs, request, out, head, block, ROWS, STATE)
    slots_of = Slots(state, positions, tails)
    store_slot(request, base, new, shared, slots_of, head, block, KEYS, ROWS, STATE)
    if STEP.NORM and not _has_groups(CONFIG):
        normalize_head(request, out, z, norm_weight, counters, index, head, CONFIG)
