"""vLLM's batches and levels of CUDA graphs in attnlib's terms."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backend import CommonAttentionMetadata as VllmBatch

from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import AttentionSpec, AttentionType, CudaGraphSupport, StateSpec
from attnlib.workspace import BatchLimits

__all__ = ["CUDA_GRAPH_SUPPORT", "batch_limits", "common_batch"]

CUDA_GRAPH_SUPPORT = {
    CudaGraphSupport.NEVER: AttentionCGSupport.NEVER,
    CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE: AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    CudaGraphSupport.UNIFORM_BATCH: AttentionCGSupport.UNIFORM_BATCH,
    CudaGraphSupport.ALWAYS: AttentionCGSupport.ALWAYS,
}
"""attnlib's levels in vLLM's terms."""


def batch_limits(vllm_config: Any) -> BatchLimits:
    """The largest batch of an engine."""
    return BatchLimits(
        max_num_reqs=vllm_config.scheduler_config.max_num_seqs,
        max_num_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        max_seq_len=vllm_config.model_config.max_model_len,
    )


def common_batch(
    batch: VllmBatch, spec: AttentionSpec | StateSpec, host_lengths: bool
) -> CommonAttentionMetadata:
    """vLLM's batch in attnlib's terms, without slots, which vLLM passes to `do_kv_cache_update`. No
    tensor is copied, except lengths that a backend needs on the host.
    """
    return CommonAttentionMetadata(
        query_start_loc=batch.query_start_loc,
        query_start_loc_cpu=batch.query_start_loc_cpu,
        seq_lens=batch.seq_lens,
        # vLLM's own host lengths are upper bounds.
        seq_lens_cpu=batch.seq_lens.cpu() if host_lengths else None,
        num_reqs=batch.num_reqs,
        num_actual_tokens=batch.num_actual_tokens,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        block_table_tensor=batch.block_table_tensor if spec.is_paged else None,
        is_cross_attention=isinstance(spec, AttentionSpec)
        and spec.attn_type is AttentionType.ENCODER_DECODER,
    )
