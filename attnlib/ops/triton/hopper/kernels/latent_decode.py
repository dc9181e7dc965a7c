"""The Hopper decode kernel over latents: values are a prefix of the keys (P10, M12).

A CTA has the two consumer warpgroups of `latent_steps` and a warp that loads latents by TMA, in
three parts: two halves of the values and the rotary part. Over 8-bit caches four warps load and
convert them instead (`latent_converter`). It attends with a block of up to 64 query
rows of a request, all of which read the one KV head of the cache. The unit of the work distribution
(`latent_splits`) is a pair of tiles. Prefills whose blocks fill the chip have one CTA for each
block (WHOLE). Uses of the shared memory are counted across splits, so the
first latents of a split are loaded while the one before it ends.
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
from attnlib.ops.triton.hopper.kernels.kv_scales import (
    load_kv_scale,
    sums_of_keys,
    with_key_scale,
)
from attnlib.ops.triton.hopper.kernels.latent_converter import convert_range
from attnlib.ops.triton.hopper.kernels.latent_decode_attend import (
    PAIR,
    attend_to_split,
    receive_queries,
)
from attnlib.ops.triton.hopper.kernels.latent_loader import load_range
from attnlib.ops.triton.hopper.kernels.latent_pages import LatentCache
from attnlib.ops.triton.hopper.kernels.latent_rows import clear_rows, query_rows
from attnlib.ops.triton.hopper.kernels.latent_splits import (
    MOST_BLOCKS,
    SplitPlace,
    place_of,
    split_at,
    whole_block,
)
from attnlib.ops.triton.hopper.kernels.latent_store import store_split
from attnlib.ops.triton.hopper.kernels.latent_tiles import TILE, allocate_tiles
from attnlib.ops.triton.hopper.kernels.logits import logits_of
from attnlib.ops.triton.hopper.kernels.ranges import worker_range
from attnlib.ops.triton.hopper.kernels.schedule import Batch, KeyTiles, Mask

__all__ = ["hopper_latent_decode_kernel"]


_FEW = gl.constexpr(16)
"""Pairs of tiles of all requests up to which a range may have one. On an H200, with two and with
one, in us: 128 heads and 1k 16.9 and 14.6, 2k 17.4 and 15.5; 4 tokens of 64 heads over 2k 20.7 and
19.2; but 128 heads and 8k 20.4 and 22.8, 4 tokens of 128 heads over 2k 19.8 and 21.1."""


@gluon.jit
def _consumer(
    queries,
    outputs,
    partials,
    keys,
    own,
    block,
    tiles,
    scales,
    soft_cap,
    CONFIG: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Compute one half of the value elements of all splits of the CTA's range.

    Args:
        scales: (softmax scale, k_scale, v_scale).
    """
    # [rows, keys].
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    scale, k_scale, v_scale = scales
    value_scale = 1.0
    if CONFIG.CONVERTS:
        scale = with_key_scale(scale, k_scale, 0, CONFIG.K_SCALE_KIND)
        value_scale = load_kv_scale(v_scale, 0, CONFIG.V_SCALE_KIND)
    logits = logits_of(scale, soft_cap, CONFIG.HAS_CAP)
    rows = query_rows(gl.arange(0, CONFIG.ROWS, gl.SliceLayout(1, SCORES)), block, CONFIG)
    columns = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    request = own.request
    before = own.before
    position = own.begin
    step = 0
    splits = 0
    while position < own.end:
        units = keys.count(request, True)
        request_end = before + units
        if position < request_end:
            split = split_at(keys, request, block, units, before, position, own.end)
            row_logits = receive_queries(queries, rows, split, tiles, logits, CONSUMER)
            acc, row_max, row_sum, step = attend_to_split(
                split, rows, columns, keys.mask, tiles, row_logits, step, splits, CONFIG, CONSUMER
            )
            splits += 1
            if CONFIG.CONVERTS:
                row_sum = sums_of_keys(row_sum, row_sum == 0.0, k_scale, 0, CONFIG.K_SCALE_KIND)

            if CONFIG.WHOLE:
                place = SplitPlace(1, 0)
            else:
                place = place_of(own, before, request_end, position, gl.program_id(0))
            store_split(
                acc,
                row_max,
                row_sum,
                rows,
                split,
                place,
                outputs,
                partials,
                value_scale,
                tiles,
                CONFIG,
                CONSUMER,
            )
            position += split.count
        if position >= request_end:
            before = request_end
            request += 1
    if CONFIG.WHOLE and CONSUMER == 0:
        if own.request == keys.batch.num_reqs:
            # Elsewhere the combine kernel does.
            clear_rows(outputs, keys.batch, queries.num_tokens, block, CONFIG)


