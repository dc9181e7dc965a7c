"""Write new keys and values to the paged cache: one program per token and group of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.kv_formats import KVFormat
from attnlib.kv_rotation import KVRotation
from attnlib.ops.addresses import check_slot_values
from attnlib.ops.checks import check_slots, vector_elements
from attnlib.ops.latent import values_are_prefix
from attnlib.ops.scales import check_scale
from attnlib.ops.signature import scale_signature, tensor_signature
from attnlib.ops.triton.heuristics.device import (
    DeviceLimits,
    device_guard,
    limits_of,
    programmatic_launch,
)
from attnlib.ops.triton.kernels.cache_write import WriteConfig, write_kv_kernel
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.config import with_config
from attnlib.ops.triton.launch.scales import scale_kind
from attnlib.ops.triton.launch.sequence import (
    K_SCALE,
    KEY,
    KEY_CACHE,
    V_SCALE,
    VALUE,
    VALUE_CACHE,
    Launches,
    batch_sources,
    bind_step,
)

__all__ = ["CacheWrite", "prepare_write", "write_kv"]

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
    k_format: KVFormat | None = None,
    v_format: KVFormat | None = None,
    rotation: KVRotation | None = None,
) -> None:
    """Write the keys and values of a step to their slots.

    Args:
        key: `[T', Hkv, D]` with T' >= T, float16, bfloat16 or float32, last stride 1.
        value: `[T', Hkv, Dv]`, likewise.
        key_cache: `[B, N, Hkv, D]`, any strides but the last (1). float8_e4m3fn and float8_e5m2
            hold value / scale, saturated at the largest finite number.
        value_cache: `[B, N, Hkv, Dv]`, the same dtype; may interleave with `key_cache`. If it is a
            prefix of it (P10), only the keys are written and `value` is not read.
        slot_mapping: `[T]` int64, slot = block * N + offset; a negative slot writes nothing. Its
            length is the number of tokens written.
        k_scale: real key = stored key * k_scale; a number, or a float32 tensor of 1 or `[Hkv]`
            elements. Read for float8 only. For a format with scales in the page, the view of these
            scales, which is written (M16).
        v_scale: the same for values.
        k_format, v_format: the formats with scales in the page, of the library; None for the one
            with these dtypes (`kv_dtype.page_format`).
        rotation: of the heads (P15), for formats with scales in the page.

    Raises:
        ContractError: as the operation of torch; open formats, slots that are not contiguous.
    """
    for one in (k_format, v_format):
        if one is not None and one.is_open:
            raise ContractError(
                f"{one.name} is written by its own functions: use attnlib.ops.torch.cache_write",
                rule="P16",
            )
    if slot_mapping.is_cpu:  # elsewhere the layer checks, under ATTNLIB_VALIDATE
        check_slot_values(slot_mapping, key_cache.shape[0] * key_cache.shape[1])
    scales = (scale_signature(k_scale, key_cache), scale_signature(v_scale, value_cache))
    tensors = (key, value, key_cache, value_cache)
    latent = values_are_prefix(key_cache, value_cache)
    signature = (*(tensor_signature(tensor) for tensor in tensors), *scales, latent, rotation)
    prepared = prepare_write(signature, *tensors, slot_mapping, k_scale, v_scale, rotation)
    if prepared.launch is None:
        return
    if prepared.as_bytes:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    addresses = key.data_ptr() | value.data_ptr() | key_cache.data_ptr() | value_cache.data_ptr()
    given = (x if isinstance(x, Tensor) else float(x) for x in (k_scale, v_scale))
    with device_guard(key_cache):
        prepared.launch.run(
            (key, value, key_cache, value_cache, slot_mapping, *given, *prepared.numbers),
            addresses,
            prepared.index,
        )


@dataclass(frozen=True, eq=False)
class CacheWrite:
    """The launch for one call signature of `write_kv`, without addresses.

    Attributes:
        limits: the chip that the grid was chosen for.
        index: the device index.
        numbers: the runtime arguments after the scales: numbers, and the signs of a rotation.
        launch: the kernel; None when there is nothing to write.
        as_bytes: whether the kernel writes the cache as bytes (float8, pages).
    """

    limits: DeviceLimits
    index: int
    numbers: tuple[Any, ...]
    launch: BoundLaunch | None
    as_bytes: bool = True

    def launches(self, direct: bool, aligned: bool = True) -> Launches:
        """The launch, which takes the slots as the value of its batch.

        Args:
            direct: launch without Triton, on addresses.
            aligned: for launches by Triton, whether all layer tensors are aligned.
        """
        if self.launch is None:
            return Launches(())
        tensors = (KEY, VALUE, KEY_CACHE, VALUE_CACHE)
        fixed = (x.data_ptr() if direct and isinstance(x, Tensor) else x for x in self.numbers)
        arguments = (*tensors, *batch_sources(1), K_SCALE, V_SCALE, *fixed)
        return Launches((bind_step(self.launch, direct, aligned, arguments),))


def prepare_write(
    signature: tuple[Any, ...],
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float | Tensor,
    v_scale: float | Tensor,
    rotation: KVRotation | None = None,
) -> CacheWrite:
    """The launch for calls of this signature. Cached.

    Raises:
        ContractError: as `write_kv`.
    """
    limits = limits_of(key_cache)
    slots = (slot_mapping.dtype, slot_mapping.shape, slot_mapping.stride())
    found: CacheWrite | None = LAUNCHES.get(("write", signature, slots))
    if found is not None and found.limits is limits:
        return found
    _check(key, value, slot_mapping)
    check_scale("k_scale", k_scale)
    check_scale("v_scale", v_scale)
    scales = (k_scale, v_scale)
    if isinstance(k_scale, Tensor) and k_scale.dim() == 4:
        from attnlib.ops.triton.page_write import page_write  # most caches do not need its kernels

        given = (key, value, key_cache, value_cache, slot_mapping.shape[0], scales, rotation)
        prepared = CacheWrite(limits, key.get_device(), *page_write(*given))
    elif rotation is not None:
        raise ContractError(
            "this kernel rotates heads for pages that hold their scales: call rotate_heads of "
            "attnlib.ops.triton.hadamard before the write",
            rule="P15",
        )
    else:
        prepared = _write_elements(key, value, key_cache, value_cache, slot_mapping, scales)
    kept: CacheWrite = LAUNCHES.keep(("write", signature, slots), prepared)
    return kept


_Scales = tuple[float | Tensor, float | Tensor]


def _write_elements(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    scales: _Scales,
) -> CacheWrite:
    """The launch over caches of floating-point numbers and of float8."""
    num_tokens, (_, block_size, num_heads, head_size) = slot_mapping.shape[0], key_cache.shape
    limits, head_size_v = limits_of(key_cache), value_cache.shape[3]
    padded, padded_v = triton.next_power_of_2(head_size), triton.next_power_of_2(head_size_v)
    block_h = max(1, _ELEMENTS_PER_PROGRAM // max(padded, padded_v))
    block_h = min(triton.next_power_of_2(num_heads), block_h)
    is_latent, is_float8 = values_are_prefix(key_cache, value_cache), key_cache.dtype in _FP8
    constants = {
        "BLOCK_SIZE": block_size,
        "D": head_size,
        "DV": head_size_v,
        "D_PAD": padded,
        "DV_PAD": padded_v,
        "BLOCK_H": block_h,
        "VEC_K": vector_elements("key", key),
        "VEC_V": 1 if is_latent else vector_elements("value", value),
        "VEC_KC": vector_elements("key_cache", key_cache),
        "VEC_VC": 1 if is_latent else vector_elements("value_cache", value_cache),
        "K_SCALE_KIND": scale_kind("k_scale", scales[0]),
        "V_SCALE_KIND": scale_kind("v_scale", scales[1]),
        "FP8": is_float8,
        "E5M2": key_cache.dtype == torch.float8_e5m2,
        "LATENT": is_latent,
        "num_warps": 4 if padded * block_h > 512 else 1,
        "enable_fp_fusion": True,
        **programmatic_launch(limits, num_tokens * triton.cdiv(num_heads, block_h)),
    }
    strides = (*key.stride()[:2], *value.stride()[:2])
    numbers = (num_heads, *strides, *key_cache.stride()[:3], *value_cache.stride()[:3])
    launch = None
    if num_tokens and num_heads:
        grid = (num_tokens, triton.cdiv(num_heads, block_h), 1)
        launch = BoundLaunch(write_kv_kernel, grid, with_config(constants, WriteConfig))
    return CacheWrite(limits, key.get_device(), numbers, launch, is_float8)


def _check(key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    check_slots(key, value, slot_mapping)
    if slot_mapping.shape[0] > 1 and slot_mapping.stride(0) != 1:
        raise ContractError(
            f"slot_mapping has stride {slot_mapping.stride(0)}; it must be 1: call .contiguous()",
            rule="P4",
        )
