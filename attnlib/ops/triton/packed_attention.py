"""Attention over the packed cache of vLLM's PagedAttention, and its cache write, as Triton kernels.

Keys are `[B, Hkv, D / x, N, x]`, where x elements are 16 bytes, and values `[B, Hkv, D, N]`. Grids
come from upper bounds and lengths are read on the device: no operation synchronizes with the host,
and a CUDA graph can capture all of them.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from attnlib.errors import ContractError
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
from attnlib.ops.triton.heuristics.packed_tiles import packed_tile
from attnlib.ops.triton.kernels.packed import (
    packed_prefill_kernel,
    packed_write_kernel,
)
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.config import with_config
from attnlib.ops.triton.launch.packed import (
    MAX_REQUESTS,
    joined_addresses,
    packed_constants,
    readable_caches,
    scale_arguments,
    whole_vectors,
)
from attnlib.ops.triton.launch.scales import scale_kind, scale_signature
from attnlib.ops.triton.packed_decode import packed_decode

__all__ = ["packed_decode", "packed_prefill", "packed_write"]

_ELEMENTS_PER_PROGRAM = 1024
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
    limits = limits_of(query)
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads, num_reqs = value_cache.shape[1], seq_lens.shape[0]
    group = num_heads // num_kv_heads
    rows = group * min(max(1, max_query_len), 128)
    tile = packed_tile(
        head_size, query.element_size(), key_cache.element_size(), rows, limits.shared_memory
    )
    tile_heads = min(group, tile.block_m)
    tile_tokens, head_blocks = tile.block_m // tile_heads, triton.cdiv(group, tile_heads)
    token_tiles = triton.cdiv(max(1, max_query_len), tile_tokens)
    tensors = (query, key, value, key_cache, value_cache, out, block_table, seq_lens)
    signature = (
        "packed prefill", *(tensor_signature(tensor) for tensor in tensors), query_start_loc.dtype,
        token_tiles, tile, params.window[0] >= 0, params.alibi_slopes is None,
        scale_signature(params.k_scale), scale_signature(params.v_scale),
    )  # fmt: skip
    found: tuple[DeviceLimits, BoundLaunch] | None = LAUNCHES.get(signature)
    if found is None or found[0] is not limits:
        for name, tensor in (("key", key), ("value", value)):
            if tensor.stride(-1) != 1 or tensor.shape[1:] != (num_kv_heads, head_size):
                raise ContractError(
                    f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; it "
                    f"must be [T, {num_kv_heads}, {head_size}] with last stride 1"
                )
        if num_reqs > MAX_REQUESTS:
            raise ContractError(
                f"a batch of {num_reqs} requests exceeds the limit of {MAX_REQUESTS}; split it "
                "into several calls"
            )
        constants = packed_constants(query, key_cache, value_cache, out, params, limits) | {
            "TILE_HEADS": tile_heads,
            "TILE_TOKENS": tile_tokens,
            "HEAD_BLOCKS": head_blocks,
            "NUM_KV_HEADS": num_kv_heads,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "HAS_LEFT": params.window[0] >= 0,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }
        grid = (token_tiles * num_kv_heads * head_blocks, 1, num_reqs + 1)
        found = LAUNCHES.keep(
            signature, (limits, BoundLaunch(packed_prefill_kernel, grid, with_config(constants)))
        )
    keys, values = readable_caches(key_cache, value_cache, limits)
    arguments = (
        query, key, value, keys, values, out, query_start_loc, seq_lens, block_table,
        params.alibi_slopes, *scale_arguments(params), float(params.scale),
        int(params.window[0]), num_tokens, *query.stride()[:2], *key.stride()[:2],
        *value.stride()[:2], *keys.stride()[:2], *values.stride()[:2], *out.stride()[:2],
        block_table.stride(0),
    )  # fmt: skip
    with device_guard(query):
        addresses = joined_addresses(query, key, value, keys, values, out)
        found[1].run(arguments, addresses, query.get_device())


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
            and above 0, or strides that the kernel cannot address.
    """
    check_slots(key, value, slot_mapping)
    check_packed_cache(key, key_cache, value_cache)
    check_scale("k_scale", k_scale)
    check_scale("v_scale", v_scale)
    num_tokens, (_, num_heads, head_size) = slot_mapping.shape[0], key.shape
    if not num_tokens or not num_heads:
        return
    fp8 = key_cache.dtype in _FP8
    constants = {
        "BLOCK_SIZE": value_cache.shape[3],
        "D": head_size,
        "X": key_cache.shape[4],
        "BLOCK": _ELEMENTS_PER_PROGRAM,
        "K_SCALE_KIND": scale_kind("k_scale", k_scale),
        "V_SCALE_KIND": scale_kind("v_scale", v_scale),
        "VEC_K": whole_vectors(key),
        "VEC_V": whole_vectors(value),
        "VEC_KC": whole_vectors(key_cache),
        "VEC_VC": whole_vectors(value_cache),
        "FP8": fp8,
        "E5M2": key_cache.dtype == torch.float8_e5m2,
        "num_warps": 4,
    }
    if fp8:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    elements = num_heads * head_size
    grid = (num_tokens, triton.cdiv(elements, _ELEMENTS_PER_PROGRAM), 1)
    scales = (x if isinstance(x, Tensor) else float(x) for x in (k_scale, v_scale))
    with device_guard(key_cache):
        packed_write_kernel[grid](
            key, value, key_cache, value_cache, slot_mapping.contiguous(), *scales, elements,
            *key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:2],
            *value_cache.stride()[:2], **constants,
        )  # fmt: skip
