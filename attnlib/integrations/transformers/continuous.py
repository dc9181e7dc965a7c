"""`generate_batch`: attention over the paged cache of transformers.

A layer with full attention writes by slot and attends by block table, over two strided views of the
memory of transformers; nothing is gathered. The table follows from the read and write indices of
the step, or is passed by transformers on its fast path for decodes. Sliding layers have a ring of
pages: decodes read it by block table (`ring_allocator`), and for other steps the cache gathers the
keys of the windows, which the kernel reads as one-token blocks.

CUDA graphs capture the steps, so on a GPU nothing here reads from the device: lengths stay there,
and every size is an upper bound that transformers passes as an int. A backend that needs lengths on
the host (`AttentionMetadataBuilder.needs_host_lengths`) costs one copy per batch and cannot be
captured.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers.continuous_batch import (
    Step,
    common_of_step,
    lengths_of,
    placement,
)
from attnlib.integrations.transformers.layers import (
    Call,
    builder_for,
    is_capturing,
    layer_for,
    layer_name,
)
from attnlib.integrations.transformers.paged_calls import LOCAL, Updates, check_states, keep_update
from attnlib.integrations.transformers.pages import token_pages
from attnlib.integrations.transformers.storage import (
    LayerStorage,
    attention_layers,
    layer_storage,
    sliding_update,
)

__all__ = ["attend_continuous", "check_layers"]


@dataclass(eq=False)
class _Session:
    """State of one paged cache of transformers.

    Attributes:
        step: the current step.
        captured: the captured steps: a graph replays into the workspace and tables of its capture.
        reached: indices of the layers that have attended since `check_layers` began.
    """

    step: Step | None = None
    captured: list[Step] = field(default_factory=list)
    reached: set[int] = field(default_factory=set)


_sessions: WeakKeyDictionary[Any, _Session] = WeakKeyDictionary()


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
    LOCAL.model = type(model).__name__
    LOCAL.updates = Updates(cache)
    cache.update = functools.partial(keep_update, LOCAL.updates)
    try:
        yield
    finally:
        LOCAL.model = LOCAL.updates = None
        del cache.update
    missed = attention_layers(cache) - session.reached
    replayed = not session.reached and bool(session.captured)  # a replay calls no Python
    if missed and not replayed:
        raise UnsupportedConfigError(
            f"{type(model).__name__}: layers {sorted(missed)} did not attend over the paged cache, "
            f"so their tokens would be wrong: use generate instead of generate_batch"
        )


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
    check_states(call)
    step = _step_of(cache, index, kwargs)
    if storage.pages is None or (storage.window is not None and storage.table(kwargs) is None):
        return _attend_gathered(call, cache, storage, step, kwargs)
    window = call.sliding_window
    if storage.window is not None:
        _check_ring(call, storage)
        window = None  # the ring has no other keys
    spec = call.spec(block_size=storage.pages.block_size, sliding_window=window)
    layer = layer_for(call, spec)
    key = (layer.backend, spec, storage.group)
    if key not in step.metadata:
        lengths = lengths_of(storage, step, kwargs)
        table, slots, longest = placement(storage, lengths, kwargs, call.query.shape[2])
        common = common_of_step(layer, step, lengths, kwargs, call.query.shape[2], longest).replace(
            block_table_tensor=table,
            slot_mapping=slots,
            is_cross_attention=storage.window is not None,  # slots of a ring are in no order
        )
        step.metadata[key] = builder_for(layer.backend, spec, call.query.device).build(0, common)
    query, key_rows, value_rows = (
        states[0].transpose(0, 1) for states in (call.query, call.key, call.value)
    )
    out: torch.Tensor = layer(query, key_rows, value_rows, storage.pages, step.metadata[key])
    return out.unsqueeze(0)


def _attend_gathered(
    call: Call, cache: Any, storage: LayerStorage, step: Step, kwargs: dict[str, Any]
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
        starts, lengths = storage.key_starts(kwargs), lengths_of(storage, step, kwargs)
        longest = min(storage.longest(kwargs), keys.shape[2])
        table = starts[:-1, None] + torch.arange(longest, dtype=torch.int32, device=starts.device)
        common = common_of_step(layer, step, lengths, kwargs, call.query.shape[2], longest).replace(
            block_table_tensor=table
        )
        step.metadata[key] = builder_for(layer.backend, spec, call.query.device).build(0, common)
    out: torch.Tensor = layer(call.query[0].transpose(0, 1), None, None, pages, step.metadata[key])
    return out.unsqueeze(0)


def _step_of(cache: Any, index: int, kwargs: dict[str, Any]) -> Step:
    """The current step.

    transformers creates new tensors for each step, except that a capture repeats the step before it
    with the same ones.
    """
    session = _sessions.setdefault(cache, _Session())
    starts: torch.Tensor = kwargs["cu_seq_lens_q"]
    capturing = is_capturing(starts.device)
    step = session.step
    if (
        step is None
        or step.starts is not starts
        or step.capturing != capturing
        or index in step.reached
    ):
        step = session.step = Step(starts, capturing)
        if capturing:
            session.captured.append(step)
    step.reached.add(index)
    session.reached.add(index)
    return step


def _check_ring(call: Call, storage: LayerStorage) -> None:
    """Refuse a ring with more keys than the layer sees, whose order is not known."""
    if call.sliding_window not in (None, storage.window):
        raise UnsupportedConfigError(
            f"{layer_name(call.module)}: its window is {call.sliding_window}, but the paged cache "
            f"of transformers keeps {storage.window} keys: pass "
            "ContinuousBatchingConfig(max_blocks_per_request=0)"
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
