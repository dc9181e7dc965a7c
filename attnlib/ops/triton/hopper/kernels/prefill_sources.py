"""Where the loaders of the Hopper prefill read keys and values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate
from attnlib.ops.triton.hopper.kernels.gather import RequestRows
from attnlib.ops.triton.hopper.kernels.tma_load import RequestPages

__all__ = ["CacheSource", "GatherSource"]

_PREFETCHED_PAGES = gl.constexpr(32)
"""Tiles go backwards: the 128-byte line of the block table before the current one is prefetched."""


@aggregate
class CacheSource:
    """A key or value cache that TMA reads.

    Fields:
        desc: TMA descriptor.
        PARTS: parts of a row in shared memory.
        SPARE: tiles of a stage that are not loaded.
    """

    desc: Value
    PARTS: gl.constexpr
    SPARE: gl.constexpr

    @gluon.jit
    def load(self, call, work, table, pages, ring, tile, step):
        """Issue the loads of a tile into the stage of `step`."""
        PAGE: gl.constexpr = max(call.config.BLOCK_SIZE, 1)
        source = RequestPages(
            self.desc,
            table,
            pages,
            call.batch.num_blocks,
            work.kv_head // call.config.SHARED,
            call.config.BLOCK_SIZE,
            "nhd",
        )
        later_page = tile * call.config.BLOCK_N // PAGE - _PREFETCHED_PAGES
        source.load(ring, step, tile, later_page, self.PARTS, self.SPARE)


@aggregate
class GatherSource:
    """Both caches, whose rows are copied one by one.

    Fields:
        key, value: pointers to the caches.
        key_strides, value_strides: strides of blocks, rows and heads, in bytes.
        values: ring of the values.
    """

    key: Value
    value: Value
    key_strides: Value
    value_strides: Value
    values: Value

    @gluon.jit
    def load_keys(self, call, work, table, ring, tile, step):
        """Issue the copies of the keys of a tile."""
        rows = RequestRows(
            self.key,
            table,
            work.seq_len,
            work.kv_head // call.config.SHARED,
            self.key_strides[0],
            self.key_strides[1],
            self.key_strides[2],
            call.config.D,
            call.config.BLOCK_SIZE,
        )
        rows.load(ring, step, tile, tile - 2)

    @gluon.jit
    def load_values(self, call, work, table, tile, later_tile, step):
        """Issue the copies of the values of a tile."""
        rows = RequestRows(
            self.value,
            table,
            work.seq_len,
            work.kv_head // call.config.SHARED,
            self.value_strides[0],
            self.value_strides[1],
            self.value_strides[2],
            call.config.DV,
            call.config.BLOCK_SIZE,
        )
        rows.load(self.values, step, tile, later_tile)
