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
from attnlib.integrations.vllm.masks import BatchTensors, Mask, announced_masks, mask_of
from attnlib.integrations.vllm.metadata import VllmMetadata
from attnlib.integrations.vllm.warm import GroupWarmup
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.parameters import PerLayerParameters
from attnlib.spec import AttentionSpec, AttentionType, CudaGraphSupport
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
        self._layers = {name: layers[name] for name in layer_names}
        for layer in self._layers.values():
            layer.impl.set_block_size(kv_cache_spec.block_size)
        self.limits, self.block_table_width = batch_limits(vllm_config), block_table_width
        self.builders: dict[AttentionSpec, Any] = {}
        self.distributed: DistributedBuilder | None = None
        GroupWarmup(self, self._layers.values(), vllm_config)
        self._masks, self._specs = announced_masks(vllm_config), dict[Mask, list[AttentionSpec]]()
        self._tensors = BatchTensors(self.limits.max_num_reqs, device)
        impls = [layer.impl for layer in self._layers.values()]
        if any(impl.is_distributed for impl in impls):  # drafts need not be
            interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
            specs = list({impl.spec for impl in impls})
            self.distributed = DistributedBuilder(specs, device, self.limits, interleave)
            self._init_reorder_batch_threshold(1)
            return
        for mask in (Mask.OWN, *self._masks):
            self._specs_under(mask)
        thresholds = [builder.reorder_batch_threshold for builder in self.builders.values()]
        decode = min((threshold for threshold in thresholds if threshold is not None), default=None)
        self._init_reorder_batch_threshold(decode, supports_spec_as_decode=True)

    def _specs_under(self, mask: Mask) -> list[AttentionSpec]:
        """The specs of the layers under a mask; each has a builder from now on."""
        if mask in self._specs:
            return self._specs[mask]
        retained = getattr(self.vllm_config.model_config, "rswa_window", None) or 0
        by_spec: dict[AttentionSpec, dict[str, PerLayerParameters]] = {}
        for name, layer in self._layers.items():
            clamped = getattr(layer, "mm_prefix_clamp_sliding_window", False)
            spec = layer.impl.use_mask(mask, clamped=clamped, retained=retained)
            left, right = spec.visible_window.as_kernel_args()
            by_spec.setdefault(spec, {})[name] = PerLayerParameters(
                left, spec.logits_soft_cap, layer.impl.scale, right
            )
        for spec, parameters in by_spec.items():
            if spec not in self.builders:
                names, limits = list(parameters), self.limits
                self.builders[spec] = select(spec, names[0]).make_builder(
                    spec, self.device, layer_names=names, layers=parameters, limits=limits
                )
        self._specs[mask] = list(by_spec)
        return self._specs[mask]

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """What the backends of all layers can capture; with decode context parallelism, decodes of
        one token, because other batches attend in two parts; for models with images, decodes and
        verifications, because a graph of prefills has one mask."""
        layers = vllm_config.compilation_config.static_forward_context.values()
        specs = {
            layer.impl.spec
            for layer in layers
            if isinstance(getattr(layer, "impl", None), AttnlibImpl)
        }
        levels = [select(spec).get_builder_cls().cudagraph_support for spec in specs]
        level = min(levels, default=CudaGraphSupport.NEVER)
        if Mask.SPANS in announced_masks(vllm_config):
            level = min(level, CudaGraphSupport.UNIFORM_BATCH)
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
        return self._metadata(
            common_attn_metadata, lambda b, common: b.build(0, common, fast_build)
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: VllmBatch) -> VllmMetadata:
        """The metadata to capture with. It holds for every batch of these sizes: vLLM replays the
        graph of a mixed batch for all mixed batches with as many tokens, and its second model
        runner captures with tokens that are distributed evenly over the requests."""
        if self.distributed is not None or self._attn_type is AttentionType.ENCODER_DECODER:
            # vLLM's builder of cross-attention overrides `build`.
            return self.build(0, common_attn_metadata)
        mode = self.vllm_config.compilation_config.cudagraph_mode

        def capture(builder: Any, common: CommonAttentionMetadata) -> Any:
            if not mode.separate_routine():  # no graphs of their own for decodes
                common = common.replace(max_query_len=common.num_actual_tokens)
            return builder.build_for_cudagraph_capture(common)

        return self._metadata(common_attn_metadata, capture)

    @property
    def _attn_type(self) -> AttentionType:
        attn_type: AttentionType = next(iter(self._layers.values())).impl.spec.attn_type
        return attn_type

    def _metadata(self, batch: VllmBatch, build: Any) -> VllmMetadata:
        mask, spans = mask_of(batch, self._attn_type, self._masks)
        tokens = batch.num_actual_tokens
        if self.distributed is not None:
            if mask is not Mask.OWN:
                raise UnsupportedConfigError(
                    f"decode context parallelism: a batch with the mask {mask.value!r}; use "
                    "another attention backend"
                )
            return VllmMetadata(tokens, {}, self.distributed.build(batch))
        batches = {}
        # Some layers of a model may be causal where others see images.
        for part in (mask, Mask.OWN) if mask is Mask.SPANS else (mask,):
            for spec in self._specs_under(part):
                builder = self.builders[spec]
                common = common_batch(batch, spec, builder.needs_host_lengths)
                common.causal = self._tensors.causal(batch)
                common.score_tensors = self._tensors.score_tensors(part, batch, spans, spec)
                batches[spec] = build(builder, common)
        return VllmMetadata(tokens, batches, mask=mask, mm_prefix_range_tensor=spans)


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
        is_cross_attention=spec.attn_type is AttentionType.ENCODER_DECODER,
    )
