"""What each generation of FlashAttention can do, and which of those installed fits a spec best.

The limits are facts read from the kernels' own checks (csrc/flash_attn, hopper, flash_attn/cute); what a build may leave out is read from its
signature and its build flags. Every refusal names the generation, the value and the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attnlib.backends.flash_attn.probe import FlashKernel, find_kernels
from attnlib.capabilities import Capabilities, Sizes, unsupported_reasons
from attnlib.device import DeviceInfo
from attnlib.spec import AttentionSpec, AttentionType, CudaGraphSupport, MaskKind

__all__ = ["capabilities_of", "choose_kernel", "kernel_refusals"]

_PREFERRED: Mapping[int, tuple[int, ...]] = {
    8: (2, 3),
    9: (3, 4, 2),
    10: (4, 2),
    11: (4, 2),
    12: (2,),
}
"""Major compute capability -> generations, best first. A generation that is not listed has no paged kernel there."""

_SINK_NAMES = ("s_aux", "sinks", "sink", "learnable_sink")
_SINK_HEADS_FA3 = 64


def capabilities_of(kernel: FlashKernel) -> Capabilities:
    """What one installed kernel can do."""
    takes, flags, version = kernel.keywords, kernel.flags, kernel.version
    return Capabilities(
        devices=("cuda",),
        min_capability={2: (8, 0), 3: _lowest_fa3(kernel), 4: (9, 0)}[version],
        max_capability={2: None, 3: (9, 9), 4: (11, 9)}[version],
        dtypes=(torch.bfloat16,)
        if "FLASHATTENTION_DISABLE_FP16" in flags
        else (torch.float16, torch.bfloat16),
        kv_cache_dtypes=(torch.float8_e4m3fn,) if _has_fp8(kernel) else (),
        kv_scale_kinds=("tensor", "head") if _has_fp8(kernel) else (),
        head_sizes=_head_sizes(kernel),
        head_size_v_may_differ=version in (3, 4),
        block_sizes=Sizes(kernel.block_multiple, None, kernel.block_multiple),
        kv_cache_layouts=(
            "NHD",
            "HND",
            "NHD_INTERLEAVED",
            "HND_INTERLEAVED",
            "NHD_PACKED",
            "HND_PACKED",
        ),
        group_sizes=Sizes(1),
        attn_types=(AttentionType.DECODER, AttentionType.ENCODER_DECODER),
        mask_kinds=(MaskKind.CAUSAL, MaskKind.BIDIRECTIONAL),
        sliding_window="window_size" in takes and "FLASHATTENTION_DISABLE_LOCAL" not in flags,
        attention_chunks=False,
        logits_soft_cap="softcap" in takes and "FLASHATTENTION_DISABLE_SOFTCAP" not in flags,
        alibi=version == 2 and "alibi_slopes" in takes,
        sink=version in (3, 4) and takes.first(*_SINK_NAMES) is not None,
        mla=False,
        lse=takes.first("return_softmax_lse", "return_lse", "return_attn_probs") is not None,
        kv_sharing=True,
        batch_invariant=False,
        cudagraph=CudaGraphSupport.UNIFORM_BATCH,
        needs_finite_cache=version in (3, 4),
        allocates_in_forward=True,
    )


def _lowest_fa3(kernel: FlashKernel) -> tuple[int, int]:
    """FlashAttention 3 runs on Ampere only where the build's own record of its flags does not say otherwise."""
    return (8, 0) if kernel.flags and "FLASHATTENTION_DISABLE_SM80" not in kernel.flags else (9, 0)


def _has_fp8(kernel: FlashKernel) -> bool:
    return (
        kernel.version == 3
        and "k_descale" in kernel.keywords
        and "FLASHATTENTION_DISABLE_FP8" not in kernel.flags
    )


def _head_sizes(kernel: FlashKernel) -> Sizes:
    if kernel.version != 3 or not kernel.flags:
        return Sizes(8, 256, 8)
    built = [
        size
        for size in (64, 96, 128, 192, 256)
        if f"FLASHATTENTION_DISABLE_HDIM{size}" not in kernel.flags
    ]
    return Sizes(8, max(built, default=8), 8)


def kernel_refusals(
    kernel: FlashKernel, spec: AttentionSpec, device: DeviceInfo, config: Mapping[str, Any]
) -> list[str]:
    """Every reason why one installed kernel cannot serve `spec`, each naming the kernel."""
    reasons = unsupported_reasons(spec, device, capabilities_of(kernel))
    if device.capability is not None and kernel.version not in _PREFERRED.get(
        device.capability[0], ()
    ):
        reasons.append(
            f"no paged kernel for compute capability {device.capability[0]}.{device.capability[1]}"
        )
    reasons += _combinations(kernel, spec, device, config)
    return [f"{kernel.label}: {reason}" for reason in dict.fromkeys(reasons)]


