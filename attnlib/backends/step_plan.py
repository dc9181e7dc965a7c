"""Step plans: what a backend prepares once per batch, and which layers share it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["LayerGroup", "StepPlan"]


class StepPlan(Protocol):
    """Prepared cache write and attention for one call signature and batch, from
    `AttentionImpl.plan`.

    A plan may have a method `bind_call(query, key_cache, value_cache, output, lse, key, value, *,
    own)`. It gets the tensors of a call, or `...` where any will do, and in `own` those of the
    layer: slopes and sinks, if the spec has either, then score tensors. It returns None or a
    function of all of them in this order. That function compares its tensors with them (type,
    dtype, shape, strides, device) and does what `run` does. It returns False, and does nothing,
    where they differ or `run` is needed. A plan with `is_bound` gives the final answer already
    before its first run.
    """

    def run(
        self,
        impl: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Write the new keys and values, then compute attention.

        Args:
            impl: the impl of the calling layer, for its sinks and slopes.
            query, key, value, output: flat or per head, as passed to the layer. `key` and `value`
                are None where nothing is written.
            cache: the `PagedKVCache` of the layer; None where keys are not cached.
            lse: `[T, Hq]` float32, or None.
        """


class LayerGroup:
    """Identity of the layers that may share a step plan: equal backend, spec, scale and config.

    Attributes:
        has_plan: whether `AttentionImpl.plan` is equivalent to `write_kv` and `forward` of these
            layers. False where a subclass or an assignment replaced one of these two and kept an
            inherited `plan`.
        has_rotary_write: likewise, whether `rotate_and_write_kv` is equivalent to a rotation and
            `write_kv`.
        has_rotary_plan: likewise, whether `plan_rotary_write` is equivalent to
            `rotate_and_write_kv`.
    """

    __slots__ = ("__weakref__", "has_plan", "has_rotary_plan", "has_rotary_write")

    def __init__(self, has_plan: bool, has_rotary_write: bool, has_rotary_plan: bool) -> None:
        self.has_plan = has_plan
        self.has_rotary_write = has_rotary_write
        self.has_rotary_plan = has_rotary_plan
