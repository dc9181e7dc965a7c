"""What vLLM asks about attnlib for models with multi-head latent attention (MLA)."""

from __future__ import annotations

from typing import ClassVar

from vllm.v1.attention.backend import MLAAttentionImpl

from attnlib.integrations.vllm.backend import AttnlibBackend
from attnlib.integrations.vllm.mla_builder import AttnlibMLAMetadataBuilder
from attnlib.integrations.vllm.mla_impl import AttnlibMLAImpl

__all__ = ["AttnlibMLABackend"]


class AttnlibMLABackend(AttnlibBackend):
    """attnlib as a backend of latent attention in vLLM 0.26 and 0.33."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
    ]

    @classmethod
    def is_mla(cls) -> bool:
        """Yes: vLLM projects the queries and outputs of decodes."""
        return True

    @staticmethod
    def get_impl_cls() -> type[MLAAttentionImpl]:
        """The attention of one layer."""
        return AttnlibMLAImpl

    @staticmethod
    def get_builder_cls() -> type[AttnlibMLAMetadataBuilder]:
        """The builder of metadata."""
        return AttnlibMLAMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """The logical shape of a layer's cache; vLLM 0.33 decides it without this method."""
        return (num_blocks, block_size, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Its order in memory; vLLM 0.33 decides it without this method."""
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """No: masks over latents do not depend on the batch, and decodes are split on the host."""
        return False

    supports_non_causal = supports_rswa = supports_mm_prefix
    supports_device_cpu_query_lens_mismatch = supports_mm_prefix
    supports_alibi_sqrt = supports_per_head_quant_scales = supports_mm_prefix

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders."""
        return attn_type == "decoder"
