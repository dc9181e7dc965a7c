"""Host side of the Hopper kernel over latents, of decodes and prefills: grid and constants.

It is launched as a `decode_launches.HopperDecode`, with blocks of up to 64 query rows in the place
of KV heads: up to 64 query heads of one or more query tokens of a request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.hopper.decode_grid import (
    workers_per_head,
)
from attnlib.ops.triton.hopper.decode_launches import HopperDecode, unbounded
from attnlib.ops.triton.hopper.descriptors import CacheView
from attnlib.ops.triton.hopper.kernels.latent_decode import hopper_latent_decode_kernel
from attnlib.ops.triton.hopper.kernels.latent_splits import LatentConfig
from attnlib.ops.triton.hopper.kernels.latent_swap_ab import hopper_latent_swap_ab_kernel
from attnlib.ops.triton.hopper.latent_combine import combination
from attnlib.ops.triton.hopper.latent_grid import LatentGrid
from attnlib.ops.triton.hopper.latent_tiles import LatentTile, choose_latent_tile
from attnlib.ops.triton.hopper.sizes import (
    LATENT_ROWS,
    LATENT_SIZES,
    latent_head_blocks,
)
from attnlib.ops.triton.kernels.quant import KV_PLAIN
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.scales import kv_kind, scale_kind
from attnlib.ops.triton.launch.sequence import KEY_CACHE

__all__ = ["latent_decode_workspace_bytes", "prepare_latent_decode"]

_TILE = 64
"""Latents of a tile."""
_LEAST_TILES = 2
"""Units of work of a range, at least: with shorter ones, combining takes longer than it saves."""


def latent_decode_workspace_bytes(
    num_tokens: int, num_heads: int, max_query_len: int, num_sms: int, is_quantized: bool = False
) -> int:
    """Workspace in bytes: partial results with LSEs, and headers by token and block of heads."""
    head_blocks = latent_head_blocks(num_heads)
    group = num_heads // head_blocks
    rows = group * min(max_query_len, LATENT_ROWS // group)
    # One block has at least as many CTAs as the blocks of shorter queries, whose two workers over
    # an 8-bit cache have at most 32 rows and ranges of their own.
    ctas = workers_per_head(num_sms, 1, 1)
    most = max(rows, 2 * min(rows, LATENT_ROWS // 2)) if is_quantized else rows
    return _workspace_bytes(ctas, most, num_tokens * head_blocks)


def _workspace_bytes(ranges: int, rows: int, num_headers: int) -> int:
    return 4 * (2 * ranges * rows * (LATENT_SIZES[1] + 1) + num_headers)


def prepare_latent_decode(
    call: AttentionCall,
    max_query_len: int,
    max_ctas: int | None = None,
    tile: LatentTile | None = None,
    keys_per_sm: int | None = None,
    is_prefill: bool = False,
) -> HopperDecode:
    """Prepare the launches of calls like this one; at least one query and block.

    Args:
        call: over latents, or over packed latents (P14): the keys are their bfloat16 elements, the
            values the others, and the scales are before the bfloat16 elements of each token.
        max_query_len: upper bound of the query lengths, in tokens.
        max_ctas: CTAs that may run at a time; None means one per SM.
        tile: None chooses it.
        keys_per_sm: see `choose_latent_tile`.
        is_prefill: requests are not divided where their tokens fill the chip, and one combine
            kernel serves all batches.
    """
    query, key, out, params, shape = call.query, call.key, call.out, call.params, call.shape
    (left, right), is_quantized = params.window, call.value.dtype.itemsize == 1
    packed = call.value.dtype != key.dtype
    grid = LatentGrid.of(call, max_query_len, max_ctas or call.limits.num_sms, is_prefill)
    rows, blocks, tokens = grid.rows, grid.blocks, call.num_tokens
    tile = tile or choose_latent_tile(rows, blocks, is_quantized, packed, keys_per_sm)
    in_kernel, combine = combination(call, grid, tile, is_prefill)
    num_ranges = grid.ctas * tile.ranges
    workspace = 0 if grid.whole else _workspace_bytes(num_ranges, rows, tokens * grid.head_blocks)
    num_partials, (size, size_v) = 2 * num_ranges * rows, shape.head_sizes
    by_address = packed or tile.converts
    dense = None if tile.swaps else (key.stride(1) == size) * key.stride(0)
    strides = key.stride()[:2] if by_address else (dense, None)
    assert is_quantized or not isinstance(params.k_scale, Tensor)
    return HopperDecode(
        limits=call.limits,
        index=query.get_device(),
        packed=False,
        is_quantized=is_quantized,
        key_address=(KEY_CACHE,) if by_address or not tile.swaps else (None,),
        takes_scores=False,
        counts=None if tile.swaps else in_kernel,
        last_strides=(*strides, grid.token_blocks),
        views=_views(call),
        scale=params.scale if is_quantized else params.scale * float(params.k_scale),
        score_sizes=(),
        numbers=(
            *(float(params.logits_soft_cap), unbounded(left), unbounded(right)),
            *(unbounded(params.attention_chunk_size), call.num_reqs, call.num_tokens),
            *(key.shape[0], rows, *query.stride()[:2], *out.stride()[:2]),
            *(call.lse_stride, call.table_stride),
        ),
        combine_tail=(call.num_reqs, rows, *out.stride()[:2], call.lse_stride, blocks, tokens),
        lse_offset=num_partials * size_v,
        header_offset=num_partials * (size_v + 1),
        workspace_bytes=workspace,
        attend=_attend_launch(call, grid, tile, in_kernel),
        combine=combine,
    )


def _views(call: AttentionCall) -> tuple[CacheView, CacheView]:
    """The cache as TMA reads it: the elements after those of the values, and the values."""
    size, size_v = call.shape.head_sizes
    box = min(call.shape.block_size, _TILE)
    return CacheView.of(call.key, box, size - size_v), CacheView.of(call.value, box, size_v // 4)


def _attend_launch(
    call: AttentionCall, grid: LatentGrid, tile: LatentTile, in_kernel: bool
) -> BoundLaunch:
    """The attention kernel."""
    shape, params, (left, right) = call.shape, call.params, call.params.window
    stored, groups = kv_kind(call.value.dtype, has_fp8=False), call.value.dtype != call.key.dtype
    config = LatentConfig(
        HEAD_BLOCKS=grid.head_blocks,
        MANY_TOKENS=grid.whole or grid.blocks > grid.head_blocks,
        GROUP=grid.group,
        DV=shape.head_size_v,
        ROTARY=shape.head_size - shape.head_size_v,
        TILE_TOKENS=tile.rows * (tile.workers if tile.shares else 1) // grid.group,
        BLOCK_SIZE=shape.block_size,
        ROWS=tile.rows,
        CAUSAL=bool(params.causal),
        HAS_LEFT=left >= 0,
        HAS_RIGHT=right >= 0,
        HAS_CHUNK=params.attention_chunk_size > 0,
        HAS_CAP=params.logits_soft_cap > 0,
        HAS_SINK=params.sinks is not None,
        HAS_LSE=call.lse is not None,
        LEAST=_LEAST_TILES,
        CONSUMER_REGISTERS=tile.consumer_registers,
        LOADER_REGISTERS=tile.loader_registers,
        KV_KIND=KV_PLAIN.value if tile.converts else stored,
        GROUP_SCALES=groups and not tile.converts,
        K_SCALE_KIND=scale_kind("k_scale", params.k_scale),
        V_SCALE_KIND=scale_kind("v_scale", params.v_scale),
        WORKERS=tile.workers,
        SHARES=tile.shares,
        STAGES=tile.stages,
        ROTARY_STAGES=tile.rotary_stages,
        IN_FLIGHT=tile.in_flight,
        CONVERTS=tile.converts,
        STORED_KIND=stored if tile.converts else KV_PLAIN.value,
        STORED_GROUPS=groups and tile.converts,
        HALVED=tile.halved and not groups and call.query.dtype == torch.bfloat16,
        WHOLE=grid.whole,
        COMBINE=in_kernel,
    )
    options = {"num_warps": 4, "enable_fp_fusion": True, "launch_pdl": True, "CONFIG": config}
    if tile.registers is not None:
        options["maxnreg"] = tile.registers
    kernel = hopper_latent_swap_ab_kernel if tile.swaps else hopper_latent_decode_kernel
    return BoundLaunch(kernel, (grid.ctas, 1, 1), options)
