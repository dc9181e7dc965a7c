"""Per-layer attention of a cascade: suffixes, then shared prefixes, merged by log-sum-exps."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import torch

from attnlib.backends._pairs.impl import PairImpl
from attnlib.backends.base import AttentionBackend, StepPlan
from attnlib.backends.cascade.metadata import CascadeMetadata, prefix_spec
from attnlib.backends.cascade.plans import CascadePlan, ItemsPlan, PartialStates
from attnlib.backends.cascade.schedule import not_shared_reason
from attnlib.cache.storage import PagedKVCache
from attnlib.ops.signature import tensor_signature
from attnlib.spec import AttentionSpec

__all__ = ["CascadeImpl"]


class CascadeImpl(PairImpl):
    """Runs the suffix backend on the batch and the prefix backend on the shared prefixes.

    The suffix backend writes the cache, and its softmax contains the sinks.
    """

    prefix_backend: ClassVar[type[AttentionBackend]]
    suffix_backend: ClassVar[type[AttentionBackend]]
    child_names = ("_prefix", "_suffix")
    reading_names = ("_suffix",)
    writing_name = "_suffix"

    def __init__(self, spec: AttentionSpec, **kwargs: Any) -> None:
        super().__init__(spec, **kwargs)
        self._suffix = self.make_child(self.suffix_backend, spec, kwargs)
        if not_shared_reason(spec) is None:
            kwargs.pop("sinks", None)
            self._prefix = self.make_child(self.prefix_backend, prefix_spec(spec), kwargs)
        self.read_per_head_tensors_from(self._owner)

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
            return ItemsPlan(self.spec, slots, metadata, metadata.items, query)
        partial = None if metadata.prefix is None else PartialStates(metadata.prefix, query, output)
        own_lse = partial.lse_for(lse, query) if partial else lse
        suffix = None
        if self._suffix.group.has_plan:
            # A call without LSEs has them where prefixes are merged.
            own = (signature, "suffix", None if own_lse is None else tensor_signature(own_lse))
            suffix = self._suffix.plan(
                own, query, key, value, cache, metadata.suffix, output, own_lse
            )
        if partial is not None and self._prefix.group.has_plan:
            partial.prepare(self._prefix, (signature, "prefix"), query, cache)
        return CascadePlan(self.spec, slots, metadata.suffix, suffix, partial)

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
            items_plan = ItemsPlan(self.spec, None, metadata, metadata.items, query)
            items_plan.run(self, query, None, None, cache, output, lse)
            return
        partial = None if metadata.prefix is None else PartialStates(metadata.prefix, query, output)
        plan = CascadePlan(self.spec, None, metadata.suffix, None, partial)
        plan.run(self, query, None, None, cache, output, lse)
