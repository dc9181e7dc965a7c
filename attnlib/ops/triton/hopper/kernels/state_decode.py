"""Decodes of few tokens that copy the state to shared memory while queries go through the tail.

The arithmetic is that of `kernels.state_decode`: back through the tail, then one product with the
state, for each new token. Tail and state are copied asynchronously, so that no register waits for
them. A step that fills a chunk goes forward through the same tokens, with rows of the state in
registers. Sums over keys are inside a warp.

Row i of the tail in shared memory is the i-th token before the first new one. Rows without a token
are 0, which changes nothing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels import state_memory as memory
from attnlib.ops.triton.hopper.kernels import state_slots as decodes
from attnlib.ops.triton.hopper.kernels.compat import partition_barrier, wait_for_copies
from attnlib.ops.triton.hopper.kernels.state_fill import fill_chunk
from attnlib.ops.triton.kernels import state_requests as requests
from attnlib.ops.triton.kernels.state_arguments import (
    UNALIGNED,
    Slots,
    StateBatch,
    Tail,
    Tokens,
    numbers,
)

__all__ = ["copied_decode_kernel", "decode_tokens", "store_slot"]


@gluon.jit
def _dot(a, b):
    """Return the sum of the products of a and b [DK]; those of pairs in a thread are fused."""
    PAIRS: gl.constexpr = [a.shape[0] // 2, 2]
    a, a_odd = gl.split(gl.reshape(a, PAIRS))
    b, b_odd = gl.split(gl.reshape(b, PAIRS))
    return gl.sum(gl.fma(a_odd, b_odd, a * b), 0)


@gluon.jit
def _go_back(ws, os, token, FIRST: gl.constexpr, CONFIG: gl.constexpr):
    """Return (w, o) of the queries from number FIRST on before a `Token`, see
    `kernels.state_decode`, and the others as they are."""
    k, v = token.k.to(gl.float32), token.v.to(gl.float32)
    norm = 1.0
    if CONFIG.NORM:
        norm = gl.rsqrt(_dot(k, k) + CONFIG.EPS)
    factor = gl.exp(token.decay)
    before = ()
    outputs = ()
    for number in gl.static_range(len(ws)):
        w, o = ws[number], os[number]
        if number >= FIRST:
            c = _dot(k, w) * (norm * token.beta)
            o = gl.fma(v, c, o)
            if CONFIG.DELTA:
                w = gl.fma(k, -(c * norm), w)
            w = w * factor
        before = before + (w,)
        outputs = outputs + (o,)
    return before, outputs


@gluon.jit
def _go_through(
    ws, os, shared, count, KEYS: gl.constexpr, ROWS: gl.constexpr, CONFIG: gl.constexpr
):
    """Return (w, o) of all queries before the last `count` tokens of the tail."""
    GROUP: gl.constexpr = CONFIG.GROUP
    for group in range(0, gl.cdiv(count, GROUP)):
        for number in gl.static_range(GROUP):
            row = group * GROUP + number
            k, v = shared.key_rows.index(row).load(KEYS), shared.value_rows.index(row).load(ROWS)
            decay, beta = memory.gates(shared, group, number, KEYS, CONFIG)
            ws, os = _go_back(ws, os, decodes.Token(k, v, decay, beta), 0, CONFIG)
    return ws, os


@gluon.jit
def decode_tokens(request, base, new, queries, shared, skip, scale, CONFIG: gl.constexpr):
    """Return the outputs [ROWS * PASSES] of the new tokens, `Token`s, float32. Copies of tail and
    state are under way; `skip` points to that of the head."""
    QUERIES: gl.constexpr = len(queries)
    KEYS: gl.constexpr = memory.key_layout(CONFIG)
    ROWS: gl.constexpr = gl.SliceLayout(1, memory.state_layout(CONFIG, 1))
    ws = queries
    os = [gl.full([CONFIG.ROWS * CONFIG.PASSES], 0.0, gl.float32, ROWS) for query in queries]
    factors = [scale for query in queries]
    # Always true. ptxas would put this in front of the copies, which would wait for the tokens; it
    # moves nothing over a branch.
    if request.end > 0:
        for last in gl.static_range(QUERIES - 1, -1, -1):
            ws, os = _go_back(ws, os, new[last], last, CONFIG)
        if CONFIG.NORM:
            factors = [scale * gl.rsqrt(_dot(query, query) + CONFIG.EPS) for query in queries]
    wait_for_copies(1)
    ws, os = _go_through(ws, os, shared, request.computed - base, KEYS, ROWS, CONFIG)
    wait_for_copies(0)
    outputs = ()
    for number in gl.static_range(QUERIES):
        o = os[number] + memory.multiply_state(shared, ws[number], number, CONFIG)
        o = o * factors[number]
        if CONFIG.HAS_SKIP:
            o = gl.fma(new[number].v.to(gl.float32), gl.load(skip).to(gl.float32), o)
        outputs = outputs + (o,)
    return outputs


@gluon.jit
def store_slot(
    request, base, new, shared, slots, head, block, KEYS: gl.constexpr, ROWS, CONFIG: gl.constexpr
):
    """Write what the step leaves in the slot."""
    kept = requests.kept_state(request, CONFIG)
    has_tail = kept <= base
    if CONFIG.D > 0:
        has_tail = request.end > kept
    if has_tail:
        target = requests.open_tail(slots.tail, request.slot, head, CONFIG)
        if request.source != request.slot:
            decodes.copy_slot(
                shared, request, base, kept, slots.state, target, head, block, KEYS, ROWS, CONFIG
            )
        for number in gl.static_range(len(new)):
            position = request.computed + number
            if (position >= kept) & (position < request.end):
                decodes.store_token(new[number], position, target, head, block, KEYS, ROWS, CONFIG)
    if kept > base:  # changes shared memory
        count = request.computed - base
        fill_chunk(shared, new[0], count, slots.state, request.slot, head, block, CONFIG)
    requests.store_positions(slots.positions, request, head, block, CONFIG)


@gluon.jit(do_not_specialize=["num_reqs", "num_tokens"], do_not_specialize_on_alignment=UNALIGNED)
def copied_decode_kernel(
    q, k, v, decay, beta, skip, out, state, positions, tail_k, tail_v, tail_decay, tail_beta,
    query_start_loc, seq_lens, slots, sources, workspace, scale, num_reqs, num_tokens,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute at most QUERIES tokens of one request for ROWS * PASSES value rows of one state head.

    CONFIG is a `StateConfig` with GROUP, for heads whose rows fill the programs. Arguments and grid
    are those of `state_step_kernel`. Files: `state_memory`, `state_slots`, `state_fill`.
    """
    KEYS: gl.constexpr = memory.key_layout(CONFIG)
    ROWS: gl.constexpr = gl.SliceLayout(1, memory.state_layout(CONFIG, 1))
    number = gl.program_id(0)
    head, block = gl.program_id(1) // CONFIG.BLOCKS, gl.program_id(1) % CONFIG.BLOCKS
    if number == num_reqs:
        first = gl.load(query_start_loc + num_reqs)
        decodes.clear_rows(out, first, num_tokens, head, block, ROWS, CONFIG)
        return
    request = requests.open_request(StateBatch(query_start_loc, seq_lens, slots, sources), number)
    if request.slot < 0:
        last = request.first + request.count
        decodes.clear_rows(out, request.first, last, head, block, ROWS, CONFIG)
        return
    if request.count <= 0:
        return
    base = requests.load_base(positions, request, head, block, CONFIG)
    tokens = requests.open_head(Tokens(q, k, v, decay, beta), head, CONFIG)
    tails = Tail(tail_k, tail_v, tail_decay, tail_beta)
    tail = requests.open_tail(tails, request.source, head, CONFIG)
    shared = memory.allocate(tail, CONFIG)
    QUERIES: gl.constexpr = CONFIG.QUERIES
    pairs = [
        decodes.load_token(request, n, tokens, block, KEYS, ROWS, CONFIG) for n in numbers(QUERIES)
    ]
    new, queries = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    partition_barrier()  # ptxas would put these loads behind the copies
    memory.copy_tail(shared, request, base, tokens, tail, block, CONFIG)
    memory.copy_state(shared, state, request.source, head, block, base, CONFIG)
    outputs = decode_tokens(request, base, new, queries, shared, skip + head, scale, CONFIG)
    decodes.store_outputs(outputs, request, out, head, block, ROWS, CONFIG)
    slots_of = Slots(state, positions, tails)
    store_slot(request, base, new, shared, slots_of, head, block, KEYS, ROWS, CONFIG)
