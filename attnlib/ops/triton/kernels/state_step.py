"""The recurrence over slots in the tail form (T9), one program per request, head and value rows.

A slot holds the state at `base`, the multiple of C at or before its position `low`, and in a ring
the inputs of the tokens since then. A step computes the chunks from `base` on, each with one shape,
whether its rows are new or from the ring, and moves `low` to max(n, end - D). Rows of a tail are
never moved, so that programs of several heads may read the same keys while one of them writes those
of new tokens: the ring's C + 2 (D + 1) rows hold both for steps of up to D + 1 tokens. Longer steps
run in three launches, see `state_prefill`. The arithmetic is in `state_chunk`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.state_arguments import UNALIGNED, Slots, StateBatch, Tail, Tokens
from attnlib.ops.triton.kernels.state_chunk import (
    advance_state,
    chunk_factors,
    chunk_matrices,
    chunk_outputs,
)
from attnlib.ops.triton.kernels.state_prefill import matrix_places
from attnlib.ops.triton.kernels.state_rows import (
    chunk_rows,
    clear_tokens,
    first_kept,
    first_written,
    load_base,
    load_chunk,
    load_values,
    open_head,
    open_request,
    open_tail,
    store_chunk,
    store_positions,
)
from attnlib.ops.triton.kernels.stored_state import load_state, round_state, store_state

__all__ = ["compute_request", "state_step_kernel"]


@triton.jit
def _store_outputs(out, rows, o, columns, CONFIG: tl.constexpr):
    """Store the outputs of new tokens, [C, ROWS]. `out` points to those of the head."""
    place = out + rows.token[:, None] * CONFIG.O_T + columns[None, :]
    inside = rows.fresh[:, None] & (columns < CONFIG.DV)[None, :]
    tl.store(place, o.to(out.dtype.element_ty), mask=inside)


@triton.jit
def compute_request(
    request,
    number,
    base,
    s,
    tokens,
    slots,
    skip,
    out,
    workspace,
    scale,
    CONFIG: tl.constexpr,
):
    """Compute the step of a request for the value rows and the head of this program, and write its
    outputs and its slot. `s` is the state at `base`, `number` the request's place in the batch."""
    head, block = tl.program_id(1) // CONFIG.BLOCKS, tl.program_id(1) % CONFIG.BLOCKS
    columns = block * CONFIG.ROWS + tl.arange(0, CONFIG.ROWS)
    state = slots.state
    keep = first_kept(request, CONFIG) // CONFIG.C * CONFIG.C
    tokens = open_head(tokens, head, CONFIG)
    tail = open_tail(slots.tail, request.source, head, CONFIG)
    target = open_tail(slots.tail, request.slot, head, CONFIG)
    copies = request.source != request.slot
    first = first_written(request, CONFIG)
    if copies & (base > 0) & (keep == base):
        store_state(state, request.slot, head, columns, s, CONFIG)
    chunks = request.first // CONFIG.C + number * CONFIG.EXTRA
    for start in range(base, request.end, CONFIG.C):
        rows = chunk_rows(request, start, CONFIG)
        chunk = load_chunk(rows, tokens, tail, CONFIG)
        values = load_values(rows, tokens, tail, columns, CONFIG)
        factors = chunk_factors(chunk, scale, CONFIG)
        if CONFIG.PREPARED:
            index = (start - base) // CONFIG.C
            matrices = matrix_places(workspace, chunks, index, head, CONFIG)
            pairs = tl.load(matrices + CONFIG.C * CONFIG.C)
            solve = pairs
            if CONFIG.DELTA:
                solve = tl.load(matrices)
        else:
            solve, pairs = chunk_matrices(chunk, factors, CONFIG)
        if CONFIG.RELOAD:
            # The compiler would keep the parts that it loads twice without a barrier.
            tl.debug_barrier()
        value = values.to(tl.float32)
        u, o = chunk_outputs(s, chunk, value, factors, solve, pairs, CONFIG)
        if CONFIG.HAS_SKIP:
            o = o + value * tl.load(skip + head).to(tl.float32)
        _store_outputs(out + head * CONFIG.O_H, rows, o, columns, CONFIG)
        if not CONFIG.PREPARED:
            wanted = (rows.position >= first) & (rows.position < request.end)
            store_chunk(rows, wanted, chunk, values, target, columns, head, block, CONFIG)
        if CONFIG.RELOAD:
            tl.debug_barrier()
        after = start + CONFIG.C
        if after <= request.end:
            # A state is rounded once for each chunk, whether it is stored or not (T13).
            s = round_state(advance_state(s, u, chunk, factors, CONFIG), state, CONFIG)
            if after == keep:
                store_state(state, request.slot, head, columns, s, CONFIG)
    if not CONFIG.PREPARED:
        store_positions(slots.positions, request, head, block, CONFIG)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"], do_not_specialize_on_alignment=UNALIGNED)
def state_step_kernel(
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
    CONFIG: tl.constexpr,
):
    """Compute a step of one request for ROWS value rows of one state head.

    CONFIG is a `StateConfig`. Grid: (requests + 1, HV * BLOCKS). The last programs clear the rows
    after the last request.
    """
    number = tl.program_id(0)
    head, block = tl.program_id(1) // CONFIG.BLOCKS, tl.program_id(1) % CONFIG.BLOCKS
    columns = block * CONFIG.ROWS + tl.arange(0, CONFIG.ROWS)
    if number == num_reqs:
        first = tl.load(query_start_loc + num_reqs)
        clear_tokens(out, first, num_tokens, head, columns, CONFIG)
        return
    request = open_request(StateBatch(query_start_loc, seq_lens, slots, sources), number)
    if request.slot < 0:
        clear_tokens(out, request.first, request.first + request.count, head, columns, CONFIG)
        return
    if request.count <= 0:
        return
    slots_of = Slots(state, positions, Tail(tail_k, tail_v, tail_decay, tail_beta))
    base = load_base(positions, request, head, block, CONFIG)
    s = load_state(state, request.source, head, columns, base, CONFIG)
    tokens = Tokens(q, k, v, decay, beta)
    compute_request(request, number, base, s, tokens, slots_of, skip, out, workspace, scale, CONFIG)
