"""The `flashinfer_mla` backend: FlashInfer's MLA wrapper over latent caches (P10, M12).

This module can be imported without FlashInfer. Setting, given as `register_backend(...,
config=...)`:

    kernels   "fa2", "fa3" or "auto" (the default: fa3 on Hopper)
"""

from __future__ import annotations

from typing import Any

from attnlib.backends._foreign.latents import latent_capabilities, other_layer_reasons
from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.backends.flashinfer.mla.wrapper import find_mla_wrapper
from attnlib.backends.flashinfer.toolchain import unavailable_reasons
from attnlib.capabilities import Sizes
from attnlib.device import DeviceInfo
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.spec import AttentionSpec

__all__ = ["FlashInferMLABackend"]


class FlashInferMLABackend(AttentionBackend):
    """FlashInfer's `BatchMLAPagedAttentionWrapper`, for decodes and absorbed prefills."""

    description = "FlashInfer's MLA wrapper, planned once per batch"
    capabilities = latent_capabilities(
        min_capability=(8, 0), block_sizes=Sizes(1), least_product=-5e4
    )

    @staticmethod
    def get_name() -> str:
        return "flashinfer_mla"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        from attnlib.backends.flashinfer.mla.impl import FlashInferMLAImpl

        return FlashInferMLAImpl

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        from attnlib.backends.flashinfer.mla.metadata import FlashInferMLAMetadata

        return FlashInferMLAMetadata

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        from attnlib.backends.flashinfer.mla.metadata import FlashInferMLAMetadataBuilder

        return FlashInferMLAMetadataBuilder

    @classmethod
    def unavailable(cls, device: DeviceInfo) -> list[str]:
        """See `unavailable_reasons`."""
        return unavailable_reasons(device, find_mla_wrapper)

    @classmethod
    def supports_combination(cls, spec: AttentionSpec, device: DeviceInfo) -> list[str]:
        """The wrapper reads latent caches with values of 512 elements only."""
        return other_layer_reasons(spec, "this wrapper reads latent caches only; use flashinfer")
