"""A decode of one token whose query goes backward through the tail, so that the state is read once.

With S the state before the chunk and the tokens of the chunk up to the new one, from the last to
the first, each with its decay g, and w the query:

    c = beta (k . w),   o += c v,   w = exp(g) (w - c k)      w = exp(g) w for additive updates

Then o + S w is the output of the new token. It needs no product of matrices, and one product of the
state with a vector. Every warp has the whole vector w and rows of the state of its own, so that no
sum crosses warps. A step that fills the chunk computes the state after it as other steps do.

The bits differ from those of a chunk, so layers without invariance use it (T18).
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels import state_requests as requests
from attnlib.ops.triton.kernels import state_rows as inputs
from attnlib.ops.triton.kernels import stored_state as stored
from attnlib.ops.triton.kernels.decode_loads import load_group, load_query, state_row_places
from attnlib.ops.triton.kernels.state_arguments import numbers
from attnlib.ops.triton.kernels.state_chunk import advance_state, chunk_factors, chunk_outputs
from attnlib.ops.triton.kernels.state_matrices import chunk_matrices
from attnlib.ops.triton.kernels.token_rows import load_held, load_new, store_row, value_rows

__all__ = ["decode_request"]


@triton.jit
def _inverse_length(x, CONFIG: tl.constexpr):
    """Return 1 / sqrt(sum of squares + EPS) of each row of x [1, WARPS, WIDTH], [1, WARPS, 1]."""
    return tl.math.rsqrt(tl.sum(x * x, axis=2, keep_dims=True) + CONFIG.EPS)


@triton.jit
def _go_back(w, o, row, CONFIG: tl.constexpr):
    """Return (w, o) before the token of a `Row`, see above."""
    k = row.k.to(tl.float32)
    c = tl.sum(k * w, axis=2, keep_dims=True)
    norm = 1.0
    if CONFIG.NORM:
        norm = _inverse_length(k, CONFIG)
    c = c * (norm * row.beta)
    o = o + row.v.to(tl.float32) * c
    if CONFIG.DELTA:
        w = w - k * (c * norm)
    return w * tl.exp(row.decay), o


@triton.jit
def _go_back_group(w, o, group, CONFIG: tl.constexpr):
    """Return (w, o) before the tokens of what `_load_group` returns."""
    for number in tl.static_range(len(group)):
        w, o = _go_back(w, o, group[number], CONFIG)
    return w, o


@triton.jit
def _parts_of(w, CONFIG: tl.constexpr):
    """Return the parts of w [1, WARPS, WIDTH], [PART], which every warp has."""
    warp = tl.arange(0, CONFIG.WARPS)[None, :, None]
    row = tl.reshape(tl.sum(tl.where(warp == 0, w, 0.0), axis=1), [w.shape[2]])
    # Other operations would spread the layout of w to the state.
    parts = [requests.part_columns(part, CONFIG) for part in numbers(CONFIG.PARTS)]
    return [tl.gather(row, columns, 0) for columns in parts]


@triton.jit
def _multiply_state(s, w, base, CONFIG: tl.constexpr):
    """Return the product of the state at `base` and w, in the shape of `value_rows`."""
    WARPS: tl.constexpr = CONFIG.WARPS
    SPAN: tl.constexpr = CONFIG.ROWS * CONFIG.PASSES
    ROWS: tl.constexpr = SPAN // WARPS
    COPIES: tl.constexpr = max(1, 32 // ROWS)
    products = tl.full([SPAN, CONFIG.PART], 0.0, tl.float32)
    columns = _parts_of(w, CONFIG)
    for part in tl.static_range(len(s)):
        products += s[part].to(tl.float32) * columns[part][None, :]
    seen = tl.sum(products, axis=1)
    seen = tl.where(tl.full(seen.shape, 0, tl.int32) + base > 0, seen, 0.0)
    seen = tl.broadcast_to(tl.reshape(seen, [1, WARPS, 1, ROWS]), [1, WARPS, COPIES, ROWS])
    return tl.reshape(seen, [1, WARPS, COPIES * ROWS])


@triton.jit
def _copy_slot(request, base, s, slots, head, block, CONFIG: tl.constexpr):
    """Write what a fork keeps of its source: the state and the tail before the new token."""
    source = requests.open_tail(slots.tail, request.source, head, CONFIG)
    target = requests.open_tail(slots.tail, request.slot, head, CONFIG)
    if base > 0:
        for part in tl.static_range(len(s)):
            place, inside = state_row_places(slots.state, request.slot, head, block, part, CONFIG)
            tl.store(place, s[part], mask=inside)
    for position in range(base, request.computed):
        row = load_held(position, base, source, source, block, CONFIG)
        store_row(row, position % CONFIG.RING, target, head, block, CONFIG)


@triton.jit
def _fill_chunk(request, base, tokens, slots, scale, head, block, CONFIG: tl.constexpr):
    """Store the state after the chunk at `base`, which the new token fills, ROWS rows at a time."""
    tail = requests.open_tail(slots.tail, request.source, head, CONFIG)
    rows = inputs.chunk_rows(request, base, CONFIG)
    chunk = inputs.choose_rows(inputs.load_chunk(rows, tokens, tail, CONFIG), CONFIG)
    factors = chunk_factors(chunk, scale, CONFIG)
    solve, pairs = chunk_matrices(chunk, factors, CONFIG)
    for number in range(0, CONFIG.PASSES):
        columns = requests.pass_columns(block, number, CONFIG)
        s = stored.load_state(slots.state, request.source, head, columns, base, CONFIG)
        pair = inputs.load_values(rows, tokens, tail, columns, CONFIG)
        values = inputs.choose(rows, pair).to(tl.float32)
        s = stored.settle_state(s, base, CONFIG)
        u, _ = chunk_outputs(s, chunk, values, factors, solve, pairs, CONFIG)
        if CONFIG.RELOAD:
            tl.debug_barrier()
        s = stored.round_state(advance_state(s, u, chunk, factors, CONFIG), slots.state)
        stored.store_state(slots.state, request.slot, head, columns, s, CONFIG)


@triton.jit
def decode_request(
    request, base, loaded, tokens, slots, results, FUSED: tl.constexpr, CONFIG: tl.constexpr
):
    """Compute the new token of a request for the value rows and the head of this program, and write
    its output and its slot. `loaded` is what `load_decode` returns of the state at `base`."""
    GROUP: tl.constexpr = CONFIG.GROUP
    head, block = tl.program_id(1) // CONFIG.BLOCKS, tl.program_id(1) % CONFIG.BLOCKS
    tokens = requests.open_head(tokens, head, CONFIG)
    tail = requests.open_tail(slots.tail, request.source, head, CONFIG)
    if FUSED:
        new = load_new(request, tokens, block, CONFIG)
        w = load_query(request, tokens, CONFIG)
    else:
        new, w = loaded.new, loaded.query
    query = w
    o = tl.zeros_like(new.v.to(tl.float32))
    group = [new] + loaded.group
    last = request.computed - GROUP
    # Nothing is computed before the loop: the compiler would move it in front of the loads.
    while last >= base:
        # The rows that come next are under way while these are computed.
        behind = load_group(last, base, tokens, tail, block, GROUP, CONFIG)
        w, o = _go_back_group(w, o, group, CONFIG)
        group = behind
        last -= GROUP
    w, o = _go_back_group(w, o, group, CONFIG)
    factor = results.scale
    if CONFIG.NORM:
        factor = factor * _inverse_length(query, CONFIG)
    o = (o + _multiply_state(loaded.rows, w, base, CONFIG)) * factor
    values = value_rows(block, CONFIG)
    if CONFIG.HAS_SKIP:
        o = o + new.v.to(tl.float32) * tl.load(results.skip + head).to(tl.float32)
    place = results.out + head * CONFIG.O_H + request.first.to(tl.int64) * CONFIG.O_T + values
    tl.store(place, o.to(results.out.dtype.element_ty), mask=values < CONFIG.DV)
    if request.end % CONFIG.UNIT == 0:
        tl.debug_barrier()  # other threads store these rows of the state
        _fill_chunk(request, base, tokens, slots, results.scale, head, block, CONFIG)
    else:
        if request.source != request.slot:
            _copy_slot(request, base, loaded.rows, slots, head, block, CONFIG)
        target = requests.open_tail(slots.tail, request.slot, head, CONFIG)
        store_row(new, request.computed % CONFIG.RING, target, head, block, CONFIG)
    requests.store_positions(slots.positions, request, head, block, CONFIG)
