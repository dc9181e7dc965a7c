"""Filling a ring of key or value tiles by TMA, page by page: the inner step of every loading warp."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.ops.triton.hopper.kernels.compat import load_box, prefetch_line

__all__ = ["load_tile"]


@gluon.jit
def load_tile(cache, table, pages, num_blocks, kv_head, tile, later_page, ring, full, empty, step, BLOCK_SIZE: gl.constexpr,
              STAGES: gl.constexpr):  # fmt: skip
    """Send for the `tile`-th tile of a request's keys (or values) into stage `step` of the ring, once that is empty.

    `table` is the request's row of the block table, which has `pages` entries that may be read; pages past the last one
    are aimed past the pool's end, which TMA fills with zeros. `later_page` is one that will be wanted in a few steps: its
    number comes into L1 meanwhile, because a loader that waits for memory to tell it the pages falls behind.
    """
    BLOCK_N: gl.constexpr = ring.shape[1]
    BOX: gl.constexpr = min(BLOCK_SIZE, BLOCK_N)
    BOXES: gl.constexpr = BLOCK_N // BOX
    BYTES: gl.constexpr = BLOCK_N * ring.shape[2] * 2
    first_page = tile * BLOCK_N // BLOCK_SIZE
    inside = tile * BLOCK_N % BLOCK_SIZE
    prefetch_line(table + gl.maximum(gl.minimum(later_page, pages - 1), 0))
    blocks = ()
    for box in gl.static_range(BOXES):
        page = gl.load(table + first_page + box, mask=first_page + box < pages, other=num_blocks)
        blocks = blocks + (page,)
    stage = step % STAGES
    place = ring.index(stage)
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    for box in gl.static_range(BOXES):
        load_box(
            cache,
            [blocks[box], kv_head, inside, 0],
            full.index(stage),
            place.slice(box * BOX, BOX, 0),
        )
