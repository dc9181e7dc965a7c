"""What each generation of FlashAttention supports, and which installed one is best for a spec.

The limits come from the kernels' own checks (csrc/flash_attn, hopper, flash_attn/cute). Features
that a build may lack are read from its signature and its build flags. Every reason names the
generation, the value and the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attnlib.backends.flash_attn.kernel import FlashKernel
from attnlib.backends.flash_attn.limits import absorbed_reasons, combination_reasons
from attnlib.backends.flash_attn.probe import find_kernels
from attnlib.capabilities import Capabilities, Reason, Sizes, unsupported_reasons
from attnlib.device import DeviceInfo
from attnlib.spec import AttentionSpec, AttentionType, CudaGraphSupport, MaskKind

__all__ = ["capabilities_of", "choose_kernel", "kernel_unsupported_reasons"]

_PREFERRED: Mapping[int, tuple[int, ...]] = {
    8: (2, 3),
    9: (3, 4, 2),
    10: (4, 2),
    11: (4, 2),
    12: (2,),
}
"""Major compute capability -> generations with a paged kernel for it, best first."""

_SINK_NAMES = ("s_aux", "sinks", "sink", "learnable_sink")


def capabilities_of(kernel: FlashKernel) -> Capabilities:
    """The capabilities of one installed kernel."""
    keywords, flags, version = kernel.keywords, kernel.flags, kernel.version
    return Capabilities(
        devices=("cuda",),
        min_capability={2: (8, 0), 3: _min_capability_fa3(kernel), 4: (9, 0)}[version],
        max_capability={2: None, 3: (9, 9), 4: (11, 9)}[version],
        dtypes=(torch.bfloat16,)
        if "FLASHATTENTION_DISABLE_FP16" in flags
        else (torch.float16, torch.bfloat16),
        kv_cache_dtypes=(torch.float8_e4m3fn,) if _has_fp8(kernel) else (),
        kv_formats=(),
        kv_format_pairs=(),
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
        sliding_window="window_size" in keywords and "FLASHATTENTION_DISABLE_LOCAL" not in flags,
        attention_chunks=False,
        logits_soft_cap="softcap" in keywords and "FLASHATTENTION_DISABLE_SOFTCAP" not in flags,
        score_function=False,
        alibi=version == 2 and "alibi_slopes" in keywords,
        sink=version in (3, 4) and keywords.first(*_SINK_NAMES) is not None,
        mla=version == 3 and keywords.first("qv", "q_v") is not None,
        lse=keywords.first("return_softmax_lse", "return_lse", "return_attn_probs") is not None,
        kv_sharing=True,
        batch_invariant=False,
        cudagraph=CudaGraphSupport.UNIFORM_BATCH,
        needs_finite_cache=version in (3, 4),
        allocates_in_forward=True,
    )


def _min_capability_fa3(kernel: FlashKernel) -> tuple[int, int]:
    """FlashAttention 3 runs on Ampere if the build flags are known and do not exclude it."""
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


def kernel_unsupported_reasons(
    kernel: FlashKernel, spec: AttentionSpec, device: DeviceInfo, config: Mapping[str, Any]
) -> list[str]:
    """Every reason why one installed kernel does not support `spec`; each names the kernel."""
    reasons = []
    if spec.use_mla and capabilities_of(kernel).mla:
        reasons = absorbed_reasons(spec)
        spec = spec.replace(use_mla=False, head_size=max(1, spec.head_size - spec.head_size_v))
    reasons += unsupported_reasons(spec, device, capabilities_of(kernel))
    if device.capability is not None and kernel.version not in _PREFERRED.get(
        device.capability[0], ()
    ):
        reasons.append(
            f"no paged kernel for compute capability {device.capability[0]}.{device.capability[1]}"
        )
    reasons += combination_reasons(kernel, spec, device, config)
    return [Reason.prefixed(kernel.label, reason) for reason in dict.fromkeys(reasons)]


def choose_kernel(
    spec: AttentionSpec, device: DeviceInfo, config: Mapping[str, Any]
) -> tuple[FlashKernel | None, list[str]]:
    """The installed kernel for `spec` on `device`.

    It is of generation `config["fa_version"]` if given, otherwise the best one that supports
    `spec`.

    Returns:
        (kernel, []) or (None, every installed kernel's reasons).
    """
    candidates = _ranked(find_kernels().kernels, device)
    requested = config.get("fa_version")
    if requested is not None:
        installed = ", ".join(kernel.label for kernel in candidates) or "none"
        candidates = [kernel for kernel in candidates if kernel.version == int(requested)]
        if not candidates:
            return None, [f"fa_version={requested} is not installed (found: {installed})"]
    reasons: list[str] = []
    for kernel in candidates:
        kernel_reasons = kernel_unsupported_reasons(kernel, spec, device, config)
        if not kernel_reasons:
            return kernel, []
        reasons += kernel_reasons
    return None, reasons


def _ranked(kernels: Sequence[FlashKernel], device: DeviceInfo) -> list[FlashKernel]:
    order = _PREFERRED.get(device.capability[0], ()) if device.capability else ()
    rank = {version: index for index, version in enumerate(order)}
    return sorted(kernels, key=lambda kernel: rank.get(kernel.version, len(rank)))
