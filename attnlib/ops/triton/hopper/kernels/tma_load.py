"""Fill a ring of key or value tiles by TMA, page by page: the inner step of every loader warp."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.ops.triton.hopper.kernels.cache_tiles import box_keys, tile_bytes, tile_keys
from attnlib.ops.triton.hopper.kernels.compat import (
    Value,
    aggregate,
    load_box,
    prefetch_l1,
)

__all__ = ["RequestPages", "load_tile"]


@aggregate
class RequestPages:
    """The keys or the values of a request and KV head, in pages that TMA reads.

    Fields:
        cache: TMA descriptor, one box per page or per tile in a page.
        table: the request's row of the block table.
        pages: entries of `table` that may be read.
        num_blocks: blocks of the cache.
        kv_head: KV head.
        BLOCK_SIZE: positions of a page.
        LAYOUT: of the cache, see `cache_tiles`.
    """

    cache: Value
    table: Value
    pages: Value
    num_blocks: Value
    kv_head: Value
    BLOCK_SIZE: gl.constexpr
    LAYOUT: gl.constexpr

    @gluon.jit
    def load(self, ring, step, tile, later_page):
        """Issue the loads of key tile `tile` as tile number `step` of a `Ring`.

        `later_page` is a column of the block table that a later step needs.
        """
        load_tile(
            self.cache, self.table, self.pages, self.num_blocks, self.kv_head, tile, later_page,
            ring.memory, ring.full, ring.empty, step, self.BLOCK_SIZE, ring.STAGES, self.LAYOUT,
        )  # fmt: skip


@gluon.jit
def load_tile(
    cache, table, pages, num_blocks, kv_head, tile, later_page, ring, full, empty, step,
    BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
    PARTS: gl.constexpr = 1, SPARE: gl.constexpr = 0,
):  # fmt: skip
    """Issue the TMA loads of key tile `tile` into stage `step % STAGES` of the ring.

    Args:
        cache: TMA descriptor of the key or value cache, one box per page or per tile in a page.
        table: the request's row of the block table; with BLOCK_SIZE 0, which stands for keys
            without pages, a pointer to the request's first row of `cache`, [1, rows, Hkv, D].
        pages: entries of `table` that may be read.
        num_blocks: blocks of the cache.
        kv_head: KV head.
        tile: number of the tile in the request, in units of BLOCK_N positions.
        later_page: column of `table` that a later step needs.
        ring: shared memory [STAGES, BLOCK_N, width], or as in `cache_tiles.allocate_rings`.
        full: mbarriers that count the bytes of a stage.
        empty: mbarriers that count the consumers that have released a stage.
        step: number of tiles that this loader has loaded.
        LAYOUT: of the cache, see `cache_tiles`.
        PARTS: the ring is [STAGES * (PARTS + SPARE), BLOCK_N, width], and a row has PARTS * width
            elements.
        SPARE: tiles of a stage that are not loaded.
    """
    if BLOCK_SIZE == 0:
        _load_rows(cache, table, kv_head, tile, ring, full, empty, step, STAGES, PARTS, SPARE)
    else:
        _load_pages(
            cache, table, pages, num_blocks, kv_head, tile, later_page, ring, full, empty, step,
            BLOCK_SIZE, STAGES, LAYOUT, PARTS, SPARE)  # fmt: skip


@gluon.jit
def _load_rows(
    cache, table, kv_head, tile, ring, full, empty, step, STAGES: gl.constexpr,
    PARTS: gl.constexpr, SPARE: gl.constexpr,
):  # fmt: skip
    """Issue the loads of a tile of keys without pages. Rows past the request's last one are those
    of the next request."""
    BLOCK_N: gl.constexpr = ring.shape[1]
    BYTES: gl.constexpr = PARTS * tile_bytes(ring.shape)
    row = gl.load(table) + tile * BLOCK_N
    stage = step % STAGES
    # As in `_load_pages`.
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    for part in gl.static_range(PARTS):
        load_box(
            cache,
            [0, kv_head, row, part * ring.shape[2]],
            full.index(stage),
            ring.index(stage * (PARTS + SPARE) + part),
        )


@gluon.jit
def _load_pages(
    cache, table, pages, num_blocks, kv_head, tile, later_page, ring, full, empty, step,
    BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
    PARTS: gl.constexpr, SPARE: gl.constexpr,
):  # fmt: skip
    """Issue the loads of a tile, a box for each page or for the part of a page."""
    BLOCK_N: gl.constexpr = tile_keys(ring.shape, LAYOUT)
    BOX: gl.constexpr = box_keys(BLOCK_SIZE, BLOCK_N, LAYOUT)
    BOXES: gl.constexpr = BLOCK_N // BOX
    BYTES: gl.constexpr = PARTS * tile_bytes(ring.shape)
    first_page = tile * BLOCK_N // BLOCK_SIZE
    inside = tile * BLOCK_N % BLOCK_SIZE
    # A loader that waits for global memory before it knows its pages falls behind the consumers, so
    # the block table is prefetched into L1 a few steps ahead.
    prefetch_l1(table + gl.maximum(gl.minimum(later_page, pages - 1), 0))
    blocks = ()
    for box in gl.static_range(BOXES):
        # Pages past the last one become block `num_blocks`, which is out of bounds: TMA fills their
        # boxes with zeros, and the barrier still receives all BYTES.
        column = first_page + box * BOX // BLOCK_SIZE
        page = gl.load(table + column, mask=column < pages, other=num_blocks)
        blocks = blocks + (page,)
    stage = step % STAGES
    if PARTS + SPARE == 1:
        buffer = ring.index(stage)
    else:
        buffer = ring.index(stage * (PARTS + SPARE))
    # Wait until all consumers have released the tile that the stage held STAGES steps ago. The
    # parity is inverted, so that the first pass over the ring does not wait.
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    for box in gl.static_range(BOXES):
        first = inside + box * BOX % BLOCK_SIZE
        if LAYOUT == "packed_keys":
            load_box(
                cache,
                [blocks[box], kv_head, first // 8, 0, 0],
                full.index(stage),
                buffer.slice(box * BOX // 8, BOX // 8, 0),
            )
        elif LAYOUT == "packed_values":
            load_box(
                cache,
                [blocks[box], kv_head, 0, first],
                full.index(stage),
                buffer.slice(box * BOX, BOX, 1),
            )
        else:
            load_box(
                cache,
                [blocks[box], kv_head, first, 0],
                full.index(stage),
                buffer.slice(box * BOX, BOX, 0),
            )
            for part in gl.static_range(1, PARTS):
                load_box(
                    cache,
                    [blocks[box], kv_head, first, part * ring.shape[2]],
                    full.index(stage),
                    ring.index(stage * (PARTS + SPARE) + part).slice(box * BOX, BOX, 0),
                )
