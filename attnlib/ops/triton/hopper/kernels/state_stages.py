"""Chunks of long steps (`state_serial`) in shared memory, and the warps that copy them there."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.ops.triton.hopper.kernels import compat
from attnlib.ops.triton.hopper.kernels.state_long import factor_size, plane_size
from attnlib.ops.triton.hopper.kernels.state_memory import copy_layout
from attnlib.ops.triton.hopper.kernels.state_pieces import open_part, token_places, wanted_rows

__all__ = ["WARPS", "Stages", "allocate", "load_chunks"]

WARPS: gl.constexpr = gl.constexpr(4)
"""Warps that copy, and as many that multiply."""


@compat.aggregate
class Stages:
    """Chunks in shared memory.

    Fields:
        rows: [STAGES * R, C, PART], rows that the state is multiplied by: keys and queries or, with
            decays per channel, those for what the state holds, for outputs and for the next state,
            in two parts each.
        planes: [STAGES * M, C, C], P and T in two parts each.
        values: [STAGES, C, ROWS].
        factors: [STAGES, a power of two] float32. Decays of channels are in the second half.
        full, empty: mbarriers [STAGES, 1].
        R, M, STAGES: numbers of tiles.
    """

    rows: compat.Value
    planes: compat.Value
    values: compat.Value
    factors: compat.Value
    full: compat.Value
    empty: compat.Value
    R: gl.constexpr
    M: gl.constexpr
    STAGES: gl.constexpr


@gluon.jit
def allocate(CONFIG: gl.constexpr):
    """Return the `Stages` of a program, as many as fit."""
    C: gl.constexpr = CONFIG.C
    CHANNEL: gl.constexpr = CONFIG.DECAY == "channel"
    STAGES: gl.constexpr = CONFIG.CHUNKS if CONFIG.CHUNKS else 3 if CHANNEL else 4
    KINDS: gl.constexpr = 3 if CONFIG.DELTA else 2
    R: gl.constexpr = 2 * KINDS if CHANNEL else 2
    M: gl.constexpr = 4 if CONFIG.DELTA else 2
    NUMBERS: gl.constexpr = max(8 * C, 2 * CONFIG.PART if CHANNEL else 0)
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, CONFIG.PART], gl.bfloat16)
    PAIRS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, CONFIG.ROWS], gl.bfloat16)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    stages = Stages(
        gl.allocate_shared_memory(gl.bfloat16, [STAGES * R, C, CONFIG.PART], KEYS),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES * M, C, C], PAIRS),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, CONFIG.ROWS], VALUES),
        gl.allocate_shared_memory(gl.float32, [STAGES, NUMBERS], FLAT),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        R,
        M,
        STAGES,
    )
    for stage in gl.static_range(STAGES):
        mbarrier.init(stages.full.index(stage), count=32 * WARPS)
        mbarrier.init(stages.empty.index(stage), count=1)
    return stages


@gluon.jit
def _copy_tokens(target, part, old, new, OLD: gl.constexpr, NEW: gl.constexpr, CONFIG):
    """Copy rows of a chunk from the tail or the step, 0 where there is no token. OLD and NEW are
    the strides of rows."""
    LAYOUT: gl.constexpr = copy_layout(target.shape[1], 8, WARPS)
    row = gl.arange(0, CONFIG.C, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, target.shape[1], gl.SliceLayout(0, LAYOUT))
    place, exists = token_places(part, row, columns, old, new, OLD, NEW, CONFIG)
    compat.copy_to_shared(target, place, mask=exists)


@gluon.jit
def _copy_tile(target, place, first=0, last=None):
    """Copy a matrix whose rows follow each other, 0 for all but the rows from `first` to `last`."""
    LAYOUT: gl.constexpr = copy_layout(target.shape[1], 8, WARPS)
    row = gl.arange(0, target.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, target.shape[1], gl.SliceLayout(0, LAYOUT))
    wanted = None if last is None else ((row >= first) & (row < last))[:, None]
    compat.copy_to_shared(target, place + row[:, None] * target.shape[1] + columns[None, :], wanted)


@gluon.jit
def _copy_rows(stages, stage, part, plane, tokens, tail, CONFIG: gl.constexpr):
    """Copy the rows that the state is multiplied by."""
    C: gl.constexpr = CONFIG.C
    PART: gl.constexpr = CONFIG.PART
    first = stage * stages.R
    if CONFIG.DECAY == "channel":
        # Without DELTA, there are no rows for what a state holds.
        AT: gl.constexpr = stages.M * C * C + (0 if CONFIG.DELTA else 2 * C * PART)
        for piece in gl.static_range(stages.R):
            place = plane + (AT + piece * C * PART)
            if CONFIG.CHUNKS:
                start, stop = wanted_rows(part, piece // 2 + (3 - stages.R // 2), CONFIG)
                _copy_tile(stages.rows.index(first + piece), place, start, stop)
            else:
                _copy_tile(stages.rows.index(first + piece), place)
    else:
        OLD: gl.constexpr = CONFIG.HK * CONFIG.DK
        keys, queries = stages.rows.index(first), stages.rows.index(first + 1)
        _copy_tokens(keys, part, tail.k, tokens.k, OLD, CONFIG.K_T, CONFIG)
        # Nobody stores the outputs of tokens in the tail: any query does for them.
        _copy_tokens(queries, part, tokens.q, tokens.q, 0, CONFIG.Q_T, CONFIG)


@gluon.jit
def load_chunks(stages, work, tokens, tail, planes, factors, CONFIG: gl.constexpr):
    """Copy all chunks of a request, `work`: that, the position of its state, and their number.
    `planes` and `factors` point to those of the first one, values to those of the program."""
    request, base, count = work
    C: gl.constexpr = CONFIG.C
    CHANNEL: gl.constexpr = CONFIG.DECAY == "channel"
    PLANES: gl.constexpr = plane_size(C, CONFIG.PART, CONFIG.DELTA, CHANNEL)
    OLD: gl.constexpr = CONFIG.HV * CONFIG.DV
    FACTORS: gl.constexpr = factor_size(C, CONFIG.PART, CHANNEL)
    HALF: gl.constexpr = stages.factors.shape[1] // 2
    number = gl.arange(0, 2 * HALF, gl.BlockedLayout([1], [32], [WARPS], [0]))
    source, wanted = number, number < FACTORS
    if CHANNEL:
        source = number - gl.where(number < HALF, 0, HALF - C)
        wanted = (number < C) | (number >= HALF) & (source < C + CONFIG.PART)
    for own in range(count):
        part = open_part(request, base, own, CONFIG)
        stage = own % stages.STAGES
        plane = planes + own.to(gl.int64) * (PLANES * CONFIG.HV)
        vector = factors + own.to(gl.int64) * (FACTORS * CONFIG.HV)
        mbarrier.wait(stages.empty.index(stage), ((own // stages.STAGES) & 1) ^ 1)
        _copy_rows(stages, stage, part, plane, tokens, tail, CONFIG)
        compat.copy_to_shared(stages.factors.index(stage), vector + source, mask=wanted)
        values = stages.values.index(stage)
        _copy_tokens(values, part, tail.v, tokens.v, OLD, CONFIG.V_T, CONFIG)
        for piece in gl.static_range(stages.M):
            _copy_tile(stages.planes.index(stage * stages.M + piece), plane + piece * C * C)
        compat.arrive_after_copies(stages.full.index(stage), increment_count=False)
