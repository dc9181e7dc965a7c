"""Decodes of one token that copy the state to shared memory while the query goes through the tail.

The arithmetic is that of `kernels.state_decode`: back through the tail, then one product with the
state. Tail and state are copied asynchronously, so that no register waits for them. A step that
fills the chunk goes forward through the same tokens, with rows of the state in registers. Sums over
keys are inside a warp.

Row i of the tail in shared memory is the i-th token before the new one. Rows without a token are 0,
which changes nothing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import (
    wait_for_copies,
)
from attnlib.ops.triton.hopper.kernels.state_fill import fill_chunk
from attnlib.ops.triton.hopper.kernels.state_memory import (
    PART_KEYS,
    allocate,
    copy_state,
    copy_tail,
    gates,
    key_layout,
    state_layout,
)
from attnlib.ops.triton.hopper.kernels.state_slots import (
    Token,
    clear_rows,
    copy_slot,
    load_token,
    store_token,
)
from attnlib.ops.triton.kernels.state_arguments import (
    UNALIGNED,
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
    store_positions,
)

__all__ = ["copied_decode_kernel", "decode_token"]


@gluon.jit
def _dot(a, b):
    """Return the sum of the products of a and b [DK]; those of pairs in a thread are fused."""
    PAIRS: gl.constexpr = [a.shape[0] // 2, 2]
    a, a_odd = gl.split(gl.reshape(a, PAIRS))
    b, b_odd = gl.split(gl.reshape(b, PAIRS))
    return gl.sum(gl.fma(a_odd, b_odd, a * b), 0)


@gluon.jit
def _go_back(w, o, token, CONFIG: gl.constexpr):
    """Return (w, o) before a `Token`, see `kernels.state_decode`."""
    k = token.k.to(gl.float32)
    c = _dot(k, w)
    norm = 1.0
    if CONFIG.NORM:
        norm = gl.rsqrt(_dot(k, k) + CONFIG.EPS)
    c = c * (norm * token.beta)
    o = gl.fma(token.v.to(gl.float32), c, o)
    if CONFIG.DELTA:
        w = gl.fma(k, -(c * norm), w)
    return w * gl.exp(token.decay), o


@gluon.jit
def _go_through(w, o, shared, count, KEYS: gl.constexpr, ROWS: gl.constexpr, CONFIG: gl.constexpr):
    """Return (w, o) before the last `count` tokens of the tail."""
    GROUP: gl.constexpr = CONFIG.GROUP
    for group in range(0, gl.cdiv(count, GROUP)):
        for number in gl.static_range(GROUP):
            row = group * GROUP + number
            k, v = shared.key_rows.index(row).load(KEYS), shared.value_rows.index(row).load(ROWS)
            decay, beta = gates(shared, group, number, KEYS, CONFIG)
            w, o = _go_back(w, o, Token(k, v, decay, beta), CONFIG)
    return w, o


@gluon.jit
def _multiply_state(shared, w, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """Return the product of the rows of the state and w, [ROWS * PASSES]."""
    SPAN: gl.constexpr = CONFIG.ROWS * CONFIG.PASSES
    PARTS: gl.constexpr = CONFIG.DK // PART_KEYS
    shared.query.store(w)
    acc = gl.zeros([SPAN, PART_KEYS], gl.float32, LAYOUT)
    for part in gl.static_range(PARTS):
        x = shared.query.slice(part * PART_KEYS, PART_KEYS).load(gl.SliceLayout(0, LAYOUT))
        rows = shared.state.slice(part * PART_KEYS, PART_KEYS, 1).load(LAYOUT)
        acc = gl.fma(rows, x[None, :], acc)
    return gl.sum(acc, 1)


@gluon.jit
def decode_token(
    request,
    base,
    new,
    query,
    shared,
    slots,
    skip,
    out,
    scale,
    head,
    block,
    LAYOUT: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """Compute a new `Token` and write its output and its slot. Copies of tail and state are under
    way."""
    SPAN: gl.constexpr = CONFIG.ROWS * CONFIG.PASSES
    KEYS: gl.constexpr = key_layout(CONFIG)
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    state = slots.state
    w, o = _go_back(query, gl.zeros([SPAN], gl.float32, ROWS), new, CONFIG)
    wait_for_copies(1)
    w, o = _go_through(w, o, shared, request.computed - base, KEYS, ROWS, CONFIG)
    wait_for_copies(0)
    factor = scale
    if CONFIG.NORM:
        factor = scale * gl.rsqrt(_dot(query, query) + CONFIG.EPS)
    o = (o + _multiply_state(shared, w, LAYOUT, CONFIG)) * factor
    if CONFIG.HAS_SKIP:
        o = gl.fma(new.v.to(gl.float32), gl.load(skip + head).to(gl.float32), o)
    place = out + head * CONFIG.O_H + request.first.to(gl.int64) * CONFIG.O_T + block * SPAN
    gl.store(place + gl.arange(0, SPAN, ROWS), o.to(out.dtype.element_ty))
    if request.end % CONFIG.UNIT == 0:
        fill_chunk(shared, new, state, request.slot, head, block, CONFIG)
    else:
        target = open_tail(slots.tail, request.slot, head, CONFIG)
        if request.source != request.slot:
            copy_slot(shared, request, base, state, target, head, block, KEYS, ROWS, CONFIG)
        store_token(new, request.computed, target, head, block, KEYS, ROWS, CONFIG)
    store_positions(slots.positions, request, head, block, CONFIG)


@gluon.jit(do_not_specialize=["num_reqs", "num_tokens"], do_not_specialize_on_alignment=UNALIGNED)
def copied_decode_kernel(
    q,
    k,
    v,
    decay,
    beta,
    skip,
    out,
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
    workspace,
    scale,
    num_reqs,
    num_tokens,
    CONFIG: gl.constexpr,
):
    """Compute one new token of one request for ROWS * PASSES value rows of one state head.

    CONFIG is a `StateConfig` with GROUP, for heads whose rows fill the programs. Arguments and grid
    are those of `state_step_kernel`. Files: `state_memory`, `state_slots`, `state_fill`.
    """
    KEYS: gl.constexpr = key_layout(CONFIG)
    LAYOUT: gl.constexpr = state_layout(CONFIG, 1)
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    number = gl.program_id(0)
    head, block = gl.program_id(1) // CONFIG.BLOCKS, gl.program_id(1) % CONFIG.BLOCKS
    if number == num_reqs:
        first = gl.load(query_start_loc + num_reqs)
        clear_rows(out, first, num_tokens, head, block, ROWS, CONFIG)
        return
    request = open_request(StateBatch(query_start_loc, seq_lens, slots, sources), number)
    if request.slot < 0:
        last = request.first + request.count
        clear_rows(out, request.first, last, head, block, ROWS, CONFIG)
        return
    if request.count <= 0:
        return
    base = load_base(positions, request, head, block, CONFIG)
    tokens = open_head(Tokens(q, k, v, decay, beta), head, CONFIG)
    tails = Tail(tail_k, tail_v, tail_decay, tail_beta)
    tail = open_tail(tails, request.source, head, CONFIG)
    shared = allocate(tail, CONFIG)
    new, query = load_token(request, tokens, block, KEYS, ROWS, CONFIG)
    copy_tail(shared, request, base, tokens, tail, block, CONFIG)
    copy_state(shared, state, request.source, head, block, base, CONFIG)
    slots_of = Slots(state, positions, tails)
    given = shared, slots_of, skip, out, scale, head, block
    decode_token(request, base, new, query, *given, LAYOUT, CONFIG)
