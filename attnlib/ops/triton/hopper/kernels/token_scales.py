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
    KV_MXFP4,
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
    """The scales of the keys and of the values of a tile; None where pages hold none, and where
    they multiply elements."""

    keys: Value
    values: Value


@gluon.constexpr_function
def _scale_dtype(kind):
    """The scales of a head as one number."""
    if kind == KV_INT4 or kind == KV_NVFP4:
        return gl.int64
    return gl.int32 if kind == KV_MXFP4 else gl.float32


@gluon.constexpr_function
def _ring_dtype(k_kind, v_kind):
    """The wider of the numbers of both sides."""
    keys = _scale_dtype(k_kind)
    values = _scale_dtype(v_kind)
    return keys if keys.primitive_bitwidth >= values.primitive_bitwidth else values


@gluon.constexpr_function
def scales_weights(kind):
    """Whether the scales of values of this kind multiply weights, and those of keys scores, and
    not elements."""
    return kind != KV_NVFP4


@gluon.jit
def _scale_words(pointer, KIND: gl.constexpr):
    """Return the pointer to the scales of one side, as the numbers that a stage holds."""
    DTYPE: gl.constexpr = _scale_dtype(KIND)
    if pointer.dtype.element_ty != DTYPE:
        return pointer.to(gl.pointer_type(DTYPE))
    else:
        return pointer


@gluon.jit
def _slot(ring, index, KIND: gl.constexpr):
    """Return the scales of one side in `TokenScales.ring`."""
    KEYS: gl.constexpr = ring.shape[1]
    DTYPE: gl.constexpr = _scale_dtype(KIND)
    slot = ring.index(index)
    if ring.dtype != DTYPE:
        slot = reinterpret(slot, DTYPE, [KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return slot


@aggregate
class TokenScales:
    """The scales of pages that hold them (M16), and the ring for those of the tiles.

    Fields:
        keys, values: pointers to the scales.
        stride_kb, stride_kn, stride_kh: strides of blocks, positions and heads of those of keys.
        stride_vb, stride_vn, stride_vh: of those of values.
        ring: [2 * stages, keys], the scales of the keys and of the values of each stage. Those of a
            head are one number. If it has 64 bits on one side only, the numbers of the other side
            take the first half of their slots.
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
        """Return the `TileScales` of a stage; None in place of those of elements."""
        if not scales_weights(self.K_KIND):
            keys = None
        else:
            keys = self.keys_slot(stage).load(LAYOUT)
        if scales_weights(self.V_KIND):
            return TileScales(keys, self.values_slot(stage).load(LAYOUT))
        else:
            return TileScales(keys, None)

    @gluon.jit
    def keys_slot(self, stage):
        """Return the shared memory of the scales of the keys of a stage."""
        return _slot(self.ring, 2 * stage, self.K_KIND)

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
        k_slot = self.keys_slot(stage)
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
    return gl.allocate_shared_memory(
        _ring_dtype(K_KIND, V_KIND), [2 * STAGES, BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0])
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
