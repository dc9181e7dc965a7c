"""`generate_batch`: attention over the paged cache of transformers.

A layer with full attention writes by slot and attends by block table, over two strided views of the
memory of transformers; nothing is gathered. The table follows from the read and write indices of
the step, or is passed by transformers on its fast path for decodes. Sliding layers have a ring
buffer that no table describes: the cache gathers the keys of their windows, and the kernel reads
those as one-token blocks.

CUDA graphs capture the steps, so on a GPU nothing here reads from the device: lengths stay there,
and every size is an upper bound that transformers passes as an int. A backend that needs lengths on
the host (`AttentionMetadataBuilder.needs_host_lengths`) costs one copy per batch and cannot be
captured.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from attnlib.cache.slots import compute_slot_mapping
from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers.layers import Call, builder_for, layer_for, layer_name
from attnlib.integrations.transformers.pages import token_pages
from attnlib.integrations.transformers.storage import (
    LayerStorage,
    attention_layers,
    layer_storage,
    sliding_update,
)
from attnlib.layer import Attention
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import CudaGraphSupport

__all__ = [
    "attend_continuous",
    "cache_of_step",
    "check_layers",
    "paged_forward",
    "refuse_plain_call",
]


@dataclass(eq=False)
class _Step:
    """State shared by the layers of one step.

    A new step begins with other tensors, with a layer that occurs again, or with a capture.

    Attributes:
        starts: `[R+1]`, `cu_seq_lens_q` of the step.
        capturing: the step is recorded in a CUDA graph.
        reached: indices of the layers that have attended.
        metadata: (backend, spec, group) -> metadata of the backend.
    """

    starts: torch.Tensor
    capturing: bool
    reached: set[int] = field(default_factory=set)
    metadata: dict[Any, Any] = field(default_factory=dict)


@dataclass(eq=False)
class _Session:
    """State of one paged cache of transformers.

    Attributes:
        step: the current step.
        captured: the captured steps: a graph replays into the workspace and tables of its capture.
        reached: indices of the layers that have attended since `check_layers` began.
    """

    step: _Step | None = None
    captured: list[_Step] = field(default_factory=list)
    reached: set[int] = field(default_factory=set)


_sessions: WeakKeyDictionary[Any, _Session] = WeakKeyDictionary()
_local = threading.local()


@contextmanager
def check_layers(cache: Any, model: torch.nn.Module) -> Iterator[None]:
    """Run one step of continuous batching and check that it reaches every attention layer.

    A layer that does not pass the arguments of the step on to its attention would attend to the
    packed new tokens as if they were one sequence without a history.

    Args:
        cache: the `PagedAttentionCache` of transformers.
        model: the model, for messages.

    Raises:
        UnsupportedConfigError: a layer of the cache did not attend over it.
    """
    session = _sessions.setdefault(cache, _Session())
    session.reached.clear()
    _local.model = type(model).__name__
    _local.updates = _Updates(cache)
    cache.update = functools.partial(_keep_update, _local.updates)
    try:
        yield
    finally:
        _local.model = _local.updates = None
        del cache.update
    missed = attention_layers(cache) - session.reached
    replayed = not session.reached and bool(session.captured)  # a replay calls no Python
    if missed and not replayed:
        raise UnsupportedConfigError(
            f"{type(model).__name__}: layers {sorted(missed)} did not attend over the paged cache, "
            f"so their tokens would be wrong: use generate instead of generate_batch"
        )


@dataclass(eq=False)
class _Updates:
    """The calls of `cache.update` in one step, from transformers 5.24 on.

    Attributes:
        cache: the `PagedAttentionCache` of transformers.
        states: (keys, values) of each call.
    """

    cache: Any
    states: list[tuple[ref[torch.Tensor], ref[torch.Tensor]]] = field(default_factory=list)

    def has(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether these tensors were the keys and values of a call."""
        return any(keys() is key and values() is value for keys, values in self.states)


