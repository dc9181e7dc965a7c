"""A candidate for the serial part of long steps (`long_step_kernel`), with asynchronous products.

Four warps multiply, with rows of the state in registers as left operands, and four others copy what
`long_matrices_kernel` prepared, keys, queries and values of later chunks to shared memory. For
value sizes that are multiples of 64, and key sizes of 64 and 128. It is the choice `serial` of
`benchmarks.gpu.state_tiles`, which compares its outputs and states with those of the product.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnlib.ops.triton.hopper.kernels.compat import (
    Value,
    aggregate,
    arrive_after_copies,
    copy_to_shared,
)
from attnlib.ops.triton.hopper.kernels.state_long import FACTORS, plane_size
from attnlib.ops.triton.hopper.kernels.state_pieces import count_chunks, open_part, parts_of
from attnlib.ops.triton.kernels.state_arguments import (
    DECAY_CHANNEL,
    UNALIGNED,
    Request,
    StateBatch,
    Tail,
    Tokens,
)
from attnlib.ops.triton.kernels.state_requests import (
    kept_state,
    load_base,
    open_head,
    open_request,
    open_tail,
)

__all__ = ["serial_step_kernel"]

VECTORS: gl.constexpr = gl.constexpr(8)
"""Vectors [C] of a stage in shared memory, of which FACTORS are used."""
WARPS: gl.constexpr = gl.constexpr(4)


@aggregate
class Stages:
    """Chunks in shared memory.

    Fields:
        rows: [STAGES * R, C, PART], rows that the state is multiplied by: keys and queries or, with
            decays per channel, those for what the state holds, for outputs and for the next state,
            in two parts each.
        planes: [STAGES * M, C, C], P and T in two parts each.
        values: [STAGES, C, ROWS].
        factors: [STAGES, VECTORS * C] float32.
        full, empty: mbarriers [STAGES, 1].
        R, M, STAGES: numbers of tiles.
    """

    rows: Value
    planes: Value
    values: Value
    factors: Value
    full: Value
    empty: Value
    R: gl.constexpr
    M: gl.constexpr
    STAGES: gl.constexpr


@gluon.jit
def _allocate(CONFIG: gl.constexpr, STAGES: gl.constexpr):
    C: gl.constexpr = CONFIG.C
    CHANNEL: gl.constexpr = CONFIG.DECAY == DECAY_CHANNEL
    KINDS: gl.constexpr = 3 if CONFIG.DELTA else 2
    R: gl.constexpr = 2 * KINDS if CHANNEL else 2
    M: gl.constexpr = 4 if CONFIG.DELTA else 2
    ROWS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, CONFIG.PART], gl.bfloat16)
    PLANE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    VALUE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, CONFIG.ROWS], gl.bfloat16)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows = gl.allocate_shared_memory(gl.bfloat16, [STAGES * R, C, CONFIG.PART], ROWS_LAYOUT)
    planes = gl.allocate_shared_memory(gl.bfloat16, [STAGES * M, C, C], PLANE_LAYOUT)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, CONFIG.ROWS], VALUE_LAYOUT)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES, VECTORS * C], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=32 * WARPS)
        mbarrier.init(empty.index(stage), count=1)
    return Stages(rows, planes, values, factors, full, empty, R, M, STAGES)


@gluon.constexpr_function
def _copy_layout(columns, elements):
    lanes = min(8, columns // elements)
    return gl.BlockedLayout([1, elements], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def _copy_rows(target, part, old, new, stop, OLD, NEW, CONFIG: gl.constexpr):
    """Copy rows of a chunk from the tail or the step, 0 from position `stop` on."""
    C: gl.constexpr = CONFIG.C
    WIDTH: gl.constexpr = target.shape[1]
    LAYOUT: gl.constexpr = _copy_layout(WIDTH, 8)
    row = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    place = new + (part.token + row) * NEW
    if part.is_old:
        place = old + ((part.start + row) % CONFIG.RING) * OLD
    inside = (row < stop - part.start)[:, None] & (columns < WIDTH)[None, :]
    copy_to_shared(target, place[:, None] + columns[None, :], mask=inside)


@gluon.jit
def _copy_tile(target, place):
    """Copy a matrix whose rows follow each other."""
    LAYOUT: gl.constexpr = _copy_layout(target.shape[1], 8)
    row = gl.arange(0, target.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, target.shape[1], gl.SliceLayout(0, LAYOUT))
    copy_to_shared(target, place + row[:, None] * target.shape[1] + columns[None, :])


@gluon.jit
def _loader(stages, request, base, count, tokens, tail, first, block, CONFIG: gl.constexpr):
    """Copy all chunks. `first` holds pointers to planes and factors of the first one."""
    C: gl.constexpr = CONFIG.C
    CHANNEL: gl.constexpr = CONFIG.DECAY == DECAY_CHANNEL
    PLANES: gl.constexpr = plane_size(C, CONFIG.PART, CONFIG.DELTA, CHANNEL)
    planes, factors = first
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    number = gl.arange(0, VECTORS * C, FLAT)
    for own in range(count):
        part = open_part(request, base, own, CONFIG)
        stage = own % stages.STAGES
        plane = planes + own.to(gl.int64) * (PLANES * CONFIG.HV)
        vector = factors + own.to(gl.int64) * (FACTORS * C * CONFIG.HV)
        mbarrier.wait(stages.empty.index(stage), ((own // stages.STAGES) & 1) ^ 1)
        if CHANNEL:
            # Rows for what a state holds are not used without DELTA.
            ROWS_AT: gl.constexpr = stages.M * C * C + (0 if CONFIG.DELTA else 2 * C * CONFIG.PART)
            for piece in gl.static_range(stages.R):
                _copy_tile(
                    stages.rows.index(stage * stages.R + piece),
                    plane + (ROWS_AT + piece * C * CONFIG.PART),
                )
        else:
            OLD: gl.constexpr = CONFIG.HK * CONFIG.DK
            _copy_rows(
                stages.rows.index(stage * stages.R), part, tail.k, tokens.k, part.stop, OLD,
                CONFIG.K_T, CONFIG,
            )  # fmt: skip
            stop = gl.where(part.is_old, part.start, part.stop)
            _copy_rows(
                stages.rows.index(stage * stages.R + 1), part, tokens.q, tokens.q, stop, 0,
                CONFIG.Q_T, CONFIG,
            )  # fmt: skip
        if CHANNEL:  # the decays of the channels are in the second half
            source = number - gl.where(number < 4 * C, 0, 3 * C)
            wanted = (number < C) | (number >= 4 * C) & (source < C + CONFIG.PART)
            copy_to_shared(stages.factors.index(stage), vector + source, mask=wanted)
        else:
            copy_to_shared(stages.factors.index(stage), vector + number, mask=number < FACTORS * C)
        OLD_V: gl.constexpr = CONFIG.HV * CONFIG.DV
        OFFSET = block * CONFIG.ROWS
        _copy_rows(
            stages.values.index(stage), part, tail.v + OFFSET, tokens.v + OFFSET, part.stop,
            OLD_V, CONFIG.V_T, CONFIG,
        )  # fmt: skip
        for piece in gl.static_range(stages.M):
            _copy_tile(stages.planes.index(stage * stages.M + piece), plane + piece * C * C)
        arrive_after_copies(stages.full.index(stage), increment_count=False)


@gluon.jit
def _halves(x, OPERAND: gl.constexpr):
    """Return two numbers of bfloat16 whose sum is x to 16 bits, the larger first, as left operands
    of products."""
    high, low = parts_of(x)
    return gl.convert_layout(high, OPERAND), gl.convert_layout(low, OPERAND)


@gluon.jit
def _multiply(a, b, acc, EMPTY: gl.constexpr):
    """Issue acc + a b^T with a in two halves, and b a tuple of two transposed tiles or one; the
    product of the smaller halves is left out. EMPTY: acc is 0. There are len(b) + 1 products."""
    if len(b) == 2:
        acc = warpgroup_mma(a[0], b[1], acc, use_acc=not EMPTY, is_async=True)
        acc = warpgroup_mma(a[1], b[0], acc, is_async=True)
    else:
        acc = warpgroup_mma(a[1], b[0], acc, use_acc=not EMPTY, is_async=True)
    return warpgroup_mma(a[0], b[0], acc, is_async=True)


@gluon.jit
def _turned(tiles, first, COUNT: gl.constexpr):
    """Return COUNT tiles as right operands of `_multiply`."""
    found = ()
    for number in gl.static_range(COUNT):
        found = found + (tiles.index(first + number).permute((1, 0)),)
    return found


@gluon.jit
def _as_they_are(tiles, first, COUNT: gl.constexpr):
    """Return COUNT tiles [C, PART] as right operands of the product for the next state."""
    found = ()
    for number in gl.static_range(COUNT):
        found = found + (tiles.index(first + number),)
    return found


@gluon.jit
def _vector(stages, stage, which: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    start: gl.constexpr = which * stages.values.shape[1]
    part = stages.factors.index(stage).slice(start, SIZE)
    return part.load(gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _compute_chunk(s, stages, stage, skip, CONFIG: gl.constexpr):
    """Return the state [ROWS, PART] after the chunk in a stage, which is still being computed, and
    the outputs of the chunk [ROWS, C]."""
    C: gl.constexpr = CONFIG.C
    ROWS: gl.constexpr = CONFIG.ROWS
    CHANNEL: gl.constexpr = CONFIG.DECAY == DECAY_CHANNEL
    # Tiles of rows that the state is multiplied by. Keys serve for the next state, too.
    TILES: gl.constexpr = 2 if CHANNEL else 1
    READ: gl.constexpr = TILES if CONFIG.DELTA or not CHANNEL else 0
    KEPT: gl.constexpr = READ + TILES if CHANNEL else 0
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    STATE: gl.constexpr = s.type.layout
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    OF_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    FLAT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    zeros = gl.zeros([ROWS, C], gl.float32, LAYOUT)
    row = stage * stages.R
    plane = stage * stages.M
    halves = _halves(s, OPERAND)
    seen = zeros
    if CONFIG.DELTA:
        seen = _multiply(halves, _turned(stages.rows, row, TILES), zeros, True)
    values = stages.values.index(stage).permute((1, 0)).load(LAYOUT).to(gl.float32)
    u = values * _vector(stages, stage, 0, C, LAYOUT)
    if CONFIG.DELTA:
        seen = warpgroup_mma_wait(0, [seen])
        if not CHANNEL:
            seen = seen * _vector(stages, stage, 1, C, LAYOUT)
        solve = _turned(stages.planes, plane + 2, 2)
        u = _multiply(_halves(u - seen, OPERAND), solve, zeros, True)
    o = _multiply(halves, _turned(stages.rows, row + READ, TILES), zeros, True)
    if CHANNEL:
        s = s * _vector(stages, stage, 4, CONFIG.PART, STATE)
    else:
        # All numbers of this vector are equal.
        end = gl.max(stages.factors.index(stage).slice(4 * C, C).load(FLAT), 0)
        s = s * end
    if CONFIG.DELTA:
        u = warpgroup_mma_wait(TILES + 1, [u])
    inner = _multiply(_halves(u, OPERAND), _turned(stages.planes, plane, 2), zeros, True)
    if not CHANNEL:
        u = u * _vector(stages, stage, 3, C, LAYOUT)
    kept = _as_they_are(stages.rows, row + KEPT, TILES)
    s = _multiply(_halves(u, OF_STATE), kept, s, False)
    o, inner = warpgroup_mma_wait(TILES + 1, [o, inner])
    if not CHANNEL:
        o = o * _vector(stages, stage, 2, C, LAYOUT)
    o = o + inner
    if CONFIG.HAS_SKIP:
        o = o + values * skip
    return s, o


@gluon.jit
def _store_outputs(out, part, o, CONFIG: gl.constexpr):
    """Store outputs [ROWS, C] of the new tokens of a chunk; `out` points to those of the block."""
    LAYOUT: gl.constexpr = _copy_layout(CONFIG.ROWS, 8)
    row = gl.arange(0, CONFIG.C, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, CONFIG.ROWS, gl.SliceLayout(0, LAYOUT))
    o = gl.convert_layout(gl.permute(o.to(out.dtype.element_ty), (1, 0)), LAYOUT)
    place = out + (part.token + row)[:, None] * CONFIG.O_T + columns[None, :]
    if not part.is_old:
        gl.store(place, o, mask=(row < part.stop - part.start)[:, None])


@gluon.jit
def _state_places(state, slot, head, block, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """Return pointers to the rows of a state of this program, [ROWS, PART]."""
    row = block * CONFIG.ROWS + gl.arange(0, CONFIG.ROWS, gl.SliceLayout(1, LAYOUT))
    keys = gl.arange(0, CONFIG.PART, gl.SliceLayout(0, LAYOUT))
    base = state + slot * CONFIG.STATE + head * (CONFIG.DV * CONFIG.DK)
    return base + row[:, None] * CONFIG.DK + keys[None, :]


@gluon.jit
def _multiplier(stages, request, base, count, state, out, skip, head, block, CONFIG: gl.constexpr):
    """Compute all chunks."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.PART, 16])
    places = _state_places(state, request.source, head, block, LAYOUT, CONFIG)
    none = gl.full([CONFIG.ROWS, CONFIG.PART], 0, gl.int32, LAYOUT)
    s = gl.load(places, mask=none < base, other=0.0).to(gl.float32)
    keep = kept_state(request, CONFIG)
    places = _state_places(state, request.slot, head, block, LAYOUT, CONFIG)
    TYPE: gl.constexpr = state.dtype.element_ty
    if (count > 0) & (request.source != request.slot) & (base > 0) & (keep == base):
        gl.store(places, s.to(TYPE))
    out += head * CONFIG.O_H + block * CONFIG.ROWS
    for own in range(count):
        part = open_part(request, base, own, CONFIG)
        stage = own % stages.STAGES
        mbarrier.wait(stages.full.index(stage), (own // stages.STAGES) & 1)
        fence_async_shared()
        s, o = _compute_chunk(s, stages, stage, skip, CONFIG)
        _store_outputs(out, part, o, CONFIG)
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(stages.empty.index(stage), count=1)
        if part.stop == keep:
            gl.store(places, s.to(TYPE))


@gluon.jit(do_not_specialize=["num_reqs", "num_tokens"], do_not_specialize_on_alignment=UNALIGNED)
def serial_step_kernel(
    q, k, v, skip, out, state, positions, tail_k, tail_v, query_start_loc, seq_lens, slots, sources,
    planes, factors, num_reqs, num_tokens, CONFIG: gl.constexpr,
):  # fmt: skip
    """Arguments and grid of `long_step_kernel`. Eight warps."""
    C: gl.constexpr = CONFIG.C
    CHANNEL: gl.constexpr = CONFIG.DECAY == DECAY_CHANNEL
    number = gl.program_id(0)
    head, block = gl.program_id(1) // CONFIG.BLOCKS, gl.program_id(1) % CONFIG.BLOCKS
    batch = StateBatch(query_start_loc, seq_lens, slots, sources)
    request = open_request(batch, gl.minimum(number, num_reqs - 1))
    first, last = request.first, request.first
    if number == num_reqs:
        first = request.first + request.count
        last = num_tokens
    elif request.slot < 0:
        last = request.first + request.count
    _clear_rows(out, first, last, head, block, CONFIG)
    is_served = (number < num_reqs) & (request.slot >= 0) & (request.count > 0)
    # Others have a count of 0, whatever their numbers are.
    served = is_served.to(gl.int32)
    request = Request(
        request.slot * served, request.source * served, request.first, request.count,
        request.computed * served, request.end,
    )  # fmt: skip
    base = load_base(positions, request, head, block, CONFIG)
    count, _held = count_chunks(request, base, CONFIG)
    count = count * served
    tokens = open_head(Tokens(q, k, v, q, q), head, CONFIG)
    tail = open_tail(Tail(tail_k, tail_v, q, q), request.source, head, CONFIG)
    factor = 0.0
    if CONFIG.HAS_SKIP:
        factor = gl.load(skip + head).to(gl.float32)
    PLANES: gl.constexpr = plane_size(C, CONFIG.PART, CONFIG.DELTA, CHANNEL)
    chunk = (request.first // C + number * CONFIG.EXTRA).to(gl.int64) * CONFIG.HV + head
    prepared = (planes + chunk * PLANES, factors + chunk * (FACTORS * C))
    stages = _allocate(CONFIG, 3 if CHANNEL else 4)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiplier,
                (stages, request, base, count, state, out, factor, head, block, CONFIG),
            ),
            (_loader, (stages, request, base, count, tokens, tail, prepared, block, CONFIG)),
        ],
        [WARPS],
        [64],
    )


@gluon.jit
def _clear_rows(out, first, last, head, block, CONFIG: gl.constexpr):
    """Store zeros in the outputs of tokens from `first` to before `last`."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ROWS: gl.constexpr = CONFIG.ROWS
    place = out + head * CONFIG.O_H + block * ROWS + gl.arange(0, ROWS, LAYOUT)
    zeros = gl.zeros([ROWS], out.dtype.element_ty, LAYOUT)
    for token in range(first, last):
        gl.store(place + token.to(gl.int64) * CONFIG.O_T, zeros)
