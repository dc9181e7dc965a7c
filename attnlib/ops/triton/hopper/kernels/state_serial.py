"""The serial part of long steps of state layers (`state_long`): one chunk after the other.

Four warps multiply, with rows of the state in registers as left operands of asynchronous products,
and four others (`state_stages`) copy what `long_matrices_kernel` prepared, keys, queries and values
of later chunks to shared memory. In steps of few tokens (CHUNKS), the same four do both.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from attnlib.ops.triton.hopper.kernels import state_pieces as pieces
from attnlib.ops.triton.hopper.kernels.compat import partition_barrier
from attnlib.ops.triton.hopper.kernels.state_long import factor_size, plane_size
from attnlib.ops.triton.hopper.kernels.state_memory import copy_layout
from attnlib.ops.triton.hopper.kernels.state_slots import clear_rows
from attnlib.ops.triton.hopper.kernels.state_stages import WARPS, allocate, load_chunks
from attnlib.ops.triton.kernels import state_arguments as arguments
from attnlib.ops.triton.kernels import state_requests as requests

__all__ = ["serial_step_kernel"]


@gluon.jit
def _halves(x, OPERAND: gl.constexpr):
    """Return two numbers of bfloat16 whose sum is x to 16 bits, the larger first, as left operands
    of products."""
    high, low = pieces.parts_of(x)
    return gl.convert_layout(high, OPERAND), gl.convert_layout(low, OPERAND)


@gluon.jit
def _multiply(a, b, acc, EMPTY: gl.constexpr):
    """Issue acc + a b^T with a in two halves, and b a tuple of two transposed tiles or one; the
    product of the smaller halves is left out. EMPTY: acc is 0. There are len(b) + 1 products."""
    if len(b) == 2:
        acc = hopper.warpgroup_mma(a[0], b[1], acc, use_acc=not EMPTY, is_async=True)
        acc = hopper.warpgroup_mma(a[1], b[0], acc, is_async=True)
    else:
        acc = hopper.warpgroup_mma(a[1], b[0], acc, use_acc=not EMPTY, is_async=True)
    return hopper.warpgroup_mma(a[0], b[0], acc, is_async=True)


@gluon.jit
def _tiles(tiles, first, COUNT: gl.constexpr, TURNED: gl.constexpr):
    """Return COUNT tiles as right operands of `_multiply`."""
    found = [tiles.index(first + number) for number in arguments.numbers(COUNT)]
    return [tile.permute((1, 0)) if TURNED else tile for tile in found]


@gluon.jit
def _vector(stages, stage, START: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    part = stages.factors.index(stage).slice(START, SIZE)
    return part.load(gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _compute_chunk(s, stages, stage, skip, CONFIG: gl.constexpr):
    """Return the state [ROWS, PART] after the chunk in a stage, which is still being computed, and
    the outputs of the chunk [ROWS, C]."""
    C: gl.constexpr = CONFIG.C
    ROWS: gl.constexpr = CONFIG.ROWS
    CHANNEL: gl.constexpr = CONFIG.DECAY == "channel"
    # Tiles of rows that the state is multiplied by. Keys serve for the next state, too.
    TILES: gl.constexpr = 2 if CHANNEL else 1
    READ: gl.constexpr = TILES if CONFIG.DELTA or not CHANNEL else 0
    KEPT: gl.constexpr = READ + TILES if CHANNEL else 0
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    STATE: gl.constexpr = s.type.layout
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    OF_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    zeros = gl.zeros([ROWS, C], gl.float32, LAYOUT)
    row = stage * stages.R
    plane = stage * stages.M
    halves = _halves(s, OPERAND)
    seen = zeros
    if CONFIG.DELTA:
        seen = _multiply(halves, _tiles(stages.rows, row, TILES, True), zeros, True)
    values = stages.values.index(stage).permute((1, 0)).load(LAYOUT).to(gl.float32)
    u = values * _vector(stages, stage, 0, C, LAYOUT)
    if CONFIG.DELTA:
        seen = hopper.warpgroup_mma_wait(0, [seen])
        if not CHANNEL:
            seen = seen * _vector(stages, stage, C, C, LAYOUT)
        solve = _tiles(stages.planes, plane + 2, 2, True)
        u = _multiply(_halves(u - seen, OPERAND), solve, zeros, True)
    o = _multiply(halves, _tiles(stages.rows, row + READ, TILES, True), zeros, True)
    if CHANNEL:
        ENDS: gl.constexpr = stages.factors.shape[1] // 2
        s = s * _vector(stages, stage, ENDS, CONFIG.PART, STATE)
    else:
        # All numbers of this vector are equal.
        ends = stages.factors.index(stage).slice(4 * C, C).load(gl.SliceLayout(0, LAYOUT))
        s = s * gl.max(ends, 0)
    if CONFIG.DELTA:
        u = hopper.warpgroup_mma_wait(TILES + 1, [u])
    inner = _multiply(_halves(u, OPERAND), _tiles(stages.planes, plane, 2, True), zeros, True)
    if not CHANNEL:
        u = u * _vector(stages, stage, 3 * C, C, LAYOUT)
    kept = _tiles(stages.rows, row + KEPT, TILES, False)
    s = _multiply(_halves(u, OF_STATE), kept, s, False)
    o, inner = hopper.warpgroup_mma_wait(TILES + 1, [o, inner])
    if not CHANNEL:
        o = o * _vector(stages, stage, 2 * C, C, LAYOUT)
    o = o + inner
    if CONFIG.HAS_SKIP:
        o = o + values * skip
    return s, o


@gluon.jit
def _store_outputs(out, part, o, CONFIG: gl.constexpr):
    """Store outputs [ROWS, C] of the new tokens of a chunk; `out` points to those of the block."""
    LAYOUT: gl.constexpr = copy_layout(CONFIG.ROWS, 8, WARPS)
    row = gl.arange(0, CONFIG.C, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, CONFIG.ROWS, gl.SliceLayout(0, LAYOUT))
    o = gl.convert_layout(gl.permute(o.to(out.dtype.element_ty), (1, 0)), LAYOUT)
    place = out + (part.token + row)[:, None] * CONFIG.O_T + columns[None, :]
    gl.store(place, o, mask=((row >= part.held) & (row < part.stop - part.start))[:, None])


@gluon.jit
def _state_places(state, slot, head, block, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """Return pointers to the rows of a state of this program, [ROWS, PART]."""
    row = block * CONFIG.ROWS + gl.arange(0, CONFIG.ROWS, gl.SliceLayout(1, LAYOUT))
    keys = gl.arange(0, CONFIG.PART, gl.SliceLayout(0, LAYOUT))
    base = state + slot * CONFIG.STATE + head * (CONFIG.DV * CONFIG.DK)
    return base + row[:, None] * CONFIG.DK + keys[None, :]


@gluon.jit
def _multiply_chunks(stages, work, state, out, skip, head, block, CONFIG: gl.constexpr):
    """Compute all chunks of a request, see `load_chunks`; store outputs and the state to keep."""
    request, base, count = work
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CONFIG.PART, 16])
    places = _state_places(state, request.source, head, block, LAYOUT, CONFIG)
    none = gl.full([CONFIG.ROWS, CONFIG.PART], 0, gl.int32, LAYOUT)
    s = gl.load(places, mask=none < base, other=0.0).to(gl.float32)
    keep = requests.kept_state(request, CONFIG)
    places = _state_places(state, request.slot, head, block, LAYOUT, CONFIG)
    TYPE: gl.constexpr = state.dtype.element_ty
    if (count > 0) & (request.source != request.slot) & (base > 0) & (keep == base):
        gl.store(places, s.to(TYPE))
    out += head * CONFIG.O_H + block * CONFIG.ROWS
    for own in range(count):
        part = pieces.open_part(request, base, own, CONFIG)
        stage = own % stages.STAGES
        hopper.mbarrier.wait(stages.full.index(stage), (own // stages.STAGES) & 1)
        hopper.fence_async_shared()
        s, o = _compute_chunk(s, stages, stage, skip, CONFIG)
        _store_outputs(out, part, o, CONFIG)
        s = hopper.warpgroup_mma_wait(0, [s])
        hopper.mbarrier.arrive(stages.empty.index(stage), count=1)
        if CONFIG.C == CONFIG.UNIT:
            s = s.to(TYPE).to(gl.float32)  # once for each chunk, stored or not (T13)
        if part.stop == keep:
            gl.store(places, s.to(TYPE))


@gluon.jit(
    do_not_specialize=["num_reqs", "num_tokens"], do_not_specialize_on_alignment=arguments.UNALIGNED
)
def serial_step_kernel(
    q, k, v, skip, out, state, positions, tail_k, tail_v, query_start_loc, seq_lens, slots, sources,
    planes, factors, num_reqs, num_tokens, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute a step of one request for ROWS value rows of one state head.

    CONFIG is a `StateConfig` of `long_tile`. Grid: (requests + 1, HV * BLOCKS), launched with WARPS
    warps. The last programs clear the rows after the last request.
    """
    CHANNEL: gl.constexpr = CONFIG.DECAY == "channel"
    number = gl.program_id(0)
    head, block = gl.program_id(1) // CONFIG.BLOCKS, gl.program_id(1) % CONFIG.BLOCKS
    batch = arguments.StateBatch(query_start_loc, seq_lens, slots, sources)
    request = requests.open_request(batch, gl.minimum(number, num_reqs - 1))
    first, last, base, count = request.first, request.first, 0, 0
    if number == num_reqs:
        first, last = request.first + request.count, num_tokens
    elif request.slot < 0:
        last = request.first + request.count
    elif request.count > 0:
        base = requests.load_base(positions, request, head, block, CONFIG)
        count = pieces.count_chunks(request, base, CONFIG)
    clear_rows(out, first, last, head, block, gl.BlockedLayout([1], [32], [WARPS], [0]), CONFIG)
    tokens = requests.open_head(arguments.Tokens(q, k, v + block * CONFIG.ROWS, q, q), head, CONFIG)
    tails = arguments.Tail(tail_k, tail_v + block * CONFIG.ROWS, q, q)
    tail = requests.open_tail(tails, request.source, head, CONFIG)
    factor = 0.0
    if CONFIG.HAS_SKIP:
        factor = gl.load(skip + head).to(gl.float32)
    chunk = (request.first // CONFIG.C + number * CONFIG.EXTRA).to(gl.int64) * CONFIG.HV + head
    planes += chunk * plane_size(CONFIG.C, CONFIG.PART, CONFIG.DELTA, CHANNEL)
    factors += chunk * factor_size(CONFIG.C, CONFIG.PART, CHANNEL)
    stages = allocate(CONFIG)
    hopper.fence_async_shared()
    # More would not fit, and wait forever: those of a request with more tokens than the step says.
    work = request, base, gl.minimum(count, CONFIG.CHUNKS) if CONFIG.CHUNKS else count
    if CONFIG.CHUNKS:
        # All chunks fit: warps of their own would wait for nothing, and take registers.
        partition_barrier()
        load_chunks(stages, work, tokens, tail, planes, factors, CONFIG)
        _multiply_chunks(stages, work, state, out, factor, head, block, CONFIG)
    else:
        gl.warp_specialize(
            [
                (_multiply_chunks, (stages, work, state, out, factor, head, block, CONFIG)),
                (load_chunks, (stages, work, tokens, tail, planes, factors, CONFIG)),
            ],
            [WARPS],
            [64],
        )
