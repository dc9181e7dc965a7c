"""Launch of the Hopper prefill. `limits.prefill_gaps` says what it does not do, and `choice` asks."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.triton.device import device_guard, limits_of
from attnlib.ops.triton.hopper.descriptors import cache_descriptor, query_descriptor
from attnlib.ops.triton.hopper.limits import ROWS
from attnlib.ops.triton.hopper.prefill import hopper_prefill_kernel
from attnlib.ops.triton.hopper.tiles import HopperTile, choose_section, padded_width

__all__ = ["launch_hopper_prefill"]

_UNBOUNDED = 1 << 30


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
    counters: Tensor | None = None,
) -> None:
    """Run the kernel with a given tile; arguments as in `ops.triton.paged_prefill`.

    `counters` are two int32 zeros on the device, by which persistent programs share the work and which the kernel leaves
    as it found them; made when None and needed.
    """
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
    halves = (64 // group, group) if group <= 64 else (1, 64)
    load_query = tile_tokens * group == ROWS
    if tile.persistent and counters is None:
        counters = torch.zeros(2, dtype=torch.int32, device=query.device)
    with device_guard(query):
        hopper_prefill_kernel[(programs,)](
            cache_descriptor(key_cache, box, width), cache_descriptor(value_cache, box, width_v),
            query_descriptor(query, *halves, width) if load_query else None, query, out, lse, sinks, query_start_loc,
            seq_lens, block_table, counters, scale, logits_soft_cap, min(left, _UNBOUNDED), min(right, _UNBOUNDED),
            min(attention_chunk_size, _UNBOUNDED), num_reqs, num_tokens, num_tiles, section, num_blocks, query.stride(0),
            query.stride(1), out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0), block_table.stride(0),
            NUM_KV_HEADS=num_kv_heads, GROUP=group, D=head_size, DV=head_size_v, WIDTH=width, WIDTH_V=width_v,
            TILE_TOKENS=tile_tokens, BLOCK_N=tile.block_n, BLOCK_SIZE=block_size, STAGES=tile.stages,
            Q_STAGES=tile.q_stages, LOAD_QUERY=load_query, PERSISTENT=tile.persistent, TURNS=tile.turns,
            STAGED_STORE=tile.staged_store and width == width_v, CONSUMER_REGISTERS=tile.consumer_registers,
            PRODUCER_REGISTERS=tile.producer_registers, PDL=True, CAUSAL=causal, HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0,
            HAS_CHUNK=attention_chunk_size > 0, HAS_CAP=logits_soft_cap > 0, HAS_SINK=sinks is not None,
            HAS_LSE=lse is not None, num_warps=4, enable_fp_fusion=True, launch_pdl=True,
        )  # fmt: skip
