"""Operands of float8 products: queries, weights, and copies of keys and values in shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.compat import partition_barrier, reinterpret
from attnlib.ops.triton.hopper.kernels.quantized import query_powers

__all__ = [
    "float8_queries",
    "float8_tile",
    "pack_float8_weights",
    "quantize_queries",
    "value_column",
]


@gluon.jit
def value_column(first_row, request):
    """Return the first column of the values of a request, whose keys begin at `first_row`.

    It is a multiple of 16, and at least 128 columns follow the last key of the request before it,
    which `transposed_copy` sets to 0 up to the end of a tile.
    """
    return first_row // 16 * 16 + request * 144


@gluon.jit
def float8_queries(tile):
    """View the first half of a tile of 16-bit queries as float8 elements of the same shape."""
    ROWS: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = tile.shape[1]
    halves = reinterpret(
        tile, gl.float8e4nv, [2, ROWS, WIDTH], gl.NVMMASharedLayout(min(WIDTH, 128), 8, 2)
    )
    return halves.index(0)


@gluon.jit
def quantize_queries(source, target):
    """Round queries [64, W] to e4m3, each row times the power of two that brings its largest
    magnitude to [2^7, 2^8). `target` may be a part of `source`.

    Returns:
        The inverse powers [64]; NaN for rows with infinities.
    """
    WIDTH: gl.constexpr = source.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    rows = source.load(LAYOUT).to(gl.float32)
    largest = gl.max(gl.abs(rows), 1)
    power, inverse = query_powers(largest)
    # All four warps have loaded their rows.
    partition_barrier()
    target.store((rows * (power * 2.0**-7)[:, None]).to(gl.float8e4nv))
    # WGMMA reads shared memory through the async proxy: fence, then wait for all four warps.
    fence_async_shared()
    partition_barrier()
    return gl.where(largest == float("inf"), float("nan"), inverse * 2.0**7)


@gluon.jit
def pack_float8_weights(weights, OPERAND: gl.constexpr):
    """Round weights [M, N] to e4m3, as the operand of the product with permuted values."""
    M: gl.constexpr = weights.shape[0]
    N: gl.constexpr = weights.shape[1]
    pairs = gl.permute(gl.reshape(weights, [M, N // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }",
        "=r,f,f,f,f",
        [gl.convert_layout(gl.reshape(pairs, [M, N]), OPERAND)],
        gl.float8e4nv,
        True,
        4,
    )


@gluon.jit
def float8_tile(tile):
    """View a stage of 16-bit words as float8 elements."""
    ROWS: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = 2 * tile.shape[1]
    return reinterpret(
        tile, gl.float8e4nv, [ROWS, WIDTH], gl.NVMMASharedLayout(min(WIDTH, 128), 8, 2)
    )
