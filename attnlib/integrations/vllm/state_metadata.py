"""Metadata of state layers from vLLM's batches, for pages that hold slots of attnlib."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backend import CommonAttentionMetadata as VllmBatch
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from attnlib.integrations.vllm.batch import CUDA_GRAPH_SUPPORT, batch_limits, common_batch
from attnlib.integrations.vllm.names import backend_name
from attnlib.integrations.vllm.warm import GroupWarmup
from attnlib.layer.state_warmup import unused_batches
from attnlib.metadata.states import StateMetadata
from attnlib.spec import CudaGraphSupport

__all__ = ["AttnlibStateBackend", "AttnlibStateBuilder"]


class AttnlibStateBuilder(AttentionMetadataBuilder[StateMetadata]):
    """Builds the metadata of one group of state layers, once per step.

    Args:
        kv_cache_spec: vLLM's description of the group's pages.
        layer_names: layers of the group.
        vllm_config: of the engine.
        device: where the layers run.
    """

    supports_update_block_table: ClassVar[bool] = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        self._layers = [layers[name] for name in layer_names]
        self._builder = self._make_builder()
        warmup = GroupWarmup(self, vllm_config)
        for layer in self._layers:
            layer.group_warmup = warmup
        # Graphs replay with these slots: a build changes them in place.
        reqs = vllm_config.scheduler_config.max_num_seqs
        self._slots = torch.full((reqs,), -1, dtype=torch.int32, device=device)

    def _make_builder(self) -> Any:
        layer = self._layers[0].state_layer
        return layer.backend.make_builder(layer.spec, self.device)

    def take_layers(self) -> list[Any]:
        """vLLM's layers, when all have run: kernels depend on the strides of their inputs."""
        return self._layers if all(layer.inputs for layer in self._layers) else []

    def warmup_metadata(self, shared: bool) -> Iterator[StateMetadata]:
        """The batches of a warm-up. All slots are -1.

        Args:
            shared: whether this builder makes them; no metadata of it is in use.
        """
        limits = batch_limits(self.vllm_config)
        builder = self._builder if shared else self._make_builder()
        for _, metadata in unused_batches(builder, limits, self.device, with_sources=False):
            yield metadata

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """What the backends of all layers can capture, but not mixed batches."""
        layers = vllm_config.compilation_config.static_forward_context.values()
        found = (getattr(layer, "state_layer", None) for layer in layers)
        levels = [x.backend.state_capabilities.cudagraph for x in found if x is not None]
        return CUDA_GRAPH_SUPPORT[min(*levels, CudaGraphSupport.UNIFORM_BATCH)]

    def build(
        self, common_prefix_len: int, common_attn_metadata: VllmBatch, fast_build: bool = False
    ) -> StateMetadata:
        """The metadata of one batch; the other arguments are ignored."""
        batch = common_attn_metadata
        common = common_batch(batch, self._builder.spec, self._builder.needs_host_lengths)
        common.state_slots = self._slots_in(batch.block_table_tensor, batch.seq_lens)
        metadata: StateMetadata = self._builder.build(0, common)
        return metadata

    def update_block_table(
        self, metadata: StateMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> StateMetadata:
        """The metadata of another group of state layers, with the pages of this one."""
        return metadata.with_slots(self._slots_in(blk_table, metadata.seq_lens))

    def _slots_in(self, table: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        """The page of each request. Page 0 is vLLM's padding, which is slot -1 (T7)."""
        mode = self.vllm_config.cache_config.mamba_cache_mode
        pages = mamba_get_block_table_tensor(table, seq_lens, self.kv_cache_spec, mode)
        slots = self._slots[: pages.shape[0]]
        slots.copy_(pages if pages.dim() == 1 else pages[:, 0])
        return slots.masked_fill_(slots <= 0, -1)


class AttnlibStateBackend(AttentionBackend):
    """Whose builder makes the metadata of attnlib's state layers; they compute without an impl."""

    @staticmethod
    def get_name() -> str:
        """vLLM's name for attnlib."""
        return backend_name()

    @staticmethod
    def get_impl_cls() -> Any:
        """None: a state layer calls attnlib itself."""
        return None

    @staticmethod
    def get_builder_cls() -> type[AttnlibStateBuilder]:
        """The builder of metadata."""
        return AttnlibStateBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        """Its layers have pages of states."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """By the form `tail` (T18)."""
        return True
