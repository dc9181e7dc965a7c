"""Copies of calls of state layers with the slots that they use, and the same calls on other
backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.backends.state_impl import StateInputs
from attnlib.cache.states import StateCache
from attnlib.device import resolve_device
from attnlib.errors import ContractError
from attnlib.layer.state import StateLayer
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.ops.states import RecurrenceParams, StateTensors
from attnlib.ops.states.batch import StateRequest
from attnlib.ops.torch.states import exchange
from attnlib.spec import CudaGraphSupport, StateSpec
from attnlib.testing.batch_spec import BatchSpec
from attnlib.testing.outcome import UnsupportedCase
from attnlib.testing.tensor_io import pack_tensor, unpack_tensor

if TYPE_CHECKING:
    from attnlib.metadata.states import StateMetadata

__all__ = [
    "RecordedStateCall",
    "StateOutcome",
    "capture_state_call",
    "live_outcome",
    "run_state_call",
]

_TENSORS = ("conv_weight", "conv_bias", "skip", "log_decay")


class StateOutcome(NamedTuple):
    """What a call has done.

    Attributes:
        out: `[T, Hv, Dv]` or `[T, C]`.
        states: after the call, of each request with new tokens and a slot, in canonical form (T20).
    """

    out: torch.Tensor
    states: list[torch.Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordedStateCall:
    """One call of a state layer.

    Attributes:
        spec: with the form and the chunk size of the recorded slots.
        part: "recurrence" or "convolution".
        scale: factor of q.
        tensors: of the layer, by name.
        inputs: those of `StateInputs`, or x alone. A constant decay is one of `tensors`.
        query_lens, seq_lens: of each request.
        slots, sources: of each request, rows of `memory`; -1 for none.
        memory: `[n, bytes per slot]` uint8, the slots that the call uses, before it.
    """

    spec: StateSpec
    part: str
    scale: float
    tensors: Mapping[str, torch.Tensor]
    inputs: tuple[torch.Tensor | None, ...]
    query_lens: list[int]
    seq_lens: list[int]
    slots: list[int]
    sources: list[int]
    memory: torch.Tensor

    def __str__(self) -> str:
        """The batch in the notation of `attnlib.testing.batch_spec`."""
        return str(BatchSpec(tuple(self.query_lens), tuple(self.seq_lens), 0))

    def requests(self) -> list[StateRequest]:
        """The requests with new tokens and a slot."""
        found, start = [], 0
        each = zip(self.query_lens, self.seq_lens, self.sources, self.slots, strict=True)
        for number, (count, end, source, slot) in enumerate(each):
            if count and slot >= 0:
                found.append(StateRequest(number, start, end - count, end, source, slot))
            start += count
        return found

    def selected(self, requests: Sequence[int]) -> RecordedStateCall:
        """The call with some of its requests, over the same slots."""
        starts = [sum(self.query_lens[:n]) for n in range(len(self.query_lens))]
        rows = [r for n in requests for r in range(starts[n], starts[n] + self.query_lens[n])]
        return replace(
            self,
            inputs=tuple(None if x is None else x[rows] for x in self.inputs),
            query_lens=[self.query_lens[n] for n in requests],
            seq_lens=[self.seq_lens[n] for n in requests],
            slots=[self.slots[n] for n in requests],
            sources=[self.sources[n] for n in requests],
        )

    def read(self, tensors: StateTensors, slot: int, position: int) -> torch.Tensor:
        """The state, or the window, of a slot after `position` tokens (T20)."""
        if self.part == "convolution":
            return exchange.read_window(tensors, slot, position)
        spec = self.spec
        params = RecurrenceParams(scale=1.0, update=spec.update, qk_norm=spec.qk_norm)
        return exchange.read_state(tensors, slot, position, params, self.tensors.get("log_decay"))


def capture_state_call(
    layer: StateLayer,
    part: str,
    inputs: tuple[torch.Tensor | None, ...],
    cache: StateCache,
    metadata: StateMetadata,
) -> RecordedStateCall:
    """Copy a call before it runs; arguments as an observer of `attnlib.instrumentation` gets
    them. Synchronizes."""
    batch = metadata.batch
    requests = list(batch.requests())
    used = sorted({r.slot for r in requests} | {r.source for r in requests if r.computed})
    rows = {slot: row for row, slot in enumerate(used)}
    starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    own = {r.number: r for r in requests}
    numbers = range(batch.num_reqs)
    if part == "recurrence" and layer.spec.decay == "constant":
        inputs = (*inputs[:3], None, inputs[4])
    tensors = {name: getattr(layer, name) for name in _TENSORS}
    return RecordedStateCall(
        spec=layer.spec,
        part=part,
        scale=layer.impl.scale,
        tensors={name: x.detach().clone() for name, x in tensors.items() if x is not None},
        inputs=tuple(
            None if x is None else unpack_tensor(pack_tensor(x), x.device) for x in inputs
        ),
        query_lens=[starts[n + 1] - starts[n] for n in numbers],
        seq_lens=[lengths[n] for n in numbers],
        slots=[rows[own[n].slot] if n in own else -1 for n in numbers],
        sources=[rows.get(own[n].source, -1) if n in own else -1 for n in numbers],
        memory=cache.memory[used].clone(),
    )


def live_outcome(
    call: RecordedStateCall, cache: StateCache, metadata: StateMetadata, output: torch.Tensor
) -> StateOutcome:
    """What the live call has done that `call` was captured from."""
    states = [call.read(cache.tensors, r.slot, r.end) for r in metadata.batch.requests()]
    return StateOutcome(output.clone(), states)


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
    out = _call(call, layer, cache, metadata)
    states = [call.read(cache.tensors, r.slot, r.end) for r in call.requests()]
    return StateOutcome(out, states)


@torch.no_grad()
def _call(
    call: RecordedStateCall, layer: StateLayer, cache: StateCache, metadata: StateMetadata
) -> torch.Tensor:
    """The call of the impl: observers of layers do not see it."""
    run: Any
    if call.part == "convolution":
        x: Any = call.inputs[0]
        out = torch.full_like(x, torch.nan, memory_format=torch.contiguous_format)
        run = layer.impl.plan_convolution("replay", x, cache, metadata, out)
        if run is None:
            layer.impl.convolve(x, cache, metadata, out)
        else:
            run(layer.impl, x, cache, out)
        return out
    values: Any = call.inputs
    given = StateInputs(*values)
    if layer.log_decay is not None:
        given = given._replace(log_decay=layer.log_decay)
    out = torch.full_like(given.value, torch.nan, memory_format=torch.contiguous_format)
    run = layer.impl.plan_step("replay", given, cache, metadata, out)
    if run is None:
        layer.impl.step(given, cache, metadata, out)
    else:
        run(layer.impl, given, cache, out)
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
    after = StateCache.allocate(spec, max(count, 1), device=call.memory.device)
    write = exchange.write_window if call.part == "convolution" else exchange.write_state
    for request in call.requests():
        computed = request.computed
        if computed:
            state = call.read(before, request.source, computed)
            try:
                write(after.tensors, request.number, computed, state)
            except ContractError as error:  # a tail begins at multiples of its chunk size
                raise UnsupportedCase([str(error)]) from None
    own = [number if slot >= 0 else -1 for number, slot in enumerate(call.slots)]
    return replace(call, spec=spec, slots=own, sources=own, memory=after.memory)
