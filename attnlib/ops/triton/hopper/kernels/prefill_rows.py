"""Query rows of a work tile: their numbers, their outputs, and tiles that are stored with them.

A consumer warpgroup has 64 rows. A row is one query head of one query token; the heads of a group
are adjacent.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.compat import consumers_sync, partition_barrier

__all__ = [
    "aligned_offset",
    "clear_values",
    "stage_rows",
    "store_empty_rows",
    "store_layout",
    "store_rows",
    "wide_layout",
    "work_rows",
]


@gluon.jit
def aligned_offset(offset):
    """Return the offset, marked as a multiple of 8 elements (16 bytes).

    The launcher checks the alignment; the shifts tell the compiler.
    """
    return (offset >> 3) << 3


@gluon.constexpr_function
def store_layout(columns):
    """Return a layout of rows in which each thread has 8 adjacent elements of a row."""
    lanes = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def wide_layout(columns):
    """Return a layout of [64, columns] with 8 adjacent elements of a row in each thread.

    Each warp has the rows that it has in an accumulator of WGMMA. At least 32 columns.
    """
    rest = [[0, 32 << bit] for bit in range((columns // 32).bit_length() - 1)]
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *rest]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, columns])


@gluon.jit
def work_rows(call, work, BLOCK: gl.constexpr, layout: gl.constexpr):
    """Return (token in the request, query head, whether the row exists) of block BLOCK of the rows
    of a work tile."""
    GROUP: gl.constexpr = call.config.GROUP
    rows = BLOCK * 64 + gl.arange(0, 64, layout)
    token = work.first_token + rows // GROUP
    head = work.kv_head * GROUP + rows % GROUP
    return token, head, (rows < call.config.TILE_TOKENS * GROUP) & (token < work.query_len)


@gluon.jit
def store_rows(out, offsets, tile, valid, head_size):
    """Store rows [M, W] at element offsets [M], columns up to head_size."""
    columns = gl.arange(0, tile.shape[1], gl.SliceLayout(0, tile.type.layout))
    pointers = out + aligned_offset(offsets)[:, None] + columns[None, :]
    gl.store(pointers, tile, mask=valid[:, None] & (columns < head_size)[None, :])


@gluon.jit
def store_empty_rows(
    outputs,
    start,
    token,
    head,
    valid,
    DTYPE: gl.constexpr,
    LAYOUT: gl.constexpr,
    WIDTH: gl.constexpr,
    DV: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    """Store rows after the last request: outputs of 0 (M6) and LSEs of -inf."""
    offsets = outputs.offsets(start + token, head)
    zeros = gl.zeros([64, WIDTH], DTYPE, LAYOUT)
    store_rows(outputs.pointer, offsets, zeros, valid, DV)
    if HAS_LSE:
        lses = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
        gl.store(outputs.lses(start + token, head), lses, mask=valid)


@gluon.jit
def stage_rows(q_tile, rows):
    """Put output rows into the queries' shared memory, from which stores are 16 bytes wide."""
    partition_barrier()
    q_tile.store(rows)
    partition_barrier()


@gluon.jit
def clear_values(v_tile, valid, WARPGROUP: gl.constexpr, CONSUMERS: gl.constexpr):
    """Set the rows of a value tile from `valid` on to 0; of several consumers, two do a half each.

    A page may hold anything past the sequence's end, and 0 * NaN is NaN (P5).
    """
    ROWS: gl.constexpr = v_tile.shape[0] // min(CONSUMERS, 2)
    LAYOUT: gl.constexpr = store_layout(v_tile.shape[1])
    if WARPGROUP < 2:
        half = v_tile.slice(WARPGROUP * ROWS, ROWS, 0)
        rows = WARPGROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        content = half.load(LAYOUT)
        half.store(gl.where(rows[:, None] < valid, content, 0.0))
        # WGMMA reads shared memory through the async proxy.
        fence_async_shared()
    # All consumers multiply by the whole tile, so all wait for all rows.
    consumers_sync(CONSUMERS)
