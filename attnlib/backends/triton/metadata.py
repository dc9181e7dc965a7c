"""Metadata of the `triton` backend: paged metadata, scratch memory, and splits of decodes."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from attnlib.backends.triton.declared import (
    decode_bytes,
    prefill_bytes,
    seq_len_bounds,
    warmup_lengths,
)
from attnlib.backends.triton.scheduler import Scheduler
from attnlib.backends.triton.tune import use_tuned_tiles
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.paged import PagedMetadata, paged_fields
from attnlib.metadata.strides import refuse_strided
from attnlib.ops.triton.decode_schedule import DecodeSchedule
from attnlib.ops.triton.hopper.sizes import decode_rows
from attnlib.ops.triton.paged_mixed import concurrent_ctas
from attnlib.spec import AttentionSpec, CudaGraphSupport
from attnlib.workspace import BatchLimits, Workspace

__all__ = ["TritonMetadata", "TritonMetadataBuilder"]

DECODE_THRESHOLD = 8
"""Most new tokens of a request in the decode part: decodes and verification steps."""


@dataclass(kw_only=True)
class TritonMetadata(PagedMetadata):
    """A batch for the Triton kernels.

    Attributes:
        scheduler: chooses splits from the bounds of the batch.
        workspace: partial results of decodes, or of a batch of prefills, whose keys are split,
            float32 or uint8 device; None when nothing is split, and for prefills of a builder
            without limits, whose plans allocate it. Its size follows from upper bounds only, so a
            graph replays it with other lengths.
        counters: int32 zeros by which CTAs of the Hopper kernels distribute work and detect the
            last split of a request; None where no kernel needs them.
        early: `BatchTensors.early` of the decodes.
    """

    scheduler: Scheduler
    workspace: torch.Tensor | None = None
    counters: torch.Tensor | None = None
    early: bool = False

    def behind_queries(self) -> TritonMetadata:
        """See `AttentionMetadata.behind_queries`; of batches without prefills."""
        if self.num_prefills:
            return self
        found = copy.copy(self)
        found.early = True
        return found

    @cached_property
    def decode_schedule(self) -> DecodeSchedule:
        """Splits of the decode part."""
        return self.scheduler.decode(
            self.num_decodes, self.max_decode_query_len, self.max_seq_len, self.causal is True
        )

    @cached_property
    def concurrent_schedule(self) -> DecodeSchedule | None:
        """Splits of the decode part while the prefill part runs concurrently; None where the parts
        run one after the other."""
        scheduler, decode = self.scheduler, self.decode_schedule
        uses_hopper = decode.uses_hopper or (
            scheduler.batch_invariant and scheduler.limits.capability[0] == 9
        )
        if not (self.num_decodes and self.num_prefills and uses_hopper):
            return None
        causal, lens = self.causal is True, self.seq_lens_cpu
        # Decodes are often over longer sequences than new prompts.
        longest = self.max_seq_len if lens is None else int(lens[self.num_decodes :].max())
        shape, bounds = scheduler.shape, (self.max_query_len, longest)
        ctas = concurrent_ctas(
            shape,
            scheduler.limits,
            num_decodes=self.num_decodes,
            decode_visible=scheduler.visible(self.max_decode_query_len, self.max_seq_len, causal),
            prefill_tokens=self.num_prefill_tokens,
            prefill_visible=scheduler.visible(*bounds, causal),
            bounds=bounds,
        )
        return decode._replace(max_ctas=ctas)


class TritonMetadataBuilder(AttentionMetadataBuilder[TritonMetadata]):
    """Requests of up to 8 new tokens (decodes and verification steps) form the decode part, or of
    up to `config["decode_query_len"]` new tokens."""

    cudagraph_support: ClassVar[CudaGraphSupport] = CudaGraphSupport.ALWAYS
    reorder_batch_threshold: ClassVar[int | None] = DECODE_THRESHOLD
    # Host lengths only decide where a mixed batch is split; an unsplit batch is correct too.
    needs_host_lengths: ClassVar[bool] = False
    follows_device: ClassVar[bool] = True

    def __init__(
        self, spec: AttentionSpec, device: torch.device | str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(spec, device, **kwargs)
        use_tuned_tiles(self.device)  # before any tile is chosen
        self.reorder_batch_threshold = int(  # type: ignore[misc]  # of this builder
            self.config.get("decode_query_len", DECODE_THRESHOLD)
        )
        self._scheduler = Scheduler.of(
            spec, self.device, str(self.config.get("kernels", "auto")), self.reorder_batch_threshold
        )
        # Consecutive steps have equal sizes and splits, and longer sequences.
        self._decodes = functools.lru_cache(maxsize=1024)(self._scheduler.decodes)
        self._needed_bytes = functools.lru_cache(maxsize=1024)(self._scheduler.workspace_bytes)
        self._counters: torch.Tensor | None = None
        dispatch = self._scheduler.dispatch()
        self._num_counters = (
            0 if dispatch is None else int(dispatch.num_counters(self._scheduler.limits))
        )
        prefills = declared = 0
        if self.limits is not None:
            prefills = prefill_bytes(self._scheduler, self.limits) if spec.is_paged else 0
            decodes = decode_bytes(self._scheduler, self.limits, self._longest_decode)
            declared = max(decodes, prefills)
        fixed = self.limits is not None
        self._workspace = Workspace(self.device, declared, fixed=fixed, dtype=torch.float32)
        # A graph holds its address. Without limits each plan of divided prefills has its own.
        self._prefill_space = self._workspace.reserve(prefills) if prefills else None

    @classmethod
    def max_decode_query_len(cls, spec: AttentionSpec) -> int:
        """As many tokens as fill the rows of the Hopper decode kernel."""
        return max(DECODE_THRESHOLD, decode_rows(spec.head_size_v) // spec.group_size)

    @property
    def shared_decode_shape(self) -> tuple[int, int] | None:
        """See `AttentionMetadataBuilder.shared_decode_shape`; of the Hopper kernel."""
        scheduler = self._scheduler
        dispatch = scheduler.dispatch()
        if dispatch is None:
            return None
        found: tuple[int, int] | None = dispatch.shared_decode_shape(
            scheduler.shape, scheduler.limits
        )
        return found

    @property
    def workspace_bytes(self) -> int:
        """Bytes of scratch memory held now; with `limits`, all that will ever be held."""
        return self._workspace.num_bytes

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonMetadata:
        """The batch, split into decodes and prefills, with scratch memory for split decodes."""
        return self._build(common_attn_metadata, this_batch_only=True)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> TritonMetadata:
        """The same with bounds that hold for every batch of these sizes. A batch with requests of
        more than `reorder_batch_threshold` new tokens is not split.

        Raises:
            ContractError: the batch has strided metadata.
        """
        refuse_strided(common_attn_metadata)
        return self._build(common_attn_metadata, this_batch_only=False)

    def _build(self, common: CommonAttentionMetadata, this_batch_only: bool) -> TritonMetadata:
        threshold = self.reorder_batch_threshold
        if not this_batch_only and threshold is not None and common.max_query_len > threshold:
            # A captured split would be that of one batch. Without a split the prefill kernels find
            # every request in the batch's own tensors, whatever its length at a replay.
            threshold = None
        fields = paged_fields(
            common,
            self.spec,
            threshold,
            this_batch_only=this_batch_only,
            needs_host_lengths=self.needs_host_lengths,
        )
        workspace, num_decodes = self._prefill_space, fields["num_decodes"]
        if num_decodes:
            of_length = self._decodes(
                num_decodes, fields["max_decode_query_len"], fields["causal"] is True
            )
            # The value of the cached property.
            schedule = fields["decode_schedule"] = of_length(fields["max_seq_len"])
            needed = self._needed_bytes(schedule, fields["num_decode_tokens"])
            workspace = self._workspace.reserve(needed) if needed else None
        fields["scheduler"], fields["workspace"] = self._scheduler, workspace
        fields["counters"] = self._step_counters(bool(fields["num_prefills"]))
        metadata: TritonMetadata = TritonMetadata.from_fields(fields)
        return metadata

    def _step_counters(self, prefills: bool) -> torch.Tensor | None:
        """Zeros, which the kernels leave as zeros. With `limits` always the same tensor, as a graph
        requires. Without, a batch with prefills gets its own; decodes share the builder's."""
        renewed = prefills and self.limits is None
        if self._num_counters and (self._counters is None or renewed):
            self._counters = torch.zeros(self._num_counters, dtype=torch.int32, device=self.device)
        return self._counters

    def seq_len_bounds(self, num_reqs: int, least: int, most: int) -> list[int]:
        """See `declared.seq_len_bounds`."""
        return seq_len_bounds(self._scheduler, num_reqs, least, most)

    def warmup_lengths(self, limits: BatchLimits) -> list[tuple[int, ...]]:
        """See `declared.warmup_lengths`; none for layers without pages."""
        if not self.spec.is_paged:
            return []
        return list(warmup_lengths(self._scheduler, limits, self._longest_decode))

    @property
    def _longest_decode(self) -> int:
        return self.reorder_batch_threshold or 1
