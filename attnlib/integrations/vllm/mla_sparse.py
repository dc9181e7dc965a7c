"""Latent attention to the keys that an indexer selects (DeepSeek V3.2), inside vLLM.

The indexer is vLLM's. For each layer that has one it writes positions of selected keys to a buffer
that the layers share; the other layers read what is there.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backend import CommonAttentionMetadata as VllmBatch

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.vllm.batch import CUDA_GRAPH_SUPPORT, common_batch
from attnlib.integrations.vllm.layer_spec import select
from attnlib.integrations.vllm.mla_backend import AttnlibMLABackend
from attnlib.integrations.vllm.mla_builder import (
    AttnlibMLAMetadataBuilder,
    VllmLatentMetadata,
    latent_specs,
)
from attnlib.integrations.vllm.mla_impl import AttnlibMLAImpl
from attnlib.integrations.vllm.warm import run_batches
from attnlib.sparse.key_selection import KeySelection, SelectedKeys

__all__ = ["AttnlibSparseMLABackend", "AttnlibSparseMLAImpl", "AttnlibSparseMLAMetadataBuilder"]


class AttnlibSparseMLAMetadataBuilder(AttnlibMLAMetadataBuilder):
    """Builds the metadata of one group of layers; see `AttnlibMLAMetadataBuilder`. All tokens are
    in the decode part: a list of selected keys bounds the work of a query, so that no query is
    expanded to the keys of the heads."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """What the backends can capture."""
        builders = [select(spec).get_builder_cls() for spec in latent_specs(vllm_config)]
        levels = [builder.cudagraph_support for builder in builders]
        return CUDA_GRAPH_SUPPORT[min(levels)] if levels else AttentionCGSupport.NEVER

    def _build(self, batch: VllmBatch, build_decodes: Any) -> VllmLatentMetadata:
        common = common_batch(batch, self._spec, self.decodes.needs_host_lengths)
        tokens, built = batch.num_actual_tokens, build_decodes(common)
        return VllmLatentMetadata(batch, batch.num_reqs, 0, tokens, built, None)


class AttnlibSparseMLAImpl(AttnlibMLAImpl):
    """One latent layer over selected keys.

    Args:
        topk_indices_buffer: `[T, K]` int32, positions of the keys that each token of the batch
            selects, negative for none. None where the layer has an indexer, which has the buffer.
        indexer: vLLM's; None for a layer that attends to the keys of an earlier one.
        index_group_builder: of vLLM's layers that share conversions of positions; not needed.
        arguments: as of `AttnlibMLAImpl`.

    Raises:
        UnsupportedConfigError: as of `AttnlibMLAImpl`, or there is no buffer.
    """

    is_sparse = True
    supports_dense_mha_prefill = False
    can_return_lse_for_decode = supports_dcp = supports_pcp = False

    def __init__(
        self,
        *args: Any,
        topk_indices_buffer: torch.Tensor | None = None,
        indexer: Any = None,
        index_group_builder: Any = None,
        **arguments: Any,
    ) -> None:
        self._indexer, self._buffer = indexer, topk_indices_buffer
        if self.topk_indices_buffer is None:
            raise UnsupportedConfigError(
                "a sparse latent layer has neither an indexer nor topk_indices_buffer: use another "
                "attention backend for this model"
            )
        selection = KeySelection(max_blocks=self.topk_indices_buffer.shape[-1])
        super().__init__(*args, key_selection=selection, **arguments)

    @property
    def topk_indices_buffer(self) -> torch.Tensor:
        """The buffer. vLLM replaces it, also that of the indexer, after the layer exists."""
        indexer: Any = self._indexer
        buffer: Any = self._buffer if indexer is None else indexer.topk_indices_buffer
        return buffer  # type: ignore[no-any-return]

    @topk_indices_buffer.setter
    def topk_indices_buffer(self, buffer: torch.Tensor) -> None:
        self._indexer, self._buffer = None, buffer

    def record_logical_topk_ready(self) -> None:
        """Nothing: positions are read as the indexer wrote them."""

    def warmup_key(self, layer: Any) -> Hashable:
        """See `AttnlibMLAImpl`."""
        return self.topk_indices_buffer.stride(), super().warmup_key(layer)

    def warm_up(self, layer: Any, builder: AttnlibMLAMetadataBuilder, shared: bool) -> None:
        """See `AttnlibImpl.warm_up`."""
        cache = self._view(layer.kv_cache, layer._k_scale)
        own, columns = builder.decodes if shared else None, builder.block_table_width
        run_batches(self._attention, cache, builder.limits, own, columns, self._device)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: VllmLatentMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All tokens of the batch. Arguments and results as of `AttnlibMLAImpl.forward_mqa`."""
        self._warm_up_pending()
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        cache = self._view(kv_c_and_k_pe_cache, layer._k_scale)
        keys = SelectedKeys(self.topk_indices_buffer[: query.shape[0], None])
        batch = attn_metadata.decode
        return self._attention(query, None, None, cache, batch, selected_keys=keys), None


class AttnlibSparseMLABackend(AttnlibMLABackend):
    """attnlib as a backend of sparse latent attention in vLLM 0.26 and 0.33."""

    @classmethod
    def is_sparse(cls) -> bool:
        """Yes: an indexer selects the keys."""
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """No: vLLM's ExampleConnector takes the keys of the indexer for keys and values."""
        return False

    @staticmethod
    def get_impl_cls() -> type[AttnlibSparseMLAImpl]:
        """The attention of one layer."""
        return AttnlibSparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[AttnlibSparseMLAMetadataBuilder]:
        """The builder of metadata."""
        return AttnlibSparseMLAMetadataBuilder

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """Reasons against a layer; see `AttnlibBackend`. vLLM 0.26 does not ask for decode context
        parallelism."""
        reasons = super().validate_configuration(*args, **kwargs)
        if get_current_vllm_config().parallel_config.decode_context_parallel_size > 1:
            reasons.append("attnlib: no decode context parallelism over selected keys")
        return reasons
