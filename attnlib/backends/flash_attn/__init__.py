"""Card of the `flash_attn` backend: whichever FlashAttention is installed (2, 3 or 4), behind the common contract. Importable without any.

What it can do depends on what is installed, so `validate_configuration` answers for the kernels that were found; `capabilities` says what one
generation or another can do. Settings (`register_backend(..., config=...)`): `fa_version` 2, 3 or 4 insists on a generation; `num_splits` fixes
the split of the keys (FlashAttention 3; 0 leaves it to the kernel); `aot_schedule=False` leaves scheduling to each layer; `quantize_query=True`
allows a float8 cache on FlashAttention 3 at the price of a float8 query.
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
from attnlib.spec import AttentionSpec, AttentionType, CudaGraphSupport, MaskKind

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
        sink=True,
        mla=False,
        lse=True,
        kv_sharing=True,
        batch_invariant=False,
        cudagraph=CudaGraphSupport.UNIFORM_BATCH,
        needs_finite_cache=True,  # FlashAttention 3 and 4; one cache serves whichever is chosen
        allocates_in_forward=True,  # the LSE and the partial results of split keys
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
        """Nothing installed, or nothing usable: each package's own reason, with the versions that an ABI clash depends on."""
        if nothing_installed():
            return [
                "no FlashAttention is installed: pip install flash-attn (2), or pip install --pre flash-attn-4 (4, Hopper and later)"
            ]
        if device.type != "cuda":
            return []  # validate_configuration says that the device does not fit; no reason to import anything
        found = find_kernels()
        if found.kernels:
            return []
        gaps = found.gaps or (
            "the packages that are installed hold no FlashAttention: pip install flash-attn, or pip install --pre flash-attn-4",
        )
        facts = environment_facts(device, _DISTRIBUTIONS)
        return [f"{gap} {facts}" for gap in gaps]

    @classmethod
    def validate_configuration(
        cls, spec: AttentionSpec, device: torch.device | str | DeviceInfo | None = None
    ) -> list[str]:
        """Reasons of every installed generation when none fits; the general capabilities where none is installed."""
        info = resolve_device(device)
        if (
            unsupported_device_reasons(info, cls.capabilities)
            or nothing_installed()
            or not find_kernels().kernels
        ):
            return super().validate_configuration(spec, info)
        return choose_kernel(spec, info, cls.config)[1]
