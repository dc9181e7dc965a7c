"""What the layers of a step have found, and the step after it that continues it.

A `DecodeBatch` over keys that grow in place, or over a full window, outlives its step: the next
step has the same layer, plan and launcher, and only fills table and lengths again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.integrations.transformers.decode_batch import (
    BoundCall,
    DecodeBatch,
    current_stream,
    lasting_tokens,
    sees_all_keys,
)
from attnlib.integrations.transformers.layers import Call, is_transient
from attnlib.integrations.transformers.patterns import Pattern
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.layer import Attention
from attnlib.metadata.base import AttentionMetadata
from attnlib.ops.signature import tensor_check
from attnlib.selection import get_attn_backend

__all__ = ["Arguments", "Continued", "Repeat", "continuation", "continue_step"]


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
        batch: the batch.
        key_view, value_view: shape and strides of the views of keys and values.
        pattern: of the mask.
        tokens: those of `lasting_tokens`.
        query_fits: whether a query has the layout of the first one.
        layouts: dtypes, strides and sizes besides the tokens of keys and values.
        place: thread and stream, which the batch belongs to.
    """

    batch: DecodeBatch
    key_view: tuple[tuple[int, ...], tuple[int, ...]]
    value_view: tuple[tuple[int, ...], tuple[int, ...]]
    pattern: Pattern
    tokens: int
    query_fits: Callable[..., bool]
    layouts: tuple[Any, ...]
    place: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Repeat:
    """What the first layer of a step has found.

    Attributes:
        layer: that layer.
        metadata: the batch.
        fits: whether query, key and value have the shapes, strides and dtypes of that call.
        cache: its cache; the views of other layers have the same signature. None where the step
            before found it.
        key_view, value_view: shape and strides of the views of keys and values.
        bound_call: the backend's launcher over the tensors of transformers.
        batch: the batch, if other steps use it too.
    """

    layer: Attention
    metadata: AttentionMetadata
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
    fits = tensor_check(call.query)
    if repeat.batch is None or tokens is None or pattern is None or fits is None:
        return None
    if step.is_static or pattern.segments is not None or pattern.spans is not None:
        return None
    place = threading.get_ident(), current_stream(call.query.device)
    layouts, views = _layouts(call.key, call.value), (repeat.key_view, repeat.value_view)
    return Continued(repeat.batch, *views, pattern, tokens, fits, layouts, place)


def _layouts(key: torch.Tensor, value: torch.Tensor) -> tuple[Any, ...]:
    return tuple((x.dtype, x.stride(), x.shape[:2], x.shape[3]) for x in (key, value))


def continue_step(
    known: Arguments,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: StepMask,
) -> Repeat | None:
    """The plan of the step before, over the keys that this one sees; None if it is another one."""
    last, layer = known.continued, known.layer
    if last is None or step.is_reused or step.is_static or is_transient():
        return None
    pattern = step.pattern
    if pattern is None or pattern.segments is not None or pattern.spans is not None:
        return None
    if step.q_length != 1 or pattern != last.pattern:
        return None
    if step.attention_mask is None and pattern.depends_on_distance and not sees_all_keys(step):
        return None
    if lasting_tokens(step, key, value) != last.tokens or not last.query_fits(query):
        return None
    if last.layouts != _layouts(key, value):
        return None
    if last.place != (threading.get_ident(), current_stream(query.device)):
        return None
    if get_attn_backend(layer.spec, None, query.device) is not layer.backend:
        return None
    fits, batch = tensor_check(query, key, value), last.batch
    if fits is None:
        return None
    step.check(query, key)
    if batch.filled_for != step.number:
        batch.fill(step, pattern)
    views = last.key_view, last.value_view
    repeat = Repeat(layer, batch.metadata, fits, None, *views, batch.bound_call, batch)
    step.plans["repeat", id(layer.spec)] = repeat
    return repeat
