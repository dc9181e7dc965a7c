"""Card of the `flashinfer` backend: FlashInfer's paged decode and prefill wrappers behind the common contract. Importable without the package.

Settings (`register_backend(..., config=...)`): `prefill_backend` "fa2", "fa3" or "auto" (fa3 on Hopper where it fits the batch);
`tensor_cores=False` decodes on CUDA cores; `workspace_bytes` replaces the computed size of the workspace.
"""

from __future__ import annotations

from typing import Any

import torch

from attnlib.backends._foreign.imports import environment_facts, is_installed
from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.backends.flashinfer.probe import find_api, toolchain_gaps
from attnlib.capabilities import Capabilities, Sizes
from attnlib.device import DeviceInfo
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.spec import AttentionSpec, AttentionType, CudaGraphSupport, MaskKind

__all__ = ["FlashInferBackend"]


class FlashInferBackend(AttentionBackend):
    """FlashInfer on NVIDIA GPUs from Turing on; kernels are compiled at first use, or come prebuilt."""

    description = "FlashInfer's paged wrappers, planned once per batch"
    capabilities = Capabilities(
        devices=("cuda",),
        min_capability=(8, 0),
        dtypes=(torch.float16, torch.bfloat16),
        kv_cache_dtypes=(torch.float8_e4m3fn, torch.float8_e5m2),
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
        alibi=False,  # FlashInfer knows the standard slopes only and takes no others
        sink=True,  # applied from the LSE, exactly as its sink variant does inside the kernel
        mla=False,
        lse=True,
        kv_sharing=True,
        batch_invariant=False,
        cudagraph=CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE,
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
        """Not installed, not importable, of an unknown shape, or without a way to get its kernels."""
        if not is_installed("flashinfer"):
            return ["flashinfer is not installed: pip install flashinfer-python"]
        if device.type != "cuda":
            return []  # validate_configuration says that the device does not fit; no reason to import anything
        api, problem = find_api(device.capability)
        if api is None:
            return [
                f"{problem} {environment_facts(device, ('flashinfer-python', 'flashinfer-jit-cache', 'flashinfer-cubin'))}"
            ]
        return toolchain_gaps(api.release)

    @classmethod
    def supports_combination(cls, spec: AttentionSpec, device: DeviceInfo) -> list[str]:
        """FlashInfer's windows end at the query: a layer may look back a number of keys, never forward a number of keys."""
        right = spec.visible_window.right
        if right:
            return [
                f"window={tuple(spec.visible_window)}: a bound of {right} keys after the query's own is not supported (supported: 0 or none)"
            ]
        return []
