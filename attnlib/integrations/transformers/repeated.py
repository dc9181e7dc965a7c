"""Layers of a step after the first one: their plan is known, only the tensors differ.

Finding the plan of a layer (spec, selection, layer, views of the cache, signature of the call)
takes several times as long as one token's attention. The first layer of a step leaves what it has
found with the mask of the step, and with its module. A later layer compares its tensors with those
of the first one, in one call, and its arguments with those of its own call before: of a prefill
with those of the last prefill, of a decode with those of the last decode. Where the backend can
compare calls itself, later layers go to its launcher directly. Selection is asked once per step.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from attnlib.cache.storage import PagedKVCache
from attnlib.instrumentation import ENVIRONMENT, OBSERVERS, VALIDATE_KEY
from attnlib.integrations.transformers.batch_plan import BatchPlan, run_layer
from attnlib.integrations.transformers.continued import (
    Arguments,
    Repeat,
    continuation,
    continue_step,
    states_check,
)
from attnlib.integrations.transformers.decode_batch import BoundCall, DecodeBatch
from attnlib.integrations.transformers.growing_cache import LAST_UPDATE, note_served
from attnlib.integrations.transformers.layers import Call, tensor_version
from attnlib.integrations.transformers.recorded_weights import weights_are_collected
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.layer import Attention
from attnlib.layer.per_head import own_tensors

__all__ = ["attend_again", "remember"]

_REFUSED = (
    "output_attentions",
    "attnlib_step",
    "write_index",
    "cu_seq_lens_q",
    "position_bias",
    "indices",
    "block_indices",
)
"""Arguments of calls that are never repeated."""
_DECIDING = (*_REFUSED, "is_causal", "s_aux", "sinks", "softcap", "sliding_window")


_decodes: WeakKeyDictionary[nn.Module, Arguments] = WeakKeyDictionary()
_prefills: WeakKeyDictionary[nn.Module, Arguments] = WeakKeyDictionary()
_known_decodes: dict[ref[nn.Module], Arguments] = vars(_decodes)["data"]
_known_prefills: dict[ref[nn.Module], Arguments] = vars(_prefills)["data"]
"""The same by weak references: found without a Python function."""


def remember(
    call: Call,
    step: StepMask,
    layer: Attention,
    plan: BatchPlan,
    cache: PagedKVCache,
    out: torch.Tensor,
    batch: DecodeBatch | None = None,
) -> None:
    """Keep what a call over pages of one token has found, for `attend_again`.

    Args:
        call, step: the call and its mask.
        layer, plan, cache: what served it. Nothing is kept if `cache` is a copy, or if the mask
            outlives the step.
        out: its result, `[B, T, Hq, Dv]`.
        batch: the batch of `plan`, if other steps use it too.
    """
    key, value = cache.key_cache, cache.value_cache
    if step.is_reused or weights_are_collected():
        return
    if key.data_ptr() != call.key.data_ptr() or value.data_ptr() != call.value.data_ptr():
        return
    fits = states_check(call.query, call.key, call.value)
    found: Repeat | None = step.plans.get(("repeat", id(layer.spec)))
    if found is None and fits is not None:
        bound = BoundCall() if batch is None else batch.bound_call
        views = (key.shape, key.stride()), (value.shape, value.stride())
        found = Repeat(layer, plan, fits, cache, *views, bound, batch)
        step.plans["repeat", id(layer.spec)] = found
    values = (call.soft_cap, call.sliding_window, call.declared_causal)
    version = tensor_version(call.sinks)
    continued = None if found is None else continuation(call, step, found)
    modules = _decodes if call.query.shape[2] == 1 else _prefills
    own = own_tensors(layer) if layer._has_per_head else ()
    known = Arguments(layer, call.scale, values, call.sinks, version, own, continued)
    modules[call.module] = known
    if found is not None and found.bound_call.group is None:
        _bind(found.bound_call, known, plan, call.query, out)


def attend_again(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: StepMask,
    scale: float,
    kwargs: dict[str, Any],
) -> torch.Tensor | None:
    """Attention of a layer whose plan an earlier layer of the step has made.

    Args:
        module, query, key, value, kwargs: as in `attnlib_attention`.
        step: the mask of the step.
        scale: softmax scale.

    Returns:
        `[B, T, Hq, Dv]`, or None for a call that is not known.
    """
    batch, heads, queries, _ = query.shape
    known = (_known_decodes if queries == 1 else _known_prefills).get(ref(module))
    if known is None or known.scale != scale or VALIDATE_KEY in ENVIRONMENT:
        return None
    layer, accepted = known.layer, known.accepted
    if accepted is None or kwargs.keys() != accepted[0]:
        if not _accept(known, kwargs):
            return None
    else:
        for name, given in accepted[1]:
            if kwargs[name] is not given and not _accept(known, kwargs):
                return None
        sinks, version = known.sinks, known.sinks_version
        if sinks is not None and version >= 0 and sinks._version != version:
            return None
    repeat: Repeat | None = step.plans.get(("repeat", id(layer.spec)))
    if repeat is None:  # the first layer of a step, or the first of its kind
        if not weights_are_collected():
            repeat = continue_step(known, query, key, value, step)
    if repeat is None or repeat.layer.backend is not layer.backend:
        return None
    if not (repeat.fits(query, key, value) and key.shape[2] == value.shape[2] == step.kv_length):
        return None
    if LAST_UPDATE.layer is not None:
        note_served(key, value)
    if (filled := repeat.batch) is not None and filled.filled_for != step.number:
        return None
    bound = repeat.bound_call
    launch = bound.launch
    if launch is not None and bound.group is layer.impl._group and not OBSERVERS:
        out = query.new_empty(batch, queries, heads, value.shape[3])
        if launch(query, key, value, out, None, None, None, *known.own):
            return out
    cache = repeat.pages(key, value)
    out = run_layer(layer, repeat.plan, query, None, None, cache)
    if bound.group is None:
        _bind(bound, known, repeat.plan, query, out)
    return out


def _accept(known: Arguments, kwargs: dict[str, Any]) -> bool:
    """Whether a call has the arguments of the module's call before, and none that is refused; the
    next call is compared by identity."""
    get = kwargs.get
    for name in _REFUSED:
        given = get(name)  # a tensor has no truth value
        if given is not None and given is not False:
            return False
    causal, sinks = get("is_causal"), get("s_aux")
    sinks = get("sinks") if sinks is None else sinks
    values = (get("softcap"), get("sliding_window"), None if causal is None else bool(causal))
    if values != known.values or sinks is not known.sinks:
        return False
    if sinks is not None and tensor_version(sinks) != known.sinks_version:
        return False
    deciding = tuple((name, kwargs[name]) for name in _DECIDING if name in kwargs)
    known.accepted = frozenset(kwargs), deciding
    return True


def _bind(
    bound: BoundCall,
    known: Arguments,
    plan: BatchPlan,
    query: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Take the launcher of the call that has just run, for calls with these tensors. It reads their
    addresses, so that packed queries must be a view."""
    (batch, _, queries, _), (row, _, token, element) = query.shape, query.stride()
    recent = plan.metadata.recent_plan
    if recent is None or recent.call is None or plan.queries is not None:
        return
    if element != 1 or (batch > 1 and queries > 1 and row != queries * token):
        return
    bound.group = recent.group
    # The views of a cache begin where its keys and values do, and only addresses are read.
    bound.launch = recent.plan.bind_call(query, ..., ..., out, ..., None, None, own=known.own)