def _combinations(
    kernel: FlashKernel, spec: AttentionSpec, device: DeviceInfo, config: Mapping[str, Any]
) -> list[str]:
    reasons = []
    size, size_v = spec.head_size, spec.head_size_v
    if size_v != size and kernel.version == 3:
        fits = (128 < size <= 192 and 96 < size_v <= 128) or (size <= 64 and size_v <= 512)
        if (
            not fits
            or size_v % 8
            or f"FLASHATTENTION_DISABLE_HDIMDIFF{64 if size <= 64 else 192}" in kernel.flags
        ):
            reasons.append(
                f"head_size={size} with head_size_v={size_v} not supported (129 to 192 with 97 to 128, or up to 64 with up to 512)"
            )
    if kernel.version == 4 and (size_v > 256 or size_v % 8):
        reasons.append(
            f"head_size_v={size_v} not supported (supported: multiples of 8 from 8 to 256)"
        )
    irregular = [
        f"{name}={value}"
        for name, value in (("head_size", size), ("head_size_v", size_v))
        if value % 16
    ]
    if kernel.version == 4 and irregular:
        # pages that are no whole key tile, whose size differs from kernel to kernel, are copied without a check of the head's end
        reasons.append(
            f"paged keys with {', '.join(dict.fromkeys(irregular))} not supported (supported: multiples of 16)"
        )
    blackwell = device.capability is not None and device.capability[0] >= 10
    if (
        kernel.version == 4
        and blackwell
        and max(size, size_v) > 128
        and (size, size_v) not in ((192, 128), (256, 256))
    ):
        reasons.append(
            f"head_size={size} with head_size_v={size_v} not supported on this chip (8 to 128, 192 with 128, 256 with 256)"
        )
    if (
        kernel.version == 3
        and spec.has_sink
        and (size_v != size or spec.num_heads > _SINK_HEADS_FA3)
    ):
        reasons.append(
            f"sinks with num_heads={spec.num_heads}, head_size_v={size_v} not supported (up to {_SINK_HEADS_FA3} heads of equal size)"
        )
    if kernel.version == 3 and spec.is_kv_quantized:
        reasons += _fp8_reasons(spec, config)
    return reasons


def _fp8_reasons(spec: AttentionSpec, config: Mapping[str, Any]) -> list[str]:
    reasons = []
    if spec.dtype is not torch.bfloat16:
        reasons.append(
            f"kv_cache_dtype={spec.kv_cache_dtype} writes bfloat16 only, the spec says {spec.dtype}"
        )
    if spec.head_size % 16:
        reasons.append(
            f"kv_cache_dtype={spec.kv_cache_dtype} needs a head_size that is a multiple of 16, not {spec.head_size}"
        )
    if not config.get("quantize_query", False):
        reasons.append(
            f"kv_cache_dtype={spec.kv_cache_dtype} needs a float8 query, which costs accuracy: "
            f"register the backend with config quantize_query=True to allow it"
        )
    return reasons


def choose_kernel(
    spec: AttentionSpec, device: DeviceInfo, config: Mapping[str, Any]
) -> tuple[FlashKernel | None, list[str]]:
    """The installed kernel for `spec` on `device`: the generation that `config["fa_version"]` insists on, else the best one that fits.

    Returns:
        (kernel, []) or (None, every installed kernel's reasons).
    """
    candidates = _ranked(find_kernels().kernels, device)
    wanted = config.get("fa_version")
    if wanted is not None:
        installed = ", ".join(kernel.label for kernel in candidates) or "none"
        candidates = [kernel for kernel in candidates if kernel.version == int(wanted)]
        if not candidates:
            return None, [f"fa_version={wanted} is not installed (found: {installed})"]
    reasons: list[str] = []
    for kernel in candidates:
        against = kernel_refusals(kernel, spec, device, config)
        if not against:
            return kernel, []
        reasons += against
    return None, reasons


def _ranked(kernels: Sequence[FlashKernel], device: DeviceInfo) -> list[FlashKernel]:
    order = _PREFERRED.get(device.capability[0], ()) if device.capability else ()
    rank = {version: place for place, version in enumerate(order)}
    return sorted(kernels, key=lambda kernel: rank.get(kernel.version, len(rank)))
