"""The ring of key and value tiles of a warp that loads and multiplies."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnlib.ops.triton.hopper.kernels.compat import (
    Value,
    aggregate,
    arrive_after_copies,
    load_box,
    prefetch_l1,
)
from attnlib.ops.triton.hopper.kernels.token_scales import (
    TileScales,
    TokenScales,
    allocate_token_scales,
)
from attnlib.ops.triton.hopper.kernels.warp_operands import PRODUCTS, num_parts
from attnlib.ops.triton.kernels.quant import SCALE_PER_TOKEN

__all__ = ["WarpTiles", "allocate_warp_tiles", "tile_blocks"]


@aggregate
class WarpTiles:
    """Stages of tiles that one warp loads and reads, so that no barrier makes a stage empty.

    Fields:
        keys, values: words in shared memory, [STAGES, BLOCK_N, words].
        full: mbarriers [STAGES, 1] that complete when keys, values and scales are loaded.
        scales: `TokenScales`, or None where the pages hold none.
        STAGES: number of stages.
        BLOCK_SIZE: positions of a page.
    """

    keys: Value
    values: Value
    full: Value
    scales: Value
    STAGES: gl.constexpr
    BLOCK_SIZE: gl.constexpr

    @gluon.jit
    def wait(self, step):
        """Wait until the tile of a step has been loaded."""
        mbarrier.wait(self.full.index(step % self.STAGES), (step // self.STAGES) & 1)

    @gluon.jit
    def load_scales(self, stage):
        """Return the `TileScales` of a loaded stage."""
        if self.scales is not None:
            return self.scales.load(stage, gl.SliceLayout(1, PRODUCTS))
        else:
            return TileScales(None, None)

    @gluon.jit
    def load(self, key_cache, value_cache, blocks, num_blocks, kv_head, tile, step):
        """Issue the loads of the keys, the values and the scales of a tile. The stage is free.

        Args:
            key_cache, value_cache: TMA descriptors.
            blocks: of the tile, from `tile_blocks`.
            num_blocks: blocks of the cache.
            tile: number of the tile in the request.
            step: number of the tile in the ring.
        """
        BLOCK_N: gl.constexpr = self.keys.shape[1]
        BOX: gl.constexpr = min(self.BLOCK_SIZE, BLOCK_N)
        BYTES: gl.constexpr = 2 * BLOCK_N * (self.keys.shape[2] + self.values.shape[2])
        stage = step % self.STAGES
        inside = tile * BLOCK_N % self.BLOCK_SIZE
        if self.scales is not None:
            keys = gl.arange(0, BLOCK_N, gl.BlockedLayout([1], [32], [1], [0]))
            block = gl.full([BLOCK_N], 0, gl.int32, keys.type.layout) + blocks[0]
            for box in gl.static_range(1, BLOCK_N // BOX):
                block = gl.where(keys >= box * BOX, blocks[box], block)
            position = (inside + keys) % self.BLOCK_SIZE
            exists = (block >= 0) & (block < num_blocks)
            self.scales.copy(block, position, exists, kv_head, stage, "keys and values")
            arrive_after_copies(self.full.index(stage), increment_count=False)
        full = self.full.index(stage)
        mbarrier.expect(full, BYTES)
        for box in gl.static_range(BLOCK_N // BOX):
            # Blocks past the last one are out of bounds: TMA fills their boxes with zeros.
            where = [blocks[box], kv_head, inside + box * BOX % self.BLOCK_SIZE, 0]
            load_box(key_cache, where, full, self.keys.index(stage).slice(box * BOX, BOX, 0))
            load_box(value_cache, where, full, self.values.index(stage).slice(box * BOX, BOX, 0))


@gluon.jit
def allocate_warp_tiles(
    k_scale, v_scale, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, config
):
    """Return `WarpTiles`; arguments as those of the entry kernel."""
    STAGES: gl.constexpr = config.STAGES
    BLOCK_N: gl.constexpr = config.BLOCK_N
    K_SHAPE: gl.constexpr = [BLOCK_N, config.WIDTH // num_parts(config.K_KIND)]
    V_SHAPE: gl.constexpr = [BLOCK_N, config.WIDTH_V // num_parts(config.V_KIND)]
    K_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(K_SHAPE, gl.int16)
    V_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(V_SHAPE, gl.int16)
    HAS_SCALES: gl.constexpr = config.K_SCALE_KIND == SCALE_PER_TOKEN
    MEMORY: gl.constexpr = STAGES + config.SPARE_STAGES
    keys = gl.allocate_shared_memory(gl.int16, [MEMORY, K_SHAPE[0], K_SHAPE[1]], K_LAYOUT)
    values = gl.allocate_shared_memory(gl.int16, [MEMORY, V_SHAPE[0], V_SHAPE[1]], V_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        # The `expect` of the warp, and its 32 threads where they copy scales.
        mbarrier.init(full.index(slot), count=33 if HAS_SCALES else 1)
    # Makes the initialized barriers visible to TMA.
    fence_async_shared()
    scales = None
    if HAS_SCALES:
        scales = TokenScales(
            k_scale,
            v_scale,
            stride_kb,
            stride_kn,
            stride_kh,
            stride_vb,
            stride_vn,
            stride_vh,
            allocate_token_scales(STAGES, BLOCK_N, config.K_KIND, config.V_KIND),
            config.K_KIND,
            config.V_KIND,
        )
    return WarpTiles(keys, values, full, scales, STAGES, config.BLOCK_SIZE)


@gluon.jit
def tile_blocks(
    table, pages, num_blocks, tile, is_live, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr
):
    """Load the blocks of a tile. Positions without a block get `num_blocks`."""
    BOX: gl.constexpr = min(BLOCK_SIZE, BLOCK_N)
    first_page = tile * BLOCK_N // BLOCK_SIZE
    # 32 pages ahead: one 128-byte line of the block table.
    prefetch_l1(table + gl.maximum(gl.minimum(first_page + 32, pages - 1), 0))
    blocks = ()
    for box in gl.static_range(BLOCK_N // BOX):
        column = first_page + box * BOX // BLOCK_SIZE
        mask = (column < pages) & is_live
        blocks = blocks + (gl.load(table + column, mask=mask, other=num_blocks),)
    return blocks
