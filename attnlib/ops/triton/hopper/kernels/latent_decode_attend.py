"""How two consumer warpgroups attend to a split of a request over latents."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.compat import consumers_sync
from attnlib.ops.triton.hopper.kernels.latent_halves import HalvedLogits, halve_split_queries
from attnlib.ops.triton.hopper.kernels.latent_rows import copy_queries, query_offsets
from attnlib.ops.triton.hopper.kernels.latent_splits import TileKeys
from attnlib.ops.triton.hopper.kernels.latent_steps import attend_both, attend_other, attend_own
from attnlib.ops.triton.hopper.kernels.latent_tiles import TILE, clear_tile_from

__all__ = ["PAIR", "attend_to_split", "receive_queries"]

PAIR: gl.constexpr = gl.constexpr(128)
"""Latents of a pair of tiles, the unit of the work distribution."""


@gluon.jit
def _copy_split_queries(queries, rows, split, tiles, CONSUMER: gl.constexpr):
    """Copy the queries of a split to shared memory, each consumer a part of them.

    Both consumers are done with the queries of the split before (`LatentTiles.total_sum`).
    """
    HALF: gl.constexpr = tiles.queries.low.shape[2]
    valid = rows.exist(split.query_len)
    offsets = query_offsets(queries, rows, split.start)
    if CONSUMER == 0:
        copy_queries(tiles.queries.low.index(0), queries, offsets, valid, 0)
    else:
        copy_queries(tiles.queries.high.index(0), queries, offsets, valid, HALF)
        copy_queries(tiles.queries.rotary.index(0), queries, offsets, valid, 2 * HALF)
    fence_async_shared()
    consumers_sync(2)


@gluon.jit
def receive_queries(queries, rows, split, tiles, logits, CONSUMER: gl.constexpr):
    """Copy the queries of a split to shared memory; return the logits of their scores."""
    if tiles.HALVED:
        return HalvedLogits(logits, halve_split_queries(queries, rows, split, tiles, CONSUMER))
    else:
        _copy_split_queries(queries, rows, split, tiles, CONSUMER)
        return logits


@gluon.jit
def attend_to_split(
    split,
    rows,
    columns,
    mask,
    tiles,
    logits,
    step,
    splits,
    CONFIG: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Attend to all tiles of a split.

    Args:
        columns: [keys], numbers of the keys of a tile.
        step: number of tiles of the consumer before the split.
        splits: number of splits before this one.

    Returns:
        (accumulators of one half of the value elements, maxima, sums of the weights of both
        consumers, number of tiles of the consumer so far).
    """
    HALF: gl.constexpr = CONFIG.DV // 2
    ROWS: gl.constexpr = CONFIG.ROWS
    # TMA fills whole pages past the end with zeros, but not the rest of the last page. Warps
    # that convert latents load none past the end.
    BLOCK_SIZE: gl.constexpr = CONFIG.BLOCK_SIZE
    ROW: gl.constexpr = rows.row.type.layout
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    seq_len = split.seq_len
    row_first, row_last = mask.span(rows.token + (seq_len - split.query_len), seq_len)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    row_sum = gl.zeros([ROWS], gl.float32, ROW)
    acc = gl.zeros([ROWS, HALF], gl.float32, VALUES)
    first_own = split.first() * PAIR + CONSUMER * TILE
    if CONSUMER == 0:
        if not CONFIG.CONVERTS:
            if (seq_len - first_own < TILE) & (seq_len % BLOCK_SIZE != 0):
                clear_tile_from(tiles, seq_len - first_own, step & 1, CONSUMER)
        keys = TileKeys(first_own + columns, row_first[:, None], row_last[:, None])
        acc, row_max, row_sum = attend_own(
            acc, row_max, row_sum, keys, step & 1, tiles, logits, CONSUMER
        )
        step += 1
    # Consumer 0 attends to a tile A together with the tile B before it.
    for i in range(1 - CONSUMER, split.count):
        parity = step & 1
        first_key = first_own + i * PAIR
        if not CONFIG.CONVERTS:
            if (seq_len - first_key < TILE) & (seq_len % BLOCK_SIZE != 0):
                clear_tile_from(tiles, seq_len - first_key, parity, CONSUMER)
        keys = TileKeys(first_key + columns, row_first[:, None], row_last[:, None])
        other_parity = (step + CONSUMER + 1) & 1
        acc, row_max, row_sum = attend_both(
            acc, row_max, row_sum, keys, parity, other_parity, tiles, logits, CONSUMER
        )
        step += 1
    if CONSUMER == 0:
        acc, row_max, row_sum = attend_other(acc, row_max, row_sum, (step - 1) & 1, tiles, CONSUMER)
    row_sum = tiles.total_sum(row_sum, splits & 1, CONSUMER)
    return acc, row_max, row_sum, step
