"""The `flash_mla` backend: DeepSeek's FlashMLA kernels over latent caches on Hopper (P10, M12).

This module can be imported without FlashMLA. The build in vLLM's wheels serves too. Selected keys
are refused: FlashMLA's sparse kernels read latents of contiguous tokens or of its packed format,
and not a paged cache of 16-bit latents.
"""

from __future__ import annotations

from typing import Any

from attnlib.backends._foreign.imports import environment_facts, is_installed
from attnlib.backends._foreign.latents import latent_capabilities, other_layer_reasons
from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.backends.flash_mla.probe import MODULES, find_flash_mla
from attnlib.capabilities import Sizes
from attnlib.device import DeviceInfo
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.spec import AttentionSpec

__all__ = ["FlashMLABackend"]

_NOT_INSTALLED = "flash_mla is not installed: build https://github.com/deepseek-ai/FlashMLA"


class FlashMLABackend(AttentionBackend):
    """FlashMLA's dense kernel. It was written for decodes; prefills are correct and slow."""

    description = "FlashMLA over latent caches on Hopper"
    capabilities = latent_capabilities(
        min_capability=(9, 0),
        max_capability=(9, 9),
        block_sizes=Sizes(exactly=(64,)),
        needs_finite_cache=True,
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
        return other_layer_reasons(spec, "FlashMLA reads latent caches only")
