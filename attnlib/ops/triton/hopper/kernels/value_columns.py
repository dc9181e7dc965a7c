"""P @ V with values in parts of 32 elements in shared memory, and a part of ones, whose columns of
the result are the sums of the weights.

Adding the weights of a row takes a seventh of the instructions of a step without it. And tiles of
Gluon have powers of two as sizes: values of 80 or 96 elements have a tile of 128 columns, while
WGMMA takes any multiple of 8. Therefore a stage of the ring of values has a part [keys, 32] for
each 32 elements, and one whose elements are 1, which TMA does not write. The product is issued in
PTX: Gluon cannot express it.

PTX needs the address of the ring, which Gluon does not give either. Triton places the largest
allocations of shared memory first, and equal ones in the order of the program
(`shared_memory_offset`). `check_offset` verifies that in each CTA, and ends the kernel with an
error otherwise.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.compat import consumers_sync, partition_barrier

__all__ = [
    "PART_ELEMENTS",
    "PART_KEYS",
    "check_offset",
    "clear_value_parts",
    "first_columns",
    "multiply_value_parts",
    "product_columns",
    "shared_memory_offset",
    "store_ones",
]

PART_ELEMENTS = gl.constexpr(32)
"""Elements of a part: 64 bytes, the width of its swizzle."""

PART_KEYS = gl.constexpr(128)
"""Keys of a tile. Weights and accumulator have this many columns."""

_MARK = gl.constexpr(0x4B7D)
"""16 bits that `check_offset` stores and reads."""


@gluon.constexpr_function
def product_columns(head_size, parts, sums):
    """Return the columns of the product: those of the parts and 8 of ones, or of the head."""
    return 32 * parts + 8 if sums else (head_size + 7) // 8 * 8


@gluon.constexpr_function
def shared_memory_offset(sizes, own):
    """Return the offset in shared memory of an allocation of `own` bytes behind those of `sizes`
    bytes that were made before it, where no later one is larger."""
    return sum(size for size in sizes if size >= own)


@gluon.constexpr_function
def _product(columns, offset, is_bfloat16):
    """Return PTX: 8 products [64, 16] @ [16, columns] over the 128 keys of a tile.

    Operands: 64 elements of the accumulator and their inputs, 32 words of weights, and the offset
    of the tile behind `offset`.
    """
    accumulator = ", ".join(f"${i}" for i in range(columns // 2))
    kind = "bf16" if is_bfloat16 else "f16"
    lines = [
        ".reg .pred all;",
        ".reg .b32 address;",
        ".reg .b64 tile;",
        "setp.eq.b32 all, 0, 0;",
        "mov.u32 address, global_smem;",
        f"add.u32 address, address, {offset};",
        "add.u32 address, address, $160;",
        "bfe.u32 address, address, 4, 14;",
        "cvt.u64.u32 tile, address;",
        # Swizzle of 64 bytes. Groups of 8 keys are 512 bytes apart, parts 8 KB.
        "or.b64 tile, tile, 0x8000002002000000;",
        "wgmma.fence.sync.aligned;",
    ]
    for step in range(8):
        weights = ", ".join(f"${128 + 4 * step + i}" for i in range(4))
        lines += [
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
            f"{{{accumulator}}}, {{{weights}}}, tile, all, 1, 1, 1;",
            "add.u64 tile, tile, 64;",  # 16 keys of 64 bytes, in units of 16 bytes
        ]
    lines.append("wgmma.commit_group.sync.aligned;")
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _constraints():
    return ",".join(["=f"] * 64 + [str(i) for i in range(64)] + ["r"] * 32 + ["r"] * 64)


@gluon.jit
def multiply_value_parts(
    words, v_ring, stage, acc, COLUMNS: gl.constexpr, STAGES: gl.constexpr, OFFSET: gl.constexpr
):
    """Issue P @ V + acc over the first COLUMNS columns of a stage; one group of WGMMA.

    Args:
        words: packed weights [64, 64] of 128 keys (`mainloop.pack_weights`).
        v_ring: [STAGES * parts, 128, 32] in shared memory.
        stage: the stage of the tile.
        acc: [64, 128], float32. Columns from COLUMNS on stay as they are.
        OFFSET: of the ring in shared memory, in bytes.
    """
    DTYPE: gl.constexpr = v_ring.dtype
    LAYOUT: gl.constexpr = acc.type.layout
    STAGE_BYTES: gl.constexpr = v_ring.shape[0] // STAGES * PART_KEYS * PART_ELEMENTS * 2
    low = words.to(gl.int16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    # Registers of weights as an operand are those of a result of WGMMA.
    weights = gl.convert_layout(gl.reshape(gl.join(low, high), [64, PART_KEYS]), LAYOUT)
    tile = gl.full([64, PART_KEYS], 0, gl.int32, LAYOUT) + stage * STAGE_BYTES
    ASM: gl.constexpr = _product(COLUMNS, OFFSET, DTYPE == gl.bfloat16)
    CONSTRAINTS: gl.constexpr = _constraints()
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [acc, weights, tile], gl.float32, False, 64)


@gluon.jit
def first_columns(acc, head_size: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the columns of the head of `acc` [64, 128], then zeros, in a layout [64, 64] or
    [64, 128]."""
    # The compiler keeps no registers for columns that it sees to be unused, and omits their
    # rescaling.
    columns = gl.arange(0, PART_KEYS, gl.SliceLayout(0, acc.type.layout))
    acc = gl.where((columns < head_size)[None, :], acc, 0.0)
    if head_size <= 64:
        acc, rest = gl.split(gl.permute(gl.reshape(acc, [64, 2, 64]), (0, 2, 1)))
    return gl.convert_layout(acc, LAYOUT)


