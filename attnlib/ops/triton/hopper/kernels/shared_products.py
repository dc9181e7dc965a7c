"""Products and softmax of the decode of shared prefixes, and the exchange between its consumers.

Query rows are the rows of the products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnlib.ops.triton.hopper.kernels.cache_tiles import clear_tile
from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate
from attnlib.ops.triton.hopper.kernels.prefill_products import pack_weights, unpack_weights
from attnlib.ops.triton.hopper.kernels.shared_sums import ROWS, RowSums
from attnlib.ops.triton.hopper.kernels.softmax import (
    mask_scores,
    online_softmax,
    transform_scores,
)

__all__ = [
    "ConsumerTiles",
    "multiply_item",
    "multiply_tile",
    "output_layout",
    "score_layout",
]


@gluon.constexpr_function
def score_layout(keys):
    """Return the layout of scores [ROWS, keys]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, keys, 16])


@gluon.constexpr_function
def output_layout(width):
    """Return the layout of outputs [ROWS, width]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@aggregate
class ConsumerTiles:
    """The queries of a consumer, the rings of keys and values, and what turns products to scores.

    Fields:
        q_tile: [ROWS, width].
        keys, values: `Ring` of each.
        factor, soft_cap, HAS_CAP: of the scores.
        GROUP: query heads of a KV head.
    """

    q_tile: Value
    keys: Value
    values: Value
    factor: Value
    soft_cap: Value
    HAS_CAP: gl.constexpr
    GROUP: gl.constexpr

    @gluon.jit
    def skip(self, step):
        """Release a tile that only the other consumer reads.

        A consumer waits for every tile, because a barrier tells apart two phases only.
        """
        self.keys.wait_full(step)
        self.keys.release(step)
        self.values.wait_full(step)
        self.values.release(step)


@gluon.jit
def _sees(offset, segment, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Return which query rows see a `SeenSegment`; the first one is of member `offset`."""
    member = offset + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)) // GROUP
    return (member >= segment.low) & (member < segment.low + segment.seeing)


