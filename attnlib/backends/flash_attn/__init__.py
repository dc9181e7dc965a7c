"""The `flash_attn` backend: FlashAttention 2, 3 or 4, whichever is installed.

This module can be imported without FlashAttention. `capabilities` is the union over all
generations; `validate_configuration` reports what the installed kernels support. Settings, given as
`register_backend(..., config=...)`:

    fa_version       2, 3 or 4: use this generation only
    num_splits       number of key splits (FlashAttention 3 and 4); 0 lets the kernel choose
    aot_schedule     False: each layer schedules itself, instead of once per batch
    quantize_query   True: allow a float8 cache on FlashAttention 3, which quantizes the query too
"""

from __future__ import annotations

from typing import Any

import torch

from attnlib.backends._foreign.imports import environment_facts
from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.backends.flash_attn.probe import find_kernels, nothing_installed
from attnlib.backends.flash_attn.support import choose_kernel
from attnlib.capabilities import Capabilities, Sizes, unsupported_device_reasons
from attnlib.device import DeviceInfo, resolve_device
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.spec import AttentionSpec, AttentionType, CudaGraphSupport, LayerSpec, MaskKind

__all__ = ["FlashAttnBackend"]

_DISTRIBUTIONS = ("flash-attn", "flash-attn-3", "flash-attn-4", "vllm", "sgl-kernel")


class FlashAttnBackend(AttentionBackend):
    """FlashAttention 2, 3 or 4 on NVIDIA GPUs from Ampere on."""

    description = "FlashAttention 2, 3 or 4, whichever is installed"
    capabilities = Capabilities(
        devices=("cuda",),
        min_capability=(8, 0),
        dtypes=(torch.float16, torch.bfloat16),
        kv_cache_dtypes=(torch.float8_e4m3fn,),
        kv_formats=(),
        kv_format_pairs=(),
        kv_scale_kinds=("tensor", "head"),
        head_sizes=Sizes(8, 256, 8),
        head_size_v_may_differ=True,
        block_sizes=Sizes(1),
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
        sliding_window=True,
        attention_chunks=False,
        logits_soft_cap=True,
        alibi=True,
        score_function=False,
        query_tensors=False,
        token_sinks=False,
        key_selection=False,
        compressed_entries=False,
        sink=True,
        mla=True,  # FlashAttention 3
        lse=True,
        kv_sharing=True,
        batch_invariant=False,
        cudagraph=CudaGraphSupport.UNIFORM_BATCH,
        # FlashAttention 3 and 4 need it. The cache may be allocated before the kernel is chosen.
        needs_finite_cache=True,
        allocates_in_forward=True,  # the LSE and the partial results of key splits
    )

    @staticmethod
    def get_name() -> str:
        return "flash_attn"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        from attnlib.backends.flash_attn.impl import FlashAttnImpl

        return FlashAttnImpl

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        from attnlib.backends.flash_attn.metadata import FlashAttnMetadata

        return FlashAttnMetadata

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        from attnlib.backends.flash_attn.metadata import FlashAttnMetadataBuilder

        return FlashAttnMetadataBuilder

    @classmethod
    def unavailable(cls, device: DeviceInfo) -> list[str]:
        """Why no FlashAttention can be used: the problem of each package, with version numbers."""
        if nothing_installed():
            return [
                "no FlashAttention is installed: pip install flash-attn (2), "
                "or pip install --pre flash-attn-4 (4, Hopper and later)"
            ]
        if device.type != "cuda":
            return []  # validate_configuration reports the device without importing anything
        found = find_kernels()
        if found.kernels:
            return []
        problems = found.problems or (
            "the installed packages contain no FlashAttention: pip install flash-attn, "
            "or pip install --pre flash-attn-4",
        )
        facts = environment_facts(device, _DISTRIBUTIONS)
        return [f"{problem} {facts}" for problem in problems]

    @classmethod
    def validate_configuration(
        cls, spec: LayerSpec, device: torch.device | str | DeviceInfo | None = None
    ) -> list[str]:
        """The reasons of every installed generation if none supports `spec`.

        Without an installed kernel, or on a device that no generation supports, `capabilities`
        decides.
        """
        info = resolve_device(device)
        if not isinstance(spec, AttentionSpec):
            return super().validate_configuration(spec, info)
        if (
            unsupported_device_reasons(info, cls.capabilities)
            or nothing_installed()
            or not find_kernels().kernels
        ):
            return super().validate_configuration(spec, info)
        return choose_kernel(spec, info, cls.config)[1]
