"""P @ V over the value elements that a head has, where its tile in shared memory is wider.

Tiles of Gluon have powers of two as sizes, so that heads of 80 or 96 elements have tiles of 128
columns. WGMMA has an N of any multiple of 8 up to 256. Gluon cannot express its product over a part
of a tile, so `multiply_value_columns` issues it in PTX: the first columns of the tile and of the
accumulator, whose other columns are not touched.

PTX needs the address of the tile, which Gluon does not give either. Triton places the largest
allocations of shared memory first, and equal ones in the order of the program
(`shared_memory_offset`). `check_offset` verifies that in each CTA, and ends the kernel with an error
otherwise.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import partition_barrier

__all__ = ["check_offset", "multiply_value_columns", "shared_memory_offset", "value_columns"]

_KEYS = gl.constexpr(128)
"""Keys of a tile, and its width: accumulator and weights have equal shapes."""

_MARK = gl.constexpr(0x4B7D)
"""16 bits that `check_offset` stores and reads."""


@gluon.constexpr_function
def value_columns(head_size, keys, width, plain):
    """Return the columns of the product with a tile [keys, width] of values, or 0 for all.

    `plain` excludes kernels whose product is another one.
    """
    columns = (head_size + 7) // 8 * 8
    return columns if plain and (keys, width) == (128, 128) and columns < width else 0


@gluon.constexpr_function
def shared_memory_offset(sizes, own):
    """Return the offset in shared memory of an allocation of `own` bytes, which is as large as each
    later one, behind those of `sizes` bytes that were made before it."""
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
        # Swizzle of 128 bytes. Groups of 8 keys are 1024 bytes apart, groups of 64 columns 16 KB.
        "or.b64 tile, tile, 0x4000004004000000;",
        "wgmma.fence.sync.aligned;",
    ]
    for step in range(8):
        weights = ", ".join(f"${128 + 4 * step + i}" for i in range(4))
        lines += [
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
            f"{{{accumulator}}}, {{{weights}}}, tile, all, 1, 1, 1;",
            "add.u64 tile, tile, 128;",  # 16 keys of 128 bytes, in units of 16 bytes
        ]
    lines.append("wgmma.commit_group.sync.aligned;")
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _constraints():
    return ",".join(["=f"] * 64 + [str(i) for i in range(64)] + ["r"] * 32 + ["r"] * 64)


@gluon.jit
def multiply_value_columns(words, v_ring, stage, acc, COLUMNS: gl.constexpr, OFFSET: gl.constexpr):
    """Issue P @ V + acc over the first COLUMNS value elements; one group of WGMMA.

    Args:
        words: packed weights [64, 64] of 128 keys (`mainloop.pack_weights`).
        v_ring: [STAGES, 128, 128] in shared memory, with a swizzle of 128 bytes.
        stage: the stage of the tile.
        acc: [64, 128], float32. Columns from COLUMNS on stay as they are.
        OFFSET: of the ring in shared memory, in bytes.
    """
    DTYPE: gl.constexpr = v_ring.dtype
    LAYOUT: gl.constexpr = acc.type.layout
    low = words.to(gl.int16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    # Registers of weights as an operand are those of a result of WGMMA.
    weights = gl.convert_layout(gl.reshape(gl.join(low, high), [64, _KEYS]), LAYOUT)
    tile = gl.full([64, _KEYS], 0, gl.int32, LAYOUT) + stage * (2 * _KEYS * _KEYS)
    ASM: gl.constexpr = _product(COLUMNS, OFFSET, DTYPE == gl.bfloat16)
    CONSTRAINTS: gl.constexpr = _constraints()
    return gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [acc, weights, tile], gl.float32, False, 64
    )  # fmt: skip


@gluon.constexpr_function
def _check(offset):
    return (
        "{ .reg .pred other; "
        f"ld.shared.b32 $0, [global_smem+{offset}]; "
        "setp.ne.b32 other, $0, $1; @other trap; }"
    )


@gluon.jit
def check_offset(ring, OFFSET: gl.constexpr):
    """End the kernel with an error if a ring [STAGES, 128, 128] is not OFFSET bytes into the shared
    memory of its CTA. Overwrites 8 rows; 4 warps."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    marks = gl.full([8, _KEYS], _MARK, gl.int16, layout).to(ring.dtype, bitcast=True)
    ring.index(0).slice(0, 8, 0).store(marks)
    partition_barrier()
    ASM: gl.constexpr = _check(OFFSET)
    gl.inline_asm_elementwise(ASM, "=r,r", [_MARK | _MARK << 16], gl.int32, False, 1)