@gluon.jit
def multiply_tile(tiles, sums, step, segment, offset, masked, valid, clear):
    """Multiply by the keys and values of ring step `step`.

    The products of one consumer overlap with the softmax of the other one, so that nothing overlaps
    within a consumer. All tiles have the same instructions: a kernel with more of them for first,
    last and masked tiles took longer.

    Args:
        tiles: `ConsumerTiles`.
        sums: `RowSums` of the tiles before.
        segment: `SeenSegment` of the tile.
        offset: member of the first query row.
        masked: some rows do not see the tile, or it has keys past the end of its segment.
        valid: keys of the tile in its segment.
        clear: the first value of the tile that may be NaN.

    Returns:
        `RowSums`.
    """
    keys = tiles.keys
    values = tiles.values
    DTYPE: gl.constexpr = keys.memory.dtype
    BLOCK_N: gl.constexpr = keys.memory.shape[1]
    WIDTH: gl.constexpr = values.memory.shape[2]
    S_LAYOUT: gl.constexpr = score_layout(BLOCK_N)
    O_LAYOUT: gl.constexpr = output_layout(WIDTH)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    STAGES: gl.constexpr = keys.STAGES
    stage = step % STAGES
    phase = (step // STAGES) & 1
    mbarrier.wait(keys.full.index(stage), phase)
    scores = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    tile = keys.memory.index(stage).permute((1, 0))
    scores = warpgroup_mma(tiles.q_tile, tile, scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(keys.empty.index(stage), count=1)
    scores = transform_scores(scores, tiles.factor, tiles.soft_cap, tiles.HAS_CAP)
    if masked:
        row_last = gl.where(_sees(offset, segment, tiles.GROUP, S_LAYOUT), valid, 0)
        scores = mask_scores(scores, row_last, row_last, 0, False)
    probs, acc_scale, row_max, row_sum = online_softmax(
        scores, tiles.factor, sums.row_max, sums.row_sum, True, tiles.HAS_CAP
    )
    weights = unpack_weights(pack_weights(probs, DTYPE), DTYPE, P_LAYOUT)
    mbarrier.wait(values.full.index(stage), phase)
    if clear < BLOCK_N:
        clear_tile(values.memory.index(stage), clear, 0)
    found = gl.zeros([ROWS, WIDTH], gl.float32, O_LAYOUT)
    found = warpgroup_mma(weights, values.memory.index(stage), found, use_acc=False, is_async=True)
    found = warpgroup_mma_wait(0, deps=[found])
    mbarrier.arrive(values.empty.index(stage), count=1)
    # The weights of rows that do not see the values are 0, but 0 * NaN is NaN.
    found = gl.where(_sees(offset, segment, tiles.GROUP, O_LAYOUT)[:, None], found, 0.0)
    acc = sums.acc * gl.convert_layout(acc_scale, gl.SliceLayout(1, O_LAYOUT))[:, None] + found
    return RowSums(row_max, row_sum, acc)


@gluon.jit
def multiply_item(tiles, sums, step, count, valid):
    """Multiply by `count` tiles from ring step `step` on, which all rows see; they have `valid`
    keys. Products with values overlap with the softmax of the next tile.

    Returns:
        `RowSums`.
    """
    keys = tiles.keys
    values = tiles.values
    acc = sums.acc
    row_max = sums.row_max
    row_sum = sums.row_sum
    STAGES: gl.constexpr = keys.STAGES
    DTYPE: gl.constexpr = keys.memory.dtype
    BLOCK_N: gl.constexpr = keys.memory.shape[1]
    S_LAYOUT: gl.constexpr = score_layout(BLOCK_N)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    stage = step % STAGES
    mbarrier.wait(keys.full.index(stage), (step // STAGES) & 1)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    tile = keys.memory.index(stage).permute((1, 0))
    scores = warpgroup_mma(tiles.q_tile, tile, zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(keys.empty.index(stage), count=1)
    scores = transform_scores(scores, tiles.factor, tiles.soft_cap, tiles.HAS_CAP)
    row_last = gl.full([ROWS], valid, gl.int32, ROW)
    scores = mask_scores(scores, row_last, row_last, 0, False)
    probs, _, row_max, row_sum = online_softmax(
        scores, tiles.factor, row_max, row_sum, False, tiles.HAS_CAP
    )
    weights = pack_weights(probs, DTYPE)
    for i in range(1, count):
        v_stage = stage
        v_phase = ((step + i - 1) // STAGES) & 1
        stage = (step + i) % STAGES
        mbarrier.wait(keys.full.index(stage), ((step + i) // STAGES) & 1)
        zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
        tile = keys.memory.index(stage).permute((1, 0))
        scores = warpgroup_mma(tiles.q_tile, tile, zeros, use_acc=False, is_async=True)
        mbarrier.wait(values.full.index(v_stage), v_phase)
        operand = unpack_weights(weights, DTYPE, P_LAYOUT)
        acc = warpgroup_mma(operand, values.memory.index(v_stage), acc, is_async=True)
        # One group may stay in flight: Q @ K^T is complete, P @ V overlaps with the softmax.
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(keys.empty.index(stage), count=1)
        scores = transform_scores(scores, tiles.factor, tiles.soft_cap, tiles.HAS_CAP)
        if valid < (i + 1) * BLOCK_N:
            row_last = gl.full([ROWS], valid - i * BLOCK_N, gl.int32, ROW)
            scores = mask_scores(scores, row_last, row_last, 0, False)
        probs, acc_scale, row_max, row_sum = online_softmax(
            scores, tiles.factor, row_max, row_sum, False, tiles.HAS_CAP
        )
        # P @ V is complete: its stage is free, and the accumulator may be rescaled.
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(values.empty.index(v_stage), count=1)
        acc = acc * gl.convert_layout(acc_scale, gl.SliceLayout(1, acc.type.layout))[:, None]
        weights = pack_weights(probs, DTYPE)
    mbarrier.wait(values.full.index(stage), ((step + count - 1) // STAGES) & 1)
    operand = unpack_weights(weights, DTYPE, P_LAYOUT)
    acc = warpgroup_mma(operand, values.memory.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(values.empty.index(stage), count=1)
    return RowSums(row_max, row_sum, acc)
