"""Step plans of a cascade: suffixes, then shared prefixes, merged by log-sum-exps."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from attnlib.backends._pairs.impl import PairPlan, attend
from attnlib.backends.base import AttentionImpl, StepPlan
from attnlib.backends.cascade.batches import PrefixBatch
from attnlib.backends.cascade.metadata import CascadeMetadata
from attnlib.cache.storage import PagedKVCache
from attnlib.metadata.base import AttentionMetadata
from attnlib.ops.dispatch import operation
from attnlib.ops.params import AttentionParams
from attnlib.ops.shared_decode import DecodeItems
from attnlib.ops.signature import tensor_signature
from attnlib.spec import AttentionSpec

__all__ = ["CascadePlan", "ItemsPlan", "PartialStates"]


class PartialStates:
    """Memory of the partial states over the shared prefixes of one batch.

    Attributes:
        batch: the prefixes as a batch.
        query: `[P, Hq, D]`, the queries repeated for each part; None where the batch's own first
            rows serve.
        output: `[P, Hq, Dv]`.
        lse: `[P, Hq]` float32.
        plan: the prefix backend's plan, or None.
    """

    def __init__(self, batch: PrefixBatch, query: torch.Tensor, output: torch.Tensor) -> None:
        rows = batch.num_rows
        self.batch = batch
        self.query = None
        if batch.query_rows is not None:
            self.query = query.new_empty(rows, *query.shape[1:])
        self.output = output.new_empty(rows, *output.shape[1:])
        self.lse = torch.empty(rows, query.shape[1], dtype=torch.float32, device=query.device)
        self.plan: StepPlan | None = None
        self._own_lse: torch.Tensor | None = None
        self._merge = operation("merge_states", "merge_partial_rows", query)

    def lse_for(self, lse: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor:
        """`lse`, or memory for the log-sum-exps of the suffixes."""
        if lse is not None:
            return lse
        if self._own_lse is None:
            self._own_lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        return self._own_lse

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """The queries of all parts, `[P, Hq, D]`."""
        if self.query is None or self.batch.query_rows is None:
            return query[: self.batch.num_rows]
        return torch.index_select(query, 0, self.batch.query_rows, out=self.query)

    def prepare(
        self, impl: AttentionImpl, signature: Hashable, query: torch.Tensor, cache: PagedKVCache
    ) -> None:
        """Prepare the plan of the prefix backend."""
        rows, metadata = self.queries(query), self.batch.metadata
        states = (self.output, self.lse)
        # Rows are those of the batch, with its strides, or copies.
        signature = (signature, tensor_signature(rows))
        self.plan = impl.plan(signature, rows, None, None, cache, metadata, *states)

    def merge_into(
        self,
        impl: AttentionImpl,
        query: torch.Tensor,
        cache: PagedKVCache,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Compute the shared prefixes and merge them into the states of the suffixes."""
        rows = self.queries(query)
        if self.plan is None:
            attend(impl, rows, cache, self.batch.metadata, self.output, self.lse)
        else:
            self.plan.run(impl, rows, None, None, cache, self.output, self.lse)
        tokens = self.batch.partial_starts.shape[0] - 1
        entries = (self.batch.partial_starts, self.batch.partial_rows)
        self._merge(output[:tokens], lse[:tokens], self.output, self.lse, *entries)


class ItemsPlan(PairPlan):
    """The cache write, then prefixes and suffixes by one kernel."""

    def __init__(
        self,
        spec: AttentionSpec,
        slot_mapping: torch.Tensor | None,
        metadata: CascadeMetadata,
        items: DecodeItems,
        query: torch.Tensor,
    ) -> None:
        super().__init__(spec, slot_mapping)
        self._metadata = metadata.suffix
        self._block_table = metadata.block_table
        self._items = items
        rows = items.num_partials * spec.num_heads
        self._workspace = torch.empty(
            rows * (spec.head_size_v + 1), dtype=torch.float32, device=query.device
        )
        self._decode = operation("shared_decode", "shared_decode", query)

    def run(
        self,
        impl: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """See `StepPlan.run`."""
        spec, suffix = self._spec, impl._suffix
        query, output = self.per_head(query, output)
        self.write(suffix, key, value, cache)
        params = AttentionParams(
            scale=suffix.scale,
            logits_soft_cap=spec.logits_soft_cap or 0.0,
            sinks=suffix.per_head_tensors[1],
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        )
        caches, results = (cache.key_cache, cache.value_cache), {"out": output, "lse": lse}
        pages = (*caches, self._block_table, self._items)
        if not self._decode(query, *pages, params, **results, workspace=self._workspace):
            attend(suffix, query, cache, self._metadata, output, lse)


class CascadePlan(PairPlan):
    """The cache write and the suffixes, then the shared prefixes if there are any."""

    def __init__(
        self,
        spec: AttentionSpec,
        slot_mapping: torch.Tensor | None,
        metadata: AttentionMetadata,
        suffix: StepPlan | None,
        partial: PartialStates | None,
    ) -> None:
        super().__init__(spec, slot_mapping)
        self._metadata = metadata
        self._suffix = suffix
        self._partial = partial

    def run(
        self,
        impl: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """See `StepPlan.run`."""
        partial = self._partial
        if partial is None and self._suffix is not None:
            self._suffix.run(impl._suffix, query, key, value, cache, output, lse)
            return
        query, output = self.per_head(query, output)
        own_lse = lse if partial is None else partial.lse_for(lse, query)
        if self._suffix is not None:
            self._suffix.run(impl._suffix, query, key, value, cache, output, own_lse)
        else:
            self.write(impl, key, value, cache)
            attend(impl._suffix, query, cache, self._metadata, output, own_lse)
        if partial is not None and own_lse is not None:
            partial.merge_into(impl._prefix, query, cache, output, own_lse)
