"""Loads of latents by TMA from the blocks of a paged cache."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate, load_box, prefetch_l2
from attnlib.ops.triton.hopper.kernels.latent_tiles import TILE

__all__ = ["LatentCache", "Pages", "load_part"]


@aggregate
class Pages:
    """The block table of a request.

    Fields:
        row: pointer to the blocks of the request.
        count: blocks with tokens of the request.
        num_blocks: blocks of the cache.
        BLOCK_SIZE: tokens of a block.
    """

    row: Value
    count: Value
    num_blocks: Value
    BLOCK_SIZE: gl.constexpr

    @gluon.jit
    def blocks(self, tile):
        """Return the blocks of a tile of latents, one for each box.

        Pages past the last one become block `num_blocks`, which is out of bounds: TMA fills their
        boxes with zeros.
        """
        BOX: gl.constexpr = min(self.BLOCK_SIZE, TILE)
        blocks = ()
        for box in gl.static_range(TILE // BOX):
            column = (tile * TILE + box * BOX) // self.BLOCK_SIZE
            block = gl.load(self.row + column, mask=column < self.count, other=self.num_blocks)
            blocks = blocks + (block,)
        return blocks

    @gluon.jit
    def offset(self, tile):
        """Return the offset of a tile in its block; 0 for blocks smaller than a tile."""
        return tile * TILE % self.BLOCK_SIZE


@aggregate
class LatentCache:
    """A paged cache of latents.

    Fields:
        key_desc: TMA descriptor of the keys, in boxes of their elements after those of the values.
        value_desc: TMA descriptor of the values, in boxes of a quarter of their elements.
        latents: pointer to the keys, for prefetches and loads; None without them.
        batch: the `Batch`.
        stride_latents: elements from block to block of the keys; 0 if 16-bit latents are not
            adjacent, and nothing is prefetched.
        stride_token: elements from token to token of the keys, where they are read by address; else
            None.
        BLOCK_SIZE: tokens of a block.
    """

    key_desc: Value
    value_desc: Value
    latents: Value
    batch: Value
    stride_latents: Value
    stride_token: Value
    BLOCK_SIZE: gl.constexpr

    @gluon.jit
    def pages(self, request, seq_len):
        """Return the `Pages` of a request."""
        row = self.batch.table(request)
        count = (seq_len + self.BLOCK_SIZE - 1) // self.BLOCK_SIZE
        return Pages(row, count, self.batch.num_blocks, self.BLOCK_SIZE)

    @gluon.jit
    def prefetch(self, blocks, offset, ROW: gl.constexpr):
        """Prefetch a tile of one block into the L2 cache.

        Args:
            blocks, offset: of the tile, see `Pages`.
            ROW: elements of a latent.
        """
        if (self.stride_latents > 0) & (blocks[0] < self.batch.num_blocks):
            start = blocks[0].to(gl.int64) * self.stride_latents + offset * ROW
            prefetch_l2(self.latents + start, TILE * ROW * 2)


@gluon.jit
def load_part(descriptor, blocks, offset, target, full, START: gl.constexpr):
    """Issue the TMA loads of elements START and following of a tile.

    Args:
        blocks, offset: of the tile, see `Pages`.
        target: [TILE, elements] in shared memory.
        full: mbarrier that counts the bytes.
    """
    BOXES: gl.constexpr = len(blocks)
    BOX: gl.constexpr = TILE // BOXES
    mbarrier.expect(full, TILE * target.shape[1] * 2)
    for box in gl.static_range(BOXES):
        load_box(descriptor, [blocks[box], 0, offset, START], full, target.slice(box * BOX, BOX, 0))
