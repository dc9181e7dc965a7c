"""Decodes of few tokens that copy the state to shared memory while queries go through the tail.

The arithmetic is that of `kernels.state_decode`: back through the tail, then one product with the
state, for each new token. Tail and state are copied asynchronously, so that no register waits for
them. A step that fills a chunk goes forward through the same tokens, with rows of the state in
registers. Sums over keys are inside a warp. Warps divide the queries up to the product with the
state, whose rows are read once for all of them. Two tokens of the tail are passed at a time: with
the product of their keys, that of the query and the earlier one waits for no other.

A launch overlaps the end of the kernel before, and waits for it before it reads anything.

Row i of the tail in shared memory is the i-th token before the first new one. Rows without a token
are 0, which changes nothing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels import compat
from attnlib.ops.triton.hopper.kernels import state_memory as memory
from attnlib.ops.triton.hopper.kernels import state_slots as decodes
from attnlib.ops.triton.hopper.kernels.state_fill import fill_chunk
from attnlib.ops.triton.hopper.kernels.state_memory import ROWS_LAYOUT
from attnlib.ops.triton.kernels import state_arguments as arguments
from attnlib.ops.triton.kernels import state_requests as requests

__all__ = ["copied_decode_kernel", "decode_tokens", "store_slot"]


@gluon.constexpr_function
def _pairs(shape):
    return [*shape[:-1], shape[-1] // 2, 2]


@gluon.jit
def _dot(a, b):
    """Return the sums of the products of a and b over the last dimension; those of pairs in a
    thread are fused."""
    PAIRS: gl.constexpr = _pairs(a.shape)
    a, a_odd = gl.split(gl.reshape(a, PAIRS))
    b, b_odd = gl.split(gl.reshape(b, PAIRS))
    return gl.sum(gl.fma(a_odd, b_odd, a * b), len(PAIRS) - 2)


@gluon.jit
def _column(x, like):
    """Return numbers [QUERIES] as a column beside a tensor [QUERIES, N]."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]


@gluon.jit
def _norm(k, CONFIG: gl.constexpr):
    """Return the inverse length of a key [DK]; 1 where keys are not normalized."""
    norm = 1.0
    if CONFIG.NORM:
        norm = gl.rsqrt(_dot(k, k) + CONFIG.EPS)
    return norm


@gluon.jit
def _seen(w, k):
    """Return the products [QUERIES] of queries and a key [DK]."""
    keys, _ = gl.broadcast(k[None, :], w)
    return _dot(keys, w)


@gluon.jit
def _behind(w, o, c, k, token, norm, CONFIG: gl.constexpr):
    """Return (w, o) before a `Token`, whose factor is c [QUERIES]."""
    factor = gl.exp(token.decay)
    if CONFIG.DECAY == "channel":
        factor = factor[None, :]
    o = gl.fma(token.v.to(gl.float32)[None, :], _column(c, o), o)
    if CONFIG.DELTA:
        w = gl.fma(k[None, :], _column(c * -norm, w), w)
    return w * factor, o


@gluon.jit
def _go_back(w, o, token, FIRST: gl.constexpr, CONFIG: gl.constexpr):
    """Return (w, o) of the queries from number FIRST on before a `Token`, see
    `kernels.state_decode`, and the others as they are; [QUERIES, DK] and [QUERIES, values]."""
    k = token.k.to(gl.float32)
    norm = _norm(k, CONFIG)
    c = _seen(w, k) * (norm * token.beta)
    before = _behind(w, o, c, k, token, norm, CONFIG)
    number = gl.arange(0, CONFIG.QUERIES, c.type.layout)
    if FIRST > 0:
        w = gl.where(_column(number, w) >= FIRST, before[0], w)
        o = gl.where(_column(number, o) >= FIRST, before[1], o)
    else:
        w, o = before
    return w, o


@gluon.jit
def _go_back_twice(w, o, late, early, CONFIG: gl.constexpr):
    """Return (w, o) of all queries before two `Token`s, of which no product waits for another."""
    k, key = late.k.to(gl.float32), early.k.to(gl.float32)
    norm, length = _norm(k, CONFIG), _norm(key, CONFIG)
    decayed = key * gl.exp(late.decay)
    c, d = _seen(w, k) * (norm * late.beta), _seen(w, decayed)
    if CONFIG.DELTA:
        d = gl.fma(c, -norm * _dot(decayed, k), d)
    w, o = _behind(w, o, c, k, late, norm, CONFIG)
    return _behind(w, o, d * (length * early.beta), key, early, length, CONFIG)


@gluon.jit
def _go_through(w, o, shared, count, CONFIG: gl.constexpr):
    """Return (w, o) of all queries before the last `count` tokens of the tail."""
    GROUP: gl.constexpr = CONFIG.GROUP
    for group in range(0, gl.cdiv(count, GROUP)):
        for number in gl.static_range(0, GROUP, 2):
            late = decodes.held_token(shared, group, number, CONFIG)
            early = decodes.held_token(shared, group, number + 1, CONFIG)
            w, o = _go_back_twice(w, o, late, early, CONFIG)
    return w, o


