"""vLLM's common metadata of a batch as metadata of attnlib's backends, for latent attention."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backend import CommonAttentionMetadata as VllmBatch
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.vllm.batch import CUDA_GRAPH_SUPPORT, batch_limits, common_batch
from attnlib.integrations.vllm.layer_spec import select
from attnlib.integrations.vllm.warm import GroupWarmup
from attnlib.metadata.batch_slice import slice_batch
from attnlib.parallel import ParallelAttention
from attnlib.spec import AttentionSpec, CudaGraphSupport

__all__ = ["AttnlibMLAMetadataBuilder", "VllmLatentMetadata", "latent_specs"]


class VllmLatentMetadata(MLACommonMetadata[Any]):
    """One batch for a group of latent layers. vLLM writes the new latents and passes the tokens of
    both parts to the layers separately. By its class, vLLM's ExampleConnector knows that pages have
    latents.

    Args:
        batch: vLLM's.
        num_decodes, num_prefills: requests of each part.
        num_decode_tokens: tokens of the decode part, which comes first.
        decode, prefill: attnlib's metadata of each part, without slots; None for an empty part.
    """

    decode: Any
    prefill: Any

    def __init__(
        self,
        batch: VllmBatch,
        num_decodes: int,
        num_prefills: int,
        num_decode_tokens: int,
        decode: Any,
        prefill: Any,
    ) -> None:
        super().__init__(
            num_reqs=batch.num_reqs,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            num_actual_tokens=batch.num_actual_tokens,
            query_start_loc=batch.query_start_loc,
            slot_mapping=batch.slot_mapping,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            num_prefills=num_prefills,
            prefill=prefill,
            decode=decode,
        )


class AttnlibMLAMetadataBuilder(AttentionMetadataBuilder[VllmLatentMetadata]):
    """Builds the metadata of one group of latent layers, once per step. Arguments, `limits` and
    `block_table_width` as in `AttnlibMetadataBuilder`.

    Attributes:
        decodes, prefills: attnlib's builders of the two parts of a batch.
        is_divided: whether they are those of divided layers.

    Raises:
        UnsupportedConfigError: layers of one group with different specs.
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
        self.limits, self.block_table_width = batch_limits(vllm_config), block_table_width
        self._divides_prompts = vllm_config.parallel_config.prefill_context_parallel_size > 1
        self._warmup = GroupWarmup(self, vllm_config)
        self._layers: dict[str, Any] = {}
        first = self.take_layers()[0].impl
        self._spec = first.spec
        backend = select(self._spec, layer_names[0])
        # A builder with limits uses the same memory for each batch, and both parts are in use at
        # the same time.
        divided: ParallelAttention | None = first.divided
        self.is_divided = divided is not None
        self.decodes: Any
        self.prefills: Any
        if divided is not None:
            self.decodes, self.prefills = (divided.make_builder(self.limits) for _ in range(2))
            self._init_reorder_batch_threshold(1)
            return
        self.decodes, self.prefills = (
            backend.make_builder(self._spec, device, layer_names=layer_names, limits=self.limits)
            for _ in range(2)
        )
        threshold = self.decodes.reorder_batch_threshold
        self._init_reorder_batch_threshold(threshold or 1, supports_spec_as_decode=True)

    def take_layers(self) -> list[Any]:
        """See `AttnlibMetadataBuilder.take_layers`."""
        if len(self._layers) != len(self.layer_names):
            layers = self.vllm_config.compilation_config.static_forward_context
            self._layers = {name: layers[name] for name in self.layer_names}
            for layer in self._layers.values():
                layer.impl.set_block_size(self.kv_cache_spec.block_size)
                layer.impl.group_warmup = self._warmup
            specs = {layer.impl.spec for layer in self._layers.values()}
            if len(specs) > 1:
                raise UnsupportedConfigError(
                    f"latent layers of one cache group have {len(specs)} specs; attnlib needs one: "
                    f"{sorted(map(str, specs))}"
                )
        return list(self._layers.values())

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Decodes and verifications as far as the backend can capture them. Prefills compute keys
        and values of the heads in chunks of the context, which needs lengths on the host."""
        specs = latent_specs(vllm_config)
        levels = [select(spec).get_builder_cls().cudagraph_support for spec in specs]
        level = min(levels, default=CudaGraphSupport.NEVER)
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            level = min(level, CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE)
        return CUDA_GRAPH_SUPPORT[min(level, CudaGraphSupport.UNIFORM_BATCH)]

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: VllmBatch,
        fast_build: bool = False,
    ) -> VllmLatentMetadata:
        """The metadata of one batch; `common_prefix_len` is ignored."""
        return self._build(common_attn_metadata, self._build_decodes)

    def build_for_cudagraph_capture(self, common_attn_metadata: VllmBatch) -> VllmLatentMetadata:
        """The metadata to capture decodes with."""

        writes = {"write": False} if self.is_divided else {}

        def build(common: Any) -> Any:
            return self.decodes.build_for_cudagraph_capture(common, **writes)

        return self._build(common_attn_metadata, build)

    def _build_decodes(self, common: Any) -> Any:
        if self.is_divided:
            # A slice keeps the bounds of the batch.
            return self.decodes.build(common.replace(max_query_len=1), write=False)
        return self.decodes.build(0, common)

    def _build(self, batch: VllmBatch, build_decodes: Any) -> VllmLatentMetadata:
        self.take_layers()
        decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(
            batch,
            decode_threshold=self.reorder_batch_threshold or 1,
            # Every rank has the same decodes, but other parts of prompts, which may be as short.
            treat_short_extends_as_decodes=not self._divides_prompts,
        )
        own = self.decodes.cached if self.is_divided else self.decodes
        common = common_batch(batch, self._spec, own.needs_host_lengths)
        decode = prefill = None
        tokens, bounds = batch.num_actual_tokens, batch.seq_lens_cpu_upper_bound
        if decodes:
            part = slice(0, decodes), slice(0, decode_tokens), slice(0, 0)
            decode = build_decodes(slice_batch(common, *part) if prefills else common)
        if prefills:
            part = slice(decodes, batch.num_reqs), slice(decode_tokens, tokens), slice(0, 0)
            rest = slice_batch(common, *part) if decodes else common
            if self.is_divided:
                prefill = self.prefills.build(rest, write=False, has_context=True)
                return VllmLatentMetadata(batch, decodes, prefills, decode_tokens, decode, prefill)
            if rest.seq_lens_cpu is None and bounds is not None:
                rest.seq_lens_cpu = bounds[part[0]]  # exact for prefills
            prefill = self.prefills.build(0, rest)
        return VllmLatentMetadata(batch, decodes, prefills, decode_tokens, decode, prefill)


def latent_specs(vllm_config: Any) -> set[AttentionSpec]:
    """The specs of all layers of attnlib over latents."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    specs = (getattr(getattr(layer, "impl", None), "spec", None) for layer in layers)
    return {spec for spec in specs if isinstance(spec, AttentionSpec) and spec.use_mla}
