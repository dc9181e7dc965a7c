"""What the adapters of kernels over DeepSeek's latent caches have in common (P10, M12)."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.capabilities import Capabilities, Sizes
from attnlib.errors import ContractError
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.paged import paged_fields
from attnlib.spec import AttentionSpec, AttentionType, CudaGraphSupport, MaskKind

__all__ = ["latent_batch", "latent_capabilities", "other_layer_reasons"]

_HEAD_SIZE, _HEAD_SIZE_V = 576, 512


def latent_capabilities(
    *, min_capability: tuple[int, int], block_sizes: Sizes, **fields: Any
) -> Capabilities:
    """Declare a CUDA kernel over 16-bit latents of 512 elements and a rotary part of 64.

    Args:
        min_capability: lowest CUDA compute capability.
        block_sizes: tokens per cache block.
        fields: other fields of `Capabilities`.
    """
    return Capabilities(
        devices=("cuda",),
        min_capability=min_capability,
        dtypes=(torch.float16, torch.bfloat16),
        kv_cache_dtypes=(),
        kv_formats=(),
        kv_format_pairs=(),
        kv_scale_kinds=(),
        head_sizes=Sizes(exactly=(_HEAD_SIZE,)),
        head_size_v_may_differ=True,
        block_sizes=block_sizes,
        kv_cache_layouts=("NHD",),
        group_sizes=Sizes(1),
        attn_types=(AttentionType.DECODER,),
        mask_kinds=(MaskKind.CAUSAL, MaskKind.BIDIRECTIONAL),
        sliding_window=False,
        attention_chunks=False,
        logits_soft_cap=False,
        alibi=False,
        score_function=False,
        query_tensors=False,
        token_sinks=False,
        key_selection=False,
        compressed_entries=False,
        sink=True,  # applied after the kernel, from the LSE
        mla=True,
        lse=True,
        kv_sharing=True,
        batch_invariant=False,
        cudagraph=CudaGraphSupport.NEVER,  # the first layer of a batch plans it on the host
        allocates_in_forward=True,
        **fields,
    )


def other_layer_reasons(spec: AttentionSpec, without_latents: str) -> list[str]:
    """Return why a kernel over latents does not serve a layer of another kind.

    Args:
        spec: the layer.
        without_latents: what to say of a layer without `use_mla`.
    """
    reasons = []
    if not spec.use_mla:
        reasons.append(f"use_mla=False: {without_latents}")
    if spec.head_size_v != _HEAD_SIZE_V:
        reasons.append(
            f"head_size_v={spec.head_size_v} is not supported (supported: {_HEAD_SIZE_V})"
        )
    return reasons


def latent_batch(
    builder: AttentionMetadataBuilder[Any], common: CommonAttentionMetadata, kernels: str
) -> tuple[CommonAttentionMetadata, dict[str, Any]]:
    """A batch with its lengths on the host, and the fields of its metadata.

    Args:
        builder: of the metadata.
        common: the batch.
        kernels: their name, for the message.

    Raises:
        ContractError: a batch that `check_batch` refuses, or with causality per request or a query
            bias.
    """
    common = builder.with_host_lengths(common)
    fields = paged_fields(common, builder.spec, None)
    if isinstance(common.causal, torch.Tensor) or common.query_bias is not None:
        raise ContractError(
            f"{kernels} takes one causal flag per batch and no query_bias: choose triton or torch "
            "for this batch"
        )
    return common, fields
