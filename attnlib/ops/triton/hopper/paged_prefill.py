"""Prefill over the paged cache on Hopper: same operation and arguments as `ops.triton.paged_prefill`.

`hopper_prefill_gaps` says what this kernel does not do; whoever calls it asks first and takes the plain kernel
otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.triton.device import DeviceLimits, device_guard, limits_of
from attnlib.ops.triton.hopper.descriptors import cache_descriptor
from attnlib.ops.triton.hopper.prefill import hopper_prefill_kernel
from attnlib.ops.triton.hopper.tiles import ROWS, HopperTile, choose_hopper_tile, choose_section, padded_width

__all__ = ["hopper_prefill_gaps", "launch_hopper_prefill", "paged_prefill"]

_UNBOUNDED = 1 << 30
_BLOCK_SIZES = (16, 32, 64, 128, 256)


def hopper_prefill_gaps(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
    *,
    limits: DeviceLimits,
    scale: float,
    causal: bool | Tensor = True,
    alibi_slopes: Tensor | None = None,
    query_bias: Tensor | None = None,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
) -> list[str]:
    """Why the Hopper prefill cannot take these arguments; empty when it can. Reads no tensor's contents."""
    gaps = _shape_gaps(query, key_cache, value_cache, limits)
    if isinstance(causal, Tensor):
        gaps.append("causal per request: the Hopper prefill takes one flag for the batch")
    if alibi_slopes is not None:
        gaps.append("alibi_slopes: the Hopper prefill has none")
    if query_bias is not None:
        gaps.append("query_bias: the Hopper prefill has none")
    if isinstance(k_scale, Tensor) or isinstance(v_scale, Tensor) or v_scale != 1.0:
        gaps.append("k_scale or v_scale: the Hopper prefill reads a cache without scales")
    if scale <= 0:
        gaps.append(f"scale is {scale}; the Hopper prefill needs a positive one")
    for name, tensor in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache), ("out", out)):
        gaps.extend(_alignment_gaps(name, tensor))
    return gaps


def _shape_gaps(query: Tensor, key_cache: Tensor, value_cache: Tensor, limits: DeviceLimits) -> list[str]:
    gaps = []
    if limits.capability[0] != 9:
        gaps.append(f"compute capability {limits.capability[0]}.{limits.capability[1]}; the Hopper prefill needs 9.0")
    if query.dtype not in (torch.float16, torch.bfloat16):
        gaps.append(f"query has dtype {query.dtype}; the Hopper prefill takes float16 and bfloat16")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dtype != query.dtype:
            gaps.append(f"{name} has dtype {cache.dtype} and query {query.dtype}; the Hopper prefill needs them equal")
        if not 64 <= cache.shape[3] <= 256 or cache.shape[3] % 8:
            gaps.append(f"{name} has head size {cache.shape[3]}; the Hopper prefill takes multiples of 8 in [64, 256]")
    if key_cache.shape[1] not in _BLOCK_SIZES:
        gaps.append(f"block_size {key_cache.shape[1]}; the Hopper prefill takes {', '.join(map(str, _BLOCK_SIZES))}")
    if key_cache.shape[0] == 0:
        gaps.append("the cache has no block")
    group = query.shape[1] // max(1, key_cache.shape[2])
    if group > ROWS:
        gaps.append(f"{group} query heads for each KV head; the Hopper prefill packs at most {ROWS}")
    return gaps


def _alignment_gaps(name: str, tensor: Tensor) -> list[str]:
    gaps = []
    if tensor.data_ptr() % 16:
        gaps.append(f"{name} starts at an address that is no multiple of 16 bytes")
    for dim, (size, stride) in enumerate(zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)):
        if size > 1 and (stride % 8 or stride <= 0):
            gaps.append(f"{name} has stride {stride} in dimension {dim}; the Hopper prefill needs a multiple of 8")
    if tensor.stride(-1) != 1:
        gaps.append(f"{name} has last stride {tensor.stride(-1)}; the Hopper prefill needs 1")
    return gaps


def launch_hopper_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    tile: HopperTile,
    *,
    max_seq_len: int,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    attention_chunk_size: int,
    logits_soft_cap: float,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Run the kernel with a given tile; arguments as in `paged_prefill`."""
    num_tokens, num_heads, head_size = query.shape
    num_blocks, block_size, num_kv_heads, _ = key_cache.shape
    head_size_v = value_cache.shape[3]
    if num_tokens == 0 or num_heads == 0:
        return
    width, width_v = padded_width(head_size), padded_width(head_size_v)
    group = num_heads // num_kv_heads
    tile_tokens = ROWS // group
    num_reqs = query_start_loc.shape[0] - 1
    num_tiles = num_tokens // tile_tokens + num_reqs + 1
    items = num_tiles * num_kv_heads
    programs = min(items, limits_of(query).num_sms) if tile.persistent else items
    box = min(block_size, tile.block_n)
    section = choose_section(num_kv_heads, max_seq_len, width + width_v) if tile.sections else num_kv_heads
    left, right = window
    with device_guard(query):
        hopper_prefill_kernel[(programs,)](
            cache_descriptor(key_cache, box, width), cache_descriptor(value_cache, box, width_v), query, out, lse,
            sinks, query_start_loc, seq_lens, block_table, scale, logits_soft_cap, min(left, _UNBOUNDED),
            min(right, _UNBOUNDED), min(attention_chunk_size, _UNBOUNDED), num_reqs, num_tokens, num_tiles, section, num_blocks,
            query.stride(0), query.stride(1), out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0),
            block_table.stride(0), NUM_KV_HEADS=num_kv_heads, GROUP=group, D=head_size, DV=head_size_v, WIDTH=width,
            WIDTH_V=width_v, TILE_TOKENS=tile_tokens, BLOCK_N=tile.block_n, BLOCK_SIZE=block_size, STAGES=tile.stages,
            TURNS=tile.turns, STAGED_STORE=tile.staged_store and width == width_v,
            CONSUMER_REGISTERS=tile.consumer_registers, PRODUCER_REGISTERS=tile.producer_registers, CAUSAL=causal,
            HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0, HAS_CHUNK=attention_chunk_size > 0, HAS_CAP=logits_soft_cap > 0,
            HAS_SINK=sinks is not None, HAS_LSE=lse is not None, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    causal: bool | Tensor = True,
    window: tuple[int, int] = (-1, -1),
    attention_chunk_size: int = 0,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_bias: Tensor | None = None,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """Attention of ragged query spans over the paged cache; arguments and meaning as in `ops.triton.paged_prefill`.

    The caller has asked `hopper_prefill_gaps`; arguments that it names are not checked again here.

    Raises:
        UnsupportedConfigError: head sizes for which no tile fits the chip.
    """
    group = query.shape[1] // max(1, key_cache.shape[2])
    tile = choose_hopper_tile(
        query.shape[2], value_cache.shape[3], rows=_row_class(group * max_query_len), block_size=key_cache.shape[1],
        tuned=limits_of(query).tuned,
    )  # fmt: skip
    launch_hopper_prefill(
        query, key_cache, value_cache, block_table, query_start_loc, seq_lens, tile, max_seq_len=max_seq_len,
        scale=scale * float(k_scale), causal=bool(causal),
        window=window, attention_chunk_size=attention_chunk_size, logits_soft_cap=logits_soft_cap, sinks=sinks,
        out=out, lse=lse,
    )  # fmt: skip


def _row_class(rows: int) -> int:
    """Row counts among which tiles do not differ, as one number, so that lengths do not fill the chooser's cache."""
    return min(1 << 20, 1 << max(0, rows - 1).bit_length())
