"""What runs before and after `state_step` in steps of more than D + 1 tokens.

`state_matrices_kernel` prepares the matrices of all chunks in parallel, `state_step_kernel` with
PREPARED reads them, one chunk after the other, and `state_tail_kernel` writes tails and positions
when no program reads them any more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels import state_arguments as arguments
from attnlib.ops.triton.kernels import state_requests as requests
from attnlib.ops.triton.kernels import state_rows as inputs
from attnlib.ops.triton.kernels.schedule import find_request
from attnlib.ops.triton.kernels.state_chunk import chunk_factors
from attnlib.ops.triton.kernels.state_matrices import chunk_matrices

__all__ = [
    "load_prepared",
    "prepared_columns",
    "prepared_rows",
    "state_matrices_kernel",
    "state_tail_kernel",
]


@triton.constexpr_function
def prepared_columns(C, PART, PARTS, IS_CHANNEL):
    """Numbers of a row of a chunk of one head: of T and P, inverse lengths of its query and key,
    and the sums of decays, of a head in the first of two or of each channel behind them."""
    return 2 * C + 4 + (PART * PARTS if IS_CHANNEL else 0)


@triton.jit
def prepared_rows(workspace, first, number, head, CONFIG: tl.constexpr):
    """Return pointers to the rows of a chunk, the `number`-th of its request, [C]."""
    IS_CHANNEL: tl.constexpr = CONFIG.DECAY == "channel"
    SIZE: tl.constexpr = prepared_columns(CONFIG.C, CONFIG.PART, CONFIG.PARTS, IS_CHANNEL)
    place = workspace + ((first + number).to(tl.int64) * CONFIG.HV + head) * (CONFIG.C * SIZE)
    return place + tl.arange(0, CONFIG.C) * SIZE


@triton.jit
def _channels(rows, part: tl.constexpr, CONFIG: tl.constexpr):
    """Return pointers to the sums of decays of a part of the channels, [C, PART]."""
    return rows[:, None] + (2 * CONFIG.C + 4 + requests.part_columns(part, CONFIG))[None, :]


@triton.jit
def load_prepared(rows, scale, CONFIG: tl.constexpr):
    """Return (T, P, factors) of a chunk."""
    C: tl.constexpr = CONFIG.C
    matrix = rows[:, None] + tl.arange(0, C)[None, :]
    total = tl.load(rows + 2 * C + 2)
    if CONFIG.DECAY == "channel":
        total = [tl.load(_channels(rows, part, CONFIG)) for part in arguments.numbers(CONFIG.PARTS)]
    pairs = tl.load(matrix + C)
    factors = arguments.Factors(total, tl.load(rows + 2 * C) * scale, tl.load(rows + 2 * C + 1))
    return tl.load(matrix) if CONFIG.DELTA else pairs, pairs, factors


@triton.jit(do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=arguments.UNALIGNED)
def state_matrices_kernel(
    q, k, decay, beta, positions, tail_k, tail_decay, tail_beta, query_start_loc, seq_lens,
    slots, sources, workspace, num_reqs, CONFIG: tl.constexpr,
):  # fmt: skip
    """Prepare one chunk of one state head. Grid: (chunks, HV).

    Workspace: [chunks, HV, C, prepared_columns] float32.
    """
    head = tl.program_id(1)
    number = find_request(query_start_loc, tl.program_id(0), num_reqs, CONFIG.C, 128, CONFIG.EXTRA)
    if number == num_reqs:
        return
    request = requests.open_request(
        arguments.StateBatch(query_start_loc, seq_lens, slots, sources), number
    )
    if (request.slot < 0) | (request.count <= 0):
        return
    base = requests.load_base(positions, request, head, 0, CONFIG)
    chunks = request.first // CONFIG.C + number * CONFIG.EXTRA
    start = base + (tl.program_id(0) - chunks) * CONFIG.C
    if start >= request.end:
        return
    tokens = requests.open_head(arguments.Tokens(q, k, k, decay, beta), head, CONFIG)
    tails = arguments.Tail(tail_k, tail_k, tail_decay, tail_beta)
    tail = requests.open_tail(tails, request.source, head, CONFIG)
    rows = inputs.chunk_rows(request, start, CONFIG)
    chunk = inputs.choose_rows(inputs.load_chunk(rows, tokens, tail, CONFIG), CONFIG)
    factors = chunk_factors(chunk, 1.0, CONFIG)
    solve, pairs = chunk_matrices(chunk, factors, CONFIG)
    place = prepared_rows(workspace, chunks, tl.program_id(0) - chunks, head, CONFIG)
    matrix = place[:, None] + tl.arange(0, CONFIG.C)[None, :]
    if CONFIG.DELTA:
        tl.store(matrix, solve)
    tl.store(matrix + CONFIG.C, pairs)
    tl.store(place + 2 * CONFIG.C, factors.norm_q)
    tl.store(place + 2 * CONFIG.C + 1, factors.norm_k)
    if CONFIG.DECAY == "channel":
        for part in tl.static_range(len(factors.total)):
            tl.store(_channels(place, part, CONFIG), factors.total[part])
    else:
        tl.store(place + 2 * CONFIG.C + 2, factors.total)


@triton.jit(do_not_specialize_on_alignment=arguments.UNALIGNED)
def state_tail_kernel(
    k, v, decay, beta, positions, tail_k, tail_v, tail_decay, tail_beta, query_start_loc,
    seq_lens, slots, sources, CONFIG: tl.constexpr,
):  # fmt: skip
    """Write the tail and the positions of one request and state head. Grid: (requests, HV)."""
    BLOCKS: tl.constexpr = CONFIG.BLOCKS
    head = tl.program_id(1)
    batch = arguments.StateBatch(query_start_loc, seq_lens, slots, sources)
    request = requests.open_request(batch, tl.program_id(0))
    if (request.slot < 0) | (request.count <= 0):
        return
    tokens = requests.open_head(arguments.Tokens(k, k, v, decay, beta), head, CONFIG)
    tails = arguments.Tail(tail_k, tail_v, tail_decay, tail_beta)
    tail = requests.open_tail(tails, request.source, head, CONFIG)
    target = requests.open_tail(tails, request.slot, head, CONFIG)
    first = requests.first_written(request, CONFIG)
    for start in range(requests.kept_state(request, CONFIG), request.end, CONFIG.C):
        rows = inputs.chunk_rows(request, start, CONFIG)
        wanted = (rows.position >= first) & (rows.position < request.end)
        chunk = inputs.choose_rows(inputs.load_chunk(rows, tokens, tail, CONFIG), CONFIG)
        for block in tl.static_range(BLOCKS):
            columns = requests.value_columns(block, CONFIG)
            values = inputs.choose(rows, inputs.load_values(rows, tokens, tail, columns, CONFIG))
            inputs.store_values(rows, wanted, values, target, columns, CONFIG)
        inputs.store_chunk(rows, wanted, chunk, target, head, CONFIG)
    for block in tl.static_range(BLOCKS):
        requests.store_positions(positions, request, head, block, CONFIG)
