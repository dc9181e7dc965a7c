"""Per-layer attention of a cascade: suffixes, then shared prefixes, merged by log-sum-exps."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import torch

from attnlib.backends.base import AttentionBackend, AttentionImpl, StepPlan, check_in_place
from attnlib.backends.cascade.batches import PrefixBatch
from attnlib.backends.cascade.metadata import CascadeMetadata, prefix_spec
from attnlib.backends.cascade.schedule import not_shared_reason
from attnlib.cache.storage import PagedKVCache
from attnlib.ops.dispatch import operation
from attnlib.ops.params import AttentionParams
from attnlib.ops.shared_decode import DecodeItems
from attnlib.spec import AttentionSpec

__all__ = ["CascadeImpl"]


class CascadeImpl(AttentionImpl):
    """Runs the suffix backend on the batch and the prefix backend on the shared prefixes.

    The suffix backend writes the cache, and its softmax contains the sinks.
    """

    prefix_backend: ClassVar[type[AttentionBackend]]
    suffix_backend: ClassVar[type[AttentionBackend]]

    def __init__(self, spec: AttentionSpec, **kwargs: Any) -> None:
        super().__init__(spec, **kwargs)
        kwargs.pop("config", None)
        self._suffix = self.suffix_backend.get_impl_cls()(
            spec, config=self.suffix_backend.config, **kwargs
        )
        if not_shared_reason(spec) is None:
            kwargs.pop("sinks", None)
            self._prefix = self.prefix_backend.get_impl_cls()(
                prefix_spec(spec), config=self.prefix_backend.config, **kwargs
            )
        self.read_per_head_tensors_from(self._owner)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "scale":
            for child in self._children:
                child.scale = value

    @property
    def _children(self) -> list[AttentionImpl]:
        """The children that exist: none while `AttentionImpl.__init__` runs."""
        names = ("_prefix", "_suffix")
        return [self.__dict__[name] for name in names if name in self.__dict__]

    def set_block_size(self, block_size: int) -> None:
        """See `AttentionImpl.set_block_size`."""
        super().set_block_size(block_size)
        for child in self._children:
            child.set_block_size(block_size)

    def read_per_head_tensors_from(self, owner: Any) -> None:
        """See `AttentionImpl.read_per_head_tensors_from`; only the suffix has per-head tensors."""
        super().read_per_head_tensors_from(owner)
        if "_suffix" in self.__dict__:
            self._suffix.read_per_head_tensors_from(owner)

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See `AttentionImpl.write_kv`."""
        self._suffix.write_kv(key, value, cache, slot_mapping)

    def plan(
        self,
        signature: Hashable,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache,
        metadata: CascadeMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> StepPlan | None:
        """The plans of both backends, and the memory of the partial states."""
        slots = None if key is None else metadata.slot_mapping
        if metadata.items is not None:
            return _ItemsPlan(self.spec, slots, metadata, metadata.items, query)
        partial = None if metadata.prefix is None else _Partial(metadata.prefix, query, output)
        own_lse = partial.lse_for(lse, query) if partial else lse
        suffix = None
        if self._suffix.group.has_plan:
            suffix = self._suffix.plan(
                (signature, "suffix"), query, key, value, cache, metadata.suffix, output, own_lse
            )
        if partial is not None and self._prefix.group.has_plan:
            partial.plan = self._prefix.plan(
                (signature, "prefix"), partial.queries(query), None, None, cache,
                partial.batch.metadata, partial.output, partial.lse,
            )  # fmt: skip
        return _CascadePlan(self.spec, slots, metadata.suffix, suffix, partial)

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: CascadeMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward`."""
        if metadata.items is not None:
            items_plan = _ItemsPlan(self.spec, None, metadata, metadata.items, query)
            items_plan.run(self, query, None, None, cache, output, lse)
            return
        partial = None if metadata.prefix is None else _Partial(metadata.prefix, query, output)
        plan = _CascadePlan(self.spec, None, metadata.suffix, None, partial)
        plan.run(self, query, None, None, cache, output, lse)


class _Partial:
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

    def merge_into(
        self, impl: AttentionImpl, query: torch.Tensor, cache: Any, output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:  # fmt: skip
        """Compute the shared prefixes and merge them into the states of the suffixes."""
        rows = self.queries(query)
        if self.plan is None:
            _forward(impl, rows, cache, self.batch.metadata, self.output, self.lse)
        else:
            self.plan.run(impl, rows, None, None, cache, self.output, self.lse)
        tokens = self.batch.partial_starts.shape[0] - 1
        self._merge(
            output[:tokens], lse[:tokens], self.output, self.lse,
            self.batch.partial_starts, self.batch.partial_rows,
        )  # fmt: skip


class _ItemsPlan:
    """The cache write, then prefixes and suffixes by one kernel."""

    def __init__(
        self,
        spec: AttentionSpec,
        slot_mapping: torch.Tensor | None,
        metadata: CascadeMetadata,
        items: DecodeItems,
        query: torch.Tensor,
    ) -> None:
        self._spec = spec
        self._slot_mapping = slot_mapping
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
        impl: CascadeImpl,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """See `StepPlan.run`."""
        spec, suffix = self._spec, impl._suffix
        query = query.view(-1, spec.num_heads, spec.head_size)
        output = output.view(-1, spec.num_heads, spec.head_size_v)
        _write(spec, suffix, self._slot_mapping, key, value, cache)
        params = AttentionParams(
            scale=suffix.scale, logits_soft_cap=spec.logits_soft_cap or 0.0,
            sinks=suffix.per_head_tensors[1], k_scale=cache.k_scale, v_scale=cache.v_scale,
        )  # fmt: skip
        if not self._decode(
            query, cache.key_cache, cache.value_cache, self._block_table, self._items,
            params, out=output, lse=lse, workspace=self._workspace,
        ):  # fmt: skip
            _forward(suffix, query, cache, self._metadata, output, lse)


class _CascadePlan:
    """The cache write and the suffixes, then the shared prefixes if there are any."""

    def __init__(
        self,
        spec: AttentionSpec,
        slot_mapping: torch.Tensor | None,
        metadata: Any,
        suffix: StepPlan | None,
        partial: _Partial | None,
    ) -> None:
        self._spec = spec
        self._slot_mapping = slot_mapping
        self._metadata = metadata
        self._suffix = suffix
        self._partial = partial

    def run(
        self,
        impl: CascadeImpl,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """See `StepPlan.run`."""
        spec, partial = self._spec, self._partial
        if partial is None and self._suffix is not None:
            self._suffix.run(impl._suffix, query, key, value, cache, output, lse)
            return
        query = query.view(-1, spec.num_heads, spec.head_size)
        output = output.view(-1, spec.num_heads, spec.head_size_v)
        own_lse = lse if partial is None else partial.lse_for(lse, query)
        if self._suffix is not None:
            self._suffix.run(impl._suffix, query, key, value, cache, output, own_lse)
        else:
            _write(spec, impl, self._slot_mapping, key, value, cache)
            _forward(impl._suffix, query, cache, self._metadata, output, own_lse)
        if partial is not None and own_lse is not None:
            partial.merge_into(impl._prefix, query, cache, output, own_lse)


def _write(
    spec: AttentionSpec,
    impl: AttentionImpl,
    slot_mapping: torch.Tensor | None,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: PagedKVCache,
) -> None:
    """Write new keys and values, flat or per head, if there are any."""
    if key is not None and value is not None and slot_mapping is not None:
        key = key.view(-1, spec.num_kv_heads, spec.head_size)
        value = value.view(-1, spec.num_kv_heads, spec.head_size_v)
        impl.write_kv(key, value, cache, slot_mapping)


def _forward(
    child: AttentionImpl,
    query: torch.Tensor,
    cache: Any,
    metadata: Any,
    output: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    forward: Callable[..., object] = child.forward
    check_in_place(child, forward(query, cache, metadata, output, lse))
