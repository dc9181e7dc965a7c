"""What combinations of sizes and features single generations of FlashAttention do not support.

The limits come from the kernels' own checks (hopper, flash_attn/cute). Every reason names the value
and the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attnlib.backends.flash_attn.kernel import FlashKernel
from attnlib.device import DeviceInfo
from attnlib.spec import AttentionSpec

__all__ = ["absorbed_reasons", "combination_reasons", "key_splits"]

_SINK_HEADS_FA3 = 64
_ABSORBED_SIZE_V = 512
"""The value head size with which FlashAttention 3's kernels take `qv`; they refuse small ones."""


def absorbed_reasons(spec: AttentionSpec) -> list[str]:
    """What FlashAttention 3 needs of absorbed queries over latents (M12), besides what it needs of
    a layer with the sizes of the rotary part and of the values: it multiplies the rotary parts as
    queries and keys, and the rest of the queries (`qv`) with the values."""
    rotary, reasons = spec.head_size - spec.head_size_v, []
    if not 8 <= rotary <= 64:
        reasons.append(
            f"use_mla with a rotary part of {rotary} elements not supported (supported: 8 to 64)"
        )
    if spec.head_size_v != _ABSORBED_SIZE_V:
        reasons.append(
            f"use_mla with head_size_v={spec.head_size_v} not supported (supported: "
            f"{_ABSORBED_SIZE_V})"
        )
    return reasons


def combination_reasons(
    kernel: FlashKernel, spec: AttentionSpec, device: DeviceInfo, config: Mapping[str, Any]
) -> list[str]:
    """The combinations of `spec` that one kernel does not support on `device`."""
    if kernel.version == 2:
        return _reasons_fa2(spec)
    if kernel.version == 3:
        return _reasons_fa3(kernel, spec, config)
    return _reasons_fa4(kernel, spec, device, config)


def key_splits(kernel: FlashKernel, device: DeviceInfo, config: Mapping[str, Any]) -> int | None:
    """The `num_splits` of a call: 0 lets the kernel choose, None leaves the argument out.

    On Blackwell FlashAttention 4 chooses a number if asked; the default of flash-attn-4 is 1. On
    Hopper the default is right: vLLM's build chooses a number, flash-attn-4 refuses all but 1.
    """
    configured = int(config.get("num_splits", 0))
    if kernel.version == 2 or "num_splits" not in kernel.keywords:
        return None
    if kernel.version == 4 and not configured and not _is_blackwell(device):
        return None
    return configured


def _is_blackwell(device: DeviceInfo) -> bool:
    return device.capability is not None and device.capability[0] >= 10


def _reasons_fa2(spec: AttentionSpec) -> list[str]:
    """With causal masks its ALiBi adds `slope * key position`, which leaves the output as it is
    and adds `slope * query position` to the LSE."""
    if spec.has_alibi and spec.needs_lse:
        return ["ALiBi slopes with needs_lse=True not supported (supported: needs_lse=False)"]
    return []


def _reasons_fa3(kernel: FlashKernel, spec: AttentionSpec, config: Mapping[str, Any]) -> list[str]:
    size, size_v, reasons = spec.head_size, spec.head_size_v, []
    if size_v != size:
        supported = (128 < size <= 192 and 96 < size_v <= 128) or (size <= 64 and size_v <= 512)
        if (
            not supported
            or size_v % 8
            or f"FLASHATTENTION_DISABLE_HDIMDIFF{64 if size <= 64 else 192}" in kernel.flags
        ):
            reasons.append(
                f"head_size={size} with head_size_v={size_v} not supported "
                "(supported: 129 to 192 with 97 to 128, or up to 64 with up to 512)"
            )
    if spec.has_sink and (size_v != size or spec.num_heads > _SINK_HEADS_FA3):
        reasons.append(
            f"sinks with num_heads={spec.num_heads}, head_size_v={size_v} not supported "
            f"(supported: up to {_SINK_HEADS_FA3} heads with equal head sizes)"
        )
    if spec.is_kv_quantized:
        reasons += _fp8_reasons(spec, config)
    return reasons


def _reasons_fa4(
    kernel: FlashKernel, spec: AttentionSpec, device: DeviceInfo, config: Mapping[str, Any]
) -> list[str]:
    size, size_v, reasons = spec.head_size, spec.head_size_v, []
    if size_v > 256 or size_v % 8:
        reasons.append(
            f"head_size_v={size_v} not supported (supported: multiples of 8 from 8 to 256)"
        )
    irregular = [
        f"{name}={value}"
        for name, value in (("head_size", size), ("head_size_v", size_v))
        if value % 16
    ]
    if irregular:
        # Blocks that are not a whole key tile are copied without a bound check on the head size.
        reasons.append(
            f"paged keys with {', '.join(dict.fromkeys(irregular))} not supported "
            "(supported: multiples of 16)"
        )
    if _is_blackwell(device) and max(size, size_v) > 128:
        reasons += _blackwell_reasons(kernel, size, size_v)
    splits = key_splits(kernel, device, config)
    if splits is not None and splits > 1 and not (kernel.splits_on_hopper or _is_blackwell(device)):
        reasons.append(
            f"num_splits={splits} not supported on this device (supported: 1; 0 chooses it)"
        )
    return reasons


def _blackwell_reasons(kernel: FlashKernel, size: int, size_v: int) -> list[str]:
    """Head sizes above 128. The kernel of builds with one for head size 256 alone takes no
    sequence lengths, and so no paged cache of which a part is in use."""
    if (size, size_v) == (192, 128) or ((size, size_v) == (256, 256) and not kernel.separate_256):
        return []
    above = "192 with 128" if kernel.separate_256 else "192 with 128, 256 with 256"
    return [
        f"head_size={size} with head_size_v={size_v} not supported on this device "
        f"(supported: 8 to 128, {above})"
    ]


def _fp8_reasons(spec: AttentionSpec, config: Mapping[str, Any]) -> list[str]:
    reasons = []
    if spec.dtype is not torch.bfloat16:
        reasons.append(
            f"kv_cache_dtype={spec.kv_cache_dtype} needs dtype=torch.bfloat16, not {spec.dtype}"
        )
    if spec.head_size % 16:
        reasons.append(
            f"kv_cache_dtype={spec.kv_cache_dtype} needs a head_size that is a multiple of 16, "
            f"not {spec.head_size}"
        )
    if not config.get("quantize_query", False):
        reasons.append(
            f"kv_cache_dtype={spec.kv_cache_dtype} needs a float8 query, which reduces "
            "accuracy: register the backend with config quantize_query=True to allow it"
        )
    return reasons
