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

__all__ = ["RequestPages"]


@aggregate
class RequestPages:
    """The keys or the values of a request and KV head, in pages that TMA reads.

    Fields:
        cache: TMA descriptor, one box per page or per tile in a page.
        table: the request's row of the block table; with BLOCK_SIZE 0, which stands for keys
            without pages, a pointer to the request's first row of `cache`, [1, rows, Hkv, D].
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
    def load(self, ring, step, tile, later_page, PARTS: gl.constexpr = 1, SPARE: gl.constexpr = 0):
        """Issue the loads of a tile as tile number `step` of a ring.

        Args:
            ring: `Ring` of tiles [BLOCK_N, width], or as in `cache_tiles.allocate_rings`.
            tile: number of the tile in the request, in units of BLOCK_N positions.
            later_page: column of `table` that a later step needs.
            PARTS: a stage has PARTS + SPARE tiles [BLOCK_N, width], and a row has PARTS * width
                elements.
            SPARE: tiles of a stage that are not loaded.
        """
        if self.BLOCK_SIZE == 0:
            _load_rows(self, ring, step, tile, PARTS, SPARE)
        else:
            _load_pages(self, ring, step, tile, later_page, PARTS, SPARE)


@gluon.jit
def _load_rows(pages, ring, step, tile, PARTS: gl.constexpr, SPARE: gl.constexpr):
    """Issue the loads of a tile of keys without pages. Rows past the request's last one are those
    of the next request."""
    BLOCK_N: gl.constexpr = ring.memory.shape[1]
    BYTES: gl.constexpr = PARTS * tile_bytes(ring.memory.shape)
    row = gl.load(pages.table) + tile * BLOCK_N
    stage = step % ring.STAGES
    # The parity is inverted, so that the first pass over the ring does not wait.
    mbarrier.wait(ring.empty.index(stage), ((step // ring.STAGES) & 1) ^ 1)
    mbarrier.expect(ring.full.index(stage), BYTES)
    for part in gl.static_range(PARTS):
        load_box(
            pages.cache,
            [0, pages.kv_head, row, part * ring.memory.shape[2]],
            ring.full.index(stage),
            ring.memory.index(stage * (PARTS + SPARE) + part),
        )


@gluon.jit
def _load_pages(pages, ring, step, tile, later_page, PARTS: gl.constexpr, SPARE: gl.constexpr):
    """Issue the loads of a tile, a box for each page or for the part of a page."""
    BLOCK_N: gl.constexpr = tile_keys(ring.memory.shape, pages.LAYOUT)
    BOX: gl.constexpr = box_keys(pages.BLOCK_SIZE, BLOCK_N, pages.LAYOUT)
    BOXES: gl.constexpr = BLOCK_N // BOX
    BYTES: gl.constexpr = PARTS * tile_bytes(ring.memory.shape)
    first_page = tile * BLOCK_N // pages.BLOCK_SIZE
    inside = tile * BLOCK_N % pages.BLOCK_SIZE
    # A loader that waits for global memory before it knows its pages falls behind the consumers, so
    # the block table is prefetched into L1 a few steps ahead.
    prefetch_l1(pages.table + gl.maximum(gl.minimum(later_page, pages.pages - 1), 0))
    blocks = ()
    for box in gl.static_range(BOXES):
        # Pages past the last one become block `num_blocks`, which is out of bounds: TMA fills their
        # boxes with zeros, and the barrier still receives all BYTES.
        column = first_page + box * BOX // pages.BLOCK_SIZE
        page = gl.load(pages.table + column, mask=column < pages.pages, other=pages.num_blocks)
        blocks = blocks + (page,)
    stage = step % ring.STAGES
    if PARTS + SPARE == 1:
        buffer = ring.memory.index(stage)
    else:
        buffer = ring.memory.index(stage * (PARTS + SPARE))
    # Wait until all consumers have released the tile that the stage held STAGES steps ago. The
    # parity is inverted, so that the first pass over the ring does not wait.
    mbarrier.wait(ring.empty.index(stage), ((step // ring.STAGES) & 1) ^ 1)
    mbarrier.expect(ring.full.index(stage), BYTES)
    for box in gl.static_range(BOXES):
        first = inside + box * BOX % pages.BLOCK_SIZE
        if pages.LAYOUT == "packed_keys":
            load_box(
                pages.cache,
                [blocks[box], pages.kv_head, first // 8, 0, 0],
                ring.full.index(stage),
                buffer.slice(box * BOX // 8, BOX // 8, 0),
            )
        elif pages.LAYOUT == "packed_values":
            load_box(
                pages.cache,
                [blocks[box], pages.kv_head, 0, first],
                ring.full.index(stage),
                buffer.slice(box * BOX, BOX, 1),
            )
        else:
            load_box(
                pages.cache,
                [blocks[box], pages.kv_head, first, 0],
                ring.full.index(stage),
                buffer.slice(box * BOX, BOX, 0),
            )
            for part in gl.static_range(1, PARTS):
                load_box(
                    pages.cache,
                    [blocks[box], pages.kv_head, first, part * ring.memory.shape[2]],
                    ring.full.index(stage),
                    ring.memory.index(stage * (PARTS + SPARE) + part).slice(box * BOX, BOX, 0),
                )
