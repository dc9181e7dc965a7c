"""The Hopper decode kernel over latents as the rows of both products (P10, M12).

WGMMA multiplies at least 64 rows, so with few query rows the latents are the rows of both products
and the query rows their columns (`latent_columns`). One warp loads tiles of latents by TMA, in
quarters, and four warps multiply them in place. As soon as the last product with a quarter is
complete, its stage is free for another one. The unit of the work distribution (`latent_splits`) is
a tile.

Over 8-bit caches the four warps convert latents in registers (`latent_swap_ab_scores`), in two such
workers of up to 32 rows, because memory delivers a tile in half of the time: with loaders and
ranges of their own, or with the same latents. With CONVERTS, four other warps load and convert them
(`latent_swap_ab_converter`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.compat import (
    Value,
    aggregate,
    launch_dependent_grids,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.decode_call import (
    UNALIGNED,
    UNSPECIALIZED,
    Outputs,
    Partials,
    Queries,
)
from attnlib.ops.triton.hopper.kernels.decode_products import score_layout
from attnlib.ops.triton.hopper.kernels.kv_scales import load_kv_scale, sums_of_keys, with_key_scale
from attnlib.ops.triton.hopper.kernels.latent_columns import LATENTS
from attnlib.ops.triton.hopper.kernels.latent_pages import LatentCache
from attnlib.ops.triton.hopper.kernels.latent_rows import query_rows
from attnlib.ops.triton.hopper.kernels.latent_splits import (
    place_of,
    row_block,
    split_at,
    tile_tokens,
)
from attnlib.ops.triton.hopper.kernels.latent_swap_ab_attend import attend_to_split, store_split
from attnlib.ops.triton.hopper.kernels.latent_swap_ab_converter import convert_range
from attnlib.ops.triton.hopper.kernels.latent_swap_ab_loader import load_range
from attnlib.ops.triton.hopper.kernels.latent_swap_ab_memory import (
    allocate_swap_memory,
    with_own_rows,
)
from attnlib.ops.triton.hopper.kernels.latent_swap_ab_queries import (
    copy_split_queries,
    plain_rows,
)
from attnlib.ops.triton.hopper.kernels.logits import logits_of
from attnlib.ops.triton.hopper.kernels.quantized import WEIGHT_SCALE
from attnlib.ops.triton.hopper.kernels.ranges import worker_range
from attnlib.ops.triton.hopper.kernels.schedule import Batch, KeyTiles, Mask
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["hopper_latent_swap_ab_kernel"]


@aggregate
class _SwapCall:
    """What the partitions share.

    Fields:
        queries, outputs, partials: the objects of `decode_call`.
        keys: the `KeyTiles`.
        k_scale, v_scale: of an 8-bit cache, as `SCALE_KIND` of each says; else None.
        scale, soft_cap: of the softmax.
        token_blocks: blocks of query tokens of a request; None without MANY_TOKENS.
        own: the `TileRange` of the CTA; None where each of two workers has its own.
    """

    queries: Value
    outputs: Value
    partials: Value
    keys: Value
    k_scale: Value
    v_scale: Value
    scale: Value
    soft_cap: Value
    token_blocks: Value
    own: Value

    @gluon.jit
    def range_of(self, WORKER: gl.constexpr, CONFIG: gl.constexpr):
        """Return (the `TileRange` of a worker, number of the worker or of the CTA, block of query
        rows)."""
        number = gl.program_id(0)
        if self.own is None:
            number = number * CONFIG.WORKERS + WORKER
            num_ranges = gl.num_programs(0) * CONFIG.WORKERS
            return worker_range(self.keys, number, num_ranges, 0, CONFIG.LEAST), number, 0
        elif CONFIG.HEAD_BLOCKS > 1 or CONFIG.MANY_TOKENS:
            block, _ = row_block(self.token_blocks, CONFIG)
            return self.own, number, block
        else:
            return self.own, number, 0


@gluon.jit
def _consumer(call, memory, WORKER: gl.constexpr, CONFIG: gl.constexpr):
    """Compute the splits of a worker's range. Four warps."""
    FIRST: gl.constexpr = WORKER * CONFIG.ROWS if CONFIG.SHARES else 0
    COLUMN: gl.constexpr = gl.SliceLayout(0, score_layout(CONFIG.ROWS))
    keys = call.keys
    own, worker, block = call.range_of(WORKER, CONFIG)
    scale = call.scale
    if CONFIG.CONVERTS:
        scale = with_key_scale(scale, call.k_scale, 0, CONFIG.K_SCALE_KIND)
    logits = logits_of(scale, call.soft_cap, CONFIG.HAS_CAP)
    rows = query_rows(FIRST + gl.arange(0, CONFIG.ROWS, COLUMN), block, CONFIG)
    copied_row = plain_rows(CONFIG)
    key_scale = 0.0
    value_scale = 0.0
    if CONFIG.KV_KIND != KV_PLAIN:
        key_scale = load_kv_scale(call.k_scale, 0, CONFIG.K_SCALE_KIND)
        value_scale = load_kv_scale(call.v_scale, 0, CONFIG.V_SCALE_KIND) / WEIGHT_SCALE
    elif CONFIG.CONVERTS:
        value_scale = load_kv_scale(call.v_scale, 0, CONFIG.V_SCALE_KIND)
    request = own.request
    before = own.before
    position = own.begin
    step = 0
    while position < own.end:
        units = keys.count(request, True)
        request_end = before + units
        if position < request_end:
            split = split_at(keys, request, block, units, before, position, own.end)
            copy_split_queries(
                call.queries, copied_row, split, block, memory, key_scale, FIRST, CONFIG
            )
            acc, row_max, row_sum, step = attend_to_split(
                split, rows, keys.mask, memory, logits, step, CONFIG
            )
            if CONFIG.CONVERTS:
                empty = row_sum == 0.0
                row_sum = sums_of_keys(row_sum, empty, call.k_scale, 0, CONFIG.K_SCALE_KIND)
            place = place_of(own, before, request_end, position, worker)
            store_split(
                acc, row_max, row_sum, rows, split, place, call.outputs, call.partials, value_scale
            )
            position += split.count
        if position >= request_end:
            before = request_end
            request += 1


