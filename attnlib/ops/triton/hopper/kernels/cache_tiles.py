"""Key and value tiles in shared memory by cache layout, and the operands that they hold.

`"nhd"`: the rows of one page and one KV head are `[N, D]`. A tile is `[keys, width]` with the
swizzle of TMA, from which WGMMA reads both operands.

The packed cache of vLLM's PagedAttention needs no exchange between threads either:

- `"packed_keys"`: a page is `[D / 8, N, 8]`, so 8 keys of 16 bytes are contiguous, which is what
  `ldmatrix` reads at a time. TMA reads the page as `[N / 8, D / 8, 64]` and writes it in that
  order, page after page. `ldmatrix` loads the operand into registers.
- `"packed_values"`: a page is `[D, N]`. TMA writes at most 64 positions of each row with the
  swizzle of their width, page after page, from which WGMMA reads the operand `[width, keys]`.
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnlib.ops.triton.hopper.kernels.compat import partition_barrier, reinterpret

__all__ = [
    "allocate_rings",
    "box_keys",
    "clear_tile",
    "load_packed_keys",
    "tile_bytes",
    "tile_keys",
    "value_operand",
]


@gluon.constexpr_function
def box_keys(block_size, block_n, layout):
    """Return the positions of one TMA box: those of a page or of a tile, whichever is smaller."""
    keys = min(block_size, block_n)
    # A swizzle has at most 128 bytes. Keys have the same boxes as values.
    return keys if layout == "nhd" else min(keys, 64)


@gluon.constexpr_function
def tile_keys(ring_shape, layout):
    """Return the keys of one stage of a ring."""
    if layout == "packed_keys":
        return 8 * ring_shape[1]
    return ring_shape[2] if layout == "packed_values" else ring_shape[1]


@gluon.constexpr_function
def tile_bytes(ring_shape):
    """Return the bytes of one stage of a ring of 16-bit elements."""
    return 2 * math.prod(ring_shape[1:])


@gluon.constexpr_function
def _core_matrices(keys, width):
    """Return the layout [keys, width] of packed keys: [keys / 8, width / 8, 8 keys, 8 elements]."""
    low = [[0, 1], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    elements = [[0, 8 << bit] for bit in range((width // 8).bit_length() - 1)]
    groups = [[8 << bit, 0] for bit in range((keys // 8).bit_length() - 1)]
    return gl.SharedLinearLayout(low + elements + groups)


@gluon.jit
def allocate_rings(
    DTYPE: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WIDTH: gl.constexpr,
    WIDTH_V: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Return the rings of key and value tiles of 16-bit elements."""
    if PACKED:
        SWIZZLE: gl.constexpr = 2 * box_keys(BLOCK_SIZE, BLOCK_N, "packed_values")
        k_ring = gl.allocate_shared_memory(
            DTYPE, [STAGES, BLOCK_N // 8, WIDTH // 8, 64], gl.NVMMASharedLayout(0, 16, 3)
        )
        v_ring = gl.allocate_shared_memory(
            DTYPE, [STAGES, WIDTH_V, BLOCK_N], gl.NVMMASharedLayout(SWIZZLE, 16, 2)
        )
    else:
        K_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, WIDTH], DTYPE)
        V_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, WIDTH_V], DTYPE)
        k_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, WIDTH], K_SHARED)
        v_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, WIDTH_V], V_SHARED)
    return k_ring, v_ring


@gluon.jit
def load_packed_keys(ring, empty, stage, LAYOUT: gl.constexpr):
    """Load a stage of packed keys into registers and release the stage.

    Args:
        LAYOUT: of the scores.

    Returns:
        The operand [keys, width] of the product with the queries.
    """
    # The matrix descriptors of WGMMA cannot address this layout: each 16 elements of the head begin
    # at another multiple of 256 bytes. Triton 3.6 to 3.9 writes that into the descriptor's base
    # offset, which is not valid without a swizzle, and the products were wrong on an H200.
    KEYS: gl.constexpr = 8 * ring.shape[1]
    WIDTH: gl.constexpr = 8 * ring.shape[2]
    tile = reinterpret(ring.index(stage), ring.dtype, [KEYS, WIDTH], _core_matrices(KEYS, WIDTH))
    keys = tile.load(gl.DotOperandLayout(0, LAYOUT, 2))
    # All warps have loaded their keys before the stage is released.
    partition_barrier()
    mbarrier.arrive(empty.index(stage), count=1)
    return keys


@gluon.jit
def value_operand(ring, stage, PACKED: gl.constexpr):
    """Return a stage of the ring of values as the operand [width, keys]."""
    tile = ring.index(stage)
    if not PACKED:
        tile = tile.permute((1, 0))
    return tile


@gluon.jit
def clear_tile(v_tile, valid, AXIS: gl.constexpr):
    """Set a value tile's positions along AXIS from `valid` on to 0.

    A page may hold anything past the sequence's end, and 0 * NaN is NaN (P5).
    """
    KEYS: gl.constexpr = v_tile.shape[AXIS]
    LANES: gl.constexpr = min(32, v_tile.shape[1] // 8)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    keys = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(1 - AXIS, layout)), 1 - AXIS)
    content = v_tile.load(layout)
    v_tile.store(gl.where(keys < valid, content, 0.0))
    # WGMMA reads shared memory through the async proxy: fence, then wait for all four warps.
    fence_async_shared()
    partition_barrier()
