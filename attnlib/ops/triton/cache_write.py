"""Storing new keys and values in the paged cache: one program per token and group of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.triton.heuristics.device import DeviceLimits, device_guard, limits_of
from attnlib.ops.triton.kernels.cache_write import write_kv_kernel
from attnlib.ops.triton.launch.bound import BoundLaunch, Remembered
from attnlib.ops.triton.launch.scales import scale_class, scale_kind

__all__ = ["find_write", "write_kv"]

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_ELEMENTS_PER_PROGRAM = 2048


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
    limits = limits_of(key_cache)
    same = _launch_key(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    launch = _launches.get(same)
    if launch is None or launch.limits is not limits:
        _check(key, value, slot_mapping)
        launch = _prepare(
            key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, limits
        )
        _launches.keep(same, launch)
    if launch.write is None:
        return
    if launch.as_bytes:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    addresses = key.data_ptr() | value.data_ptr() | key_cache.data_ptr() | value_cache.data_ptr()
    scales = (
        k_scale if isinstance(k_scale, Tensor) else float(k_scale),
        v_scale if isinstance(v_scale, Tensor) else float(v_scale),
    )
    with device_guard(key_cache):
        launch.write(
            (key, value, key_cache, value_cache, slot_mapping, *scales, *launch.numbers),
            addresses,
            launch.index,
        )


def find_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> _WriteLaunch | None:
    """The launch of an earlier `write_kv` with such tensors, and scales that are numbers; None when there was none."""
    launch = _launches.get(_launch_key(key, value, key_cache, value_cache, slot_mapping, 1.0, 1.0))
    return launch if launch is not None and launch.limits is limits_of(key_cache) else None


def _launch_key(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float | Tensor,
    v_scale: float | Tensor,
) -> tuple[Any, ...]:
    """All but addresses and numbers that a launch follows from."""
    return (
        key.get_device(), key.dtype, key.shape, key.stride(), value.dtype, value.shape, value.stride(),
        key_cache.dtype, key_cache.shape, key_cache.stride(), value_cache.dtype, value_cache.shape, value_cache.stride(),
        slot_mapping.dtype, slot_mapping.shape, scale_class(k_scale), scale_class(v_scale),
    )  # fmt: skip


@dataclass(frozen=True)
class _WriteLaunch:
    """A call of `write_kv` less its addresses: what the layers of one step share.

    Attributes:
        limits: the chip it was worked out for.
        index: its number.
        numbers: the runtime numbers.
        as_bytes: whether the kernel sees the cache as bytes.
        write: the kernel; None when there is nothing to write.
    """

    limits: DeviceLimits
    index: int
    numbers: tuple[int, ...]
    as_bytes: bool
    write: BoundLaunch | None


_launches: Remembered[_WriteLaunch] = Remembered()


def _check(key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    num_tokens = slot_mapping.shape[0]
    if slot_mapping.dtype != torch.int64:
        raise ContractError(
            f"slot_mapping has dtype {slot_mapping.dtype}; convert it to torch.int64", rule="P4"
        )
    if key.shape[0] < num_tokens or value.shape[0] < num_tokens:
        raise ContractError(
            f"slot_mapping names {num_tokens} tokens, but key has {key.shape[0]} and value {value.shape[0]}; "
            "shorten slot_mapping or pass every token's key and value",
            rule="P4",
        )


def _prepare(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, k_scale: float | Tensor,
    v_scale: float | Tensor, limits: DeviceLimits,
) -> _WriteLaunch:  # fmt: skip
    """Choose the grid and the compile-time arguments."""
    num_tokens, (_, block_size, num_heads, head_size), head_size_v = (
        slot_mapping.shape[0],
        key_cache.shape,
        value_cache.shape[3],
    )
    padded, padded_v = triton.next_power_of_2(head_size), triton.next_power_of_2(head_size_v)
    block_h = min(
        triton.next_power_of_2(num_heads), max(1, _ELEMENTS_PER_PROGRAM // max(padded, padded_v))
    )
    numbers = (
        num_heads,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
    )
    constants = {
        "BLOCK_SIZE": block_size,
        "D": head_size,
        "DV": head_size_v,
        "D_PAD": padded,
        "DV_PAD": padded_v,
        "BLOCK_H": block_h,
        "K_SCALE_KIND": scale_kind(k_scale),
        "V_SCALE_KIND": scale_kind(v_scale),
        "FP8": key_cache.dtype in _FP8,
        "E5M2": key_cache.dtype == torch.float8_e5m2,
        "num_warps": 4 if padded * block_h > 512 else 1,
        "enable_fp_fusion": True,
    }
    write = BoundLaunch(
        write_kv_kernel, (num_tokens, triton.cdiv(num_heads, block_h), 1), constants
    )
    nothing = num_tokens == 0 or num_heads == 0
    return _WriteLaunch(
        limits, key.get_device(), numbers, constants["FP8"], None if nothing else write
    )
