"""Step plans: what a backend prepares once per batch, and which layers share it."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from attnlib.ops.signature import tensor_signature

__all__ = ["LayerGroup", "StepPlan", "forward_signature", "group_of", "is_current"]


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
        has_rotary_write: whether `rotate_and_write_kv` is equivalent to a rotation and
            `write_kv`.
        has_rotary_plan: whether `plan_rotary_write` is equivalent to
            `rotate_and_write_kv`.
    """

    __slots__ = ("__weakref__", "has_plan", "has_rotary_plan", "has_rotary_write")

    def __init__(self, has_plan: bool, has_rotary_write: bool, has_rotary_plan: bool) -> None:
        self.has_plan = has_plan
        self.has_rotary_write = has_rotary_write
        self.has_rotary_plan = has_rotary_plan


def forward_signature(
    impl: Any,
    query: torch.Tensor,
    cache: Any,
    output: torch.Tensor,
    lse: torch.Tensor | None,
) -> tuple[Any, ...]:
    """The signature of a call of `forward` without a layer, a key of the plans of its batch."""
    own = (*impl.per_head_tensors, *impl.layer_score_tensors, lse)
    found = (None if x is None else tensor_signature(x) for x in own)
    return (impl.group, cache.signature, tensor_signature(query), tensor_signature(output), *found)


_groups: WeakValueDictionary[Any, LayerGroup] = WeakValueDictionary()

_METHODS = frozenset({"forward", "write_kv", "forward_unpaged", "plan", "rotate_and_write_kv"})
"""Methods that make an impl different from others of its class if they are replaced on it."""


def group_of(impl: Any) -> LayerGroup:
    """The group of an `AttentionImpl`: that of all impls of its class with equal spec, scale and
    config. An impl whose methods were replaced on the instance has a group of its own."""
    cls, replaced = type(impl), _METHODS & impl.__dict__.keys()
    rotates = is_current(cls, "rotate_and_write_kv", "write_kv")
    found = LayerGroup(
        not replaced and _has_current_plan(cls),
        "rotate_and_write_kv" in replaced or ("write_kv" not in replaced and rotates),
        not replaced and is_current(cls, "plan_rotary_write", "rotate_and_write_kv", "write_kv"),
    )
    if replaced:
        return found
    key = (cls, impl.spec, impl.scale, tuple(sorted(impl.config.items())))
    try:
        return _groups.setdefault(key, found)
    except TypeError:  # the config has a value that cannot be hashed
        return found


def _has_current_plan(cls: type[Any]) -> bool:
    """Whether no class below the one that defines `plan` defines `forward` or `write_kv`."""
    return is_current(cls, "plan", "forward", "write_kv")


def is_current(cls: type[Any], name: str, *replaced: str) -> bool:
    """Whether no class below the one that defines method `name` defines one that it replaces."""
    first, *others = (
        next(place for place, base in enumerate(cls.__mro__) if method in vars(base))
        for method in (name, *replaced)
    )
    return first <= min(others)
