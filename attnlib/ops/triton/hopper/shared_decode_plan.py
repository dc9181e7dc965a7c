"""Host side of the Hopper decode of requests that share prefixes: tile, grid, workspace, arguments.

`support.shared_decode_unsupported_reasons` lists what the kernel does not implement.
"""

from __future__ import annotations

import triton
from torch import Tensor

from attnlib.ops.triton.heuristics.hopper_decode_tiles import DecodeTile
from attnlib.ops.triton.heuristics.hopper_tiles import padded_width
from attnlib.ops.triton.hopper.descriptors import CacheView
from attnlib.ops.triton.hopper.kernels.cache_tiles import box_keys
from attnlib.ops.triton.hopper.kernels.merge_rows import hopper_merge_rows_kernel
from attnlib.ops.triton.hopper.kernels.shared_decode import (
    SharedDecodeConfig,
    hopper_shared_decode_kernel,
)
from attnlib.ops.triton.hopper.shared_decode_launches import HopperSharedDecode, SharedDecodeCall
from attnlib.ops.triton.launch.bound import BoundLaunch

__all__ = [
    "prepare_shared_decode",
    "shared_decode_ranges",
    "shared_decode_tile",
]

_REGISTERS = 168
"""Registers per thread of 384 threads; `setmaxnreg` gives the consumers more. An SM holds one CTA,
which the schedule relies on."""

_FEW_ROWS = 1024
"""Rows (tokens times query heads) up to which a CTA of the merge has 8 warps instead of 4, one for
each row, and reads 16 partial results of a row at a time instead of 8."""


def shared_decode_tile(head_size: int, head_size_v: int) -> DecodeTile:
    """Keys per step and depth of the rings, for head sizes of `support`.

    With heads of 128, three stages of 64 keys were faster than four on an H200, and those than two
    of 128 keys (docs/kernel-notes.md); smaller heads were not compared.
    """
    if max(padded_width(head_size), padded_width(head_size_v)) <= 64:
        return DecodeTile(128, 4, 2)
    return DecodeTile(64, 3, 2)


def shared_decode_ranges(num_kv_heads: int, num_sms: int) -> int:
    """Ranges of tiles: one CTA for each range and KV head is resident."""
    return max(1, num_sms // num_kv_heads)


def prepare_shared_decode(
    call: SharedDecodeCall, tile: DecodeTile, num_ranges: int
) -> HopperSharedDecode:
    """Prepare the launches of calls like this one."""
    query, key, value, table, out, lse, params, limits = call
    num_tokens, num_heads, head_size = query.shape
    num_blocks, block_size, num_kv_heads, head_size_v = value.shape
    width, width_v = padded_width(head_size), padded_width(head_size_v)
    box, cap = box_keys(block_size, tile.block_n, "nhd"), params.logits_soft_cap
    assert not isinstance(params.k_scale, Tensor)  # the cache is not quantized
    config = SharedDecodeConfig(
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        D=head_size,
        DV=head_size_v,
        WIDTH=width,
        WIDTH_V=width_v,
        BLOCK_N=tile.block_n,
        BLOCK_SIZE=block_size,
        STAGES=tile.stages,
        HAS_CAP=cap > 0,
    )
    attend = {
        "CONFIG": config,
        "num_warps": 4,
        "maxnreg": _REGISTERS,
        "enable_fp_fusion": True,
        "launch_pdl": True,
    }
    few = num_tokens * num_heads <= _FEW_ROWS
    warps, step = (8, 16) if few else (4, 8)
    width_merged = max(16, triton.next_power_of_2(head_size_v))
    rows = warps * (32 // min(32, width_merged // 4))
    merge = {
        "NUM_HEADS": num_heads,
        "HEADS": warps,
        "DV": head_size_v,
        "DV_PAD": width_merged,
        "STEP": step,
        "HAS_SINK": params.sinks is not None,
        "HAS_LSE": lse is not None,
        "num_warps": warps,
        "enable_fp_fusion": True,
        "launch_pdl": True,
    }
    grid = (num_tokens, -(-num_heads // rows), 1)
    return HopperSharedDecode(
        limits=limits,
        index=query.get_device(),
        views=(CacheView.of(key, box, width), CacheView.of(value, box, width_v)),
        scale=params.scale * float(params.k_scale),
        soft_cap=float(cap),
        numbers=(num_blocks, num_tokens, query.stride(0), query.stride(1), table.stride(0)),
        merge_strides=(out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0)),
        num_heads=num_heads,
        head_size_v=head_size_v,
        attend=BoundLaunch(hopper_shared_decode_kernel, (num_ranges * num_kv_heads, 1, 1), attend),
        merge=BoundLaunch(hopper_merge_rows_kernel, grid, merge),
    )
