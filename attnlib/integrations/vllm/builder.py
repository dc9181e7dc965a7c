"""vLLM's common metadata of a batch as metadata of attnlib's backends."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
)
from vllm.v1.attention.backend import CommonAttentionMetadata as VllmBatch

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.vllm.context_parallel import DistributedBuilder
from attnlib.integrations.vllm.impl import AttnlibImpl
from attnlib.integrations.vllm.layer_spec import select
from attnlib.integrations.vllm.metadata import VllmMetadata
from attnlib.integrations.vllm.warm import GroupWarmup
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.parameters import PerLayerParameters
from attnlib.spec import AttentionSpec, CudaGraphSupport
from attnlib.workspace import BatchLimits

__all__ = ["AttnlibMetadataBuilder", "CUDA_GRAPH_SUPPORT", "batch_limits", "common_batch"]

CUDA_GRAPH_SUPPORT = {
    CudaGraphSupport.NEVER: AttentionCGSupport.NEVER,
    CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE: AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    CudaGraphSupport.UNIFORM_BATCH: AttentionCGSupport.UNIFORM_BATCH,
    CudaGraphSupport.ALWAYS: AttentionCGSupport.ALWAYS,
}
"""attnlib's levels in vLLM's terms."""


class AttnlibMetadataBuilder(AttentionMetadataBuilder[VllmMetadata]):
    """Builds the metadata of one group of layers, once per step.

    Args:
        kv_cache_spec: vLLM's description of the group's cache.
        layer_names: layers of the group.
        vllm_config: of the engine.
        device: where the layers run.
        block_table_width: columns of the group's block table; None where vLLM does not say (0.26).

    Attributes:
        builders: attnlib's builders by the spec of a layer.
        distributed: with decode context parallelism, instead of `builders`.
        limits, block_table_width: of the batches.
    """

    requires_block_table_width: ClassVar[bool] = True

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        block_table_width: int | None = None,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        by_spec: dict[AttentionSpec, dict[str, PerLayerParameters]] = {}
        for name in layer_names:
            impl = layers[name].impl
            impl.set_block_size(kv_cache_spec.block_size)
            left, right = impl.spec.visible_window.as_kernel_args()
            by_spec.setdefault(impl.spec, {})[name] = PerLayerParameters(
                left, impl.spec.logits_soft_cap, impl.scale, right
            )
        self.limits, self.block_table_width = batch_limits(vllm_config), block_table_width
        self.builders: dict[AttentionSpec, Any] = {}
        self.distributed: DistributedBuilder | None = None
        GroupWarmup(self, (layers[name] for name in layer_names), vllm_config)
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
            self.distributed = DistributedBuilder(list(by_spec), device, self.limits, interleave)
            self._init_reorder_batch_threshold(1)
            return
        for spec, parameters in by_spec.items():
            self.builders[spec] = select(spec, layer_names[0]).make_builder(
                spec, device, layer_names=list(parameters), layers=parameters, limits=self.limits
            )
        thresholds = [builder.reorder_batch_threshold for builder in self.builders.values()]
        decode = min((threshold for threshold in thresholds if threshold is not None), default=None)
        self._init_reorder_batch_threshold(decode, supports_spec_as_decode=True)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """What the backends of all layers can capture; with decode context parallelism, decodes of
        one token, because other batches attend in two parts."""
        layers = vllm_config.compilation_config.static_forward_context.values()
        specs = {
            layer.impl.spec
            for layer in layers
            if isinstance(getattr(layer, "impl", None), AttnlibImpl)
        }
        levels = [select(spec).get_builder_cls().cudagraph_support for spec in specs]
        level = min(levels, default=CudaGraphSupport.NEVER)
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            level = min(level, CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE)
        return CUDA_GRAPH_SUPPORT[level]

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: VllmBatch,
        fast_build: bool = False,
    ) -> VllmMetadata:
        """The metadata of one batch; `common_prefix_len` is ignored."""
        batch = common_attn_metadata
        if self.distributed is not None:
            distributed = self.distributed.build(batch)
            return VllmMetadata(batch.num_actual_tokens, {}, distributed)
        return self._metadata(batch, lambda b, common: b.build(0, common, fast_build))

    def build_for_cudagraph_capture(self, common_attn_metadata: VllmBatch) -> VllmMetadata:
        """The metadata to capture with. It holds for every batch of these sizes: vLLM replays the
        graph of a mixed batch for all mixed batches with as many tokens, and its second model
        runner captures with tokens that are distributed evenly over the requests."""
        if self.distributed is not None:
            return self.build(0, common_attn_metadata)
        mode = self.vllm_config.compilation_config.cudagraph_mode

        def capture(builder: Any, common: CommonAttentionMetadata) -> Any:
            if not mode.separate_routine():  # no graphs of their own for decodes
                common = common.replace(max_query_len=common.num_actual_tokens)
            return builder.build_for_cudagraph_capture(common)

        return self._metadata(common_attn_metadata, capture)

    def _metadata(self, batch: VllmBatch, build: Any) -> VllmMetadata:
        batches = {}
        for spec, builder in self.builders.items():
            batches[spec] = build(builder, common_batch(batch, spec, builder.needs_host_lengths))
        return VllmMetadata(batch.num_actual_tokens, batches)


def batch_limits(vllm_config: Any) -> BatchLimits:
    """The largest batch of an engine."""
    return BatchLimits(
        max_num_reqs=vllm_config.scheduler_config.max_num_seqs,
        max_num_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        max_seq_len=vllm_config.model_config.max_model_len,
    )


def common_batch(
    batch: VllmBatch, spec: AttentionSpec, host_lengths: bool
) -> CommonAttentionMetadata:
    """vLLM's batch in attnlib's terms, without slots, which vLLM passes to `do_kv_cache_update`. No
    tensor is copied, except lengths that a backend needs on the host.

    Raises:
        UnsupportedConfigError: vLLM wants another mask than the layers have.
    """
    if batch.causal is not spec.is_causal:
        raise UnsupportedConfigError(
            f"the batch has causal={batch.causal}, the layers have causal={spec.is_causal}: "
            "attnlib does not change the mask of a layer per batch under vLLM; use another "
            "attention backend"
        )
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
    )
