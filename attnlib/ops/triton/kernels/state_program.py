"""What one program of a step of a state layer computes, see `state_step`."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnlib.ops.triton.kernels import state_requests as requests
from attnlib.ops.triton.kernels import state_rows as inputs
from attnlib.ops.triton.kernels import stored_state as stored
from attnlib.ops.triton.kernels.decode_loads import load_decode
from attnlib.ops.triton.kernels.state_chunk import advance_state, chunk_factors, chunk_outputs
from attnlib.ops.triton.kernels.state_decode import decode_request
from attnlib.ops.triton.kernels.state_matrices import chunk_matrices
from attnlib.ops.triton.kernels.state_prefill import load_prepared, prepared_rows

__all__ = ["compute_request", "load_first"]


@triton.jit
def _store_outputs(out, rows, o, columns, CONFIG: tl.constexpr):
    """Store the outputs of new tokens, [ROWS, C]. `out` points to those of the head."""
    place = out + rows.token[:, None] * CONFIG.O_T + columns[None, :]
    inside = rows.fresh[:, None] & (columns < CONFIG.DV)[None, :]
    tl.store(place, tl.trans(o.to(out.dtype.element_ty)), mask=inside)


class Here(NamedTuple):
    """What a program computes.

    Attributes:
        head, block: its head and its value rows, see `value_columns`.
        tokens, tail, target: `Tokens` of the head, and the `Tail` to read and to write.
        keep, first: the chunk whose state is stored, and the first position of the new tail.
        results: `Results` of the batch.
        chunks: the number of the request's first chunk.
    """

    head: Any
    block: Any
    tokens: Any
    tail: Any
    target: Any
    keep: Any
    first: Any
    results: Any
    chunks: Any


class Prepared(NamedTuple):
    """What the value rows of a chunk share: the `Chunk`, its `Factors`, and T and P [C, C]."""

    chunk: Any
    factors: Any
    solve: Any
    pairs: Any


@triton.jit
def _copy_state(request, base, s, state, columns, here, CONFIG: tl.constexpr):
    """Store the state that a fork keeps."""
    if (request.source != request.slot) & (base > 0) & (here.keep == base):
        stored.store_state(state, request.slot, here.head, columns, s, CONFIG)


@triton.jit
def _load(request, start, columns, here, CONFIG: tl.constexpr):
    """Return what `load_chunk` and `load_values` return of the chunk at `start`."""
    rows = inputs.chunk_rows(request, start, CONFIG)
    chunk = inputs.load_chunk(rows, here.tokens, here.tail, CONFIG)
    return chunk, inputs.load_values(rows, here.tokens, here.tail, columns, CONFIG)


@triton.jit
def _prepare(chunk, number, here, CONFIG: tl.constexpr):
    """Return the `Prepared` of a chunk, the `number`-th of its request, that was just loaded."""
    chunk = inputs.choose_rows(chunk, CONFIG)
    if CONFIG.PREPARED:
        place = prepared_rows(here.results.workspace, here.chunks, number, here.head, CONFIG)
        solve, pairs, factors = load_prepared(place, here.results.scale, CONFIG)
    else:
        factors = chunk_factors(chunk, here.results.scale, CONFIG)
        solve, pairs = chunk_matrices(chunk, factors, CONFIG)
    return Prepared(chunk, factors, solve, pairs)


@triton.jit
def _store_shared(request, prepared, here, CONFIG: tl.constexpr):
    """Store what the programs of a head share in the rows of the tail."""
    if not CONFIG.PREPARED:
        rows = prepared.chunk.rows
        wanted = (rows.position >= here.first) & (rows.position < request.end)
        if here.block == 0:
            inputs.store_chunk(rows, wanted, prepared.chunk, here.target, here.head, CONFIG)


@triton.jit
def _compute_rows(request, start, s, value, prepared, state, columns, here, CONFIG: tl.constexpr):
    """Compute the value rows `columns` of the chunk that begins at `start`, write their outputs and
    their part of the tail, and return the state after it; that of a chunk with rows left is `s`."""
    head, rows = here.head, prepared.chunk.rows
    values = inputs.choose(rows, value)
    if CONFIG.RELOAD:
        # The compiler would keep the parts that it loads twice without a barrier.
        tl.debug_barrier()
    value = values.to(tl.float32)
    u, o = chunk_outputs(
        s, prepared.chunk, value, prepared.factors, prepared.solve, prepared.pairs, CONFIG
    )
    if CONFIG.HAS_SKIP:
        o = o + tl.trans(value) * tl.load(here.results.skip + head).to(tl.float32)
    _store_outputs(here.results.out + head * CONFIG.O_H, rows, o, columns, CONFIG)
    if not CONFIG.PREPARED:
        wanted = (rows.position >= here.first) & (rows.position < request.end)
        inputs.store_values(rows, wanted, values, here.target, columns, CONFIG)
    if CONFIG.RELOAD:
        tl.debug_barrier()
    after = start + CONFIG.C
    if after <= request.end:
        # A state is rounded once for each chunk, whether it is stored or not (T13).
        s = advance_state(s, u, prepared.chunk, prepared.factors, CONFIG)
        s = stored.round_state(s, state)
        if after == here.keep:
            stored.store_state(state, request.slot, head, columns, s, CONFIG)
    return s


@triton.jit
def _compute_passes(request, base, s, slots, here, CONFIG: tl.constexpr):
    """Compute the one new token of a request, which is in the chunk that begins at `base`: all
    value rows of the program, ROWS at a time. Each pass loads the rows of the next one first."""
    columns = requests.pass_columns(here.block, 0, CONFIG)
    chunk, value = _load(request, base, columns, here, CONFIG)
    prepared = _prepare(chunk, 0, here, CONFIG)
    _store_shared(request, prepared, here, CONFIG)
    rows = prepared.chunk.rows
    for number in range(0, CONFIG.PASSES):
        columns = requests.pass_columns(here.block, number, CONFIG)
        # Rows after the last ones do not exist.
        behind = requests.pass_columns(here.block, number + 1, CONFIG)
        next_s = stored.load_state(slots.state, request.source, here.head, behind, base, CONFIG)
        next_value = inputs.load_values(rows, here.tokens, here.tail, behind, CONFIG)
        x = stored.settle_state(s, base, CONFIG)
        _copy_state(request, base, x, slots.state, columns, here, CONFIG)
        _compute_rows(request, base, x, value, prepared, slots.state, columns, here, CONFIG)
        s, value = next_s, next_value


@triton.jit
def load_first(request, base, tokens, slots, FUSED: tl.constexpr, CONFIG: tl.constexpr):
    """Return what a program loads before all else, for `compute_request`. With FUSED, it writes the
    inputs of the new tokens itself after that."""
    head, block = tl.program_id(1) // CONFIG.BLOCKS, tl.program_id(1) % CONFIG.BLOCKS
    if CONFIG.GROUP:
        first = load_decode(request, base, tokens, slots, head, block, FUSED, CONFIG)
    else:
        columns = requests.pass_columns(block, 0, CONFIG)
        first = stored.load_state(slots.state, request.source, head, columns, base, CONFIG)
    return first


@triton.jit
def compute_request(
    request, number, base, s, tokens, slots, results, FUSED: tl.constexpr, CONFIG: tl.constexpr
):
    """Compute the step of a request for the value rows and the head of this program, and write its
    outputs and its slot. `s` is what `load_first` returns of the state at `base`, `number` the
    request's place in the batch."""
    head, block = tl.program_id(1) // CONFIG.BLOCKS, tl.program_id(1) % CONFIG.BLOCKS
    here = Here(
        head,
        block,
        requests.open_head(tokens, head, CONFIG),
        requests.open_tail(slots.tail, request.source, head, CONFIG),
        requests.open_tail(slots.tail, request.slot, head, CONFIG),
        requests.kept_state(request, CONFIG),
        requests.first_written(request, CONFIG),
        results,
        request.first // CONFIG.C + number * CONFIG.EXTRA,
    )
    if CONFIG.GROUP:
        decode_request(request, base, s, tokens, slots, results, FUSED, CONFIG)
    elif CONFIG.D == 0 and not CONFIG.PREPARED:
        _compute_passes(request, base, s, slots, here, CONFIG)
    else:
        columns = requests.pass_columns(block, 0, CONFIG)
        s = stored.settle_state(s, base, CONFIG)
        _copy_state(request, base, s, slots.state, columns, here, CONFIG)
        for start in range(base, request.end, CONFIG.C):
            chunk, value = _load(request, start, columns, here, CONFIG)
            prepared = _prepare(chunk, (start - base) // CONFIG.C, here, CONFIG)
            given = s, value, prepared, slots.state, columns
            s = _compute_rows(request, start, *given, here, CONFIG)
            _store_shared(request, prepared, here, CONFIG)
    if not CONFIG.PREPARED and not CONFIG.GROUP:
        requests.store_positions(slots.positions, request, head, block, CONFIG)
