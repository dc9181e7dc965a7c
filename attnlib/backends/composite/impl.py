"""Per-layer attention of a composite: each child attends for its rows; one writes the cache."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar, NamedTuple

import torch

from attnlib.backends._pairs.impl import PairImpl, PairPlan, attend
from attnlib.backends.base import AttentionBackend, AttentionImpl, StepPlan
from attnlib.backends.composite.metadata import CompositeMetadata
from attnlib.cache.storage import PagedKVCache
from attnlib.metadata.base import AttentionMetadata
from attnlib.spec import AttentionSpec

__all__ = ["CompositeImpl"]


class CompositeImpl(PairImpl):
    """Runs each child on its rows; the prefill child writes the cache.

    `make_composite` creates a subclass for each pair of backends.
    """

    prefill_backend: ClassVar[type[AttentionBackend]]
    decode_backend: ClassVar[type[AttentionBackend]]
    child_names = reading_names = ("_prefill", "_decode")
    writing_name = "_prefill"

    def __init__(self, spec: AttentionSpec, **kwargs: Any) -> None:
        super().__init__(spec, **kwargs)
        self._prefill = self.make_child(self.prefill_backend, spec, kwargs)
        self._decode = self.make_child(self.decode_backend, spec, kwargs)
        self.read_per_head_tensors_from(self._owner)

    def plan(
        self,
        signature: Hashable,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache,
        metadata: CompositeMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> StepPlan | None:
        """The plans of the children for their rows. What a child refuses is refused here, before
        anything is written."""
        parts = []
        for name, rows, part in _parts(metadata):
            child: AttentionImpl = getattr(self, name)
            tensors = query[rows], output[rows], None if lse is None else lse[rows]
            plan = None
            if child.group.has_plan:
                # Batches of as many tokens are divided at other rows.
                own = (signature, name, tensors[0].shape[0])
                plan = child.plan(own, tensors[0], None, None, cache, part, *tensors[1:])
            parts.append(_Part(name, rows, part, plan))
        slots = None if key is None else metadata.slot_mapping
        return _CompositePlan(self.spec, slots, parts)

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: CompositeMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward`."""
        for name, rows, part in _parts(metadata):
            child: AttentionImpl = getattr(self, name)
            part_lse = None if lse is None else lse[rows]
            attend(child, query[rows], cache, part, output[rows], part_lse)


class _Part(NamedTuple):
    """What one child computes: the name of its impl, its rows, its metadata, and its plan if it has
    one."""

    child: str
    rows: slice
    metadata: AttentionMetadata
    plan: StepPlan | None


class _CompositePlan(PairPlan):
    """The cache write, then each child on its rows."""

    def __init__(
        self, spec: AttentionSpec, slot_mapping: torch.Tensor | None, parts: list[_Part]
    ) -> None:
        super().__init__(spec, slot_mapping)
        self._parts = parts

    def run(
        self,
        impl: CompositeImpl,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """See `StepPlan.run`."""
        query, output = self.per_head(query, output)
        self.write(impl, key, value, cache)
        for name, rows, metadata, plan in self._parts:
            child: AttentionImpl = getattr(impl, name)
            part_lse = None if lse is None else lse[rows]
            if plan is None:
                attend(child, query[rows], cache, metadata, output[rows], part_lse)
            else:
                plan.run(child, query[rows], None, None, cache, output[rows], part_lse)


def _parts(metadata: CompositeMetadata) -> list[tuple[str, slice, Any]]:
    """(attribute of the impl, rows, metadata) of each child that has requests. Rows past the tokens
    belong to the last part."""
    decode, prefill = metadata.decode, metadata.prefill
    if prefill is None:
        return [] if decode is None else [("_decode", slice(None), decode)]
    if decode is None:
        return [("_prefill", slice(None), prefill)]
    split = metadata.num_decode_tokens
    return [("_decode", slice(0, split), decode), ("_prefill", slice(split, None), prefill)]
