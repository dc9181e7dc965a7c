"""The card of the backend: what it is called and what it can do. Importing it is cheap; the work is in `impl`."""

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
)
from attnlib.capabilities import Sizes

__all__ = ["GatherSdpaBackend"]


class GatherSdpaBackend(AttentionBackend):
    """Gather pages, then torch's scaled_dot_product_attention."""

    description = "pages gathered for torch's scaled_dot_product_attention (example plugin)"
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
        logits_soft_cap=False,  # scaled_dot_product_attention has none
        alibi=False,
        sink=False,
        mla=False,
        lse=False,  # it does not return one
        kv_sharing=True,
        batch_invariant=False,
        cudagraph=CudaGraphSupport.NEVER,  # lengths are read on the host
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
