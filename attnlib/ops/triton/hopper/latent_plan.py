"""Host side of the Hopper kernel over latents, of decodes and prefills: grid and constants.

It is launched as a `decode_launches.HopperDecode`, with blocks of up to 64 query rows in the place
of KV heads: up to 64 query heads of one or more query tokens of a request.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.hopper.decode_grid import (
    MOST_TOKENS,
    are_mostly_whole,
    token_parts,
    workers_per_head,
)
from attnlib.ops.triton.hopper.decode_launches import HopperDecode, unbounded
from attnlib.ops.triton.hopper.descriptors import CacheView
from attnlib.ops.triton.hopper.kernels.combine import hopper_combine_kernel
from attnlib.ops.triton.hopper.kernels.latent_decode import hopper_latent_decode_kernel
from attnlib.ops.triton.hopper.kernels.latent_splits import LatentConfig
from attnlib.ops.triton.hopper.kernels.latent_swap_ab import hopper_latent_swap_ab_kernel
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
_FEW_RESULTS = 1024
"""Rows of the output up to which one is combined by several programs."""
_FEW_SPLITS = 10
"""Splits of a row that two rounds of loads of 8 bring. On an H200, in us, with loads of 16 and of
8: 16 requests of 8k latents, 2 tokens of 32 heads 61.4 and 58.1, 4 tokens of 16 heads 60.0 and
58.4. Loads of 64 parts by 128 elements and of 32 by 64, one request: 2 tokens of 128 heads over 2k
19.6 and 15.9, 4 tokens of 64 heads 19.4 and 15.5, 128 heads over 8k 19.8 and 18.1."""
_SOME_SPLITS = 35
"""Splits of the 4 to 8 requests whose rows small programs combine also with few heads: 4 requests
of 4k latents, 16 heads, 13.9 and 12.2, 8 of 8k 26.5 and 26.0; one of 32k 31.8 and 33.2."""


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


def _combine_tile(
    num_reqs: int, num_tokens: int, num_heads: int, head_size_v: int, num_ranges: int | None
) -> dict[str, int]:
    """Return the tile of the combine kernel: heads, elements, splits loaded together, warps.

    With few rows, up to four programs share a row. Each loads the splits that requests of equal
    lengths have together, in at most 64 registers of each thread. Requests and tokens count as
    powers of 2, and `num_ranges` is that of requests with one block of query tokens, so that a
    warm-up over powers of 2 compiles every variant. Without `num_ranges` there is one variant.
    """
    num_reqs, num_tokens = map(triton.next_power_of_2, (num_reqs, num_tokens))
    num_rows, group = num_tokens * num_heads, num_heads // latent_head_blocks(num_heads)
    blocks = triton.cdiv(max(1, num_tokens // num_reqs), LATENT_ROWS // group)
    if num_ranges is None or num_rows > _FEW_RESULTS:
        heads = min(4, triton.next_power_of_2(group))
        tile = {"HEADS": heads, "PARTS": 1, "DV_PAD": head_size_v, "STEP": 4, "num_warps": 4}
        # Most programs of many requests would only see that there is one split.
        are_whole = num_ranges is not None and are_mostly_whole(num_reqs, num_ranges // blocks)
        return {**tile, "TOKENS": MOST_TOKENS} if are_whole else tile
    splits = num_ranges // (num_reqs * blocks) + 2
    if num_rows > _FEW_RESULTS // 4 and splits <= _FEW_SPLITS:
        return {"HEADS": 1, "PARTS": 1, "DV_PAD": head_size_v, "STEP": 8, "num_warps": 2}
    if group > 32 or _FEW_SPLITS < splits <= _SOME_SPLITS:
        size = head_size_v // 8
        return {"HEADS": 1, "PARTS": 8, "DV_PAD": size, "STEP": 32, "num_warps": 1}
    # Measured with two ranges for each SM: 32 requests of 16 heads take 50.3 us with one program
    # for each row, and 51.0 with four; 16 requests 33.3 and 32.5 us. 64 requests of 16k latents
    # take 292.7 us with a step of 8 and two warps, and 294.5 with 16 and four.
    step = min(64, max(16, triton.next_power_of_2(splits)))
    return {
        "HEADS": 1,
        "PARTS": 4,
        "DV_PAD": head_size_v // 4,
        "STEP": step,
        "num_warps": step // 16,
    }


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
    num_ranges, combine, workspace = grid.ctas * tile.ranges, None, 0
    if not grid.whole:
        ranges = None if is_prefill else grid.ranges * tile.ranges
        combine = _combine_launch(call, grid.group, ranges)
        workspace = _workspace_bytes(num_ranges, rows, tokens * grid.head_blocks)
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
        attend=_attend_launch(call, grid, tile),
        combine=combine,
    )


def _views(call: AttentionCall) -> tuple[CacheView, CacheView]:
    """The cache as TMA reads it: the elements after those of the values, and the values."""
    size, size_v = call.shape.head_sizes
    box = min(call.shape.block_size, _TILE)
    return CacheView.of(call.key, box, size - size_v), CacheView.of(call.value, box, size_v // 4)


def _attend_launch(call: AttentionCall, grid: LatentGrid, tile: LatentTile) -> BoundLaunch:
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
    )
    options = {"num_warps": 4, "enable_fp_fusion": True, "launch_pdl": True, "CONFIG": config}
    if tile.registers is not None:
        options["maxnreg"] = tile.registers
    kernel = hopper_latent_swap_ab_kernel if tile.swaps else hopper_latent_decode_kernel
    return BoundLaunch(kernel, (grid.ctas, 1, 1), options)


def _combine_launch(call: AttentionCall, group: int, num_ranges: int | None) -> BoundLaunch:
    """The kernel that combines splits.

    Args:
        group: query heads of a CTA.
        num_ranges: ranges of the line of all tiles, if requests have one block of query tokens;
            None for a tile that serves any batch.
    """
    num_heads, size_v = call.shape.num_heads, call.shape.head_size_v
    tile = _combine_tile(call.num_reqs, call.num_tokens, num_heads, size_v, num_ranges)
    options = {
        "NUM_KV_HEADS": num_heads // group,
        "GROUP": group,
        "DV": size_v,
        "HAS_SINK": call.params.sinks is not None,
        "HAS_LSE": call.lse is not None,
        "enable_fp_fusion": True,
        "launch_pdl": True,
        **tile,
    }
    head_blocks, programs = num_heads // group, triton.cdiv(group, tile["HEADS"]) * tile["PARTS"]
    parts = token_parts(call.num_tokens, tile, head_blocks * programs, call.limits.num_sms)
    return BoundLaunch(hopper_combine_kernel, (parts, head_blocks, programs), options)
