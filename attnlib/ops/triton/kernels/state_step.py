"""The recurrence over slots in the tail form (T9), one program per request, head and value rows.

A slot holds the state at `base`, the multiple of C at or before its position `low`, and in a ring
the inputs of the tokens since then. A step computes the chunks from `base` on, each with one shape,
whether its rows are new or from the ring, and moves `low` to max(n, end - D). Rows of a tail are
never moved, so that programs of several heads may read the same keys while one of them writes those
of new tokens: the ring's C + 2 (D + 1) rows hold both for steps of up to D + 1 tokens. Longer steps
run in three launches, see `state_prefill`. The arithmetic is in `state_chunk`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
    choose,
    choose_rows,
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
from attnlib.ops.triton.kernels.stored_state import (
    load_state,
    round_state,
    settle_state,
    store_state,
)

__all__ = ["compute_request", "state_step_kernel"]


@triton.jit
def _store_outputs(out, rows, o, columns, CONFIG: tl.constexpr):
    """Store the outputs of new tokens, [C, ROWS]. `out` points to those of the head."""
    place = out + rows.token[:, None] * CONFIG.O_T + columns[None, :]
    inside = rows.fresh[:, None] & (columns < CONFIG.DV)[None, :]
    tl.store(place, o.to(out.dtype.element_ty), mask=inside)


class Here(NamedTuple):
    """What a program computes.

    Attributes:
        head, block, columns: its head and its value rows.
        tokens, tail, target: `Tokens` of the head, and the `Tail` to read and to write.
        keep, first: the chunk whose state is stored, and the first position of the new tail.
        workspace, chunks: matrices of the batch, and the number of the request's first chunk.
    """

    head: Any
    block: Any
    columns: Any
    tokens: Any
    tail: Any
    target: Any
    keep: Any
    first: Any
    workspace: Any
    chunks: Any


@triton.jit
def _copy_state(request, base, s, state, here, CONFIG: tl.constexpr):
    """Store the state that a fork keeps."""
    if (request.source != request.slot) & (base > 0) & (here.keep == base):
        store_state(state, request.slot, here.head, here.columns, s, CONFIG)


@triton.jit
def _load(request, start, here, CONFIG: tl.constexpr):
    """Return what `load_chunk` and `load_values` return of the chunk at `start`."""
    rows = chunk_rows(request, start, CONFIG)
    chunk = load_chunk(rows, here.tokens, here.tail, CONFIG)
    return chunk, load_values(rows, here.tokens, here.tail, here.columns, CONFIG)


@triton.jit
def _matrices(chunk, factors, number, here, CONFIG: tl.constexpr):
    """Return (T, P) of a chunk, the `number`-th of its request."""
    if CONFIG.PREPARED:
        matrices = matrix_places(here.workspace, here.chunks, number, here.head, CONFIG)
        pairs = tl.load(matrices + CONFIG.C * CONFIG.C)
        solve = pairs
        if CONFIG.DELTA:
            solve = tl.load(matrices)
    else:
        solve, pairs = chunk_matrices(chunk, factors, CONFIG)
    return solve, pairs


@triton.jit
def _compute_chunk(
    request,
    base,
    start,
    s,
    loaded,
    state,
    skip,
    out,
    scale,
    here,
    CONFIG: tl.constexpr,
):
    """Compute the chunk that begins at `start`, write its outputs and its rows of the tail, and
    return the state after it; that of a chunk with rows left is `s`."""
    head, columns = here.head, here.columns
    chunk = choose_rows(loaded[0], CONFIG)
    rows = chunk.rows
    values = choose(rows, loaded[1])
    factors = chunk_factors(chunk, scale, CONFIG)
    solve, pairs = _matrices(chunk, factors, (start - base) // CONFIG.C, here, CONFIG)
    if CONFIG.RELOAD:
        # The compiler would keep the parts that it loads twice without a barrier.
        tl.debug_barrier()
    value = values.to(tl.float32)
    u, o = chunk_outputs(s, chunk, value, factors, solve, pairs, CONFIG)
    if CONFIG.HAS_SKIP:
        o = o + value * tl.load(skip + head).to(tl.float32)
    _store_outputs(out + head * CONFIG.O_H, rows, o, columns, CONFIG)
    if not CONFIG.PREPARED:
        wanted = (rows.position >= here.first) & (rows.position < request.end)
        store_chunk(rows, wanted, chunk, values, here.target, columns, head, here.block, CONFIG)
    if CONFIG.RELOAD:
        tl.debug_barrier()
    after = start + CONFIG.C
    if after <= request.end:
        # A state is rounded once for each chunk, whether it is stored or not (T13).
        s = round_state(advance_state(s, u, chunk, factors, CONFIG), state, CONFIG)
        if after == here.keep:
            store_state(state, request.slot, head, columns, s, CONFIG)
    return s


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
    outputs and its slot. `s` is what `load_state` returns of the state at `base`, `number` the
    request's place in the batch."""
    head, block = tl.program_id(1) // CONFIG.BLOCKS, tl.program_id(1) % CONFIG.BLOCKS
    here = Here(
        head,
        block,
        block * CONFIG.ROWS + tl.arange(0, CONFIG.ROWS),
        open_head(tokens, head, CONFIG),
        open_tail(slots.tail, request.source, head, CONFIG),
        open_tail(slots.tail, request.slot, head, CONFIG),
        first_kept(request, CONFIG) // CONFIG.C * CONFIG.C,
        first_written(request, CONFIG),
        workspace,
        request.first // CONFIG.C + number * CONFIG.EXTRA,
    )
    if CONFIG.D == 0 and not CONFIG.PREPARED:
        # The one new token is in the chunk that begins at `base`.
        loaded = _load(request, base, here, CONFIG)
        s = settle_state(s, base, CONFIG)
        _copy_state(request, base, s, slots.state, here, CONFIG)
        _compute_chunk(request, base, base, s, loaded, slots.state, skip, out, scale, here, CONFIG)
    else:
        s = settle_state(s, base, CONFIG)
        _copy_state(request, base, s, slots.state, here, CONFIG)
        for start in range(base, request.end, CONFIG.C):
            loaded = _load(request, start, here, CONFIG)
            s = _compute_chunk(
                request, base, start, s, loaded, slots.state, skip, out, scale, here, CONFIG
            )
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
