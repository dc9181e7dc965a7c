"""Recorded calls of state layers on any backend, and what they must return."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlib.backends.base import AttentionBackend
from attnlib.backends.state_impl import StateInputs
from attnlib.cache.states import StateCache
from attnlib.debug.state_calls import RecordedStateCall, StateOutcome
from attnlib.device import resolve_device
from attnlib.errors import ContractError
from attnlib.layer.state import StateLayer
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.states import StateMetadata
from attnlib.ops.states.batch import StateRequest
from attnlib.ops.torch.states import exchange
from attnlib.spec import CudaGraphSupport
from attnlib.testing.budget import compare
from attnlib.testing.outcome import UnsupportedCase
from attnlib.testing.states.layers import state_difference
from attnlib.testing.states.oracle import convolve, recurrence

__all__ = ["compare_state_call", "run_state_call"]


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
        state_slots=torch.tensor(call.slots, dtype=torch.int32, device="cpu"),
        state_sources=torch.tensor(call.sources, dtype=torch.int32, device="cpu"),
    )
    metadata = layer.backend.make_builder(layer.spec, device).build(0, common)
    return call.outcome(_call(call, layer, cache, metadata), cache.tensors, call.requests())


@torch.no_grad()
def _call(
    call: RecordedStateCall, layer: StateLayer, cache: StateCache, metadata: StateMetadata
) -> Tensor:
    """The call of the impl: observers of layers do not see it."""
    values: Any = call.inputs
    is_convolution = call.part == "convolution"
    given: Any = values[0] if is_convolution else StateInputs(*values)
    if layer.log_decay is not None and not is_convolution:
        given = given._replace(log_decay=layer.log_decay)
    shaped = given if is_convolution else given.value
    out = torch.full_like(shaped, torch.nan, memory_format=torch.contiguous_format)
    plan = layer.impl.plan_convolution if is_convolution else layer.impl.plan_step
    run = plan(given, cache, metadata, out)
    run(layer.impl, given, cache, metadata, out)
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
        if request.is_fork:
            sources[request.number] += count
        if request.computed:
            state = call.read(before, request.source, request.computed)
            try:
                write(after.tensors, sources[request.number], request.computed, state)
            except ContractError as error:  # a tail begins at multiples of its chunk size
                raise UnsupportedCase([str(error)]) from None
    return replace(call, spec=spec, slots=slots, sources=sources, memory=after.memory)


def compare_state_call(call: RecordedStateCall, found: StateOutcome) -> str:
    """The first difference from what the rules give in float64 beyond its budget, or ""."""
    if found.problem:
        return found.problem
    before = StateCache(call.spec, call.memory).tensors
    outs, states, kept, rest = [], [], [], found.out.clone()
    for request in call.requests():
        first = None
        if request.computed:
            first = call.read(before, request.source, request.computed).cpu()
        exact, wanted = _computed(call, request, first, None)
        rounded, _ = _computed(call, request, first, call.spec.dtype)
        outs.append((found.out[request.rows].cpu(), exact, rounded.to(call.spec.dtype)))
        rest[request.rows] = 0
        states.append((f"{call.part} of request {request.number}: the state after it", wanted))
        if request.is_fork and first is not None:
            kept.append((f"{call.part}: the source of request {request.number}", first))
    for (what, wanted), state in zip([*states, *kept], found.states, strict=True):
        if message := state_difference(call.spec, state.cpu(), wanted):
            return f"{what} {message}"
    if bool((rest != 0).any()):
        row = int((rest != 0).flatten(1).any(1).nonzero()[0])
        return f"row {row} belongs to no request with a slot, and is not 0 (T3)"
    if not outs:
        return ""
    got, exacts, limits = (torch.cat(rows) for rows in zip(*outs, strict=True))
    result = compare(got, exacts, limits, call.spec.dtype)
    return "" if result.passed else f"{call.part}: {result}"


def _computed(
    call: RecordedStateCall,
    request: StateRequest,
    first: Tensor | None,
    rounding: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Outputs of a request and its state, by the oracle: in float64, or as `rounding` allows."""
    spec, width = call.spec, call.spec.conv_width - 1
    wide = torch.float64 if rounding in (None, torch.float64) else torch.float32
    inputs = [None if x is None else x[request.rows].cpu() for x in call.inputs]
    tensors = {name: x.cpu() for name, x in call.tensors.items()}
    if call.part == "convolution":
        assert inputs[0] is not None  # a convolution has an input
        start = inputs[0].new_zeros(spec.conv_channels, width) if first is None else first
        x = torch.cat([start.mT, inputs[0]])
        weights = tensors["conv_weight"], tensors.get("conv_bias")
        return convolve(spec, x, *weights, dtype=wide)[width:], x[len(x) - width :].mT
    given: list[Any] = [*inputs[:3], tensors.get("log_decay", inputs[3]), inputs[4]]
    settings: dict[str, Any] = {"dtype": wide, "rounded_norm": rounding, "initial": first}
    return recurrence(spec, *given, scale=call.scale, skip=tensors.get("skip"), **settings)
