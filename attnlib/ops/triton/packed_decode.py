"""Decode over the packed cache of vLLM's PagedAttention: kernel, tile and splits of a call.

On Hopper, the Gluon decode kernel of the P-rules' layout also reads packed caches
(`hopper.kernels.cache_tiles`). The portable kernel (`kernels.packed`) serves everything else.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.block_sparse import BlockSparsePattern
from attnlib.ops.packed_cache import check_packed_cache
from attnlib.ops.params import AttentionParams
from attnlib.ops.signature import tensor_signature
from attnlib.ops.triton import hopper
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.device import (
    DeviceLimits,
    device_guard,
    limits_of,
    programmatic_launch,
)
from attnlib.ops.triton.heuristics.packed_tiles import packed_shared_bytes, packed_tile
from attnlib.ops.triton.heuristics.splits import (
    MAX_CTAS_PER_SM,
    MAX_SPLITS,
    MIN_TILES_PER_SPLIT,
    choose_num_splits,
    paged_decode_workspace_bytes,
)
from attnlib.ops.triton.heuristics.tile_table import relevant_work_class
from attnlib.ops.triton.heuristics.tiles import next_power_of_2
from attnlib.ops.triton.kernels.decode import combine_kernel
from attnlib.ops.triton.kernels.packed import clear_counters_kernel, packed_decode_kernel
from attnlib.ops.triton.launch.bound import ALIGNMENT, BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.config import with_config
from attnlib.ops.triton.launch.packed import (
    MAX_REQUESTS,
    joined_addresses,
    packed_constants,
    readable_caches,
    scale_arguments,
)
from attnlib.ops.triton.launch.run import PreparedAttention, run_attention
from attnlib.ops.triton.launch.scales import scale_signature

__all__ = ["cleared_counters", "packed_decode"]


def packed_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    *,
    max_seq_len: int,
    out: Tensor,
    pattern: BlockSparsePattern | None = None,
    kernels: str = "auto",
) -> None:
    """Attention of one query token per request over the packed cache.

    On Hopper, the Gluon decode kernel serves 16-bit caches with int32 block tables and lengths,
    without ALiBi slopes and pattern (`hopper.dispatch.select_packed_decode`).

    Args:
        query: `[R, Hq, D]` float16, bfloat16 or float32, last stride 1.
        key_cache: `[B, Hkv, D / x, N, x]`, N a power of two; float8 holds key / k_scale.
        value_cache: `[B, Hkv, D, N]`, likewise.
        block_table: `[R, M]` int32 or int64; entries at or past ceil(seq_len / N) are not read.
        seq_lens: `[R]` int32 or int64, keys of each request, the query's own included.
        params: scale, ALiBi slopes and KV scales; other features are not supported.
        max_seq_len: upper bound of the sequence lengths.
        out: `[R, Hq, D]`, written.
        pattern: the keys that each head sees; None for all.
        kernels: "auto" uses the Hopper decode where it supports the call, "portable" never.

    Raises:
        ContractError: shapes, strides or dtypes that the kernel cannot address.
    """
    check_packed_cache(query, key_cache, value_cache, block_table, seq_lens)
    if query.numel() == 0:
        return
    limits = limits_of(query)
    tensors = (query, key_cache, value_cache, out, block_table, seq_lens)
    if limits.capability[0] == 9 and pattern is None and kernels != "portable":
        hopper_decode = _hopper_decode(*tensors, params, limits, max_seq_len)
        if hopper_decode is not None and not joined_addresses(*tensors[:4]) & ALIGNMENT:
            batch = BatchTensors(seq_lens, seq_lens, block_table, max_query_len=1)
            if len(hopper_decode.kernels) == 1:  # it combines splits itself
                batch = batch._replace(counters=cleared_counters(query, limits))
            call = AttentionCall(*tensors[:4], None, batch, params, limits, ())
            run_attention(hopper_decode, call)
            return
    num_reqs, num_heads, head_size = query.shape
    num_kv_heads = value_cache.shape[1]
    tile = packed_tile(
        head_size, query.element_size(), key_cache.element_size(), num_heads // num_kv_heads,
        limits.shared_memory,
    )  # fmt: skip
    tile_heads = min(num_heads // num_kv_heads, tile.block_m)
    ctas = num_kv_heads * triton.cdiv(num_heads // num_kv_heads, tile_heads)
    need = packed_shared_bytes(
        replace(tile, num_stages=max(1, tile.num_stages - 1)), head_size, query.element_size(),
        key_cache.element_size(),
    )  # fmt: skip
    most = MAX_CTAS_PER_SM * max(1, 4 // tile.num_warps)
    resident = max(1, min(most, limits.shared_memory_per_sm // need)) * limits.num_sms
    num_splits = choose_num_splits(num_reqs, ctas, max_seq_len, tile.block_n, resident)
    key = (
        "packed decode", *(tensor_signature(tensor) for tensor in tensors), num_splits, pattern,
        params.alibi_slopes is None, scale_signature(params.k_scale),
        scale_signature(params.v_scale),
    )  # fmt: skip
    found: tuple[DeviceLimits, BoundLaunch, BoundLaunch | None] | None = LAUNCHES.get(key)
    if found is None or found[0] is not limits:
        if num_reqs > MAX_REQUESTS:
            raise ContractError(
                f"a decode batch of {num_reqs} requests exceeds the limit of {MAX_REQUESTS}; "
                "split it into several calls"
            )
        constants = packed_constants(query, key_cache, value_cache, out, params, limits) | {
            **programmatic_launch(limits),
            "SPLIT": num_splits > 1,
            "MIN_TILES": MIN_TILES_PER_SPLIT,
            "MAX_SPLITS": MAX_SPLITS,
            "TILE_HEADS": tile_heads,
            "TILE_TOKENS": 1,
            "HEAD_BLOCKS": ctas // num_kv_heads,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "SPARSE": pattern is not None,
            "STRIPES_PER_QUERY_HEAD": pattern is None or pattern.head_sliding_step >= 0,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }
        attend = BoundLaunch(
            packed_decode_kernel, (ctas, num_splits, num_reqs), with_config(constants)
        )
        combine = _combine_launch(query, limits) if num_splits > 1 else None
        found = LAUNCHES.keep(key, (limits, attend, combine))
    _, attend, combine = found
    space = paged_decode_workspace_bytes(num_reqs, num_heads, head_size, num_splits)
    partials = None
    if space:
        partials = torch.empty(space // 4, dtype=torch.float32, device=query.device)
    keys, values = readable_caches(key_cache, value_cache, limits)
    arguments = (
        query, keys, values, out, partials, seq_lens, block_table, params.alibi_slopes,
        *scale_arguments(params), float(params.scale), num_reqs, num_heads, *query.stride()[:2],
        *keys.stride()[:2], *values.stride()[:2], *out.stride()[:2], block_table.stride(0),
        num_splits, ctas / resident, *_pattern_numbers(pattern),
    )  # fmt: skip
    with device_guard(query):
        attend.run(
            arguments, joined_addresses(query, keys, values, out, partials), query.get_device()
        )
        if combine is not None and partials is not None:
            combine.run(
                (partials, None, out, None, num_splits, num_reqs, num_heads, *out.stride()[:2], 0),
                joined_addresses(partials, out),
                query.get_device(),
            )


def _hopper_decode(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, block_table: Tensor, seq_lens: Tensor,
    params: AttentionParams, limits: DeviceLimits, max_seq_len: int,
) -> PreparedAttention | None:  # fmt: skip
    """The Hopper decode for calls of this signature; None where the portable kernel serves them."""
    tensors = (query, key, value, out, block_table, seq_lens)
    work = relevant_work_class(
        "hopper_decode", seq_lens.shape[0], value.shape[1], max_seq_len, limits.num_sms,
        limits.tuned,
    )  # fmt: skip
    signature = (
        "packed hopper decode", *(tensor_signature(tensor) for tensor in tensors), work,
        float(params.scale), params.alibi_slopes is None, scale_signature(params.k_scale),
        scale_signature(params.v_scale),
    )  # fmt: skip
    found: tuple[DeviceLimits, PreparedAttention | None] | None = LAUNCHES.get(signature)
    if found is None or found[0] is not limits:
        prepared = None
        if (dispatch := hopper.load()) is not None:
            batch = BatchTensors(seq_lens, seq_lens, block_table, max_query_len=1)
            call = AttentionCall(query, key, value, out, None, batch, params, limits, signature)
            prepared = dispatch.select_packed_decode(call, work)
        found = LAUNCHES.keep(signature, (limits, prepared))
    return found[1]


def cleared_counters(query: Tensor, limits: DeviceLimits) -> Tensor:
    """Counters with which the Hopper decode combines splits in its own kernel.

    The interface has no buffers that outlive a call, so each call clears new ones. That is shorter
    than a kernel that combines, which has a program for every request.
    """
    number, index = hopper.load().num_counters(limits), query.get_device()
    counters = torch.empty(number, dtype=torch.int32, device=query.device)
    key = ("clear counters", number, index)
    launch: BoundLaunch | None = LAUNCHES.get(key)
    if launch is None:
        constants = {
            "SIZE": next_power_of_2(number), "num_warps": 4, **programmatic_launch(limits),
        }  # fmt: skip
        launch = LAUNCHES.keep(key, BoundLaunch(clear_counters_kernel, (1, 1, 1), constants))
    with device_guard(query):
        launch.run((counters, number), counters.data_ptr(), index)
    return counters


def _combine_launch(query: Tensor, limits: DeviceLimits) -> BoundLaunch:
    """The launch of the kernel that combines splits."""
    constants = {
        "HAS_SINK": False,
        "HAS_LSE": False,
        "DV": query.shape[2],
        "DV_PAD": next_power_of_2(query.shape[2]),
        "STEP": 16,
        "num_warps": 4,
        "enable_fp_fusion": True,
        **programmatic_launch(limits),
    }
    return BoundLaunch(combine_kernel, (query.shape[0], query.shape[1], 1), constants)


def _pattern_numbers(pattern: BlockSparsePattern | None) -> tuple[int, int, int, int, int]:
    """Local blocks, stride, block size, step and the first head of this rank."""
    if pattern is None:
        return (0, 1, 1, 0, 0)
    per_query_head = pattern.head_sliding_step >= 0
    heads = pattern.num_heads if per_query_head else pattern.num_kv_heads
    return (
        pattern.local_blocks, pattern.vert_stride, pattern.block_size,
        abs(pattern.head_sliding_step), pattern.tp_rank * heads,
    )  # fmt: skip
