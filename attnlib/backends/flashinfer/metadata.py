"""Metadata of the `flashinfer` backend: one plan per group of like layers, made once per batch from lengths that the host knows.

Single-token requests at the front go to the decode wrapper, everything behind them to the prefill wrapper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from attnlib.backends.flashinfer.plans import Lease, PageList, PlanKey, list_pages
from attnlib.backends.flashinfer.probe import find_api
from attnlib.backends.flashinfer.wrappers import Wrappers
from attnlib.device import resolve_device
from attnlib.errors import BackendUnavailableError, ContractError, UnsupportedConfigError
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.paged import PagedMetadata, paged_fields
from attnlib.metadata.parameters import PerLayerParameters, group_layers
from attnlib.spec import AttentionSpec, CudaGraphSupport
from attnlib.workspace import Workspace

__all__ = ["FlashInferMetadata", "FlashInferMetadataBuilder", "plan_key", "scratch_bytes"]


def plan_key(parameters: PerLayerParameters) -> PlanKey:
    """The part of a layer's parameters that its plan depends on; the scale is given at the call."""
    return PlanKey(
        parameters.window_left,
        0 if parameters.window_right == 0 else -1,
        parameters.logits_soft_cap or None,
    )


@dataclass(kw_only=True)
class FlashInferMetadata(PagedMetadata):
    """A batch for FlashInfer.

    Attributes:
        live_tokens: tokens of real requests, fewer than `num_actual_tokens` when a graph's batch is padded; None leaves it to the device (capture).
        decode_plans: key -> planned decode wrapper for the first `num_decode_tokens` rows; empty when there are none.
        prefill_plans: key -> planned prefill wrapper for the rows behind them.
        common: the batch it was built from, to plan again with other blocks.
        scratch: bytes on the device for one layer's packed output and LSE; layers take turns.
    """

    live_tokens: int | None
    decode_plans: Mapping[PlanKey, Lease] = field(default_factory=dict)
    prefill_plans: Mapping[PlanKey, Lease] = field(default_factory=dict)
    common: CommonAttentionMetadata
    scratch: torch.Tensor


class FlashInferMetadataBuilder(AttentionMetadataBuilder[FlashInferMetadata]):
    """Plans each batch. With `layers`, one plan for every window and soft cap among them; without, one for the spec's own.

    Raises:
        BackendUnavailableError: FlashInfer is missing.
        UnsupportedConfigError: a layer's window reaches beyond the query; the message names the layer.
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
        most = scratch_bytes(spec, self.limits.max_num_tokens) if self.limits else 0
        self._scratch = Workspace(self.device, most, fixed=self.limits is not None)
        self._graphs: dict[tuple[int, int], dict[PlanKey, Lease]] = {}

    @property
    def workspace_bytes(self) -> int:
        """Bytes of scratch memory held, apart from 8 MiB on the device and 8 MiB pinned for each plan in flight."""
        return self._wrappers.workspace_bytes + self._scratch.num_bytes

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashInferMetadata:
        """The batch, planned."""
        return self._build(common_attn_metadata, self._graphs.get(_graph_id(common_attn_metadata)))

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> FlashInferMetadata:
        """A batch planned over fixed buffers; later batches over the same persistent lengths are planned into them.

        Raises:
            UnsupportedConfigError: a batch of anything but single tokens.
        """
        common = common_attn_metadata
        if common.max_query_len != 1 or common.num_actual_tokens != common.num_reqs:
            raise UnsupportedConfigError(
                f"flashinfer captures graphs of single-token decodes only, not {common.num_reqs} requests of up to {common.max_query_len} tokens"
            )
        slot = _graph_id(common)
        if slot not in self._graphs:
            self._graphs[slot] = {
                key: self._wrappers.graph_pool(common).take() for key in self._keys
            }
        metadata = self._build(common, self._graphs[slot])
        metadata.live_tokens = None  # another number at every replay
        return metadata

    def update_block_table(
        self, metadata: FlashInferMetadata, block_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> FlashInferMetadata:
        """The same batch with other blocks: page ids are part of a plan, so it is planned again."""
        return self._build(
            metadata.common.replace(block_table_tensor=block_table, slot_mapping=slot_mapping), None
        )

    def _build(
        self, common: CommonAttentionMetadata, graph: dict[PlanKey, Lease] | None
    ) -> FlashInferMetadata:
        _check(common)
        fields = paged_fields(common, self.spec, None)
        decodes = _leading_single_tokens(common)
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
            live_tokens=int(common.query_start_loc_cpu[-1]),
            common=common,
            scratch=scratch,
        )
        # A request without new tokens has no row to compute, whatever its length.
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
        starts = common.query_start_loc_cpu[first:] - common.query_start_loc_cpu[first]
        pages = self._pages(common, lengths[first:], first)
        sees_all = bool((lengths >= common.query_lens_cpu.numpy())[first:].all())
        plans = {}
        for key in self._keys:
            lease = self._wrappers.pool(self._wrappers.prefill_backend(key, sees_all)).take()
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
        assert common.block_table_tensor is not None  # paged_fields has made sure
        return list_pages(
            lengths, common.block_table_tensor[first : first + len(lengths)], self.spec.block_size
        )

    def _plan_keys(self) -> tuple[PlanKey, ...]:
        left, right = self.spec.visible_window.as_kernel_args()
        own = PerLayerParameters(left, self.spec.logits_soft_cap, self.spec.head_size**-0.5, right)
        groups = group_layers(self.layers) or {own: ["(the spec's own)"]}
        for parameters, names in groups.items():
            if parameters.window_right > 0:
                raise UnsupportedConfigError(
                    f"layer {names[0]} sees {parameters.window_right} keys after the query's own; flashinfer's windows end at the query",
                    backend="flashinfer",
                )
        return tuple(dict.fromkeys(plan_key(parameters) for parameters in groups))


def scratch_bytes(spec: AttentionSpec, num_tokens: int) -> int:
    """Bytes for one layer's output, packed, and its LSE, float32, each from a multiple of 256 on."""
    rows = num_tokens * spec.num_heads
    return -(-rows * spec.head_size_v * spec.dtype.itemsize // 256) * 256 + rows * 4


def _graph_id(common: CommonAttentionMetadata) -> tuple[int, int]:
    """A captured batch is known by its size and by the address of its persistent lengths."""
    return common.num_reqs, common.seq_lens.data_ptr()


def _leading_single_tokens(common: CommonAttentionMetadata) -> int:
    """Requests at the front with exactly one new token; a padded graph batch (one row per request, empty rows last) counts whole."""
    lengths = common.query_lens_cpu.numpy()
    others = np.flatnonzero(lengths != 1)
    first = int(others[0]) if len(others) else len(lengths)
    padded = common.num_actual_tokens == common.num_reqs and not lengths[first:].any()
    return common.num_reqs if padded else first


def _check(common: CommonAttentionMetadata) -> None:
    if isinstance(common.causal, torch.Tensor):
        raise ContractError(
            "flashinfer takes one causal flag for a batch, not one per request: mask_kind=per_request needs another backend"
        )
    if common.query_bias is not None:
        raise ContractError(
            "flashinfer takes no query_bias: mask_kind=query_bias needs another backend (triton, torch)"
        )
