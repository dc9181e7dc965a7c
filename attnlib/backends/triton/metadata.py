"""Metadata of the `triton` backend: the common paged metadata, and scratch memory for decodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attnlib.backends.triton.tune import use_tuned_tiles
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.paged import PagedMetadata, paged_fields
from attnlib.ops.triton.heuristics.device import limits_of
from attnlib.ops.triton.heuristics.tile_table import work_bounds
from attnlib.ops.triton.hopper.loader import hopper_choice
from attnlib.ops.triton.hopper.support import HOPPER_DECODE_KEYS
from attnlib.ops.triton.paged_decode import paged_decode_num_splits, paged_decode_workspace_bytes
from attnlib.spec import AttentionSpec, CudaGraphSupport
from attnlib.workspace import Workspace

__all__ = ["TritonMetadata", "TritonMetadataBuilder"]


@dataclass(kw_only=True)
class TritonMetadata(PagedMetadata):
    """A batch for the Triton kernels.

    Attributes:
        workspace: partial results of the programs that share one request's keys in decode, [>= elements] float32 device; None when nothing is split.
            Its size follows from upper bounds only, so a graph replays it with other lengths.
        counters: int32 zeros by which programs of the Hopper kernels share work and find out who merges it; None where nothing needs them.
    """

    workspace: torch.Tensor | None = None
    counters: torch.Tensor | None = None


class TritonMetadataBuilder(AttentionMetadataBuilder[TritonMetadata]):
    """Requests of up to 8 new tokens (decode and verify steps) go the decode way."""

    cudagraph_support: ClassVar[CudaGraphSupport] = CudaGraphSupport.ALWAYS
    reorder_batch_threshold: ClassVar[int | None] = 8
    needs_host_lengths: ClassVar[bool] = (
        False  # they only say where a mixed batch may be cut; uncut it is served right too
    )

    def __init__(
        self, spec: AttentionSpec, device: torch.device | str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(spec, device, **kwargs)
        use_tuned_tiles(self.device)  # before anything is planned from tiles
        # The heuristic reads heads, sizes, dtype and device off tensors; empty ones say as much as real ones.
        self._query_like = torch.empty(
            0, spec.num_heads, spec.head_size, dtype=spec.dtype, device=self.device
        )
        self._cache_like = torch.empty(
            0,
            spec.block_size,
            spec.num_kv_heads,
            spec.head_size,
            dtype=spec.kv_dtype,
            device=self.device,
        )
        self._counters: torch.Tensor | None = None
        own = self._hopper()
        self._num_counters = (
            0 if own is None else int(own.num_counters(limits_of(self._query_like)))
        )
        self._workspace = Workspace(
            self.device, self._declared_bytes(), fixed=self.limits is not None
        )

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
        """The batch, cut into decodes and prefills, with scratch memory for the decode's splits."""
        return self._build(common_attn_metadata, this_batch_only=True)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> TritonMetadata:
        """The same with bounds that hold for every batch of these sizes."""
        return self._build(common_attn_metadata, this_batch_only=False)

    def _build(
        self, common_attn_metadata: CommonAttentionMetadata, this_batch_only: bool
    ) -> TritonMetadata:
        fields = paged_fields(
            common_attn_metadata,
            self.spec,
            self.reorder_batch_threshold,
            this_batch_only=this_batch_only,
        )
        workspace = None
        if fields["num_decodes"]:
            causal = fields["causal"] is True
            splits = self._splits(
                fields["num_decodes"], fields["max_decode_query_len"], fields["max_seq_len"], causal
            )
            needed = paged_decode_workspace_bytes(
                fields["num_decode_tokens"], self.spec.num_heads, self.spec.head_size_v, splits
            )
            needed = max(
                needed,
                self._hopper_bytes(fields["num_decode_tokens"], fields["max_decode_query_len"]),
            )
            workspace = self._workspace.reserve(needed).view(torch.float32) if needed else None
        return TritonMetadata(
            **fields,
            workspace=workspace,
            counters=self._step_counters(bool(fields["num_prefills"])),
        )

    def _step_counters(self, prefills: bool) -> torch.Tensor | None:
        """Zeros, which the kernels leave as they found them: with `limits` always the same ones, as a graph wants. Without, a
        batch with prefills gets its own; decodes share those of the builder, as they share its workspace."""
        if self._num_counters and (self._counters is None or (prefills and self.limits is None)):
            self._counters = torch.zeros(self._num_counters, dtype=torch.int32, device=self.device)
        return self._counters

    def _splits(self, num_reqs: int, query_len: int, max_seq_len: int, causal: bool) -> int:
        spec = self.spec
        return paged_decode_num_splits(
            self._query_like,
            self._cache_like,
            spec.head_size_v,
            num_reqs=num_reqs,
            max_query_len=query_len,
            max_seq_len=max_seq_len,
            causal=causal,
            window=spec.visible_window.as_kernel_args(),
            attention_chunk_size=spec.attention_chunk_size or 0,
        )

    def _declared_bytes(self) -> int:
        """The most that any batch within the limits needs: splits fall as requests rise, so the largest product is looked for."""
        limits = self.limits
        if limits is None:
            return 0
        most = 0
        for query_len in range(
            1, min(self.reorder_batch_threshold or 1, limits.max_num_tokens) + 1
        ):
            most = max(most, self._hopper_bytes(limits.max_num_tokens, query_len))
            for reqs in range(1, min(limits.max_num_reqs, limits.max_num_tokens // query_len) + 1):
                splits = max(
                    self._splits(reqs, query_len, seq_len, causal=False)
                    for seq_len in self._tile_edges(reqs, limits.max_seq_len)
                )
                tokens = min(reqs * query_len, limits.max_num_tokens)
                most = max(
                    most,
                    paged_decode_workspace_bytes(
                        tokens, self.spec.num_heads, self.spec.head_size_v, splits
                    ),
                )
        return most

    def _hopper(self) -> Any:
        """The choice of Hopper's own kernels (`ops.triton.hopper.choice`), where they may serve; None elsewhere."""
        wanted = (
            limits_of(self._query_like).capability[0] == 9
            and self.config.get("kernels") != "portable"
        )
        return hopper_choice() if wanted else None

    def _hopper_bytes(self, num_tokens: int, query_len: int) -> int:
        """What Hopper's own decode wants; 0 elsewhere."""
        if (own := self._hopper()) is None:
            return 0
        chip = limits_of(self._query_like)
        return int(
            own.decode_workspace_bytes(
                self._query_like,
                self._cache_like,
                self.spec.head_size_v,
                num_tokens,
                query_len,
                chip,
            )
        )

    def seq_len_bounds(self, num_reqs: int, least: int, most: int) -> list[int]:
        """Where tiles depend on work, both sides of every edge between two tiles, and of every power of 2, where keys may begin to be split; on
        Hopper both sides of the lengths from which its own decode is the quicker one, or has another tile."""
        turns: list[int] = []
        if limits_of(self._query_like).capability[0] == 9:
            turns = [keys - side for keys in HOPPER_DECODE_KEYS for side in (0, 1)]
            turns += [
                edge + side
                for edge in self._work_edges("hopper_decode", num_reqs)
                for side in (0, 1)
            ]
        inner = {edge + side for edge in self._tile_edges(num_reqs, most) for side in (0, 1)}
        if len(inner) > 2:
            inner |= {
                (1 << exponent) - side for exponent in range(most.bit_length()) for side in (0, 1)
            }
        return sorted({least, most, *(bound for bound in (*inner, *turns) if least < bound < most)})

    def _tile_edges(self, num_reqs: int, max_seq_len: int) -> list[int]:
        """The longest sequences that each decode tile may meet: a tile for less work may be cut in more pieces."""
        return [
            max_seq_len,
            *(edge for edge in self._work_edges("decode", num_reqs) if 0 < edge < max_seq_len),
        ]

    def _work_edges(self, op: str, num_reqs: int) -> list[int]:
        """The longest sequences of the classes of work that an operation's tiles depend on."""
        chip = limits_of(self._query_like)
        return [
            bound * chip.num_sms // (num_reqs * self.spec.num_kv_heads)
            for bound in work_bounds(op, chip.tuned)
        ]
