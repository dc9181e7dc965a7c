"""The `torch` backend: plain torch on any device; the default on a CPU, and the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnlib.backends.base import AttentionBackend, AttentionImpl, StateImpl
from attnlib.capabilities import Capabilities, Sizes, StateCapabilities
from attnlib.device import DeviceInfo
from attnlib.kv_dtype import KV_FORMAT_PAIRS, PAGE_FORMATS
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.ops.dispatch import named_operation
from attnlib.spec import AttentionSpec, AttentionType, CudaGraphSupport, MaskKind

__all__ = ["TorchBackend"]


class TorchBackend(AttentionBackend):
    """Supports every spec, except selected keys and compressed entries in some layers."""

    description = "plain torch, on any device"
    capabilities = Capabilities(
        devices=("cpu", "cuda", "mps", "xpu"),
        rocm=True,
        dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        kv_cache_dtypes=(
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        ),
        kv_formats=tuple(PAGE_FORMATS),
        kv_format_pairs=KV_FORMAT_PAIRS,
        open_kv_formats=True,
        kv_scale_kinds=("tensor", "head"),
        head_sizes=Sizes(1),
        head_size_v_may_differ=True,
        block_sizes=Sizes(1),
        kv_cache_layouts=(
            "NHD",
            "HND",
            "NHD_INTERLEAVED",
            "HND_INTERLEAVED",
            "NHD_PACKED",
            "HND_PACKED",
            "ANY",
        ),
        group_sizes=Sizes(1),
        attn_types=tuple(AttentionType),
        mask_kinds=tuple(MaskKind),
        sliding_window=True,
        attention_chunks=True,
        logits_soft_cap=True,
        alibi=True,
        sink=True,
        score_function=True,
        query_tensors=True,
        token_sinks=True,
        key_selection=True,
        compressed_entries=True,
        mla=True,
        lse=True,
        kv_sharing=True,
        batch_invariant=True,
        cudagraph=CudaGraphSupport.NEVER,
    )
    state_capabilities = StateCapabilities(
        devices=("cpu", "cuda", "mps", "xpu"),
        rocm=True,
        dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        state_dtypes=(torch.float32, torch.bfloat16),
        key_sizes=Sizes(1),
        value_sizes=Sizes(1),
        group_sizes=Sizes(1),
        updates=("delta", "add"),
        decays=("head", "channel", "constant"),
        beta=True,
        skip=True,
        qk_norm=True,
        conv_widths=Sizes(2),
        conv_activations=("silu", "none"),
        conv_bias=True,
        forms=("plain", "tail", "snapshots"),
        chunk_sizes=Sizes(16),
        max_rollback=1 << 16,
        batch_invariant=True,
        cudagraph=CudaGraphSupport.NEVER,
    )

    @staticmethod
    def get_name() -> str:
        return "torch"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        from attnlib.backends.torch.impl import TorchImpl

        return TorchImpl

    @staticmethod
    def get_state_impl_cls() -> type[StateImpl]:
        from attnlib.backends.torch.states import TorchStateImpl

        return TorchStateImpl

    @classmethod
    def get_operation(cls, name: str) -> Callable[..., Any] | None:
        """Those of `attnlib.ops.torch`."""
        return named_operation("torch", name)

    @classmethod
    def supports_combination(cls, spec: AttentionSpec, device: DeviceInfo) -> list[str]:
        """Selected keys are computed for several lists at once, and read the cache as stored."""
        if spec.key_selection is not None and spec.scales_in_page:
            return [f"key_selection with kv_cache_dtype={spec.kv_format.name}: not supported"]
        if spec.compressed_entries is not None and spec.scales_in_page:
            return [f"compressed_entries with kv_cache_dtype={spec.kv_format.name}: not supported"]
        if spec.compressed_entries is not None and spec.batch_invariant:
            return ["compressed_entries with batch_invariant=True: not supported"]
        if spec.key_selection is not None and spec.batch_invariant:
            return [f"key_selection={spec.key_selection} with batch_invariant=True: not supported"]
        return []

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        from attnlib.backends.torch.metadata import TorchMetadata

        return TorchMetadata

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        from attnlib.backends.torch.metadata import TorchMetadataBuilder

        return TorchMetadataBuilder
