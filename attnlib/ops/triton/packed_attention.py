"""Attention over the packed cache of vLLM's PagedAttention, and its cache write, as Triton kernels.

Keys are `[B, Hkv, D / x, N, x]`, where x elements are 16 bytes, and values `[B, Hkv, D, N]`. Grids
come from upper bounds and lengths are read on the device: no operation synchronizes with the host,
and a CUDA graph can capture all of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.addresses import check_slot_values
from attnlib.ops.checks import check_slots
from attnlib.ops.packed_cache import check_packed_cache
from attnlib.ops.params import AttentionParams
from attnlib.ops.scales import check_scale
from attnlib.ops.signature import tensor_signature
from attnlib.ops.triton.heuristics.device import (
    DeviceLimits,
    device_guard,
    limits_of,
)
from attnlib.ops.triton.kernels.packed import packed_prefill_kernel
from attnlib.ops.triton.kernels.packed_write import packed_write_kernel
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.config import with_config
from attnlib.ops.triton.launch.packed import PackedCall, joined_addresses, whole_vectors
from attnlib.ops.triton.launch.scales import scale_kind
from attnlib.ops.triton.launch.settle import settle_keys
from attnlib.ops.triton.packed_decode import packed_decode

__all__ = ["packed_decode", "packed_prefill", "packed_write"]

_ELEMENTS_PER_PROGRAM = 1024
_MAX_ROWS = 128
"""Query tokens of the largest tile."""
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def packed_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    *,
    max_query_len: int,
    out: Tensor,
) -> None:
    """Causal attention of new tokens over their cached context and each other.

    Args:
        query: `[T, Hq, D]` float16, bfloat16 or float32, last stride 1.
        key: `[T, Hkv, D]`, keys of the new tokens, last stride 1; used as given, without a scale.
        value: `[T, Hkv, D]`, likewise.
        key_cache: `[B, Hkv, D / x, N, x]`, read for the seq_len - query_len context positions.
        value_cache: `[B, Hkv, D, N]`, likewise.
        block_table: `[R, M]` int32 or int64.
        query_start_loc: `[R + 1]` int32 or int64, the first new token of each request.
        seq_lens: `[R]` int32 or int64, context and new tokens.
        params: scale, window (left), ALiBi slopes and KV scales of the context.
        max_query_len: upper bound of the query lengths.
        out: `[T, Hq, D]`, written; rows at or past `query_start_loc[-1]` become 0 (M6).

    Raises:
        ContractError: shapes, strides or dtypes that the kernel cannot address.
    """
    check_packed_cache(query, key_cache, value_cache, block_table, seq_lens, query_start_loc)
    if query.numel() == 0:
        return
    tensors = (query, key_cache, value_cache, out, block_table, seq_lens)
    call = PackedCall(*tensors, params, limits_of(query))
    launch = _prepare_prefill(call, key, value, query_start_loc.dtype, max_query_len)
    keys, values = call.caches()
    arguments = (
        *(query, key, value, keys, values, out, query_start_loc, seq_lens, block_table),
        *(params.alibi_slopes, *call.scales(), float(params.scale), int(params.window[0])),
        query.shape[0],
        *(stride for rows in (query, key, value) for stride in rows.stride()[:2]),
        *(*keys.stride()[:2], *values.stride()[:2], *out.stride()[:2], block_table.stride(0)),
    )
    with device_guard(query):
        addresses = joined_addresses(query, key, value, keys, values, out)
        launch.run(arguments, addresses, query.get_device())


def _prepare_prefill(
    call: PackedCall, key: Tensor, value: Tensor, index_dtype: torch.dtype, max_query_len: int
) -> BoundLaunch:
    """The launch of a prefill. Cached.

    Args:
        call: the queries and the caches.
        key, value: the new keys and values.
        index_dtype: of `query_start_loc`.
        max_query_len: upper bound of the query lengths.

    Raises:
        ContractError: shapes or strides that the kernel cannot address.
    """
    tile = call.tile(call.group * min(max(1, max_query_len), _MAX_ROWS))
    tile_heads = min(call.group, tile.block_m)
    tile_tokens, head_blocks = tile.block_m // tile_heads, triton.cdiv(call.group, tile_heads)
    token_tiles = triton.cdiv(max(1, max_query_len), tile_tokens)
    new = (tensor_signature(key), tensor_signature(value), index_dtype, token_tiles, tile)
    name = ("packed prefill", call.signature, *new)
    found: tuple[DeviceLimits, BoundLaunch] | None = LAUNCHES.get(name)
    if found is not None and found[0] is call.limits:
        return found[1]
    form = (call.num_kv_heads, call.query.shape[2])
    for label, tensor in (("key", key), ("value", value)):
        if tensor.stride(-1) != 1 or tensor.shape[1:] != form:
            raise ContractError(
                f"{label} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; it must "
                f"be [T, {form[0]}, {form[1]}] with last stride 1"
            )
    call.check_requests()
    constants = {
        **call.constants(),
        "TILE_HEADS": tile_heads,
        "TILE_TOKENS": tile_tokens,
        "HEAD_BLOCKS": head_blocks,
        "NUM_KV_HEADS": call.num_kv_heads,
        "HAS_LEFT": call.params.window[0] >= 0,
        **tile.constants,
    }
    grid = (token_tiles * call.num_kv_heads * head_blocks, 1, call.seq_lens.shape[0] + 1)
    launch = BoundLaunch(packed_prefill_kernel, grid, with_config(constants))
    return LAUNCHES.keep(name, (call.limits, launch))[1]  # type: ignore[no-any-return]


def packed_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
) -> None:
    """Write the keys and values of a step to their slots in the packed cache (P4).

    Args:
        key: `[T', Hkv, D]` with T' >= T, last stride 1.
        value: `[T', Hkv, D]`, likewise.
        key_cache: `[B, Hkv, D / x, N, x]`; float8 holds key / k_scale, saturated.
        value_cache: `[B, Hkv, D, N]`, likewise.
        slot_mapping: `[T]` int64; a negative slot writes nothing.
        k_scale: real key = stored key * k_scale; a number, a 0-d or `[Hkv]` float32 tensor. Read
            for float8 only.
        v_scale: the same for values.

    Raises:
        ContractError: slots that are not int64, fewer keys than slots, a scale that is not finite
            and above 0, strides that the kernel cannot address, or, on a CPU and under
            ATTNLIB_VALIDATE, a slot past the cache.
    """
    check_slots(key, value, slot_mapping)
    check_packed_cache(key, key_cache, value_cache)
    check_slot_values(slot_mapping, value_cache.shape[0] * value_cache.shape[3])
    check_scale("k_scale", k_scale)
    check_scale("v_scale", v_scale)
    num_tokens, elements = slot_mapping.shape[0], key.shape[1] * key.shape[2]
    if not num_tokens or not elements:
        return
    constants = _write_constants(key, value, key_cache, value_cache)
    kinds = {
        "K_SCALE_KIND": scale_kind("k_scale", k_scale),
        "V_SCALE_KIND": scale_kind("v_scale", v_scale),
    }
    if constants["FP8"]:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    grid = (num_tokens, triton.cdiv(elements, _ELEMENTS_PER_PROGRAM), 1)
    scales = (x if isinstance(x, Tensor) else float(x) for x in (k_scale, v_scale))
    tensors = (key, value, key_cache, value_cache)
    strides = [stride for tensor in tensors for stride in tensor.stride()[:2]]
    settle_keys(packed_write_kernel)
    with device_guard(key_cache):
        packed_write_kernel[grid](
            *tensors, slot_mapping.contiguous(), *scales, elements, *strides, **constants, **kinds
        )


def _write_constants(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor
) -> dict[str, Any]:
    """The compile-time arguments of a write that follow from its tensors."""
    return {
        "BLOCK_SIZE": value_cache.shape[3],
        "D": key.shape[2],
        "X": key_cache.shape[4],
        "BLOCK": _ELEMENTS_PER_PROGRAM,
        "VEC_K": whole_vectors(key),
        "VEC_V": whole_vectors(value),
        "VEC_KC": whole_vectors(key_cache),
        "VEC_VC": whole_vectors(value_cache),
        "FP8": key_cache.dtype in _FP8,
        "E5M2": key_cache.dtype == torch.float8_e5m2,
        "num_warps": 4,
    }
