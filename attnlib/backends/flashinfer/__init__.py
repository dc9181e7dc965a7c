"""The `flashinfer` backend: FlashInfer's paged decode and prefill wrappers.

This module can be imported without FlashInfer. Settings, given as `register_backend(...,
config=...)`:

    prefill_backend   "fa2", "fa3" or "auto" (fa3 on Hopper where it supports the batch)
    tensor_cores      False: decode on CUDA cores
    workspace_bytes   size of the workspace, instead of the computed one
"""

from __future__ import annotations

from typing import Any

import torch

from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.backends.flashinfer.probe import find_api
from attnlib.backends.flashinfer.toolchain import unavailable_reasons
from attnlib.capabilities import Capabilities, Sizes
from attnlib.device import DeviceInfo
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.spec import AttentionSpec, AttentionType, CudaGraphSupport, MaskKind

__all__ = ["FlashInferBackend"]


class FlashInferBackend(AttentionBackend):
    """FlashInfer on NVIDIA GPUs from Ampere on; kernels are prebuilt or compiled at first use."""

    description = "FlashInfer's paged wrappers, planned once per batch"
    capabilities = Capabilities(
        devices=("cuda",),
        min_capability=(8, 0),
        dtypes=(torch.float16, torch.bfloat16),
        kv_cache_dtypes=(torch.float8_e4m3fn, torch.float8_e5m2),
        kv_formats=(),
        kv_format_pairs=(),
        kv_scale_kinds=("tensor",),
        head_sizes=Sizes(exactly=(64, 128, 256)),
        head_size_v_may_differ=False,
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
        score_function=False,
        query_tensors=False,
        token_sinks=False,
        key_selection=False,
        compressed_entries=False,
        alibi=False,  # FlashInfer supports the standard slopes only
        sink=True,  # applied after the kernel, from the LSE
        mla=False,
        lse=True,
        kv_sharing=True,
        batch_invariant=False,
        cudagraph=CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE,
        least_product=-5e4,  # the minus infinity of its kernels, math::inf
    )

    @staticmethod
    def get_name() -> str:
        return "flashinfer"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        from attnlib.backends.flashinfer.impl import FlashInferImpl

        return FlashInferImpl

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        from attnlib.backends.flashinfer.metadata import FlashInferMetadata

        return FlashInferMetadata

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        from attnlib.backends.flashinfer.metadata import FlashInferMetadataBuilder

        return FlashInferMetadataBuilder

    @classmethod
    def unavailable(cls, device: DeviceInfo) -> list[str]:
        """See `unavailable_reasons`."""
        return unavailable_reasons(device, find_api)

    @classmethod
    def supports_combination(cls, spec: AttentionSpec, device: DeviceInfo) -> list[str]:
        """FlashInfer's windows have no bound after the query other than causality."""
        right = spec.visible_window.right
        if right:
            return [
                f"window={tuple(spec.visible_window)}: a bound of {right} keys after the query's "
                "own is not supported (supported: 0 or none)"
            ]
        return []
