"""What a recorded call of a state layer must return, and how a result differs from it."""

from __future__ import annotations

import torch

from attnlib.cache.states import StateCache
from attnlib.debug.state_calls import RecordedStateCall, StateOutcome, is_fork
from attnlib.ops.states.batch import StateRequest
from attnlib.testing.budget import compare
from attnlib.testing.states.layers import state_difference
from attnlib.testing.states.oracle import convolve, recurrence

__all__ = ["compare_state_call"]


def compare_state_call(call: RecordedStateCall, found: StateOutcome) -> str:
    """The first difference from what the rules give in float64 beyond its budget, or ""."""
    if found.problem:
        return found.problem
    before = StateCache(call.spec, call.memory).tensors
    outs, exacts, rounded, rest = [], [], [], found.out.clone()
    states: list[tuple[str, torch.Tensor]] = []
    kept: list[tuple[str, torch.Tensor]] = []
    for request in call.requests():
        first = None
        if request.computed:
            first = call.read(before, request.source, request.computed).cpu()
        exact, wanted = _computed(call, request, first, None)
        exacts.append(exact)
        rounded.append(_computed(call, request, first, call.spec.dtype)[0].to(call.spec.dtype))
        outs.append(found.out[request.rows].cpu())
        rest[request.rows] = 0
        states.append((f"{call.part} of request {request.number}: the state after it", wanted))
        if is_fork(request) and first is not None:
            kept.append((f"{call.part}: the source of request {request.number}", first))
    for (what, wanted), state in zip([*states, *kept], found.states, strict=True):
        if message := state_difference(call.spec, state.cpu(), wanted):
            return f"{what} {message}"
    if bool((rest != 0).any()):
        row = int((rest != 0).flatten(1).any(1).nonzero()[0])
        return f"row {row} belongs to no request with a slot, and is not 0 (T3)"
    if not outs:
        return ""
    result = compare(torch.cat(outs), torch.cat(exacts), torch.cat(rounded), call.spec.dtype)
    return "" if result.passed else f"{call.part}: {result}"


def _computed(
    call: RecordedStateCall,
    request: StateRequest,
    first: torch.Tensor | None,
    rounding: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
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
    query, key, value, decay, beta = inputs
    assert query is not None and key is not None and value is not None  # as above
    return recurrence(
        spec,
        query,
        key,
        value,
        tensors["log_decay"] if decay is None else decay,
        beta,
        scale=call.scale,
        skip=tensors.get("skip"),
        dtype=wide,
        rounded_norm=rounding,
        initial=first,
    )