@gluon.jit
def decode_tokens(request, base, new, queries, shared, skip, scale, CONFIG: gl.constexpr):
    """Return the outputs [ROWS * PASSES] of the new tokens, `Token`s with queries [QUERIES, DK],
    float32. Copies of tail and state are under way; `skip` points to that of the head."""
    QUERIES: gl.constexpr = CONFIG.QUERIES
    SPAN: gl.constexpr = CONFIG.ROWS * CONFIG.PASSES
    SHAPE: gl.constexpr = [QUERIES, CONFIG.DK]
    VALUES: gl.constexpr = memory.query_layout(SPAN, CONFIG.WARPS)
    w, o = queries, gl.zeros([QUERIES, SPAN], gl.float32, VALUES)
    factor = gl.full([QUERIES], scale, gl.float32, gl.SliceLayout(1, VALUES))
    # Always true. ptxas would put this in front of the copies, which would wait for the tokens; it
    # moves nothing over a branch.
    if request.end > 0:
        if CONFIG.NORM:
            lengths = gl.rsqrt(_dot(w, w) + CONFIG.EPS)
            factor = factor * gl.convert_layout(lengths, factor.type.layout)
        for last in gl.static_range(QUERIES - 1, -1, -1):
            w, o = _go_back(w, o, new[last], last, CONFIG)
    compat.wait_for_copies(1)
    w, o = _go_through(w, o, shared, request.computed - base, CONFIG)
    w, o = w * _column(factor, w), o * factor[:, None]
    if CONFIG.HAS_SKIP:
        number, weight = gl.arange(0, QUERIES, factor.type.layout), gl.load(skip).to(gl.float32)
        for row in gl.static_range(QUERIES):
            own = gl.where(number == row, weight, 0.0)
            o = gl.fma(new[row].v.to(gl.float32)[None, :], own[:, None], o)
    compat.reinterpret(shared.queries, gl.float32, SHAPE, ROWS_LAYOUT).store(w)
    compat.reinterpret(shared.outputs, gl.float32, [QUERIES, SPAN], ROWS_LAYOUT).store(o)
    compat.wait_for_copies(0)
    return memory.multiply_state(shared, CONFIG)


@gluon.jit
def store_slot(request, base, new, shared, slots, head, block, CONFIG: gl.constexpr):
    """Write what the step leaves in the slot."""
    kept = requests.kept_state(request, CONFIG)
    has_tail = kept <= base
    if CONFIG.D > 0:
        has_tail = request.end > kept
    if has_tail:
        target = requests.open_tail(slots.tail, request.slot, head, CONFIG)
        if request.source != request.slot:
            decodes.copy_slot(shared, request, base, kept, slots.state, target, head, block, CONFIG)
        for number in gl.static_range(len(new)):
            position = request.computed + number
            if (position >= kept) & (position < request.end):
                decodes.store_token(new[number], position, target, head, block, CONFIG)
    if kept > base:  # changes shared memory
        count = request.computed - base
        fill_chunk(shared, new[0], count, slots.state, request.slot, head, block, CONFIG)
    requests.store_positions(slots.positions, request, head, block, CONFIG)


@gluon.jit(
    do_not_specialize=["num_reqs", "num_tokens"], do_not_specialize_on_alignment=arguments.UNALIGNED
)
def copied_decode_kernel(
    q, k, v, decay, beta, skip, out, state, positions, tail_k, tail_v, tail_decay, tail_beta,
    query_start_loc, seq_lens, slots, sources, workspace, scale, num_reqs, num_tokens,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute at most QUERIES tokens of one request for ROWS * PASSES value rows of one state head.

    CONFIG is a `StateConfig` with GROUP, for heads whose rows fill the programs. Arguments and grid
    are those of `state_step_kernel`. Files: `state_memory`, `state_slots`, `state_fill`.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, memory.state_layout(CONFIG, 1))
    compat.wait_on_dependent_grids()
    compat.launch_dependent_grids()
    number = gl.program_id(0)
    head, block = gl.program_id(1) // CONFIG.BLOCKS, gl.program_id(1) % CONFIG.BLOCKS
    if number == num_reqs:
        first = gl.load(query_start_loc + num_reqs)
        decodes.clear_rows(out, first, num_tokens, head, block, ROWS, CONFIG)
        return
    batch = arguments.StateBatch(query_start_loc, seq_lens, slots, sources)
    request = requests.open_request(batch, number)
    if request.slot < 0:
        last = request.first + request.count
        decodes.clear_rows(out, request.first, last, head, block, ROWS, CONFIG)
        return
    if request.count <= 0:
        return
    base = requests.load_base(positions, request, head, block, CONFIG)
    tokens = requests.open_head(arguments.Tokens(q, k, v, decay, beta), head, CONFIG)
    tails = arguments.Tail(tail_k, tail_v, tail_decay, tail_beta)
    tail = requests.open_tail(tails, request.source, head, CONFIG)
    shared = memory.allocate(tail, CONFIG)
    numbers = arguments.numbers(CONFIG.QUERIES)
    new = [decodes.load_token(request, n, tokens, block, CONFIG) for n in numbers]
    queries = decodes.load_queries(request, tokens, CONFIG)
    compat.partition_barrier()  # ptxas would put these loads behind the copies
    memory.copy_tail(shared, request, base, tokens, tail, block, CONFIG)
    memory.copy_state(shared, state, request.source, head, block, base, CONFIG)
    outputs = decode_tokens(request, base, new, queries, shared, skip + head, scale, CONFIG)
    decodes.store_outputs(outputs, request, out, head, block, ROWS, CONFIG)
    slots_of = arguments.Slots(state, positions, tails)
    store_slot(request, base, new, shared, slots_of, head, block, CONFIG)
