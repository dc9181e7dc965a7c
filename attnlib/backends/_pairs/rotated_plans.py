"""Step plans over a cache of rotated heads (P15), for the layers of `rotated.RotatedImpl`."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.backends.step_plan import StepPlan
from attnlib.cache.storage import PagedKVCache
from attnlib.kv_rotation import KVRotation
from attnlib.spec import AttentionSpec

__all__ = ["RotatedPlan", "RotatingPlan", "stand_in"]


class RotatingPlan:
    """A plan whose kernels rotate queries, for the calls of a `RotatedImpl`.

    Args:
        spec: of the layers.
        inner: the plan (`AttentionImpl.rotating_plan`).
    """

    def __init__(self, spec: AttentionSpec, inner: StepPlan) -> None:
        self._spec = spec
        self._inner = inner
        rotated: KVRotation | None = getattr(inner, "rotated", None)
        self._leaves_outputs = rotated is not None and not rotated.values

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
        self._inner.run(impl._inner, query, key, value, cache, output, lse)
        if self._leaves_outputs:
            impl.rotate_back(output.view(-1, self._spec.num_heads, self._spec.head_size_v))


class RotatedPlan:
    """The plan of an impl, and the rotations around it.

    Args:
        spec: of the layers.
        inner: the plan of the impl for rotated tensors.
    """

    def __init__(self, spec: AttentionSpec, inner: StepPlan) -> None:
        self._spec = spec
        self._inner = inner

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
        spec = self._spec
        query = impl.rotated_queries(query.view(-1, spec.num_heads, spec.head_size))
        if key is not None and value is not None:
            key = key.view(-1, spec.num_kv_heads, spec.head_size)
            key, value = impl.to_write(key, value.view(-1, spec.num_kv_heads, spec.head_size_v))
        output = output.view(-1, spec.num_heads, spec.head_size_v)
        self._inner.run(impl._inner, query, key, value, cache, output, lse)
        impl.rotate_back(output)


def stand_in(tensor: torch.Tensor, rotates: bool) -> torch.Tensor:
    """A tensor with the strides that the rotated one will have."""
    if not rotates:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
