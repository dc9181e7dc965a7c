"""Metadata of the `flashinfer` backend: plans, made once per batch from lengths on the host.

Layers with equal windows and soft caps share a plan. The leading requests with one token use the
decode wrapper, all other requests the prefill wrapper.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from attnlib.backends.flashinfer.batch import (
    FlashInferMetadata,
    check_batch_form,
    graph_id,
    leading_single_tokens,
    plan_key,
    scratch_bytes,
)
from attnlib.backends.flashinfer.plans import Lease, PageList, PlanKey, list_pages
from attnlib.backends.flashinfer.probe import find_api
from attnlib.backends.flashinfer.wrappers import Wrappers
from attnlib.device import resolve_device
from attnlib.errors import BackendUnavailableError, UnsupportedConfigError
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.paged import paged_fields
from attnlib.metadata.parameters import PerLayerParameters, group_layers
from attnlib.metadata.strides import refuse_strided
from attnlib.spec import AttentionSpec, CudaGraphSupport
from attnlib.workspace import Workspace

__all__ = ["FlashInferMetadata", "FlashInferMetadataBuilder"]


class FlashInferMetadataBuilder(AttentionMetadataBuilder[FlashInferMetadata]):
    """Plans each batch: one plan per window and soft cap of `layers`, or of the spec without them.

    Raises:
        BackendUnavailableError: FlashInfer cannot be imported.
        UnsupportedConfigError: the window of a layer extends past the query.
    """

    cudagraph_support: ClassVar[CudaGraphSupport] = CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: ClassVar[int | None] = 1

    def __init__(
        self, spec: AttentionSpec, device: torch.device | str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(spec, device, **kwargs)
        info = resolve_device(self.device)
        api, problem = find_api(info.capability)
        if api is None:
            raise BackendUnavailableError(problem)
        self._keys = self._plan_keys()
        self._wrappers = Wrappers(
            api,
            spec,
            self.device,
            self.config,
            info.capability is not None and info.capability[0] == 9,
            self.limits,
        )
        max_bytes = scratch_bytes(spec, self.limits.max_num_tokens) if self.limits else 0
        self._scratch = Workspace(self.device, max_bytes, fixed=self.limits is not None)
        self._graphs: dict[tuple[int, int], dict[PlanKey, Lease]] = {}

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace and scratch memory, without the buffers of each plan (16 MiB)."""
        return self._wrappers.workspace_bytes + self._scratch.num_bytes

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashInferMetadata:
        """The metadata of one batch, planned."""
        return self._build(common_attn_metadata, None, replays=True)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> FlashInferMetadata:
        """A batch planned into fixed buffers.

        `build` plans later batches with the same `seq_lens` tensor into the same buffers.

        Raises:
            UnsupportedConfigError: a request has more than one token.
            ContractError: the batch has strided metadata.
        """
        common = common_attn_metadata
        refuse_strided(common)
        if common.max_query_len != 1 or common.num_actual_tokens != common.num_reqs:
            raise UnsupportedConfigError(
                "flashinfer captures graphs of single-token decodes only, not "
                f"{common.num_reqs} requests of up to {common.max_query_len} tokens"
            )
        graph = graph_id(common)
        if graph not in self._graphs:
            self._graphs[graph] = {
                key: self._wrappers.graph_pool(common).take() for key in self._keys
            }
        metadata = self._build(common, self._graphs[graph])
        metadata.num_unpadded_tokens = None  # differs at each replay
        return metadata

    def update_block_table(
        self, metadata: FlashInferMetadata, block_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> FlashInferMetadata:
        """The same batch with other blocks, planned again: a plan contains the block ids."""
        return self._build(
            metadata.common.replace(block_table_tensor=block_table, slot_mapping=slot_mapping), None
        )

    def _build(
        self,
        common: CommonAttentionMetadata,
        graph: dict[PlanKey, Lease] | None,
        *,
        replays: bool = False,
    ) -> FlashInferMetadata:
        common = self.with_host_lengths(common)
        assert common.query_start_loc_cpu is not None and common.seq_lens_cpu is not None
        fields = paged_fields(common, self.spec, None)
        check_batch_form(common)
        if replays:  # the batch may be one of a captured graph
            graph = self._graphs.get(graph_id(common))
        decodes = leading_single_tokens(common)
        fields.update(
            num_decodes=decodes,
            num_decode_tokens=min(decodes, common.num_actual_tokens),
            num_prefills=common.num_reqs - decodes,
            num_prefill_tokens=common.num_actual_tokens - min(decodes, common.num_actual_tokens),
            max_decode_query_len=1,
        )
        scratch = self._scratch.reserve(scratch_bytes(self.spec, common.num_actual_tokens))
        metadata = FlashInferMetadata(
            **fields,
            num_unpadded_tokens=int(common.query_start_loc_cpu[-1]),
            common=common,
            scratch=scratch,
        )
        # A request without query tokens has no rows, so its keys are not planned.
        lengths = np.where(
            common.query_lens_cpu.numpy() > 0, common.seq_lens_cpu.numpy(), 0
        ).astype(np.int32)
        if decodes and common.max_seq_len:
            metadata.decode_plans = self._plan_decode(
                common, lengths[:decodes], graph if decodes == common.num_reqs else None
            )
        if metadata.num_prefill_tokens and common.max_seq_len:
            metadata.prefill_plans = self._plan_prefill(
                common, lengths, decodes, bool(fields["causal"])
            )
        return metadata

    def _plan_decode(
        self,
        common: CommonAttentionMetadata,
        lengths: np.ndarray,
        graph: dict[PlanKey, Lease] | None,
    ) -> dict[PlanKey, Lease]:
        pages = self._pages(common, lengths, 0)
        plans = graph or {key: self._wrappers.pool("decode").take() for key in self._keys}
        for key, lease in plans.items():
            if graph is not None:
                lease.await_copy()
            self._wrappers.plan(
                lease,
                key,
                indptr=pages.indptr,
                indices=pages.indices,
                last_page_len=pages.last_page_len,
                head_dim=self.spec.head_size,
                seq_lens=pages.seq_lens,
            )
        return plans

    def _plan_prefill(
        self, common: CommonAttentionMetadata, lengths: np.ndarray, first: int, causal: bool
    ) -> dict[PlanKey, Lease]:
        assert common.query_start_loc_cpu is not None  # `_build` made sure of it
        starts = common.query_start_loc_cpu[first:] - common.query_start_loc_cpu[first]
        pages = self._pages(common, lengths[first:], first)
        every_row_sees_a_key = bool((lengths >= common.query_lens_cpu.numpy())[first:].all())
        plans = {}
        for key in self._keys:
            lease = self._wrappers.pool(
                self._wrappers.prefill_backend(key, every_row_sees_a_key)
            ).take()
            self._wrappers.plan(
                lease,
                key,
                qo_indptr=starts,
                paged_kv_indptr=pages.indptr,
                paged_kv_indices=pages.indices,
                paged_kv_last_page_len=pages.last_page_len,
                head_dim_qk=self.spec.head_size,
                causal=causal or key.window_right == 0,
                seq_lens=pages.seq_lens,
            )
            plans[key] = lease
        return plans

    def _pages(self, common: CommonAttentionMetadata, lengths: np.ndarray, first: int) -> PageList:
        assert common.block_table_tensor is not None  # checked by paged_fields
        return list_pages(
            lengths, common.block_table_tensor[first : first + len(lengths)], self.spec.block_size
        )

    def _plan_keys(self) -> tuple[PlanKey, ...]:
        left, right = self.spec.visible_window.as_kernel_args()
        of_spec = PerLayerParameters(
            left, self.spec.logits_soft_cap, self.spec.head_size**-0.5, right
        )
        groups = group_layers(self.layers) or {of_spec: ["(of the spec)"]}
        for parameters, names in groups.items():
            if parameters.window_right > 0:
                raise UnsupportedConfigError(
                    f"layer {names[0]} sees {parameters.window_right} keys after the query's own; "
                    "flashinfer supports windows without a bound after the query only: "
                    "choose triton or torch",
                    backend="flashinfer",
                )
        return tuple(dict.fromkeys(plan_key(parameters) for parameters in groups))
