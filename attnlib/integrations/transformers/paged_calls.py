"""Attention calls over the paged cache of transformers, and updates of the cache before them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers.layers import Call, layer_name

__all__ = [
    "LOCAL",
    "Updates",
    "cache_of_step",
    "check_states",
    "keep_update",
    "one_row",
    "paged_forward",
    "refuse_plain_call",
]


LOCAL = threading.local()


@dataclass(eq=False)
class Updates:
    """The calls of `cache.update` in one step, from transformers 5.24 on.

    Attributes:
        cache: the `PagedAttentionCache` of transformers.
        states: (keys, values) of each call.
    """

    cache: Any
    states: list[tuple[ref[torch.Tensor], ref[torch.Tensor]]] = field(default_factory=list)

    def has(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether these tensors were the keys and values of a call: mostly of the last one."""
        for keys, values in reversed(self.states):
            if keys() is key and values() is value:
                return True
        return False


def keep_update(
    updates: Updates,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    layer_idx: int,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cache.update` of a layer, from transformers 5.24 on: the attention writes to the cache and
    reads it in place. Before 5.24, layers pass the cache on to the attention themselves."""
    updates.states.append((ref(key_states), ref(value_states)))
    kwargs["cache"] = updates.cache
    return key_states, value_states


def cache_of_step(key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    """The `PagedAttentionCache` of an attention call; None outside of a step.

    From transformers 5.24 on, layers that share the keys of an earlier layer do not update the
    cache. Their storage gets the keys again, as before.
    """
    if kwargs.get("write_index") is None:
        return None
    updates: Updates | None = getattr(LOCAL, "updates", None)
    if updates is not None and updates.has(key, value):
        return updates.cache
    return kwargs.get("cache")


def refuse_plain_call(module: torch.nn.Module) -> None:
    """Refuse a call without the arguments of a paged step while such a step runs.

    Raises:
        UnsupportedConfigError: names the layer and the model.
    """
    model = getattr(LOCAL, "model", None)
    if model is not None:
        raise UnsupportedConfigError(
            f"{layer_name(module)}: {model} does not pass the arguments of a paged step on to its "
            f"attention, so this layer would see neither its cache nor where requests begin: "
            f"use generate with attn_implementation='attnlib'"
        )


@contextmanager
def paged_forward(model: torch.nn.Module) -> Iterator[None]:
    """Run a forward in which every attention call must carry the arguments of a paged step."""
    before, LOCAL.model = getattr(LOCAL, "model", None), type(model).__name__
    try:
        yield
    finally:
        LOCAL.model = before


def one_row(original: Callable[..., Any]) -> Callable[..., Any]:
    """`find_packed_sequence_indices` of transformers, which reads the positions of a forward on the
    host to find where sequences begin: the arguments of a paged step tell it."""

    def find_packed_sequence_indices(position_ids: torch.Tensor) -> Any:
        return None if getattr(LOCAL, "model", None) is not None else original(position_ids)

    return find_packed_sequence_indices


def check_states(call: Call) -> None:
    """Refuse keys or values that the layer has changed since it updated the cache: the attention
    would write them, and the model stores others."""
    updates: Updates | None = getattr(LOCAL, "updates", None)
    if updates is not None and updates.states and not updates.has(call.key, call.value):
        raise UnsupportedConfigError(
            f"{layer_name(call.module)} changes keys or values after it has passed them to the "
            "paged cache of transformers, which attnlib does not support: use generate with "
            "attn_implementation='attnlib'"
        )
