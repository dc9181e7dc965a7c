"""Per-layer attention of a composite: each child attends for its rows; one writes the cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, ClassVar, NamedTuple

import torch

from attnlib.backends.base import AttentionBackend, AttentionImpl, StepPlan, check_in_place
from attnlib.backends.composite.metadata import CompositeMetadata
from attnlib.cache.storage import PagedKVCache
from attnlib.spec import AttentionSpec

__all__ = ["CompositeImpl"]


class CompositeImpl(AttentionImpl):
    """Runs each child on its rows; the prefill child writes the cache.

    `make_composite` creates a subclass for each pair of backends.
    """

    prefill_backend: ClassVar[type[AttentionBackend]]
    decode_backend: ClassVar[type[AttentionBackend]]

    def __init__(self, spec: AttentionSpec, **kwargs: Any) -> None:
        super().__init__(spec, **kwargs)
        kwargs.pop("config", None)
        self._prefill = self.prefill_backend.get_impl_cls()(
            spec, config=self.prefill_backend.config, **kwargs
        )
        self._decode = self.decode_backend.get_impl_cls()(
            spec, config=self.decode_backend.config, **kwargs
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
        names = ("_prefill", "_decode")
        return [self.__dict__[name] for name in names if name in self.__dict__]

    def set_block_size(self, block_size: int) -> None:
        """See `AttentionImpl.set_block_size`."""
        super().set_block_size(block_size)
        for child in self._children:
            child.set_block_size(block_size)

    def read_per_head_tensors_from(self, owner: Any) -> None:
        """See `AttentionImpl.read_per_head_tensors_from`; the children read from `owner` too."""
        super().read_per_head_tensors_from(owner)
        for child in self._children:
            child.read_per_head_tensors_from(owner)

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See `AttentionImpl.write_kv`."""
        self._prefill.write_kv(key, value, cache, slot_mapping)

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
                plan = child.plan(
                    (signature, name), tensors[0], None, None, cache, part, *tensors[1:]
                )
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
            _attend(getattr(self, name), part, rows, query, cache, output, lse)


class _Part(NamedTuple):
    """What one child computes: the name of its impl, its rows, its metadata, and its plan if it has
    one."""

    child: str
    rows: slice
    metadata: Any
    plan: StepPlan | None


class _CompositePlan:
    """The cache write, then each child on its rows."""

    def __init__(
        self, spec: AttentionSpec, slot_mapping: torch.Tensor | None, parts: list[_Part]
    ) -> None:
        self._spec = spec
        self._slot_mapping = slot_mapping
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
        spec = self._spec
        query = query.view(-1, spec.num_heads, spec.head_size)
        output = output.view(-1, spec.num_heads, spec.head_size_v)
        if key is not None and value is not None and self._slot_mapping is not None:
            key = key.view(-1, spec.num_kv_heads, spec.head_size)
            value = value.view(-1, spec.num_kv_heads, spec.head_size_v)
            impl.write_kv(key, value, cache, self._slot_mapping)
        for child, rows, metadata, plan in self._parts:
            own = getattr(impl, child)
            if plan is None:
                _attend(own, metadata, rows, query, cache, output, lse)
            else:
                part_lse = None if lse is None else lse[rows]
                plan.run(own, query[rows], None, None, cache, output[rows], part_lse)


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


def _attend(
    child: AttentionImpl,
    metadata: Any,
    rows: slice,
    query: torch.Tensor,
    cache: PagedKVCache,
    output: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    forward: Callable[..., object] = child.forward
    part_lse = None if lse is None else lse[rows]
    check_in_place(child, forward(query[rows], cache, metadata, output[rows], part_lse))
