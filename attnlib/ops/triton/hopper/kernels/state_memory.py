"""Shared memory of decodes of state layers: rows of the state and the tail, and their copies."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import commit_copies, copy_to_shared, reinterpret
from attnlib.ops.triton.kernels.state_arguments import numbers

__all__ = [
    "PART_KEYS",
    "ROWS_LAYOUT",
    "VECTOR",
    "Shared",
    "allocate",
    "copy_layout",
    "copy_state",
    "copy_tail",
    "gates",
    "key_layout",
    "multiply_state",
    "query_layout",
    "row_parts",
    "state_layout",
    "tail_rows",
    "value_layout",
]

PART_KEYS: gl.constexpr = gl.constexpr(32)
"""Keys that are multiplied at a time: 128 bytes of a row of the state."""
VECTOR: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 1, [0]))
ROWS_LAYOUT: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
"""Rows of a tail in one layout with each of them, and all of them."""
_STATE: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))


class Shared(NamedTuple):
    """Shared memory.

    Attributes:
        state: [ROWS * PASSES, DK] float32.
        key_rows, value_rows: [TAIL, DK] and [TAIL, ROWS * PASSES] as stored, see `tail_rows`. The
            last row is that of the first new token, where it fills a chunk.
        decays: [TAIL, DK] for decays per channel, else [TAIL / GROUP, GROUP].
        betas: [TAIL / GROUP, GROUP].
        queries, outputs: [QUERIES, DK] and [QUERIES, ROWS * PASSES] float32: queries before the
            tail, and what the tokens behind that add to their outputs.
    """

    state: Any
    key_rows: Any
    value_rows: Any
    decays: Any
    betas: Any
    queries: Any
    outputs: Any


@gluon.constexpr_function
def tail_rows(CONFIG):
    """A power of two of rows in shared memory for the tokens of a tail, at most UNIT - 1 + D."""
    return CONFIG.UNIT if CONFIG.D == 0 else 2 * CONFIG.UNIT


@gluon.constexpr_function
def query_layout(columns, warps):
    """[QUERIES, columns]: each warp has queries of its own."""
    return gl.BlockedLayout([1, max(1, columns // 32)], [1, 32], [warps, 1], [1, 0])


@gluon.constexpr_function
def key_layout(CONFIG):
    """[DK], the same in every warp."""
    return gl.SliceLayout(0, query_layout(CONFIG.DK, CONFIG.WARPS))


@gluon.constexpr_function
def value_layout(CONFIG):
    """[ROWS * PASSES], the same in every warp."""
    return gl.SliceLayout(0, query_layout(CONFIG.ROWS * CONFIG.PASSES, CONFIG.WARPS))


@gluon.constexpr_function
def state_layout(CONFIG, passes):
    """[rows, 32 keys]: 8 lanes read 128 bytes of a row, and each warp has rows of its own."""
    rows = CONFIG.ROWS * CONFIG.PASSES // (4 * CONFIG.WARPS * passes)
    return gl.BlockedLayout([rows, 4], [4, 8], [CONFIG.WARPS, 1], [1, 0])


@gluon.constexpr_function
def number_layout(CONFIG):
    """[GROUP], all of them in each thread."""
    return gl.SliceLayout(
        0, gl.BlockedLayout([1, CONFIG.GROUP], [32, 1], [CONFIG.WARPS, 1], [1, 0])
    )


@gluon.constexpr_function
def copy_layout(columns, vector, warps):
    """[rows, columns]: each thread copies 16 bytes of a row."""
    lanes = min(32, columns // vector)
    return gl.BlockedLayout([1, vector], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def allocate(tail, CONFIG: gl.constexpr):
    """Return the `Shared` memory of a program."""
    TAIL: gl.constexpr = tail_rows(CONFIG)
    GROUPS: gl.constexpr = [TAIL // CONFIG.GROUP, CONFIG.GROUP]
    SPAN: gl.constexpr = CONFIG.ROWS * CONFIG.PASSES
    KEYS: gl.constexpr = tail.k.dtype.element_ty
    VALUES: gl.constexpr = tail.v.dtype.element_ty
    if CONFIG.DECAY == "channel":
        decays = gl.allocate_shared_memory(gl.float32, [TAIL, CONFIG.DK], VECTOR)
    else:
        decays = gl.allocate_shared_memory(gl.float32, GROUPS, VECTOR)
    return Shared(
        gl.allocate_shared_memory(gl.float32, [SPAN, CONFIG.DK], _STATE),
        gl.allocate_shared_memory(KEYS, [TAIL, CONFIG.DK], VECTOR),
        gl.allocate_shared_memory(VALUES, [TAIL, SPAN], VECTOR),
        decays,
        gl.allocate_shared_memory(gl.float32, GROUPS, VECTOR),
        gl.allocate_shared_memory(gl.float32, [CONFIG.QUERIES, CONFIG.DK], VECTOR),
        gl.allocate_shared_memory(gl.float32, [CONFIG.QUERIES, SPAN], VECTOR),
    )


@gluon.jit
def _ring_rows(row, request, base, CONFIG: gl.constexpr):
    """Return the rows of a tail in the slot, and which exist."""
    ring = request.computed % CONFIG.RING - 1 - row  # one division for all rows
    exists = (row < request.computed - base) & (row < CONFIG.UNIT - 1 + CONFIG.D)
    return gl.where(ring < 0, ring + CONFIG.RING, ring), exists


@gluon.jit
def _copy_rows(
    target, source, request, base, STRIDE: gl.constexpr, LAYOUT: gl.constexpr, CONFIG: gl.constexpr
):
    """Copy rows of the tail to `target` [TAIL, columns]; STRIDE is from one to the next."""
    ROWS: gl.constexpr = target.shape[0]
    COLUMNS: gl.constexpr = target.shape[1]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    ring, exists = _ring_rows(row, request, base, CONFIG)
    place = (source + ring * STRIDE)[:, None] + column[None, :]
    rows = reinterpret(target, target.dtype, [ROWS, COLUMNS], ROWS_LAYOUT)
    copy_to_shared(rows, place, exists[:, None])


@gluon.jit
def _copy_numbers(target, source, request, base, STRIDE: gl.constexpr, CONFIG: gl.constexpr):
    """Copy one number of each row of the tail to `target` [TAIL / GROUP, GROUP]."""
    GROUP: gl.constexpr = CONFIG.GROUP
    GROUPS: gl.constexpr = tail_rows(CONFIG) // GROUP
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // GROUP, GROUP], [CONFIG.WARPS, 1], [1, 0])
    first = gl.arange(0, GROUPS, gl.SliceLayout(1, LAYOUT)) * GROUP
    row = first[:, None] + gl.arange(0, GROUP, gl.SliceLayout(0, LAYOUT))[None, :]
    ring, exists = _ring_rows(row, request, base, CONFIG)
    numbers = reinterpret(target, target.dtype, [GROUPS, GROUP], ROWS_LAYOUT)
    copy_to_shared(numbers, source + ring * STRIDE, exists)


@gluon.jit
def copy_tail(shared, request, base, tokens, tail, block, CONFIG: gl.constexpr):
    """Start copies of the tail before the new token: keys, the values of this program, and gates.
    Decays of a layer are copied for each token that exists."""
    SPAN: gl.constexpr = CONFIG.ROWS * CONFIG.PASSES
    KEYS: gl.constexpr = copy_layout(CONFIG.DK, 8, CONFIG.WARPS)
    VALUES: gl.constexpr = copy_layout(SPAN, 8, CONFIG.WARPS)
    DECAYS: gl.constexpr = copy_layout(CONFIG.DK, 4, CONFIG.WARPS)
    _copy_rows(shared.key_rows, tail.k, request, base, CONFIG.HK * CONFIG.DK, KEYS, CONFIG)
    values = tail.v + block * SPAN
    _copy_rows(shared.value_rows, values, request, base, CONFIG.HV * CONFIG.DV, VALUES, CONFIG)
    if CONFIG.HAS_BETA:
        _copy_numbers(shared.betas, tail.beta, request, base, CONFIG.HV, CONFIG)
    if CONFIG.DECAY == "channel":
        decays = tail.decay
        _copy_rows(shared.decays, decays, request, base, CONFIG.HV * CONFIG.DK, DECAYS, CONFIG)
    elif CONFIG.DECAY == "constant":
        _copy_numbers(shared.decays, tokens.decay, request, base, 0, CONFIG)
    else:
        _copy_numbers(shared.decays, tail.decay, request, base, CONFIG.HV, CONFIG)
    commit_copies()


@gluon.jit
def copy_state(shared, state, slot, head, block, base, CONFIG: gl.constexpr):
    """Start a copy of the rows of the state at `base` of this program; there is none at 0."""
    SPAN: gl.constexpr = CONFIG.ROWS * CONFIG.PASSES
    LAYOUT: gl.constexpr = copy_layout(CONFIG.DK, 4, CONFIG.WARPS)
    place = state + slot * CONFIG.STATE + (head * CONFIG.DV + block * SPAN) * CONFIG.DK
    row = gl.arange(0, SPAN, gl.SliceLayout(1, LAYOUT)) * CONFIG.DK
    place = place + row[:, None] + gl.arange(0, CONFIG.DK, gl.SliceLayout(0, LAYOUT))[None, :]
    copy_to_shared(shared.state, place, (row >= 0)[:, None] & (base > 0))
    commit_copies()


@gluon.jit
def gates(shared, group, number, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """Return (decay, beta) of row GROUP * group + number of the tail; decays per channel have the
    LAYOUT."""
    NUMBERS: gl.constexpr = number_layout(CONFIG)
    chosen = gl.arange(0, CONFIG.GROUP, NUMBERS) == number
    beta = 1.0
    if CONFIG.HAS_BETA:
        beta = gl.sum(gl.where(chosen, shared.betas.index(group).load(NUMBERS), 0.0), 0)
    if CONFIG.DECAY == "channel":
        decay = shared.decays.index(group * CONFIG.GROUP + number).load(LAYOUT)
    else:
        decay = gl.sum(gl.where(chosen, shared.decays.index(group).load(NUMBERS), 0.0), 0)
    return decay, beta


@gluon.jit
def row_parts(memory, LAYOUT: gl.constexpr):
    """Return the parts [32] of a row in shared memory, in float32."""
    PARTS: gl.constexpr = memory.shape[0] // PART_KEYS
    rows = [memory.slice(part * PART_KEYS, PART_KEYS) for part in numbers(PARTS)]
    return [row.load(LAYOUT).to(gl.float32) for row in rows]


@gluon.jit
def multiply_state(shared, CONFIG: gl.constexpr):
    """Return the outputs [ROWS * PASSES] of each query, with the products of the rows of the state,
    which are read once."""
    LAYOUT: gl.constexpr = state_layout(CONFIG, 1)
    SPAN: gl.constexpr = CONFIG.ROWS * CONFIG.PASSES
    PARTS: gl.constexpr = CONFIG.DK // PART_KEYS
    QUERIES: gl.constexpr = CONFIG.QUERIES
    sums = [gl.zeros([SPAN, PART_KEYS], gl.float32, LAYOUT) for number in numbers(QUERIES)]
    for part in gl.static_range(PARTS):
        rows = shared.state.slice(part * PART_KEYS, PART_KEYS, 1).load(LAYOUT)
        queries = [
            shared.queries.index(n).slice(part * PART_KEYS, PART_KEYS) for n in numbers(QUERIES)
        ]
        x = [query.load(gl.SliceLayout(0, LAYOUT)) for query in queries]
        sums = [gl.fma(rows, x[n][None, :], sums[n]) for n in numbers(QUERIES)]
    held = [shared.outputs.index(n).load(gl.SliceLayout(1, LAYOUT)) for n in numbers(QUERIES)]
    return [held[n] + gl.sum(sums[n], 1) for n in numbers(QUERIES)]