def _keep_update(
    updates: _Updates,
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
    updates: _Updates | None = getattr(_local, "updates", None)
    if updates is not None and updates.has(key, value):
        return updates.cache
    return kwargs.get("cache")


def refuse_plain_call(module: torch.nn.Module) -> None:
    """Refuse a call without the arguments of a paged step while such a step runs.

    Raises:
        UnsupportedConfigError: names the layer and the model.
    """
    model = getattr(_local, "model", None)
    if model is not None:
        raise UnsupportedConfigError(
            f"{layer_name(module)}: {model} does not pass the arguments of a paged step on to its "
            f"attention, so this layer would see neither its cache nor where requests begin: "
            f"use generate with attn_implementation='attnlib'"
        )


@contextmanager
def paged_forward(model: torch.nn.Module) -> Iterator[None]:
    """Run a forward in which every attention call must carry the arguments of a paged step."""
    before, _local.model = getattr(_local, "model", None), type(model).__name__
    try:
        yield
    finally:
        _local.model = before


def attend_continuous(call: Call, cache: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Write the new keys and values to the paged cache, then attend: `[1, T, Hq, Dv]`.

    Args:
        call: query `[1, Hq, T, D]`, key and value `[1, Hkv, T, D]` of the packed new tokens.
        cache: the `PagedAttentionCache` of transformers.
        kwargs: the arguments of the step, as transformers passes them to every layer.

    Raises:
        UnsupportedConfigError: the cache stores other head sizes than the layer has, the layer
            changes its keys or values after the update of the cache, or the backend cannot be
            captured in the CUDA graph that is being recorded.
    """
    index = call.layer_idx
    storage = layer_storage(cache, index)
    _check_head_sizes(call, storage)
    _check_states(call)
    step = _step_of(cache, index, kwargs)
    if storage.pages is None:
        return _attend_gathered(call, cache, storage, step, kwargs)
    spec = call.spec(block_size=storage.pages.block_size, sliding_window=call.sliding_window)
    layer = layer_for(call, spec)
    key = (layer.backend, spec, storage.group)
    if key not in step.metadata:
        lengths = _lengths(storage, step, kwargs)
        table, slots, longest = _placement(storage, lengths, kwargs, call.query.shape[2])
        common = _common(layer, step, lengths, kwargs, call.query.shape[2], longest).replace(
            block_table_tensor=table, slot_mapping=slots
        )
        step.metadata[key] = builder_for(layer.backend, spec, call.query.device).build(0, common)
    query, key_rows, value_rows = (
        states[0].transpose(0, 1) for states in (call.query, call.key, call.value)
    )
    out: torch.Tensor = layer(query, key_rows, value_rows, storage.pages, step.metadata[key])
    return out.unsqueeze(0)


def _attend_gathered(
    call: Call, cache: Any, storage: LayerStorage, step: _Step, kwargs: dict[str, Any]
) -> torch.Tensor:
    """Attention of a sliding layer over gathered keys: window and new tokens of each request."""
    keys, values = sliding_update(cache, call, kwargs)
    pages, _ = token_pages(keys, values)
    # Some models leave the window to the mask, which continuous batching does not create here.
    windows = [window for window in (call.sliding_window, storage.window) if window is not None]
    spec = call.spec(block_size=1, sliding_window=min(windows, default=None))
    layer = layer_for(call, spec)
    key = (layer.backend, spec, storage.group)
    if key not in step.metadata:
        starts, lengths = storage.key_starts(kwargs), _lengths(storage, step, kwargs)
        longest = min(storage.longest(kwargs), keys.shape[2])
        table = starts[:-1, None] + torch.arange(longest, dtype=torch.int32, device=starts.device)
        common = _common(layer, step, lengths, kwargs, call.query.shape[2], longest).replace(
            block_table_tensor=table
        )
        step.metadata[key] = builder_for(layer.backend, spec, call.query.device).build(0, common)
    out: torch.Tensor = layer(call.query[0].transpose(0, 1), None, None, pages, step.metadata[key])
    return out.unsqueeze(0)


def _step_of(cache: Any, index: int, kwargs: dict[str, Any]) -> _Step:
    """The current step.

    transformers creates new tensors for each step, except that a capture repeats the step before it
    with the same ones.
    """
    session = _sessions.setdefault(cache, _Session())
    starts: torch.Tensor = kwargs["cu_seq_lens_q"]
    capturing = starts.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    step = session.step
    if (
        step is None
        or step.starts is not starts
        or step.capturing != capturing
        or index in step.reached
    ):
        step = session.step = _Step(starts, capturing)
        if capturing:
            session.captured.append(step)
    step.reached.add(index)
    session.reached.add(index)
    return step


def _lengths(storage: LayerStorage, step: _Step, kwargs: dict[str, Any]) -> torch.Tensor:
    """`[R]` int32; number of keys of each request, 0 for the padding of a graph."""
    starts = storage.key_starts(kwargs)
    return starts[1:] - starts[:-1]


def _placement(
    storage: LayerStorage, lengths: torch.Tensor, kwargs: dict[str, Any], num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(block table, slot mapping, longest sequence) of a layer with full attention."""
    assert storage.pages is not None  # the caller has checked
    block_size, starts = storage.pages.block_size, kwargs["cu_seq_lens_q"].to(torch.int32)
    if kwargs.get("block_table") is not None:
        table: torch.Tensor = kwargs["block_table"][storage.group]
        slots = compute_slot_mapping(starts, lengths, table, block_size, num_tokens)
        return table, slots, table.shape[1] * block_size
    read, write = kwargs["read_index"][storage.group], kwargs["write_index"][storage.group]
    # An empty read index means that all requests are new: they read what they write.
    source, key_starts = (read, storage.key_starts(kwargs)) if read.numel() else (write, starts)
    longest = min(storage.longest(kwargs), source.numel())
    columns = torch.arange(-(-longest // block_size), device=source.device) * block_size
    positions = (key_starts[:-1, None] + columns).clamp_(max=source.numel() - 1)
    table = (source[positions] // block_size).to(torch.int32)
    tokens = torch.arange(write.numel(), device=write.device)
    # Padding tokens write nothing (P4); transformers would direct them to an unused block.
    return table, torch.where(tokens < starts[-1], write, -1), longest


def _common(
    layer: Attention,
    step: _Step,
    lengths: torch.Tensor,
    kwargs: dict[str, Any],
    num_tokens: int,
    longest: int,
) -> CommonAttentionMetadata:
    """The batch without block table and slots.

    Lengths are copied to the host on a CPU, and for backends that need them there (one copy, which
    synchronizes).
    """
    starts = step.starts.to(torch.int32)
    on_host = _needs_host_lengths(layer, starts)
    level = layer.backend.get_builder_cls().cudagraph_support
    if step.capturing and (on_host or level is not CudaGraphSupport.ALWAYS):
        reason = (
            "needs lengths on the host, which a CUDA graph cannot provide"
            if on_host
            else f"captures batches of level {level.name} only, and a step may be any batch"
        )
        raise UnsupportedConfigError(
            f"backend {layer.backend.get_name()} {reason}: pass "
            "ContinuousBatchingConfig(use_cuda_graph=False), or choose another backend",
            backend=layer.backend.get_name(),
        )
    starts_cpu = lengths_cpu = None  # then builders serve mixed batches with prefill kernels
    if on_host:
        both = torch.cat([starts, lengths]).cpu()
        starts_cpu, lengths_cpu = both[: starts.numel()], both[starts.numel() :]
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts_cpu,
        seq_lens=lengths,
        seq_lens_cpu=lengths_cpu,
        num_reqs=lengths.shape[0],
        num_actual_tokens=num_tokens,
        max_query_len=min(
            int(kwargs.get("max_length_q") or kwargs.get("max_seqlen_q") or num_tokens), num_tokens
        ),
        max_seq_len=longest,
    )


def _check_head_sizes(call: Call, storage: LayerStorage) -> None:
    """Refuse a cache whose head sizes differ, as transformers allocates it for MLA."""
    if storage.pages is None:
        return
    stored = (storage.pages.head_size, storage.pages.head_size_v)
    needed = (call.key.shape[3], call.value.shape[3])
    if stored != needed:
        raise UnsupportedConfigError(
            f"{layer_name(call.module)}: its keys and values have head sizes {needed}, but the "
            f"paged cache of transformers stores {stored}: generate_batch does not support "
            f"this model (multi-head latent attention, or values smaller than keys); use generate "
            f"with attn_implementation='attnlib'"
        )


def _check_states(call: Call) -> None:
    """Refuse keys or values that the layer has changed since it updated the cache: the attention
    would write them, and the model stores others."""
    updates: _Updates | None = getattr(_local, "updates", None)
    if updates is not None and updates.states and not updates.has(call.key, call.value):
        raise UnsupportedConfigError(
            f"{layer_name(call.module)} changes keys or values after it has passed them to the "
            "paged cache of transformers, which attnlib does not support: use generate with "
            "attn_implementation='attnlib'"
        )


def _needs_host_lengths(layer: Attention, starts: torch.Tensor) -> bool:
    return starts.device.type == "cpu" or layer.backend.get_builder_cls().needs_host_lengths
