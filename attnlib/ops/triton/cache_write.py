"""Storing new keys and values in the paged cache: one program per token and group of heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.triton.device import device_guard, limits_of
from attnlib.ops.triton.quant import encode_fp8, load_scale, scale_kind

__all__ = ["write_kv"]

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_ELEMENTS_PER_PROGRAM = 2048


@triton.jit
def _store_heads(source, cache, slot, token, heads, mask_heads, scale, stride_st, stride_sh, stride_cb, stride_cn,
                 stride_ch, BLOCK_SIZE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
                 SCALE_KIND: tl.constexpr, FP8: tl.constexpr, E5M2: tl.constexpr):  # fmt: skip
    lanes = tl.arange(0, PADDED)
    mask = mask_heads[:, None] & (lanes < SIZE)[None, :]
    heads64 = heads.to(tl.int64)
    source += token.to(tl.int64) * stride_st
    x = tl.load(source + (heads64 * stride_sh)[:, None] + lanes[None, :], mask=mask, other=0.0)
    cache += (slot // BLOCK_SIZE) * stride_cb + (slot % BLOCK_SIZE) * stride_cn
    target = cache + (heads64 * stride_ch)[:, None] + lanes[None, :]
    if FP8:
        x = x.to(tl.float32)
        if SCALE_KIND == 2:
            divisor = tl.load(scale + heads, mask=mask_heads, other=1.0)[:, None]
        else:
            divisor = tl.zeros([1, 1], tl.float32) + load_scale(scale, 0, SCALE_KIND)
        divisor, x = tl.broadcast(divisor, x)
        tl.store(target, encode_fp8(tl.math.div_rn(x, divisor), E5M2), mask=mask)
    else:
        tl.store(target, x.to(cache.dtype.element_ty), mask=mask)


@triton.jit
def _write_kv_kernel(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, num_heads, stride_kt,
                     stride_kh, stride_vt, stride_vh, stride_kcb, stride_kcn, stride_kch, stride_vcb, stride_vcn,
                     stride_vch, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
                     DV_PAD: tl.constexpr, BLOCK_H: tl.constexpr, K_SCALE_KIND: tl.constexpr,
                     V_SCALE_KIND: tl.constexpr, FP8: tl.constexpr, E5M2: tl.constexpr):  # fmt: skip
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask_heads = heads < num_heads
        _store_heads(key, key_cache, slot, token, heads, mask_heads, k_scale, stride_kt, stride_kh, stride_kcb,
                     stride_kcn, stride_kch, BLOCK_SIZE, D, D_PAD, K_SCALE_KIND, FP8, E5M2)  # fmt: skip
        _store_heads(value, value_cache, slot, token, heads, mask_heads, v_scale, stride_vt, stride_vh, stride_vcb,
                     stride_vcn, stride_vch, BLOCK_SIZE, DV, DV_PAD, V_SCALE_KIND, FP8, E5M2)  # fmt: skip


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
) -> None:
    """Write the keys and values of a step into their slots.

    Args:
        key: `[T', Hkv, D]` with T' >= T, float16, bfloat16 or float32, last stride 1.
        value: `[T', Hkv, Dv]`, likewise.
        key_cache: `[B, N, Hkv, D]`, any strides but the last (1). float8_e4m3fn and float8_e5m2 hold value / scale,
            saturated at the largest finite number.
        value_cache: `[B, N, Hkv, Dv]`, the same dtype; may interleave with or alias `key_cache`.
        slot_mapping: `[T]` int64, slot = block * N + offset; a negative slot writes nothing. Its length says how many
            tokens are written.
        k_scale: real key = stored key * k_scale; a number, a 0-d or `[Hkv]` float32 tensor. Read for float8 only.
        v_scale: the same for values.

    Raises:
        ContractError: slots that are not int64, or keys with fewer rows than there are slots.
    """
    num_tokens, num_heads = slot_mapping.shape[0], key_cache.shape[2]
    if slot_mapping.dtype != torch.int64:
        raise ContractError(f"slot_mapping has dtype {slot_mapping.dtype}; convert it to torch.int64", rule="P4")
    if key.shape[0] < num_tokens or value.shape[0] < num_tokens:
        raise ContractError(
            f"slot_mapping names {num_tokens} tokens, but key has {key.shape[0]} and value {value.shape[0]}; "
            "shorten slot_mapping or pass every token's key and value",
            rule="P4",
        )
    if num_tokens == 0 or num_heads == 0:
        return
    limits_of(key_cache)
    head_size, head_size_v, block_size = key_cache.shape[3], value_cache.shape[3], key_cache.shape[1]
    fp8, e5m2 = key_cache.dtype in _FP8, key_cache.dtype == torch.float8_e5m2
    if fp8:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    padded, padded_v = triton.next_power_of_2(head_size), triton.next_power_of_2(head_size_v)
    block_h = min(triton.next_power_of_2(num_heads), max(1, _ELEMENTS_PER_PROGRAM // max(padded, padded_v)))
    with device_guard(key_cache):
        _write_kv_kernel[(num_tokens, triton.cdiv(num_heads, block_h))](
            key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, num_heads, key.stride(0),
            key.stride(1), value.stride(0), value.stride(1), key_cache.stride(0), key_cache.stride(1),
            key_cache.stride(2), value_cache.stride(0), value_cache.stride(1), value_cache.stride(2), block_size,
            head_size, head_size_v, padded, padded_v, block_h, scale_kind(k_scale), scale_kind(v_scale), fp8, e5m2,
            num_warps=4 if padded * block_h > 512 else 1, enable_fp_fusion=True,
        )  # fmt: skip
