"""The four warps that gather the queries and latents of lists for up to 16 query heads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.ops.triton.hopper.kernels.compat import arrive_after_copies
from attnlib.ops.triton.hopper.kernels.latent_columns import LATENTS
from attnlib.ops.triton.hopper.kernels.selected_rows import gather_part
from attnlib.ops.triton.hopper.kernels.selected_swap_ab_memory import (
    BACK,
    FRONT,
    NUMBER,
    QUARTERS,
    SLOTS,
)

__all__ = ["gather_list"]

_COPY: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Layout of the rows of a copy."""


@gluon.jit
def _gather_queries(inputs, memory, token, number, HEADS: gl.constexpr):
    """Copy the queries of a token, [16, elements], once the output of the list before, which is
    staged there, has been written.

    Args:
        number: lists that the CTA has attended to before.
    """
    WIDTH: gl.constexpr = memory.ring.shape[2]
    heads = gl.arange(0, 16, gl.SliceLayout(1, _COPY))
    offsets = inputs.query_offsets(token, heads)
    mbarrier.wait(memory.queries_empty.index(0), (number & 1) ^ 1)
    for quarter in gl.static_range(QUARTERS):
        exists = heads < HEADS
        gather_part(inputs.query, offsets, exists, memory.queries.index(quarter), quarter * WIDTH)
    exists = heads < HEADS
    gather_part(inputs.query, offsets, exists, memory.query_rotary.index(0), QUARTERS * WIDTH)
    arrive_after_copies(memory.queries_full.index(0), increment_count=False)


@gluon.jit
def _add_weights(sums, memory):
    """Add the weights of a tile, [16, 64], to their sums."""
    return sums + memory.weights.index(0).load(sums.type.layout).to(gl.float32)


@gluon.jit
def _gather_tile(key, offsets, found, memory, sums, tile, done, RUNNING: gl.constexpr):
    """Copy one tile, each part as soon as its slot is free.

    Args:
        offsets, found: element offsets of the latents, and whether they exist.
        sums: of the rounded weights up to tile - 2, unless RUNNING.
        tile: number of the tile in its list, whose first one finds all slots free.
        done: tiles of the lists before.

    Returns:
        The sums up to tile - 1.
    """
    WIDTH: gl.constexpr = memory.ring.shape[2]
    use = tile * QUARTERS
    # The parity is inverted, so that the first tile does not wait.
    parity = ((done + tile) & 1) ^ 1
    # Its slot held a quarter of the tile before the last one, which has been released.
    gather_part(key, offsets, found, memory.ring.index(use % SLOTS), 0)
    memory.wait_free(FRONT, parity)
    gather_part(key, offsets, found, memory.rotary.index(0), QUARTERS * WIDTH)
    gather_part(key, offsets, found, memory.ring.index((use + 1) % SLOTS), WIDTH)
    arrive_after_copies(memory.full.index(FRONT), increment_count=False)
    memory.wait_free(BACK, parity)
    if not RUNNING:
        if tile > 0:
            # The warps that multiply store other weights only after the copies below.
            sums = _add_weights(sums, memory)
    gather_part(key, offsets, found, memory.ring.index((use + 2) % SLOTS), 2 * WIDTH)
    gather_part(key, offsets, found, memory.ring.index((use + 3) % SLOTS), 3 * WIDTH)
    arrive_after_copies(memory.full.index(BACK), increment_count=False)
    return sums


@gluon.jit
def gather_list(
    inputs, lists, memory, token, number, done, HEADS: gl.constexpr, RUNNING: gl.constexpr
):
    """Copy the queries of a token and all tiles of its list; returns the number of tiles.

    Args:
        inputs: the `SelectedInputs`.
        lists: the `KeyLists`.
        number, done: lists and tiles that the CTA has attended to before.
        HEADS: query heads.
        RUNNING: see `SelectedConfig`. Otherwise the rounded weights are summed here.
    """
    slots = lists.slots(token, gl.program_id(1), LATENTS)
    rows = slots.begin + gl.arange(0, LATENTS, gl.SliceLayout(1, _COPY))
    entry = slots.load(rows)
    next_entry = slots.load(rows + LATENTS)
    _gather_queries(inputs, memory, token, number, HEADS)
    visible = lists.visible_keys(token)
    position = slots.positions_of(entry, rows, visible)
    block = inputs.blocks(position, visible)
    rows += LATENTS
    # Entries are loaded two tiles ahead, and blocks one tile, so that no copy waits for them.
    next_position = slots.positions_of(next_entry, rows, visible)
    next_block = inputs.blocks(next_position, visible)
    rows += LATENTS
    next_entry = slots.load(rows)
    offsets = inputs.latent_offsets(position, block)
    sums = gl.zeros([16, LATENTS], gl.float32, _COPY)
    _gather_tile(inputs.key, offsets, position >= 0, memory, sums, 0, done, RUNNING)
    # The first tile is on its way before the warps that multiply have examined the list.
    mbarrier.wait(memory.listed.index(0), number & 1)
    tiles = gl.max(memory.num_tiles.load(NUMBER), 0)
    for tile in range(1, tiles):
        offsets = inputs.latent_offsets(next_position, next_block)
        found = next_position >= 0
        next_position = slots.positions_of(next_entry, rows, visible)
        next_block = inputs.blocks(next_position, visible)
        rows += LATENTS
        next_entry = slots.load(rows)
        sums = _gather_tile(inputs.key, offsets, found, memory, sums, tile, done, RUNNING)
    if not RUNNING:
        mbarrier.wait(memory.empty.index(BACK), (done + tiles - 1) & 1)
        sums = _add_weights(sums, memory)
        memory.rounded_sums.store(gl.sum(sums, 1))
        mbarrier.arrive(memory.summed.index(0), count=1)
    return tiles
