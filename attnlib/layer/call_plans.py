"""Plans of layer calls besides those of backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnlib.backends.base import AttentionImpl, StepPlan, check_in_place
from attnlib.cache.storage import PagedKVCache
from attnlib.instrumentation import Checker
from attnlib.layer.metadata_checks import ExtraKeys
from attnlib.metadata.compressed import CompressedKeys
from attnlib.spec import AttentionSpec

if TYPE_CHECKING:
    from attnlib.layer import Attention

__all__ = ["MAX_PLANS", "CheckedPlan", "MethodPlan", "RecentPlan"]

MAX_PLANS = 64
"""Step plans that one batch keeps; beyond it they are dropped and made again on demand."""


class RecentPlan(NamedTuple):
    """The plan of the call before, with what a call must agree in to use it. `check` compares the
    signatures of the tensors. `call`, where there is one, compares them too, and runs the plan
    (`StepPlan.bind_call`). One of both may be None."""

    group: Any
    cache_signature: Any
    return_lse: bool
    allocates: bool
    check: Callable[..., bool] | None
    per_head: tuple[Any, ...] | None
    shape: tuple[int, ...] | None
    run: Callable[..., None]
    call: Callable[..., bool] | None


class MethodPlan:
    """The plan of a backend without plans: calls `write_kv`, then `forward`."""

    def __init__(self, spec: AttentionSpec, metadata: Any, writes: bool) -> None:
        self._spec = spec
        self._metadata = metadata
        self._writes = writes

    def run(
        self,
        impl: AttentionImpl,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache | None,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        extra: ExtraKeys | None = None,
    ) -> None:
        """See `StepPlan.run`; `extra` are the selected keys or the compressed entries."""
        spec, metadata = self._spec, self._metadata
        query = query.view(-1, spec.num_heads, spec.head_size) if query.dim() == 2 else query
        if output.dim() == 2:
            output = output.view(-1, spec.num_heads, spec.head_size_v)
        if key is not None and value is not None:
            key = key.view(-1, spec.num_kv_heads, spec.head_size) if key.dim() == 2 else key
            if value.dim() == 2:
                value = value.view(-1, spec.num_kv_heads, spec.head_size_v)
            if cache is None:
                unpaged: Callable[..., object] = impl.forward_unpaged
                check_in_place(impl, unpaged(query, key, value, metadata, output, lse))
                return
            if self._writes:
                impl.write_kv(key, value, cache, metadata.slot_mapping)
        assert cache is not None  # `check_call` refuses a paged layer without one
        if extra is not None:
            over: Callable[..., object] = impl.forward_selected
            if isinstance(extra, CompressedKeys):
                over = impl.forward_compressed
            check_in_place(impl, over(query, cache, metadata, extra, output, lse))
            return
        forward: Callable[..., object] = impl.forward
        check_in_place(impl, forward(query, cache, metadata, output, lse))


class CheckedPlan:
    """Another plan, with a check of values before every run (ATTNLIB_VALIDATE)."""

    def __init__(self, plan: StepPlan, layer: Attention, metadata: Any, checker: Checker) -> None:
        self._plan = plan
        self._layer = layer
        self._metadata = metadata
        self._checker = checker

    def run(self, impl: AttentionImpl, *call: Any) -> None:
        """See `StepPlan.run`."""
        query, key, value, cache = call[:4]
        extra = {} if len(call) < 7 else {"extra": call[6]}
        finish = self._checker(self._layer, query, key, value, cache, self._metadata, **extra)
        self._plan.run(impl, *call)
        if finish is not None:
            finish()
