"""What vLLM asks about attnlib: names, supported features, shape of the cache."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from attnlib.errors import AttnlibError
from attnlib.integrations.vllm.builder import AttnlibMetadataBuilder, specs_of_engine
from attnlib.integrations.vllm.format_names import stored_fields
from attnlib.integrations.vllm.impl import AttnlibImpl
from attnlib.integrations.vllm.kv_cache import cache_shape, stride_order
from attnlib.integrations.vllm.layer_spec import (
    ATTENTION_TYPES,
    KV_CACHE_DTYPES,
    PROBE_HEADS,
    rejections,
    select,
)
from attnlib.integrations.vllm.names import backend_name
from attnlib.spec import AttentionSpec

__all__ = ["AttnlibBackend"]


class AttnlibBackend(AttentionBackend):
    """attnlib as a backend of vLLM 0.26 and 0.33.

    vLLM's own checks come first. Where they pass, attnlib's selection accepts the layer or names
    every reason against it.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KV_CACHE_DTYPES)
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's enumeration of backends."""
        return backend_name()

    @staticmethod
    def get_impl_cls() -> type[AttnlibImpl]:
        """The attention of one layer."""
        return AttnlibImpl

    @staticmethod
    def get_builder_cls() -> type[AttnlibMetadataBuilder]:
        """The builder of metadata."""
        return AttnlibMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Multiples of 16: the Hopper kernels need them, the others take any."""
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """The logical shape of a layer's cache; vLLM 0.33 decides it without this method."""
        return cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Its order in memory; vLLM 0.33 decides it without this method."""
        return stride_order(include_num_layers_dimension)

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """Reasons against a layer, as vLLM prints them: its own, or else all of attnlib's."""
        ask = super().validate_configuration
        reasons: list[str] = ask(*args, **kwargs)
        return reasons or rejections(inspect.signature(ask).bind(*args, **kwargs).arguments)

    @classmethod
    def supports_sink(cls) -> bool:
        """Decided by attnlib's selection."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """See `supports_sink`."""
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """See `supports_sink`; masks that depend on the batch are those of `masks`."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """See `supports_mm_prefix`."""
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        """See `supports_mm_prefix`."""
        return True

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """By a score function."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Of keys and values in the cache."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """See `supports_sink`."""
        return True

    @classmethod
    def supports_dcp(cls) -> bool:
        """Decode context parallelism. vLLM's default differs between its releases."""
        return cls.get_impl_cls().supports_dcp

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders, encoders without a cache, and cross-attention."""
        return attn_type in ATTENTION_TYPES

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Yes if the selected backends read lengths on the device only. Before there are layers,
        the answer is for the sizes and the cache of the model."""
        try:
            return all(select(spec).get_builder_cls().follows_device for spec in _expected_specs())
        except AttnlibError:
            return False

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Caches of every layout and format may be saved and loaded."""
        return True


def _expected_specs() -> set[AttentionSpec]:
    """The specs of the layers that vLLM is asking about: those that exist, else those of a plain
    layer of the model, else those of most models."""
    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    if config is None or model is None:
        dtype = torch.float32 if current_platform.device_type == "cpu" else torch.bfloat16
        return {AttentionSpec(num_heads=PROBE_HEADS, head_size=128, dtype=dtype)}
    plain = AttentionSpec(
        num_heads=PROBE_HEADS,
        head_size=model.get_head_size(),
        dtype=model.dtype,
        **stored_fields(config.cache_config.cache_dtype, config),
    )
    return specs_of_engine(config) or {plain}
