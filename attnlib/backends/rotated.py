"""Attention over a cache of rotated heads (P15), by any backend.

A rotation R is orthogonal: `q . k = (R q) . (R k)`, so rotated queries over rotated keys have the
scores, masks and LSE of the plain ones. Weights are applied to rotated values, whatever parts a
backend splits the keys into, and the output is rotated back once. The backend's impl gets rotated
tensors and a spec without the rotation; keys and values as they are if it rotates what it writes
(`AttentionImpl.rotates_writes`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch

from attnlib.backends._pairs.impl import PairImpl, attend
from attnlib.backends._pairs.rotated_plans import RotatedPlan, RotatingPlan, stand_in
from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.backends.step_plan import LayerGroup, StepPlan, forward_signature, is_current
from attnlib.cache.storage import PagedKVCache
from attnlib.kv_rotation import KVRotation
from attnlib.metadata.base import AttentionMetadata
from attnlib.score_functions.query_tensors import QueryTensors
from attnlib.sparse.key_selection import SelectedKeys
from attnlib.spec import AttentionSpec

__all__ = ["RotatedImpl", "make_backend_impl"]


def make_backend_impl(
    backend: type[AttentionBackend], spec: AttentionSpec, **settings: Any
) -> AttentionImpl:
    """The impl of a backend for a layer, with the rotation of its cache.

    Args:
        backend: accepted for the spec.
        spec: of the layer.
        settings: keyword arguments of `AttentionImpl`.
    """
    if spec.kv_rotation is None:
        return backend.get_impl_cls()(spec, **settings)
    return RotatedImpl(spec, backend=backend, **settings)


class RotatedImpl(PairImpl):
    """Rotates heads in front of a backend's impl, and outputs behind it.

    Args:
        spec: of the layer, with `kv_rotation`.
        backend: the backend that attends.
        settings: keyword arguments of `AttentionImpl`.
    """

    child_names = reading_names = ("_inner",)
    writing_name = "_inner"
    rotates = True
    _apart = False

    def __init__(
        self, spec: AttentionSpec, *, backend: type[AttentionBackend], **settings: Any
    ) -> None:
        super().__init__(spec, **settings)
        assert spec.kv_rotation is not None  # `make_backend_impl` is the only caller
        self._rotation: KVRotation = spec.kv_rotation
        plain = spec.replace(kv_rotation=None)
        self._inner = backend.get_impl_cls()(plain, **settings)
        if self._inner.rotates_writes:
            self._inner.write_rotation = self._rotation
        self.read_per_head_tensors_from(self._owner)

    @property
    def group(self) -> LayerGroup:
        """The group of impls with the same rotation in front of one group."""
        found: LayerGroup | None = self._group
        if found is None:
            inner = self._inner.group
            has_rotary_plan = self._fuses and inner.has_rotary_plan
            made = LayerGroup(inner.has_plan, True, has_rotary_plan)
            found = self.__dict__["_group"] = _groups.setdefault((inner, self._rotation), made)
        return found

    def of_call(self, given: QueryTensors) -> AttentionImpl:
        """See `AttentionImpl.of_call`."""
        bound = super().of_call(given)
        bound.__dict__["_inner"] = self._inner.of_call(given)
        return bound

    @property
    def _fuses(self) -> bool:
        """Whether the backend's impl rotates what it writes, and queries and keys with it."""
        return self._inner.write_rotation is not None and self._inner.group.has_rotary_write

    def rotated_kv(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[T, Hkv, D]` and values `[T, Hkv, Dv]` as the cache stores them."""
        return self._rotation.turn(self._inner.rotate_heads, key, value)

    def to_write(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as the backend's impl writes them: rotated, unless it rotates them."""
        given = self._inner.write_rotation is not None
        return (key, value) if given else self.rotated_kv(key, value)

    def rotated_queries(self, query: torch.Tensor) -> torch.Tensor:
        """Queries `[T, Hq, D]` for the keys of the cache."""
        rotation = self._rotation
        return self._inner.rotate_heads(query, rotation.seed) if rotation.keys else query

    def rotate_back(self, output: torch.Tensor) -> None:
        """Rotate an output `[T, Hq, Dv]` over rotated values in place."""
        rotation = self._rotation
        if rotation.values:
            self._inner.rotate_heads(output, rotation.seed, inverse=True, out=output)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, other launches rotate around all kernels, as in batches where some cannot."""
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    @property
    def _has_rotating_plan(self) -> bool:
        """Whether the backend's impl has `rotating_plan`, and no subclass replaced `plan` only."""
        cls = type(self._inner)
        replaced = cls.rotating_plan is not AttentionImpl.rotating_plan
        return replaced and not self._apart and is_current(cls, "rotating_plan", "plan")

    def _rotating_plan(self, *call: Any) -> StepPlan | None:
        """The plan of a call by kernels that rotate; None where this impl rotates."""
        has_plan = self._has_rotating_plan
        return self._inner.rotating_plan(self._rotation, *call) if has_plan else None

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See `AttentionImpl.write_kv`."""
        count = slot_mapping.shape[0]
        new = self.to_write(key[:count], value[:count])
        self._inner.write_kv(*new, cache, slot_mapping)

    def rotate_and_write_kv(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See `AttentionImpl.rotate_and_write_kv`."""
        if self._fuses:
            return self._inner.rotate_and_write_kv(*args, **kwargs)
        return super().rotate_and_write_kv(*args, **kwargs)

    def plan_rotary_write(self, *args: Any, **kwargs: Any) -> Callable[..., torch.Tensor] | None:
        """See `AttentionImpl.plan_rotary_write`."""
        return self._inner.plan_rotary_write(*args, **kwargs)

    def plan(
        self,
        signature: Hashable,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache,
        metadata: AttentionMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> StepPlan | None:
        """The plan of the impl for rotated tensors, and the rotations around it."""
        if key is None or self._inner.write_rotation is not None:
            own = self._rotating_plan(signature, query, key, value, cache, metadata, output, lse)
            if own is not None:
                return RotatingPlan(self.spec, own)
        query = stand_in(query, self._rotation.keys)
        if key is not None and value is not None and self._inner.write_rotation is None:
            key = stand_in(key, self._rotation.keys)
            value = stand_in(value, self._rotation.values)
        inner = self._inner.plan(signature, query, key, value, cache, metadata, output, lse)
        return None if inner is None else RotatedPlan(self.spec, inner)

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: AttentionMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward`."""
        if self._has_rotating_plan:
            call = (query, None, None, cache, metadata, output, lse)
            signature = ("rotated", *forward_signature(self, query, cache, output, lse))
            plans = metadata.plans
            if signature not in plans:
                own = self._rotating_plan(signature, *call)
                plans[signature] = None if own is None else RotatingPlan(self.spec, own)
            if (plan := plans[signature]) is not None:
                plan.run(self, query, None, None, cache, output, lse)
                return
        attend(self._inner, self.rotated_queries(query), cache, metadata, output, lse)
        self.rotate_back(output)

    def forward_selected(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: AttentionMetadata,
        selected_keys: SelectedKeys,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward_selected`."""
        rotated = self.rotated_queries(query)
        self._inner.forward_selected(rotated, cache, metadata, selected_keys, output, lse)
        self.rotate_back(output)


_groups: WeakValueDictionary[Any, LayerGroup] = WeakValueDictionary()