@gluon.jit
def _loader(call, cache, memory, WORKER: gl.constexpr, CONFIG: gl.constexpr):
    """Load the latents of a worker's range. One warp, or four that convert them."""
    own, _, block = call.range_of(WORKER, CONFIG)
    if CONFIG.CONVERTS:
        convert_range(cache, call.keys, own, block, memory, CONFIG)
    else:
        load_range(cache, call.keys, own, block, memory, CONFIG)


@gluon.jit
def _range_of_cta(keys, token_blocks, CONFIG: gl.constexpr):
    """Return the `TileRange` of the CTA."""
    if CONFIG.HEAD_BLOCKS > 1 or CONFIG.MANY_TOKENS:
        _, blocks = row_block(token_blocks, CONFIG)
        index = gl.program_id(0) // blocks
        return worker_range(keys, index, gl.num_programs(0) // blocks, 0, CONFIG.LEAST)
    else:
        return worker_range(keys, gl.program_id(0), gl.num_programs(0), 0, CONFIG.LEAST)


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_latent_swap_ab_kernel(
    key_desc, value_desc, latents, query, out, lse, sinks, k_scale, v_scale, query_start_loc,
    seq_lens, block_table, partials, partial_lses, split_headers, scale, soft_cap, left, right,
    chunk, num_reqs, num_tokens, num_blocks, rows, stride_qt, stride_qh, stride_ot, stride_oh,
    stride_lt, stride_table, stride_latents, stride_token, token_blocks, CONFIG: gl.constexpr,
):  # fmt: skip
    """One CTA of WORKERS consumers of 4 warps, with a loader each or, with SHARES, together. Grid:
    tile ranges * HEAD_BLOCKS * token_blocks / ranges of a CTA, all resident at a time.

    Args:
        key_desc, value_desc, block_table: see `LatentCache`.
        latents, stride_latents, stride_token: see `LatentCache`, with GROUP_SCALES; else None.
        k_scale, v_scale: of an 8-bit cache, as `SCALE_KIND` of each says; else None.
        partials, partial_lses, split_headers, rows: see `Partials`.
        token_blocks: blocks of query tokens of a request; None without MANY_TOKENS.
        CONFIG: a `LatentConfig` with 16 ROWS, or 32 over 8-bit caches.
    """
    if CONFIG.CONVERTS:
        memory = allocate_swap_memory(CONFIG, query.dtype.element_ty, query.dtype.element_ty)
    else:
        memory = allocate_swap_memory(CONFIG, value_desc.dtype, key_desc.dtype)
    more = memory
    if CONFIG.SHARES:
        more = with_own_rows(memory, CONFIG)
    elif CONFIG.WORKERS > 1:
        more = allocate_swap_memory(CONFIG, value_desc.dtype, key_desc.dtype)
    # Makes the initialized barriers visible to TMA.
    fence_async_shared()
    mask = Mask(
        left, right, chunk, CONFIG.CAUSAL, CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, CONFIG.HAS_CHUNK
    )
    batch = Batch(query_start_loc, seq_lens, block_table, num_reqs, num_blocks, stride_table)
    keys = KeyTiles(batch, mask, None, None, tile_tokens(CONFIG), LATENTS)
    cache = LatentCache(
        key_desc, value_desc, latents, batch, stride_latents, stride_token, CONFIG.BLOCK_SIZE
    )
    queries = Queries(query, stride_qt, stride_qh, num_tokens)
    outputs = Outputs(out, lse, sinks, stride_ot, stride_oh, stride_lt)
    parts = Partials(partials, partial_lses, split_headers, None, rows)

    # PDL: the previous kernel may have written the queries, the cache or the lengths. The combine
    # kernel may start; it waits for this kernel's results by itself.
    wait_on_dependent_grids()
    launch_dependent_grids()
    own = None
    if CONFIG.WORKERS == 1 or CONFIG.SHARES:
        own = _range_of_cta(keys, token_blocks, CONFIG)
    call = _SwapCall(
        queries, outputs, parts, keys, k_scale, v_scale, scale, soft_cap, token_blocks, own
    )
    if CONFIG.WORKERS == 1:
        gl.warp_specialize(
            [(_consumer, (call, memory, 0, CONFIG)), (_loader, (call, cache, memory, 0, CONFIG))],
            [4 if CONFIG.CONVERTS else 1],
            [CONFIG.LOADER_REGISTERS],
        )
    elif CONFIG.SHARES:
        gl.warp_specialize(
            [
                (_consumer, (call, memory, 0, CONFIG)),
                (_consumer, (call, more, 1, CONFIG)),
                (_loader, (call, cache, memory, 0, CONFIG)),
            ],
            [4, 1],
            [CONFIG.CONSUMER_REGISTERS, CONFIG.LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (call, memory, 0, CONFIG)),
                (_consumer, (call, more, 1, CONFIG)),
                (_loader, (call, cache, memory, 0, CONFIG)),
                (_loader, (call, cache, more, 1, CONFIG)),
            ],
            [4, 1, 1],
            [CONFIG.CONSUMER_REGISTERS, CONFIG.LOADER_REGISTERS, CONFIG.LOADER_REGISTERS],
        )
