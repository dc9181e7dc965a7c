"""What the layers of a step have found, and the step after it that continues it.

A `DecodeBatch` over keys that grow in place, or over a static cache or a full window, outlives its
step: the next step has the same layer, plan and launcher, and only fills table and lengths again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.integrations.transformers.batch_plan import BatchPlan
from attnlib.integrations.transformers.cache_buffers import CAPACITY
from attnlib.integrations.transformers.decode_batch import (
    BoundCall,
    DecodeBatch,
    lasting_tokens,
    sees_all_keys,
)
from attnlib.integrations.transformers.layers import Call, current_stream, is_transient
from attnlib.integrations.transformers.patterns import Pattern
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.layer import Attention
from attnlib.ops.signature import tensor_check
from attnlib.selection.current import selection_state

__all__ = [
    "Arguments",
    "Continued",
    "Repeat",
    "continuation",
    "continue_step",
    "states_check",
]

_TOKENS = 2
"""The dimension of keys and values that grows."""


@dataclass(eq=False)
class Arguments:
    """The layer of a module, and the arguments that it was made from.

    Attributes:
        layer: the layer.
        scale: softmax scale of the call; None for the default.
        values: soft cap, window and causality of the call.
        sinks: sink logits of the call, or None.
        sinks_version: version counter of the sinks; -1 where they have none.
        own: the tensors of the layer that kernels read.
        continued: what the next step may continue; None for nothing.
        accepted: the names of all arguments of a call that agreed, and those that decide about it
            with their values; None before one.
    """

    layer: Attention
    scale: float
    values: tuple[Any, ...]
    sinks: torch.Tensor | None
    sinks_version: int
    own: tuple[torch.Tensor | None, ...]
    continued: Continued | None
    accepted: tuple[frozenset[str], tuple[tuple[str, Any], ...]] | None = None


@dataclass(frozen=True, eq=False)
class Continued:
    """A decode whose batch outlives its step (`lasting_tokens`). It holds no keys and values, which
    end with their cache.

    Attributes:
        repeat: what the decode has found, without its cache.
        pattern: of the mask.
        tokens: those of `lasting_tokens`.
        place: thread and stream, which the batch belongs to.
        selection: what the backend was selected by.
    """

    repeat: Repeat
    pattern: Pattern
    tokens: int
    place: tuple[int, int]
    selection: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Repeat:
    """What the first layer of a step has found.

    Attributes:
        layer: that layer.
        plan: its batch.
        fits: whether query, key and value are those of such a call, with as many tokens as the mask
            tells (`states_check`).
        cache: its cache; the views of other layers have the same signature. None where a step
            before found it.
        key_view, value_view: shape and strides of the views of keys and values.
        bound_call: the backend's launcher over the tensors of transformers.
        batch: the batch, if other steps use it too.
    """

    layer: Attention
    plan: BatchPlan
    fits: Callable[..., bool]
    cache: PagedKVCache | None
    key_view: tuple[tuple[int, ...], tuple[int, ...]]
    value_view: tuple[tuple[int, ...], tuple[int, ...]]
    bound_call: BoundCall
    batch: DecodeBatch | None

    def pages(self, key: torch.Tensor, value: torch.Tensor) -> PagedKVCache:
        """The cache of a layer, as views of its keys and values."""
        views = key.as_strided(*self.key_view), value.as_strided(*self.value_view)
        return PagedKVCache(*views) if self.cache is None else self.cache.with_views(*views)


def continuation(call: Call, step: StepMask, repeat: Repeat) -> Continued | None:
    """What the next step may continue."""
    tokens, pattern = lasting_tokens(step, call.key, call.value), step.pattern
    if repeat.batch is None or tokens is None or pattern is None:
        return None
    if pattern.segments is not None or pattern.spans is not None:
        return None
    place = threading.get_ident(), current_stream(call.query.device)
    return Continued(replace(repeat, cache=None), pattern, tokens, place, selection_state())


def states_check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Callable[..., bool] | None:
    """`tensor_check` for queries, keys and values like these, whose keys may have other tokens."""
    return tensor_check(query, key, value, free=(None, _TOKENS, _TOKENS), same_strides=True)


def continue_step(
    known: Arguments,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: StepMask,
) -> Repeat | None:
    """The plan of the step before, over the keys that this one sees; None if it is another one."""
    last, pattern = known.continued, step.pattern
    if last is None or step.is_reused or is_transient():
        return None
    if pattern is None or pattern.segments is not None or pattern.spans is not None:
        return None
    repeat, tokens = last.repeat, key.shape[_TOKENS]
    batch = repeat.batch
    if pattern != last.pattern or batch is None or not repeat.fits(query, key, value):
        return None
    if (query.shape[0], 1, tokens) != (step.batch_size, step.q_length, step.kv_length):
        return None
    # `lasting_tokens`, without its calls: keys and values have equal strides, so equal capacities.
    capacity = getattr(key, CAPACITY, None)
    if (tokens if capacity is None else capacity) != last.tokens:
        return None
    grows = capacity is not None and (
        step.attention_mask is not None or not pattern.depends_on_distance
    )
    if not (grows or step.is_static or sees_all_keys(step)):
        return None
    if last.place != (threading.get_ident(), current_stream(query.device)):
        return None
    if last.selection != selection_state():
        return None
    if batch.filled_for != step.number:
        batch.fill(step, pattern)
    step.plans["repeat", id(known.layer.spec)] = repeat
    return repeat
