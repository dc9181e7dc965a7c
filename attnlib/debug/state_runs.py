"""Recorded calls of state layers on any backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.backends.state_impl import StateInputs
from attnlib.cache.states import StateCache
from attnlib.debug.state_calls import RecordedStateCall, StateOutcome, is_fork
from attnlib.device import resolve_device
from attnlib.errors import ContractError
from attnlib.layer.state import StateLayer
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.states import StateMetadata
from attnlib.ops.torch.states import exchange
from attnlib.spec import CudaGraphSupport
from attnlib.testing.outcome import UnsupportedCase

__all__ = ["run_state_call"]


def run_state_call(call: RecordedStateCall, backend: type[AttentionBackend]) -> StateOutcome:
    """Run a call on a backend, over copies of the slots. Where it has not their form, the states
    before the call are converted, and no tokens can be taken back.

    Raises:
        UnsupportedCase: the backend does not support the layer, or its slots cannot begin where
            the requests continue (T20).
    """
    device = call.memory.device
    call = _in_form_of(call, backend)
    layer = StateLayer(
        call.spec, backend=backend, scale=call.scale, prefix="replay", device=device, **call.tensors
    )
    cache = StateCache(layer.spec, call.memory.clone())
    common = CommonAttentionMetadata.from_lengths(
        call.query_lens,
        call.seq_lens,
        device=device,
        state_slots=torch.tensor(call.slots, dtype=torch.int32),
        state_sources=torch.tensor(call.sources, dtype=torch.int32),
    )
    metadata = layer.backend.make_builder(layer.spec, device).build(0, common)
    return call.outcome(_call(call, layer, cache, metadata), cache.tensors, call.requests())


@torch.no_grad()
def _call(
    call: RecordedStateCall, layer: StateLayer, cache: StateCache, metadata: StateMetadata
) -> torch.Tensor:
    """The call of the impl: observers of layers do not see it."""
    impl = layer.impl
    if call.part == "convolution":
        x: Any = call.inputs[0]
        out = torch.full_like(x, torch.nan, memory_format=torch.contiguous_format)
        run = impl.plan_convolution("replay", x, cache, metadata, out)
        run(impl, x, cache, metadata, out)
        return out
    values: Any = call.inputs
    given = StateInputs(*values)
    if layer.log_decay is not None:
        given = given._replace(log_decay=layer.log_decay)
    out = torch.full_like(given.value, torch.nan, memory_format=torch.contiguous_format)
    run = impl.plan_step("replay", given, cache, metadata, out)
    run(impl, given, cache, metadata, out)
    return out


def _in_form_of(call: RecordedStateCall, backend: type[AttentionBackend]) -> RecordedStateCall:
    """The call with slots of a form that the backend supports, one per request if another one."""
    facts = resolve_device(call.memory.device)
    if reasons := backend.unavailable(facts):
        raise UnsupportedCase(reasons)
    if not backend.state_reasons(call.spec, facts):
        return call
    alone = {"max_rollback": 0, "batch_invariant": False, "cudagraph": CudaGraphSupport.NEVER}
    spec = call.spec.replace(form=None, chunk_size=None, **alone)
    if reasons := backend.state_reasons(spec, facts):
        raise UnsupportedCase(reasons)
    spec, count = backend.resolve_state_spec(spec), len(call.slots)
    before = StateCache(call.spec, call.memory).tensors
    after = StateCache.allocate(spec, max(2 * count, 1), device=call.memory.device)
    write = exchange.write_window if call.part == "convolution" else exchange.write_state
    slots = [number if slot >= 0 else -1 for number, slot in enumerate(call.slots)]
    sources = list(slots)
    for request in call.requests():
        if is_fork(request):
            sources[request.number] += count
        if request.computed:
            state = call.read(before, request.source, request.computed)
            try:
                write(after.tensors, sources[request.number], request.computed, state)
            except ContractError as error:  # a tail begins at multiples of its chunk size
                raise UnsupportedCase([str(error)]) from None
    return replace(call, spec=spec, slots=slots, sources=sources, memory=after.memory)
