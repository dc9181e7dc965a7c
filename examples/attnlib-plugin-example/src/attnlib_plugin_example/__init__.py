"""The declaration of the backend. Importing it is cheap: the other modules load on first use."""

from __future__ import annotations

from typing import Any

import torch

from attnlib import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    Capabilities,
    CudaGraphSupport,
    MaskKind,
    Sizes,
)

__all__ = ["GatherSdpaBackend"]


class GatherSdpaBackend(AttentionBackend):
    """Gathers the pages of a request and calls torch's scaled_dot_product_attention."""

    description = "scaled_dot_product_attention over gathered pages (example plug-in)"
    capabilities = Capabilities(
        devices=("cpu", "cuda"),
        dtypes=(torch.float32, torch.float16, torch.bfloat16),
        kv_cache_dtypes=(torch.float32, torch.float16, torch.bfloat16),
        kv_scale_kinds=(),
        head_sizes=Sizes(minimum=8, maximum=256, multiple_of=8),
        head_size_v_may_differ=False,
        block_sizes=Sizes(),
        kv_cache_layouts=("NHD", "HND", "ANY"),
        group_sizes=Sizes(),
        attn_types=(AttentionType.DECODER,),
        mask_kinds=(MaskKind.CAUSAL, MaskKind.BIDIRECTIONAL),
        sliding_window=True,
        attention_chunks=False,
        logits_soft_cap=False,
        alibi=False,
        sink=False,
        mla=False,
        lse=False,  # scaled_dot_product_attention does not return the LSE
        kv_sharing=True,
        batch_invariant=False,
        cudagraph=CudaGraphSupport.NEVER,  # the lengths are read on the host
    )

    @staticmethod
    def get_name() -> str:
        return "gather_sdpa"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        from attnlib_plugin_example.impl import GatherSdpaImpl

        return GatherSdpaImpl

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        from attnlib_plugin_example.metadata import GatherSdpaMetadata

        return GatherSdpaMetadata

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        from attnlib_plugin_example.metadata import GatherSdpaBuilder

        return GatherSdpaBuilder
