"""bfloat16 queries as float16, for decodes over 8-bit latents that four warps convert.

float16 holds the elements of the cache exactly, and the chip converts two of them in one
instruction; two of bfloat16 take four. Queries may be outside of float16's range: each row is
multiplied by a power of two (`quantized.query_powers`), and its scores by the inverse. Both
consumers have a part of each row, so they exchange the largest magnitudes of these.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.compat import (
    Value,
    aggregate,
    consumers_sync,
    partition_barrier,
    reinterpret,
)
from attnlib.ops.triton.hopper.kernels.latent_rows import copy_queries, query_offsets
from attnlib.ops.triton.hopper.kernels.quantized import query_powers

__all__ = ["HalvedLogits", "halve_split_queries"]


@aggregate
class HalvedLogits:
    """The `Logits` of rows that were multiplied by powers of two.

    Fields:
        logits: of a layer.
        inverse: [rows], the inverse powers.
    """

    logits: Value
    inverse: Value

    @gluon.jit
    def transform(self, scores):
        """As `Logits.transform`."""
        return self.logits.transform(scores * self.inverse[:, None])

    @gluon.jit
    def weight_factor(self):
        """As `Logits.weight_factor`."""
        return self.logits.weight_factor()


@gluon.jit
def _load_part(target, queries, offsets, valid, START: gl.constexpr):
    """Return elements START and following of the queries, through the memory of `target`."""
    WIDTH: gl.constexpr = target.shape[1]
    LANES: gl.constexpr = min(32, WIDTH // 8)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    DTYPE: gl.constexpr = queries.pointer.dtype.element_ty
    SHAPE: gl.constexpr = target.shape
    memory = reinterpret(target, DTYPE, SHAPE, gl.NVMMASharedLayout.get_default_for(SHAPE, DTYPE))
    copy_queries(memory, queries, offsets, valid, START)
    partition_barrier()
    return memory.load(LAYOUT)


@gluon.jit
def _magnitudes(part, ROW: gl.constexpr):
    """Return the largest magnitude of each row."""
    return gl.convert_layout(gl.max(gl.abs(part.to(gl.float32)), 1), ROW)


@gluon.jit
def _store_part(target, part, power):
    """Write a part times the powers of its rows."""
    factors = gl.convert_layout(power, gl.SliceLayout(1, part.type.layout))
    target.store((part.to(gl.float32) * factors[:, None]).to(target.dtype))


@gluon.jit
def halve_split_queries(queries, rows, split, tiles, CONSUMER: gl.constexpr):
    """Copy the queries of a split to shared memory as float16, each consumer a part of them.

    Both consumers are done with the split before (`LatentTiles.total_sum`), also with its maxima.

    Returns:
        The inverse powers of the rows, [rows].
    """
    HALF: gl.constexpr = tiles.queries.low.shape[2]
    ROW: gl.constexpr = rows.row.type.layout
    valid = rows.exist(split.query_len)
    offsets = query_offsets(queries, rows, split.start)
    low = tiles.queries.low.index(0)
    high = tiles.queries.high.index(0)
    rotary = tiles.queries.rotary.index(0)
    if CONSUMER == 0:
        first = _load_part(low, queries, offsets, valid, 0)
        own = _magnitudes(first, ROW)
    else:
        first = _load_part(high, queries, offsets, valid, HALF)
        second = _load_part(rotary, queries, offsets, valid, 2 * HALF)
        own = gl.maximum(_magnitudes(first, ROW), _magnitudes(second, ROW))
    tiles.maxima.index(CONSUMER).store(own)
    consumers_sync(2)
    other = tiles.maxima.index(1 - CONSUMER).load(ROW)
    power, inverse = query_powers(gl.maximum(own, other))
    if CONSUMER == 0:
        _store_part(low, first, power)
    else:
        _store_part(high, first, power)
        _store_part(rotary, second, power)
    fence_async_shared()
    consumers_sync(2)
    return inverse
