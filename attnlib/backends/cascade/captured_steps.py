"""The metadata of batches whose steps were captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.backends.cascade.batches import PrefixBatch
from attnlib.backends.cascade.captured import CapturedPrefixes, fitting_parts
from attnlib.backends.cascade.captured_items import CapturedItems
from attnlib.backends.cascade.metadata import CascadeMetadata, covered_tokens, prefix_spec
from attnlib.backends.cascade.schedule import PrefixRule
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.shared_prefix import SharedPrefix
from attnlib.spec import AttentionSpec, CudaGraphSupport
from attnlib.workspace import BatchLimits

__all__ = ["CapturedSteps"]


class CapturedSteps:
    """The batches of one builder that graphs read.

    Args:
        spec: of the layers.
        device: of the batches.
        limits: the largest batch that is captured.
        rule: how many parts and items of prefixes a graph has.
        suffix: the builder of the suffixes.
        prefix_backend: the backend of the prefixes.
        shared_decode: keys of a tile and ranges, where one kernel computes decodes; else None.
        settings: keyword arguments of the prefix backend's builder.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device,
        limits: BatchLimits,
        rule: PrefixRule,
        suffix: AttentionMetadataBuilder[Any],
        prefix_backend: type[AttentionBackend],
        shared_decode: tuple[int, int] | None,
        settings: dict[str, Any],
    ) -> None:
        self._block_size = spec.block_size
        self._rule = rule
        self._suffix = suffix
        self._prefixes: CapturedPrefixes | None = None
        self._items: CapturedItems | None = None
        builder_cls = prefix_backend.get_builder_cls()
        if builder_cls.cudagraph_support is CudaGraphSupport.ALWAYS:
            self._prefixes = captured = CapturedPrefixes(spec, device, limits, rule)
            self._prefix = builder_cls(
                prefix_spec(spec),
                device,
                config=prefix_backend.config,
                limits=captured.limits,
                **settings,
            )
        if shared_decode is not None:
            self._items = CapturedItems(spec, device, limits, rule, shared_decode)

    def capture(self, common: CommonAttentionMetadata, is_decode: bool) -> CascadeMetadata | None:
        """The metadata to capture a graph with, without shared prefixes. Later batches in the same
        tensors belong to the graph.

        Args:
            common: the batch.
            is_decode: whether one kernel computes its prefixes and suffixes.

        Returns:
            None where steps that share prefixes are not captured.
        """
        on_host = common.query_start_loc_cpu is not None and common.seq_lens_cpu is not None
        if self._items is not None and on_host and is_decode:
            self._items.add_source(common)
            return self._build_items(self._items, [], common)
        if self._prefixes is not None:
            self._prefixes.add_source(common)
            return self._build_prefixes(self._prefixes, [], common)
        return None

    def build(
        self, chosen: Sequence[SharedPrefix], common: CommonAttentionMetadata
    ) -> CascadeMetadata | None:
        """The metadata of a batch in the tensors of a graph, whose launches it has; None for a
        batch in other tensors. Its host lengths are known where items hold it."""
        if self.holds_items(common) and int(common.query_lens_cpu.max()) <= 1:
            assert self._items is not None
            return self._build_items(self._items, chosen, common)
        if self._prefixes is not None and self._prefixes.holds(common):
            return self._build_prefixes(self._prefixes, chosen, common)
        return None

    def holds_items(self, common: CommonAttentionMetadata) -> bool:
        """Whether a graph of a decode by one kernel has the tensors of a batch. Its host lengths
        are needed then."""
        return self._items is not None and self._items.holds(common)

    def _build_prefixes(
        self,
        captured: CapturedPrefixes,
        chosen: Sequence[SharedPrefix],
        common: CommonAttentionMetadata,
    ) -> CascadeMetadata:
        query_lens = [0] * common.num_reqs
        if common.query_start_loc_cpu is not None:
            query_lens = common.query_lens_cpu.tolist()
        rows = captured.max_rows(common.num_actual_tokens)
        kept, parts = fitting_parts(
            chosen, query_lens, captured.max_parts, rows, self._rule, self._block_size
        )
        covered = covered_tokens(kept, common.num_reqs)
        suffix, batch, partial = captured.fill(common, covered, parts, query_lens)
        found = PrefixBatch(
            metadata=self._prefix.build_for_cudagraph_capture(batch),
            query_rows=partial[0],
            num_rows=batch.num_actual_tokens,
            partial_starts=partial[1],
            partial_rows=partial[2],
        )
        own = self._suffix.build_for_cudagraph_capture(suffix)
        return CascadeMetadata.of(common, own, tuple(kept), found)

    def _build_items(
        self,
        captured: CapturedItems,
        chosen: Sequence[SharedPrefix],
        common: CommonAttentionMetadata,
    ) -> CascadeMetadata:
        kept, items = captured.fill(chosen, common)
        suffix = self._suffix.build_for_cudagraph_capture(common.replace(shared_prefixes=None))
        return CascadeMetadata.of(common, suffix, tuple(kept), items=items)