@gluon.jit
def _loader(cache, keys, own, block, tiles, PREFETCH: gl.constexpr, CONFIG: gl.constexpr):
    """Load the latents of the CTA's range. One warp, or four over an 8-bit cache."""
    if CONFIG.CONVERTS:
        convert_range(cache, keys, own, block, tiles, CONFIG)
    else:
        load_range(cache, keys, own, block, tiles, PREFETCH)


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_latent_decode_kernel(
    key_desc, value_desc, latents, query, out, lse, sinks, k_scale, v_scale, query_start_loc,
    seq_lens, block_table, partials, partial_lses, split_headers, scale, soft_cap, left, right,
    chunk, num_reqs, num_tokens, num_blocks, rows, stride_qt, stride_qh, stride_ot, stride_oh,
    stride_lt, stride_table, stride_latents, stride_token, token_blocks, CONFIG: gl.constexpr,
):  # fmt: skip
    """One CTA of 9 warps, or 12 over 8-bit caches. Grid: tile ranges * HEAD_BLOCKS * token_blocks,
    all resident at a time; with WHOLE HEAD_BLOCKS for each query tile (`query_tiles`).

    Args:
        key_desc, value_desc, latents, block_table, stride_latents: see `LatentCache`.
        k_scale, v_scale: of an 8-bit cache, as `SCALE_KIND` of each says; else None.
        partials, partial_lses, split_headers, rows: see `Partials`; None with WHOLE.
        stride_token: see `LatentCache`.
        token_blocks: blocks of query tokens of a request; None without MANY_TOKENS or with WHOLE.
        CONFIG: a `LatentConfig` with 64 ROWS.
    """
    blocks = CONFIG.HEAD_BLOCKS
    TOKENS: gl.constexpr = CONFIG.TILE_TOKENS * (MOST_BLOCKS if CONFIG.MANY_TOKENS else 1)
    if CONFIG.MANY_TOKENS and not CONFIG.WHOLE:
        blocks = CONFIG.HEAD_BLOCKS * token_blocks
    DTYPE: gl.constexpr = gl.float16 if CONFIG.HALVED else query.dtype.element_ty
    tiles = allocate_tiles(CONFIG.DV, CONFIG.ROTARY, DTYPE, GATHERED=False, HALVED=CONFIG.HALVED)
    # Makes the initialized barriers visible to TMA.
    fence_async_shared()
    mask = Mask(
        left, right, chunk, CONFIG.CAUSAL, CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, CONFIG.HAS_CHUNK
    )
    batch = Batch(query_start_loc, seq_lens, block_table, num_reqs, num_blocks, stride_table)
    keys = KeyTiles(batch, mask, None, None, TOKENS, PAIR)
    cache = LatentCache(
        key_desc, value_desc, latents, batch, stride_latents, stride_token, CONFIG.BLOCK_SIZE
    )
    queries = Queries(query, stride_qt, stride_qh, num_tokens)
    outputs = Outputs(out, lse, sinks, stride_ot, stride_oh, stride_lt)
    parts = Partials(partials, partial_lses, split_headers, None, rows)

    # PDL: the previous kernel may have written the queries, the cache or the lengths. The combine
    # kernel may start; it waits for this kernel's results by itself.
    wait_on_dependent_grids()
    if not CONFIG.WHOLE:
        launch_dependent_grids()
    if CONFIG.WHOLE:
        block, keys, own = whole_block(batch, mask, PAIR, CONFIG)
    else:
        index = gl.program_id(0) // blocks
        num_ranges = gl.num_programs(0) // blocks
        own = worker_range(keys, index, num_ranges, 0, CONFIG.LEAST, _FEW)
        block = gl.program_id(0) % blocks
    SHARED: gl.constexpr = CONFIG.HEAD_BLOCKS > 1 or CONFIG.MANY_TOKENS
    PREFETCH: gl.constexpr = SHARED and CONFIG.BLOCK_SIZE >= TILE and not CONFIG.WHOLE
    scales = (scale, k_scale, v_scale)
    LOADERS: gl.constexpr = 4 if CONFIG.CONVERTS else 1
    gl.warp_specialize(
        [
            (
                _consumer,
                (queries, outputs, parts, keys, own, block, tiles, scales, soft_cap, CONFIG, 0),
            ),
            (
                _consumer,
                (queries, outputs, parts, keys, own, block, tiles, scales, soft_cap, CONFIG, 1),
            ),
            (_loader, (cache, keys, own, block, tiles, PREFETCH, CONFIG)),
        ],
        [4, LOADERS],
        [CONFIG.CONSUMER_REGISTERS, CONFIG.LOADER_REGISTERS],
    )
