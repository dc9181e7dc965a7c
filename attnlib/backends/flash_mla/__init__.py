"""The `flash_mla` backend: DeepSeek's FlashMLA kernels over latent caches on Hopper (P10, M12).

This module can be imported without FlashMLA. The build in vLLM's wheels serves too. Selected keys
are refused: FlashMLA's sparse kernels read latents of contiguous tokens or of its packed format,
and not a paged cache of 16-bit latents.
"""

from __future__ import annotations

from typing import Any

import torch

from attnlib.backends._foreign.imports import environment_facts, is_installed
from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.backends.flash_mla.probe import MODULES, find_flash_mla
from attnlib.capabilities import Capabilities, Sizes
from attnlib.device import DeviceInfo
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.spec import AttentionSpec, AttentionType, CudaGraphSupport, MaskKind

__all__ = ["FlashMLABackend"]

_HEAD_SIZE, _HEAD_SIZE_V = 576, 512
_NOT_INSTALLED = "flash_mla is not installed: build https://github.com/deepseek-ai/FlashMLA"


class FlashMLABackend(AttentionBackend):
    """FlashMLA's dense kernel. It was written for decodes; prefills are correct and slow."""

    description = "FlashMLA over latent caches on Hopper"
    capabilities = Capabilities(
        devices=("cuda",),
        min_capability=(9, 0),
        max_capability=(9, 9),
        dtypes=(torch.float16, torch.bfloat16),
        kv_cache_dtypes=(),
        kv_scale_kinds=(),
        head_sizes=Sizes(exactly=(_HEAD_SIZE,)),
        head_size_v_may_differ=True,
        block_sizes=Sizes(exactly=(64,)),
        kv_cache_layouts=("NHD",),
        group_sizes=Sizes(1),
        attn_types=(AttentionType.DECODER,),
        mask_kinds=(MaskKind.CAUSAL, MaskKind.BIDIRECTIONAL),
        sliding_window=False,
        attention_chunks=False,
        logits_soft_cap=False,
        alibi=False,
        score_function=False,
        key_selection=False,
        compressed_entries=False,
        skip_softmax=False,
        sink=True,  # applied after the kernel, from the LSE
        mla=True,
        lse=True,
        kv_sharing=True,
        batch_invariant=False,
        cudagraph=CudaGraphSupport.NEVER,  # it plans the first call of a batch on the host
        needs_finite_cache=True,
        allocates_in_forward=True,
    )

    @staticmethod
    def get_name() -> str:
        return "flash_mla"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        from attnlib.backends.flash_mla.impl import FlashMLAImpl

        return FlashMLAImpl

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        from attnlib.backends.flash_mla.metadata import FlashMLAMetadata

        return FlashMLAMetadata

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        from attnlib.backends.flash_mla.metadata import FlashMLAMetadataBuilder

        return FlashMLAMetadataBuilder

    @classmethod
    def unavailable(cls, device: DeviceInfo) -> list[str]:
        """Why FlashMLA cannot be used: import, or an interface without a function."""
        if not any(is_installed(path) for path in MODULES):
            return [_NOT_INSTALLED]
        if device.type != "cuda":
            return []  # validate_configuration reports the device without importing anything
        found = find_flash_mla()
        if found.module is None and not found.problem:
            return [_NOT_INSTALLED]
        if found.module is None:
            return [f"{found.problem} {environment_facts(device, ('flash-mla', 'vllm'))}"]
        return []

    @classmethod
    def supports_combination(cls, spec: AttentionSpec, device: DeviceInfo) -> list[str]:
        """FlashMLA reads latent caches with values of 512 elements only."""
        reasons = []
        if not spec.use_mla:
            reasons.append("use_mla=False: FlashMLA reads latent caches only")
        if spec.head_size_v != _HEAD_SIZE_V:
            reasons.append(
                f"head_size_v={spec.head_size_v} is not supported (supported: {_HEAD_SIZE_V})"
            )
        return reasons
