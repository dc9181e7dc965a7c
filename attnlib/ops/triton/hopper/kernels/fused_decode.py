"""A decode of one token in one launch, as `kernels.fused_step`, that copies the state to shared
memory, as `state_decode`. The copies are under way during the convolution.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.state_decode import decode_token
from attnlib.ops.triton.hopper.kernels.state_memory import (
    allocate,
    copy_state,
    copy_tail,
    key_layout,
    state_layout,
)
from attnlib.ops.triton.hopper.kernels.state_slots import clear_rows, load_token
from attnlib.ops.triton.kernels.fused_step import (
    FUSED_UNALIGNED,
    Convolution,
    Gates,
    Places,
    normalize_head,
    prepare_head,
)
from attnlib.ops.triton.kernels.state_arguments import Slots, StateBatch, Tail, Tokens
from attnlib.ops.triton.kernels.state_requests import (
    load_base,
    open_head,
    open_request,
    open_tail,
)

__all__ = ["fused_decode_kernel"]


@gluon.jit
def _places(CONFIG: gl.constexpr):
    """Return the `Places`; four channels are loaded at a time."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, CONFIG.STATE.WARPS], [1, 0])
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    zero = gl.arange(0, 1, gl.SliceLayout(1, LAYOUT))
    return Places(
        zero,
        zero,
        gl.arange(0, CONFIG.ELEMENTS, COLUMN),
        gl.arange(0, CONFIG.STEP.CHANNELS, COLUMN),
        gl.arange(0, CONFIG.STEP.WIDTH, COLUMN),
    )


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
    `copied_decode_kernel`."""
    STATE: gl.constexpr = CONFIG.STATE
    KEYS: gl.constexpr = key_layout(STATE)
    LAYOUT: gl.constexpr = state_layout(STATE, 1)
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
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
    tokens = Tokens(convolved + CONFIG.Q, convolved + CONFIG.K, convolved + CONFIG.V, decay, beta)
    tokens = open_head(tokens, head, STATE)
    tails = Tail(tail_k, tail_v, tail_decay, tail_beta)
    shared = allocate(tails, STATE)
    tail = open_tail(tails, request.source, head, STATE)
    copy_tail(shared, request, base, tokens, tail, block, STATE)
    copy_state(shared, state, request.source, head, block, base, STATE)
    places = _places(CONFIG)
    given = Convolution(x, weight, bias, convolved, window, window_positions)
    gates = Gates(a, b, rate, gate_bias, decay, beta)
    prepare_head(request, given, gates, places, head, block, CONFIG)
    new, query = load_token(request, tokens, block, KEYS, ROWS, STATE)
    memory = shared, Slots(state, positions, tails), skip, out, scale, head, block
    decode_token(request, base, new, query, *memory, LAYOUT, STATE)
    if CONFIG.STEP.NORM:
        normalize_head(request, out, z, norm_weight, counters, places.index, head, CONFIG)
