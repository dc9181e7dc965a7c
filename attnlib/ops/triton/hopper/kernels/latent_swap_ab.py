"""The Hopper decode kernel over latents for up to 16 query rows (P10, M12).

WGMMA multiplies at least 64 rows, so with few query rows the latents are the rows of both products
and the query rows their columns (`latent_columns`). One warp loads tiles of latents by TMA, in
quarters, and four warps multiply them in place. As soon as the last product with a quarter is
complete, its stage is free for another one. The unit of the work distribution (`latent_splits`) is
a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.compat import launch_dependent_grids, wait_on_dependent_grids
from attnlib.ops.triton.hopper.kernels.decode_call import (
    UNALIGNED,
    UNSPECIALIZED,
    Outputs,
    Partials,
    Queries,
)
from attnlib.ops.triton.hopper.kernels.latent_columns import COLUMNS, LATENTS
from attnlib.ops.triton.hopper.kernels.latent_pages import LatentCache
from attnlib.ops.triton.hopper.kernels.latent_rows import query_rows
from attnlib.ops.triton.hopper.kernels.latent_splits import place_of, split_at
from attnlib.ops.triton.hopper.kernels.latent_swap_ab_attend import (
    attend_to_split,
    copy_split_queries,
    store_split,
)
from attnlib.ops.triton.hopper.kernels.latent_swap_ab_loader import load_range
from attnlib.ops.triton.hopper.kernels.latent_swap_ab_memory import allocate_swap_memory
from attnlib.ops.triton.hopper.kernels.logits import logits_of
from attnlib.ops.triton.hopper.kernels.ranges import worker_range
from attnlib.ops.triton.hopper.kernels.schedule import Batch, KeyTiles, Mask

__all__ = ["hopper_latent_swap_ab_kernel"]


@gluon.jit
def _consumer(queries, outputs, partials, keys, own, memory, scale, soft_cap, CONFIG: gl.constexpr):
    """Compute the splits of the CTA's range. Four warps."""
    logits = logits_of(scale, soft_cap, CONFIG.HAS_CAP)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    rows = query_rows(gl.arange(0, CONFIG.ROWS, gl.SliceLayout(0, COLUMNS)), 0, CONFIG)
    copied_row = gl.arange(0, CONFIG.ROWS, gl.SliceLayout(1, COPY))
    request = own.request
    before = own.before
    position = own.begin
    step = 0
    while position < own.end:
        units = keys.count(request, True)
        request_end = before + units
        if position < request_end:
            split = split_at(keys, request, 0, units, before, position, own.end)
            copy_split_queries(queries, copied_row, split, memory, CONFIG)
            acc, row_max, row_sum, step = attend_to_split(
                split, rows, keys.mask, memory, logits, step, CONFIG
            )
            place = place_of(own, before, request_end, position)
            store_split(acc, row_max, row_sum, rows, split, place, outputs, partials)
            position += split.count
        if position >= request_end:
            before = request_end
            request += 1


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_latent_swap_ab_kernel(
    key_desc, value_desc, query, out, lse, sinks, query_start_loc, seq_lens, block_table,
    partials, partial_lses, split_headers, scale, soft_cap, left, right, chunk, num_reqs,
    num_tokens, num_blocks, rows, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt,
    stride_table, CONFIG: gl.constexpr,
):  # fmt: skip
    """One CTA of 5 warps. Grid: tile ranges.

    Args:
        key_desc, value_desc, block_table: see `LatentCache`.
        partials, partial_lses, split_headers, rows: see `Partials`.
        CONFIG: a `LatentConfig` with 16 ROWS and one of HEAD_BLOCKS.
    """
    memory = allocate_swap_memory(CONFIG, key_desc.dtype)
    # Makes the initialized barriers visible to TMA.
    fence_async_shared()
    mask = Mask(
        left, right, chunk, CONFIG.CAUSAL, CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, CONFIG.HAS_CHUNK
    )
    batch = Batch(query_start_loc, seq_lens, block_table, num_reqs, num_blocks, stride_table)
    keys = KeyTiles(batch, mask, None, None, CONFIG.TILE_TOKENS, LATENTS)
    cache = LatentCache(key_desc, value_desc, None, batch, None, CONFIG.BLOCK_SIZE)
    queries = Queries(query, stride_qt, stride_qh, num_tokens)
    outputs = Outputs(out, lse, sinks, stride_ot, stride_oh, stride_lt)
    parts = Partials(partials, partial_lses, split_headers, None, rows)

    # PDL: the previous kernel may have written the queries, the cache or the lengths. The combine
    # kernel may start; it waits for this kernel's results by itself.
    wait_on_dependent_grids()
    launch_dependent_grids()
    own = worker_range(keys, gl.program_id(0), gl.num_programs(0), 0, CONFIG.LEAST)
    gl.warp_specialize(
        [
            (_consumer, (queries, outputs, parts, keys, own, memory, scale, soft_cap, CONFIG)),
            (load_range, (cache, keys, own, memory)),
        ],
        [1],
        [CONFIG.LOADER_REGISTERS],
    )
