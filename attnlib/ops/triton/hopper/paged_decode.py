"""Launch of the Hopper decode. `limits.decode_gaps` says what it does not do, and `choice` asks."""

from __future__ import annotations

from collections.abc import Hashable

import torch
import triton
from torch import Tensor

from attnlib.ops.triton.device import device_guard, limits_of
from attnlib.ops.triton.hopper.decode import hopper_decode_kernel, join_pieces
from attnlib.ops.triton.hopper.descriptors import cache_descriptor
from attnlib.ops.triton.hopper.limits import DECODE_ROWS
from attnlib.ops.triton.hopper.tiles import DecodeTile, padded_width
from attnlib.ops.triton.launch import BoundLaunch, Remembered

__all__ = ["hopper_decode_workspace_bytes", "launch_hopper_decode"]

_MOST_PARTS = 255
_UNBOUNDED = 1 << 30


_FEW_ROWS = 1024
"""Rows (tokens times query heads) up to which each has a program of its own in the join: quickest for a few, while of
many most have nothing to merge and cost a program each."""


def _join_tile(num_rows: int, group: int, head_size_v: int) -> dict[str, int]:
    """How the join works: heads of a program, pieces that it loads together, and its warps."""
    if num_rows <= _FEW_ROWS:
        return {"HEADS": 1, "STEP": 32 if head_size_v <= 128 else 16, "num_warps": 1}
    return {"HEADS": min(4, triton.next_power_of_2(group)), "STEP": 8, "num_warps": 4}


def _parts(slots: int, num_kv_heads: int) -> int:
    """Parts of one CTA for each KV head: as many as the chip holds at a time."""
    return min(max(1, slots // num_kv_heads), _MOST_PARTS)


def hopper_decode_workspace_bytes(num_tokens: int, num_kv_heads: int, group: int, max_query_len: int, head_size_v: int, slots: int) -> int:
    """Bytes beside the output: two float32 pieces with their LSEs for each CTA, and a note for each token and KV head."""
    rows = group * max_query_len
    return 4 * (2 * _parts(slots, num_kv_heads) * num_kv_heads * rows * (head_size_v + 1) + num_tokens * num_kv_heads)


def launch_hopper_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    tile: DecodeTile,
    *,
    max_query_len: int,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    attention_chunk_size: int,
    logits_soft_cap: float,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    workspace: Tensor,
    same: Hashable | None = None,
) -> None:
    """Run the kernel with a given tile; arguments as in `paged_decode`, `workspace` contiguous float32.

    With `same`, the call's `launch_key`, launches are bound.
    """
    num_tokens, num_heads, head_size = query.shape
    num_blocks, block_size, num_kv_heads, _ = key_cache.shape
    head_size_v = value_cache.shape[3]
    if num_tokens == 0 or num_heads == 0:
        return
    width, width_v = padded_width(head_size), padded_width(head_size_v)
    group = num_heads // num_kv_heads
    rows = group * max_query_len
    programs = _parts(limits_of(query).num_sms * tile.resident, num_kv_heads) * num_kv_heads
    places = 2 * programs * rows
    partials, partial_lses = workspace, workspace[places * head_size_v :]
    pieces = workspace[places * (head_size_v + 1) :].view(torch.int32)
    num_reqs = query_start_loc.shape[0] - 1
    box = min(block_size, tile.block_n)
    left, right = window
    join_tile = _join_tile(num_tokens * num_heads, group, head_size_v)
    stride_lt = 0 if lse is None else lse.stride(0)
    attend = (
        cache_descriptor(key_cache, box, width), cache_descriptor(value_cache, box, width_v), query, out, lse, sinks,
        query_start_loc, seq_lens, block_table, partials, partial_lses, pieces, scale, logits_soft_cap,
        min(left, _UNBOUNDED), min(right, _UNBOUNDED), min(attention_chunk_size, _UNBOUNDED), num_reqs, num_blocks,
        rows, query.stride(0), query.stride(1), out.stride(0), out.stride(1), stride_lt, block_table.stride(0),
    )  # fmt: skip
    join = (partials, partial_lses, pieces, query_start_loc, sinks, out, lse, num_reqs, rows, out.stride(0), out.stride(1), stride_lt)
    known = (same, tile, max_query_len, programs)
    launches = None if same is None else _launches.get(known)
    if launches is None:
        launches = (
            BoundLaunch(hopper_decode_kernel, (programs, 1, 1), dict(
                NUM_KV_HEADS=num_kv_heads, GROUP=group, D=head_size, DV=head_size_v, WIDTH=width, WIDTH_V=width_v,
                TILE_TOKENS=DECODE_ROWS // group, BLOCK_N=tile.block_n, BLOCK_SIZE=block_size, STAGES=tile.stages,
                CAUSAL=causal, HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0, HAS_CHUNK=attention_chunk_size > 0,
                HAS_CAP=logits_soft_cap > 0, HAS_SINK=sinks is not None, HAS_LSE=lse is not None, num_warps=4,
                enable_fp_fusion=True, launch_pdl=True, maxnreg=128 if width_v <= 128 else 168,
            )),
            BoundLaunch(join_pieces, (num_tokens, num_kv_heads, triton.cdiv(group, join_tile["HEADS"])), dict(
                NUM_KV_HEADS=num_kv_heads, GROUP=group, DV=head_size_v,
                DV_PAD=triton.next_power_of_2(head_size_v), HAS_SINK=sinks is not None,
                HAS_LSE=lse is not None, enable_fp_fusion=True, launch_pdl=True, **join_tile,
            )),
        )  # fmt: skip
        if same is not None:
            _launches.keep(known, launches)
    index, written = query.get_device(), out.data_ptr() | partials.data_ptr()
    with device_guard(query):
        launches[0](attend, written | query.data_ptr(), index)
        launches[1](join, written, index)


_launches: Remembered[tuple[BoundLaunch, BoundLaunch]] = Remembered()
