"""The operator that stands for attention inside a model that torch.compile traces.

Everything that attnlib prepares on the host (layers, plans, batches) is found inside the operator,
by its tensors and numbers. No module, no layer index and no Python state is part of a graph, so one
graph serves all layers, and a model compiles as a whole (`fullgraph=True`).

Inductor may record the operator in a CUDA graph (`mode="reduce-overhead"`): its host code then runs
for the warm-up and for the recording only. Such calls are transient: they read no value of a tensor
on the host, and keep no tensor, because the memory belongs to the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from attnlib.integrations.transformers.inference_only import check_states, refuse_backward
from attnlib.integrations.transformers.layers import Call, transient
from attnlib.integrations.transformers.plain import attend_plain
from attnlib.integrations.transformers.static_memory import keep_static_memory, note_trace

__all__ = ["attend_opaquely"]


class _Stand(nn.Module):
    """What stands for the attention modules of a class: they are not known to the operator."""

    is_causal: bool


_stands: dict[tuple[str, bool], _Stand] = {}
_stands_with_sinks: Any = WeakIdKeyDictionary()
"""Sinks -> stand of the module that they belong to: a layer holds a copy of its sinks."""


@torch.library.custom_op("attnlib::transformers_attention", mutates_args=())
def attend_opaquely(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    causal: bool,
    name: str,
) -> torch.Tensor:
    """Attention of one layer, `[B, T, Hq, Dv]` contiguous.

    Args:
        query, key, value: `[B, Hq, T, D]`, `[B, Hkv, S, D]`, `[B, Hkv, S, Dv]`.
        mask: see `plain.attend_plain`.
        bias: `[B or 1, Hq or 1, T or 1, S]` added to the scores, or None.
        sinks: `[Hq]` sink logits, or None.
        scale, soft_cap: of the scores.
        window: W keys are visible without a mask; None for all.
        causal: whether a call without a mask is causal.
        name: class of the module, for messages.

    Raises:
        ContractError, UnsupportedConfigError: as `plain.attend_plain`, or a backend cannot be
            recorded in a CUDA graph.
    """
    with _scope(query.device) as is_recorded:
        check_states(name, query, key, value)
        module = _stand(name, causal, None if is_recorded else sinks)
        call = Call(module, query, key, value, scale, soft_cap, sinks, window, causal)
        return attend_plain(call, mask, bias, {}).contiguous()


@attend_opaquely.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    causal: bool,
    name: str,
) -> torch.Tensor:
    note_trace()
    batch, heads, queries, _ = query.shape
    return query.new_empty(batch, queries, heads, value.shape[3])


@torch.library.custom_op("attnlib::no_gradient", mutates_args=())
def _no_gradient(gradient: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """In the place of a gradient with respect to `state`, when it is computed.

    Raises:
        UnsupportedConfigError: always.
    """
    refuse_backward()
    return gradient


@_no_gradient.register_fake
def _(gradient: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(state)


def _keep_states(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Traced with the forward, and refused when it runs: a forward alone needs no gradient."""
    states = (_no_gradient(gradient, state) for state in ctx.saved_tensors)
    return (*states, *(None,) * 8)


attend_opaquely.register_autograd(_backward, setup_context=_keep_states)


def _stand(name: str, causal: bool, sinks: torch.Tensor | None) -> _Stand:
    """The stand of a call; the same for all layers of a class without sinks."""
    kept: Any = _stands if sinks is None else _stands_with_sinks
    key: Any = (name, causal) if sinks is None else sinks
    found: _Stand | None = kept.get(key)
    if found is None:
        found = kept[key] = type(name, (_Stand,), {})()
        found.is_causal = causal
    return found


@contextmanager
def _scope(device: torch.device) -> Iterator[bool]:
    """Run a call; the value is whether its memory belongs to a CUDA graph."""
    with torch.no_grad():
        if not _is_recorded(device):
            yield False
        else:
            keep_static_memory(device)
            with transient():
                yield True


def _is_recorded(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.is_current_stream_capturing() or _is_warming_up(device)


def _is_warming_up(device: torch.device) -> bool:
    """Whether Inductor runs a graph for the first time, in the memory that the graph will use. It
    reports every other tensor that is still alive there afterwards as an error."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    containers = getattr(getattr(trees, "local", None), "tree_manager_containers", {})
    manager = getattr(containers.get(device.index), "tree_manager", None)
    return manager is not None and bool(manager.in_warmup)
