"""Metadata of the `triton` backend: paged metadata, scratch memory, and splits of decodes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from attnlib.backends.triton.scheduler import Scheduler
from attnlib.backends.triton.tune import use_tuned_tiles
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.paged import PagedMetadata, paged_fields
from attnlib.metadata.strides import refuse_strided
from attnlib.ops.triton.decode_schedule import DecodeSchedule
from attnlib.ops.triton.heuristics.splits import paged_decode_workspace_bytes
from attnlib.ops.triton.heuristics.tile_table import work_bounds
from attnlib.ops.triton.hopper.preference import HOPPER_DECODE_KEYS, SHORT_DECODE_KEYS
from attnlib.ops.triton.hopper.sizes import decode_rows
from attnlib.ops.triton.paged_mixed import concurrent_ctas
from attnlib.spec import AttentionSpec, CudaGraphSupport
from attnlib.workspace import Workspace

__all__ = ["TritonMetadata", "TritonMetadataBuilder"]

DECODE_THRESHOLD = 8
"""Most new tokens of a request in the decode part: decodes and verification steps."""


@dataclass(kw_only=True)
class TritonMetadata(PagedMetadata):
    """A batch for the Triton kernels.

    Attributes:
        scheduler: chooses splits from the bounds of the batch.
        workspace: partial results of decodes whose keys are split, float32 or uint8 device; None
            when nothing is split. Its size follows from upper bounds only, so a graph replays it
            with other lengths.
        counters: int32 zeros by which CTAs of the Hopper kernels distribute work and detect the
            last split of a request; None where no kernel needs them.
    """

    scheduler: Scheduler
    workspace: torch.Tensor | None = None
    counters: torch.Tensor | None = None

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
        causal = self.causal is True
        shape, bounds = scheduler.shape, (self.max_query_len, self.max_seq_len)
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
        self._workspace = Workspace(
            self.device, self._declared_bytes(), fixed=self.limits is not None, dtype=torch.float32
        )

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
        workspace, num_decodes = None, fields["num_decodes"]
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

    def _declared_bytes(self) -> int:
        """The most that any batch within the limits needs. Splits fall as requests rise, so every
        number of requests is considered."""
        limits, scheduler = self.limits, self._scheduler
        if limits is None:
            return 0
        most = 0
        longest = min(self.reorder_batch_threshold or 1, limits.max_num_tokens)
        for query_len in range(1, longest + 1):
            most = max(most, scheduler.hopper_bytes(limits.max_num_tokens, query_len))
            for reqs in range(1, min(limits.max_num_reqs, limits.max_num_tokens // query_len) + 1):
                tokens = min(reqs * query_len, limits.max_num_tokens)
                if scheduler.batch_invariant:
                    schedule = scheduler.decode(reqs, query_len, limits.max_seq_len, False)
                    most = max(most, scheduler.workspace_bytes(schedule, tokens))
                    continue
                splits = max(
                    scheduler.decode(reqs, query_len, seq_len, False).num_splits
                    for seq_len in self._tile_edges(reqs, limits.max_seq_len)
                )
                needed = paged_decode_workspace_bytes(
                    tokens, self.spec.num_heads, self.spec.head_size_v, splits
                )
                most = max(most, needed)
        return most

    def seq_len_bounds(self, num_reqs: int, least: int, most: int) -> list[int]:
        """Both sides of every length at which another kernel or tile is chosen.

        Where tiles depend on work these are the edges between two tiles, and every power of 2,
        where keys may begin to be split. On Hopper, also the lengths from which its own decode is
        faster or has another tile. `least` and `most` are on the two sides of the one length from
        which a prefill has another kernel (`hopper_tiles.SHORT_CONTEXT`).
        """
        turns: list[int] = []
        if self._scheduler.limits.capability[0] == 9:
            bounds = (SHORT_DECODE_KEYS, *HOPPER_DECODE_KEYS)
            turns = [keys - side for keys in bounds for side in (0, 1)]
            edges = self._work_edges("hopper_decode", num_reqs)
            turns += [edge + side for edge in edges for side in (0, 1)]
        inner = {edge + side for edge in self._tile_edges(num_reqs, most) for side in (0, 1)}
        if len(inner) > 2:
            powers = range(most.bit_length())
            inner |= {(1 << exponent) - side for exponent in powers for side in (0, 1)}
        return sorted({least, most, *(bound for bound in (*inner, *turns) if least < bound < most)})

    def _tile_edges(self, num_reqs: int, max_seq_len: int) -> list[int]:
        """The longest sequences of each decode tile: a tile for less work may split more."""
        edges = self._work_edges("decode", num_reqs)
        return [max_seq_len, *(edge for edge in edges if 0 < edge < max_seq_len)]

    def _work_edges(self, op: str, num_reqs: int) -> list[int]:
        """The longest sequences of the classes of work that an operation's tiles depend on."""
        chip, heads = self._scheduler.limits, self.spec.num_kv_heads
        return [bound * chip.num_sms // (num_reqs * heads) for bound in work_bounds(op, chip.tuned)]