@gluon.jit
def store_ones(v_ring, PARTS: gl.constexpr, STAGES: gl.constexpr):
    """Set the part of each stage that follows those of the head to 1; 4 warps."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    ones = gl.full([PART_KEYS, PART_ELEMENTS], 1.0, v_ring.dtype, layout)
    UNITS: gl.constexpr = v_ring.shape[0] // STAGES
    for stage in gl.static_range(STAGES):
        v_ring.index(stage * UNITS + PARTS).store(ones)
    # WGMMA reads shared memory through the async proxy.
    fence_async_shared()


@gluon.jit
def clear_value_parts(
    v_ring,
    stage,
    valid,
    WARPGROUP: gl.constexpr,
    CONSUMERS: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """`prefill.clear_values` for values in parts; ones stay."""
    ROWS: gl.constexpr = PART_KEYS // 2
    UNITS: gl.constexpr = v_ring.shape[0] // STAGES
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    if WARPGROUP < 2:
        rows = WARPGROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        for part in gl.static_range(PARTS):
            half = v_ring.index(stage * UNITS + part).slice(WARPGROUP * ROWS, ROWS, 0)
            half.store(gl.where(rows[:, None] < valid, half.load(layout), 0.0))
        # WGMMA reads shared memory through the async proxy.
        fence_async_shared()
    # All consumers multiply by the whole tile, so all wait for both halves.
    consumers_sync(CONSUMERS)


@gluon.constexpr_function
def _check(offset):
    return (
        "{ .reg .pred other; "
        f"ld.shared.b32 $0, [global_smem+{offset}]; "
        "setp.ne.b32 other, $0, $1; @other trap; }"
    )


@gluon.jit
def check_offset(v_ring, OFFSET: gl.constexpr):
    """End the kernel with an error if the ring is not OFFSET bytes into the shared memory of its
    CTA. Overwrites 8 rows of the first part; 4 warps."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [4, 1], [1, 0])
    marks = gl.full([8, PART_ELEMENTS], _MARK, gl.int16, layout).to(v_ring.dtype, bitcast=True)
    v_ring.index(0).slice(0, 8, 0).store(marks)
    partition_barrier()
    ASM: gl.constexpr = _check(OFFSET)
    gl.inline_asm_elementwise(ASM, "=r,r", [_MARK | _MARK << 16], gl.int32, False, 1)
