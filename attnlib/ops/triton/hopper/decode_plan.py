"""Host side of the Hopper decode: configuration, registers and launches of a call.

`support.decode_unsupported_reasons` lists what the kernel does not implement.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.heuristics.hopper_decode_tiles import DecodeTile
from attnlib.ops.triton.heuristics.hopper_tiles import padded_width
from attnlib.ops.triton.heuristics.splits import splits_per_load
from attnlib.ops.triton.hopper.decode_grid import (
    DecodeGrid,
    DecodeSizes,
    combine_tile,
    decode_columns,
    hopper_decode_workspace_bytes,
    token_parts,
)
from attnlib.ops.triton.hopper.decode_launches import PDL_OPTIONS, HopperDecode, call_numbers
from attnlib.ops.triton.hopper.descriptors import (
    CacheView,
    gathered_strides,
)
from attnlib.ops.triton.hopper.kernels.cache_tiles import box_keys
from attnlib.ops.triton.hopper.kernels.combine import hopper_combine_kernel
from attnlib.ops.triton.hopper.kernels.decode import hopper_decode_kernel
from attnlib.ops.triton.hopper.kernels.decode_call import DecodeConfig
from attnlib.ops.triton.hopper.packed_views import PackedKeyView, PackedValueView
from attnlib.ops.triton.hopper.sizes import gathers
from attnlib.ops.triton.kernels.quant import KV_PLAIN
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.scales import scale_kind, stored_kind
from attnlib.ops.triton.launch.score import score_constants, tensor_sizes

__all__ = ["decode_config", "prepare_hopper_decode"]

_FEW_REGISTERS, _MANY_REGISTERS = 168, 240
"""Registers per thread. A CTA has 256 threads (two warps idle), so either value takes more than
half of an SM's 65536 registers and an SM holds one CTA at a time, however small the tile. In an
experiment, a CTA that waited for its predecessor grid beside a CTA of that grid ended in illegal
addresses."""

_FEW_ELEMENTS = 128 * 32
"""Elements of the output tile of a CTA up to which a thread has the smaller number of registers;
half as many with converted float8 tiles in registers."""


def prepare_hopper_decode(
    call: AttentionCall,
    tile: DecodeTile,
    max_query_len: int,
    max_ctas: int | None = None,
    num_counters: int = 0,
) -> HopperDecode:
    """Prepare the launches of calls like this one with a given tile; at least one query and block.

    Args:
        call: over pages `[B, N, Hkv, D]` and `[B, N, Hkv, Dv]`, or over a packed cache
            `[B, Hkv, D / 8, N, 8]` and `[B, Hkv, D, N]`.
        max_query_len: upper bound of the query lengths.
        max_ctas: CTAs that may run at a time; None means one per SM.
        num_counters: counters that calls pass.
    """
    params = call.params
    sizes = DecodeSizes.of(call, max_query_len)
    grid = DecodeGrid.of(call, sizes, tile, max_query_len, max_ctas, num_counters)
    gathered = gathers(sizes.block_size) and not sizes.packed
    config = _config(call, sizes, tile, grid.in_kernel, gathered)
    is_quantized = call.key.dtype.itemsize == 1
    # Dispatch leaves scales of 16-bit caches in tensors to the plain kernel.
    assert is_quantized or not isinstance(params.k_scale, Tensor)
    num_partials = 2 * grid.workers * sizes.rows
    strides = (*call.out.stride()[:2], call.lse_stride)
    turned = config.V_SIGNS
    if not (grid.in_kernel or tile.warps):
        config = config._replace(V_SIGNS=0)  # the combine kernel rotates all outputs back
    combined = (call, sizes, grid.workers, turned, turned != config.V_SIGNS)
    leaves = call.batch.uncombined and not (grid.in_kernel or turned or config.HAS_SINK)
    return HopperDecode(
        limits=call.limits,
        index=call.query.get_device(),
        rotated=params.rotation if config.K_SIGNS or turned else None,
        views=_views(call, sizes, tile),
        packed=sizes.packed,
        scale=params.scale if is_quantized else params.scale * float(params.k_scale),
        is_quantized=is_quantized,
        score_sizes=tensor_sizes(params.layer_score_tensors()),
        num_batch_tensors=len(call.batch.score_tensors),
        last_strides=gathered_strides(call.key, call.value) if gathered else _scale_strides(params),
        gathers=gathered,
        numbers=(*call_numbers(call, sizes.num_blocks, sizes.rows), int(call.batch.early)),
        combine_tail=(call.batch.num_decodes, sizes.rows, *strides, None, call.num_tokens),
        lse_offset=num_partials * sizes.head_size_v,
        header_offset=num_partials * (sizes.head_size_v + 1),
        workspace_bytes=hopper_decode_workspace_bytes(
            *(call.num_tokens, sizes.num_kv_heads, sizes.group, max_query_len),
            *(sizes.head_size_v, grid.resident, tile.consumers),
        ),
        attend=_attend(call, config, tile, grid),
        combine=None if grid.in_kernel or leaves else _combine(*combined),
        split_rows=sizes.rows if leaves else 0,
    )


def decode_config(params: AttentionParams, has_lse: bool, **sizes: Any) -> DecodeConfig:
    """A `DecodeConfig` of a call's mask, soft cap, sinks and LSE, and of `sizes`, its other
    fields."""
    left, right = params.window
    return DecodeConfig(
        CAUSAL=bool(params.causal),
        HAS_LEFT=left >= 0,
        HAS_RIGHT=right >= 0,
        HAS_CHUNK=params.attention_chunk_size > 0,
        HAS_CAP=params.logits_soft_cap > 0,
        HAS_SINK=params.sinks is not None,
        HAS_LSE=has_lse,
        **sizes,
    )


def _config(
    call: AttentionCall, sizes: DecodeSizes, tile: DecodeTile, in_kernel: bool, gathered: bool
) -> DecodeConfig:
    """The constants of both kernels."""
    params, columns, group = call.params, decode_columns(sizes.rows), sizes.group
    (kind, value_kind), width_v = _kinds(call), padded_width(sizes.head_size_v)
    # For several query tokens: 24 requests of 8 over 2k keys take 56.4 instead of 60.0 us in even
    # ranges (H200). 48 requests of one over 5k keys and 28/4 heads take 122.3 instead of 120.4 us
    # on an H200, and 174.2 instead of 177.1 on an H100. Not measured over quantized caches.
    even = in_kernel and kind == KV_PLAIN.value and columns >= max(16, 2 * group)
    # One loader warp instead of two takes 0.983 of the time of 128 x 2k and 256 x 1k (e4m3, H200).
    # Tiles of 128 keys of 64 elements have twice as many boxes for the same bytes: one warp that
    # loads keys and values costs 6% there.
    # Two accumulators of 4-bit values need the registers that a warp for queries would take.
    in_4_bits = call.value.dtype == torch.uint8
    query_warp = tile.consumers > 1 and tile.block_n <= 64 and not in_4_bits
    rotation = None if kind == KV_PLAIN.value else params.rotation
    signs = rotation.sign_bits(*call.shape.head_sizes) if rotation else (0, 0)
    return decode_config(
        params,
        call.lse is not None,
        NUM_KV_HEADS=sizes.num_kv_heads,
        GROUP=group,
        D=sizes.head_size,
        DV=sizes.head_size_v,
        WIDTH=padded_width(sizes.head_size),
        WIDTH_V=width_v,
        TILE_TOKENS=columns // group,
        BLOCK_N=tile.block_n,
        BLOCK_SIZE=sizes.block_size,
        ROWS=columns,
        STAGES=tile.stages,
        K_KIND=kind,
        V_KIND=value_kind,
        K_SCALE_KIND=scale_kind("k_scale", params.k_scale),
        V_SCALE_KIND=scale_kind("v_scale", params.v_scale),
        PACKED=sizes.packed,
        COMBINE_IN_KERNEL=in_kernel,
        SPLITS_PER_LOAD=splits_per_load(columns, width_v),
        WORKERS=tile.consumers,
        EVEN_RANGES=even,
        QUERY_WARP=query_warp,
        GATHERS=gathered,
        K_SIGNS=signs[0],
        V_SIGNS=signs[1],
        SPARE_STAGES=tile.spare,
        HALF_ROWS=any(signs) and 2 * sizes.rows <= columns,
    )


def _kinds(call: AttentionCall) -> tuple[int, int]:
    """The elements of the keys and of the values, of `KV_*`."""
    keys = None if call.key.dim() == 5 else call.shape.page_format
    values = None if keys is None else call.shape.value_format or keys
    return stored_kind(call.key.dtype, keys), stored_kind(call.value.dtype, values)


def _views(
    call: AttentionCall, sizes: DecodeSizes, tile: DecodeTile
) -> tuple[CacheView, CacheView] | tuple[PackedKeyView, PackedValueView]:
    """The caches as TMA reads them."""
    width, width_v = padded_width(sizes.head_size), padded_width(sizes.head_size_v)
    box = box_keys(sizes.block_size, tile.block_n, "packed_keys" if sizes.packed else "nhd")
    if sizes.packed:
        return PackedKeyView.of(call.key, box, width), PackedValueView.of(call.value, box, width_v)
    return CacheView.of(call.key, box, width), CacheView.of(call.value, box, width_v)


def _attend(
    call: AttentionCall, config: DecodeConfig, tile: DecodeTile, grid: DecodeGrid
) -> BoundLaunch:
    """The launch of the attention kernel."""
    ctas = (grid.workers // max(1, tile.consumers), 1, 1)
    if tile.warps:
        # Layers over 16-bit caches do not import this kernel.
        from attnlib.ops.triton.hopper.kernels.warp_decode import hopper_warp_decode_kernel

        registers = min(255, 65536 // (32 * tile.warps) // 8 * 8)
        options = {"CONFIG": config, "num_warps": 1, "maxnreg": registers, **PDL_OPTIONS}
        return BoundLaunch(hopper_warp_decode_kernel, ctas, options)
    is_quantized = call.key.dtype.itemsize == 1
    most = _FEW_ELEMENTS // 2 if is_quantized else _FEW_ELEMENTS
    few = config.WIDTH_V * config.ROWS <= most
    few = few and call.value.dtype != torch.uint8  # two accumulators, and four products of keys
    # With 384 threads, `setmaxnreg` gives the consumers more.
    few = few or tile.consumers == 2 or config.GATHERS
    registers = _FEW_REGISTERS if few else _MANY_REGISTERS
    options = {"CONFIG": config, "num_warps": 4, "maxnreg": registers, **PDL_OPTIONS}
    return BoundLaunch(hopper_decode_kernel, ctas, options | score_constants(call.params, "gluon"))


def _combine(
    call: AttentionCall, sizes: DecodeSizes, workers: int, signs: int, turns_all: bool
) -> BoundLaunch:
    """The launch of the combine kernel after `workers`."""
    options: dict[str, Any] = {
        "NUM_KV_HEADS": sizes.num_kv_heads,
        "GROUP": sizes.group,
        "DV": sizes.head_size_v,
        "DV_PAD": triton.next_power_of_2(sizes.head_size_v),
        "HAS_SINK": call.params.sinks is not None,
        "HAS_LSE": call.lse is not None,
        **{"V_SIGNS": signs, "TURNS_ALL": turns_all},
        **combine_tile(call, sizes, workers // sizes.num_kv_heads),
        **PDL_OPTIONS,
        # The sum of two products has two fused forms, of which LLVM chose one for the kernel that
        # rotates and the other one for the kernel that does not.
        "enable_fp_fusion": False,
    }
    blocks = (sizes.num_kv_heads, triton.cdiv(sizes.group, options["HEADS"]))
    parts = token_parts(call.num_tokens, options, blocks[0] * blocks[1], call.limits.num_sms)
    return BoundLaunch(hopper_combine_kernel, (parts, *blocks), options)


def _scale_strides(params: AttentionParams) -> tuple[int | None, ...]:
    """Strides of the scales of a page; see `HopperDecode.last_strides`."""
    if not params.scales_in_page:
        return (None,) * 6
    assert isinstance(params.k_scale, Tensor) and isinstance(params.v_scale, Tensor)
    # The scales of a head are loaded at once.
    sides = (params.k_scale, params.v_scale)
    return tuple(stride // side.shape[3] for side in sides for stride in side.stride()[:3])
