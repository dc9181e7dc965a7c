"""vLLM's common metadata of a batch as metadata of attnlib's backends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
)
from vllm.v1.attention.backend import CommonAttentionMetadata as VllmBatch

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.vllm.batch import CUDA_GRAPH_SUPPORT, batch_limits, common_batch
from attnlib.integrations.vllm.context_parallel import DistributedBuilder
from attnlib.integrations.vllm.impl import AttnlibImpl
from attnlib.integrations.vllm.layer_spec import select
from attnlib.integrations.vllm.masks import BatchTensors, Mask, announced_masks, mask_of
from attnlib.integrations.vllm.metadata import VllmMetadata
from attnlib.integrations.vllm.warm import GroupWarmup
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.parameters import PerLayerParameters
from attnlib.spec import AttentionSpec, AttentionType, CudaGraphSupport

__all__ = ["AttnlibMetadataBuilder", "specs_of_engine"]


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
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        block_table_width: int | None = None,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.limits, self.block_table_width = batch_limits(vllm_config), block_table_width
        self.builders: dict[AttentionSpec, Any] = {}
        self.distributed: DistributedBuilder | None = None
        self._warmup = GroupWarmup(self, vllm_config)
        self._masks, self._specs = announced_masks(vllm_config), dict[Mask, list[AttentionSpec]]()
        self._tensors = BatchTensors(self.limits.max_num_reqs, device)
        self._layers: dict[str, Any] = {}
        self.take_layers()

    def take_layers(self) -> list[Any]:
        """vLLM's layers. It makes the builder of a draft model for its first layer and adds the
        others to the group later, before the first batch."""
        if len(self._layers) != len(self.layer_names):
            layers = self.vllm_config.compilation_config.static_forward_context
            self._layers = {name: layers[name] for name in self.layer_names}
            for layer in self._layers.values():
                layer.impl.set_block_size(self.kv_cache_spec.block_size)
                layer.impl.group_warmup = self._warmup
            self.builders.clear()
            self._specs.clear()
            self._make_builders()
        return list(self._layers.values())

    def _make_builders(self) -> None:
        impls = [layer.impl for layer in self._layers.values()]
        divided = [impl.distributed for impl in impls if impl.distributed is not None]
        if divided:  # drafts need not be
            self.distributed = DistributedBuilder(divided, self.limits)
            self._init_reorder_batch_threshold(1)
            self.supports_update_block_table = False
            self.supports_draft_decode_metadata_update = False
            return
        for mask in (Mask.OWN, *self._masks):
            self._specs_under(mask)
        thresholds = [builder.reorder_batch_threshold for builder in self.builders.values()]
        decode = min((threshold for threshold in thresholds if threshold is not None), default=None)
        self._init_reorder_batch_threshold(decode, supports_spec_as_decode=True)
        # Only ever less than the class says: vLLM's subclasses turn these off.
        if not self._is_one_kind():
            self.supports_update_block_table = False
        # Score tensors are copies, which an update of vLLM's tensors does not reach.
        if Mask.RETAINED in self._masks or not all(
            builder.follows_device for builder in self.builders.values()
        ):
            self.supports_draft_decode_metadata_update = False

    def _is_one_kind(self) -> bool:
        """Whether layers with equal caches, also of other groups, have equal specs, so that one
        group's metadata with other blocks is that of another group."""
        kinds: dict[Any, set[AttentionSpec]] = {}
        for spec in specs_of_engine(self.vllm_config):
            sizes = spec.num_kv_heads, spec.head_size, spec.kv_cache_dtype
            found = kinds.setdefault((*sizes, spec.attn_type, spec.sliding_window), set())
            found.add(spec.replace(block_size=16))  # vLLM has not decided that of all groups
        return self._attn_type is AttentionType.DECODER and all(len(s) == 1 for s in kinds.values())

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
        builders = [select(spec).get_builder_cls() for spec in specs_of_engine(vllm_config)]
        levels = [builder.cudagraph_support for builder in builders]
        level = min(levels, default=CudaGraphSupport.NEVER)
        if Mask.SPANS in announced_masks(vllm_config):
            level = min(level, CudaGraphSupport.UNIFORM_BATCH)
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            level = min(level, CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE)
        return CUDA_GRAPH_SUPPORT[level]

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """The longest decode of graphs that do not replay every batch: those of models with
        images. vLLM does not ask about other graphs."""
        builders = [select(spec).get_builder_cls() for spec in specs_of_engine(vllm_config)]
        if not all(builder.follows_device for builder in builders):
            return None
        return min((builder.reorder_batch_threshold or 1 for builder in builders), default=None)

    def update_block_table(
        self, metadata: VllmMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> VllmMetadata:
        """The metadata of another group with equal layers, with the blocks of this one."""
        self.take_layers()
        self._specs_under(metadata.mask)  # their builders exist now
        batches = {
            spec: self.builders[spec].update_block_table(batch, blk_table, None)
            for spec, batch in metadata.batches.items()
        }
        return replace(metadata, batches=batches)

    def update_draft_decode_metadata(self, metadata: VllmMetadata) -> None:
        """Nothing: kernels read lengths and blocks in the tensors of the batch."""

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
        if self.distributed is not None:
            distributed = self.distributed.build(common_attn_metadata, captures=True)
            return VllmMetadata(common_attn_metadata.num_actual_tokens, {}, distributed)
        if self._attn_type is AttentionType.ENCODER_DECODER:
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
        self.take_layers()
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


def specs_of_engine(vllm_config: Any) -> set[AttentionSpec]:
    """The specs of all layers of attnlib but those over latents."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    impls = (getattr(layer, "impl", None) for layer in layers)
    return {impl.spec for impl in impls if isinstance(impl, AttnlibImpl)}
