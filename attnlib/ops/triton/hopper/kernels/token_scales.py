"""Scales of pages that hold them (M16), in the ring of a decode."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import (
    Value,
    aggregate,
    arrive_after_copies,
    copy_to_shared,
    reinterpret,
)
from attnlib.ops.triton.kernels.quant import (
    KV_INT4,
    KV_NVFP4,
)

__all__ = [
    "TileScales",
    "TokenScales",
    "allocate_token_scales",
    "copy_token_scales",
    "scales_weights",
]


@aggregate
class TileScales:
    """The scales of the keys and of the values of a tile; None where pages hold none."""

    keys: Value
    values: Value


@gluon.constexpr_function
def _has_groups(kind):
    """Whether the scales of a head are 8 bytes."""
    return kind == KV_INT4 or kind == KV_NVFP4


@gluon.constexpr_function
def scales_weights(kind):
    """Whether the scales of values of this kind multiply weights, and not elements."""
    return kind != KV_NVFP4


@gluon.jit
def _scale_words(pointer, KIND: gl.constexpr):
    """Return the pointer to the scales of one side, as the numbers that a stage holds."""
    if _has_groups(KIND):
        return pointer.to(gl.pointer_type(gl.int64))
    else:
        return pointer


@gluon.jit
def _slot(ring, index, KIND: gl.constexpr):
    """Return the scales of one side in `TokenScales.ring`."""
    KEYS: gl.constexpr = ring.shape[1]
    slot = ring.index(index)
    if not _has_groups(KIND) and ring.dtype == gl.int64:
        slot = reinterpret(slot, gl.float32, [KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return slot


@aggregate
class TokenScales:
    """The scales of pages that hold them (M16), and the ring for those of the tiles.

    Fields:
        keys, values: pointers to the scales.
        stride_kb, stride_kn, stride_kh: strides of blocks, positions and heads of those of keys.
        stride_vb, stride_vn, stride_vh: of those of values.
        ring: [2 * stages, keys], the scales of the keys and of the values of each stage. The four
            scales of a head of 4-bit integers, or the eight of 4-bit floats, are one number. If one
            side has such numbers, the others take the first half of their slots.
        K_KIND, V_KIND: elements of the keys and of the values.
    """

    keys: Value
    values: Value
    stride_kb: Value
    stride_kn: Value
    stride_kh: Value
    stride_vb: Value
    stride_vn: Value
    stride_vh: Value
    ring: Value
    K_KIND: gl.constexpr
    V_KIND: gl.constexpr

    @gluon.jit
    def load(self, stage, LAYOUT: gl.constexpr):
        """Return the `TileScales` of a stage; None in place of those of elements of values."""
        keys = _slot(self.ring, 2 * stage, self.K_KIND).load(LAYOUT)
        if scales_weights(self.V_KIND):
            return TileScales(keys, self.values_slot(stage).load(LAYOUT))
        else:
            return TileScales(keys, None)

    @gluon.jit
    def values_slot(self, stage):
        """Return the shared memory of the scales of the values of a stage."""
        return _slot(self.ring, 2 * stage + 1, self.V_KIND)

    @gluon.jit
    def copy(self, block, position, inside, kv_head, stage, LOADS: gl.constexpr):
        """Issue the copies of the scales of keys, values or both (`loader`) in these blocks and
        positions; 0 outside."""
        keys = _scale_words(self.keys, self.K_KIND)
        values = _scale_words(self.values, self.V_KIND)
        block = block.to(gl.int64)
        k_offsets = block * self.stride_kb + (position * self.stride_kn + kv_head * self.stride_kh)
        v_offsets = block * self.stride_vb + (position * self.stride_vn + kv_head * self.stride_vh)
        k_slot = _slot(self.ring, 2 * stage, self.K_KIND)
        v_slot = self.values_slot(stage)
        if LOADS != "values":
            copy_to_shared(k_slot, keys + k_offsets, mask=inside)
        if LOADS != "keys":
            copy_to_shared(v_slot, values + v_offsets, mask=inside)


@gluon.jit
def allocate_token_scales(
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr, K_KIND: gl.constexpr, V_KIND: gl.constexpr
):
    """Return shared memory for `TokenScales.ring`."""
    DTYPE: gl.constexpr = gl.int64 if _has_groups(K_KIND) or _has_groups(V_KIND) else gl.float32
    return gl.allocate_shared_memory(
        DTYPE, [2 * STAGES, BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )


@gluon.jit
def copy_token_scales(
    scales,
    table,
    pages,
    num_blocks,
    kv_head,
    tile,
    stage,
    full,
    BLOCK_SIZE: gl.constexpr,
    LOADS: gl.constexpr,
):
    """Issue the copies of the scales of a tile's keys, values or both (LOADS) into shared memory.
    One warp.

    Each of its 32 threads arrives on the stage of `full` when its copies are complete. Scales of
    positions without a block are 0.

    Args:
        scales: `TokenScales`.
        table: the request's row of the block table.
        pages: entries of `table` that may be read.
    """
    KEYS: gl.constexpr = scales.ring.shape[1]
    keys = tile * KEYS + gl.arange(0, KEYS, gl.BlockedLayout([1], [32], [1], [0]))
    # Unsigned numbers take fewer instructions.
    column = (keys.to(gl.uint32) // BLOCK_SIZE).to(gl.int32)
    block = gl.load(table + column, mask=column < pages, other=-1)
    inside = (block >= 0) & (block < num_blocks)
    scales.copy(block, keys % BLOCK_SIZE, inside, kv_head, stage, LOADS)
    arrive_after_copies(full.index(stage), increment_count=False)
