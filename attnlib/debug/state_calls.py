"""Copies of calls of state layers with the slots that they use, and their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnlib.cache.states import StateCache
from attnlib.debug.recorded_fields import plain_fields, spec_fields
from attnlib.debug.recording_files import KEY_OF_STATES, read_file, refuse_damaged, write_file
from attnlib.errors import ContractError
from attnlib.layer.state import StateLayer
from attnlib.ops.states import RecurrenceParams, StateTensors
from attnlib.ops.states.batch import StateRequest, step_requests
from attnlib.ops.torch.states import exchange
from attnlib.spec import StateSpec
from attnlib.testing.batch_spec import BatchSpec
from attnlib.testing.tensor_io import pack_tensor, unpack_tensor

if TYPE_CHECKING:
    from attnlib.metadata.states import StateMetadata

__all__ = [
    "RecordedStateCall",
    "StateOutcome",
    "capture_state_call",
    "is_state_recording",
    "load_state_recording",
    "save_state_recording",
]

_VERSION = 1
_LISTS = ("query_lens", "seq_lens", "slots", "sources")
_TENSORS = ("conv_weight", "conv_bias", "skip", "log_decay")


Inputs = tuple[Tensor | None, ...]


class StateOutcome(NamedTuple):
    """What a call has done.

    Attributes:
        out: `[T, Hv, Dv]` or `[T, C]`.
        states: after the call, in canonical form (T20): of each request with new tokens and a slot,
            then, at their positions before it, of slots that a request only reads (T12).
        problem: why the slots hold no such states, or "".
    """

    out: Tensor
    states: list[Tensor]
    problem: str = ""


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
    tensors: Mapping[str, Tensor]
    inputs: Inputs
    query_lens: list[int]
    seq_lens: list[int]
    slots: list[int]
    sources: list[int]
    memory: Tensor

    def __str__(self) -> str:
        """The batch in the notation of `attnlib.testing.batch_spec`."""
        return str(BatchSpec(tuple(self.query_lens), tuple(self.seq_lens), 0))

    def requests(self) -> list[StateRequest]:
        """The requests with new tokens and a slot."""
        return [*step_requests(self.query_lens, self.seq_lens, self.slots, self.sources)]

    def selected(self, requests: Sequence[int]) -> RecordedStateCall:
        """The call with some of its requests, over the same slots."""
        starts = [sum(self.query_lens[:n]) for n in range(len(self.query_lens))]
        rows = [r for n in requests for r in range(starts[n], starts[n] + self.query_lens[n])]
        inputs = tuple(None if x is None else x[rows] for x in self.inputs)
        lists: Any = {name: [getattr(self, name)[n] for n in requests] for name in _LISTS}
        return replace(self, inputs=inputs, **lists)

    def read(self, tensors: StateTensors, slot: int, position: int) -> Tensor:
        """The state, or the window, of a slot after `position` tokens (T20)."""
        if self.part == "convolution":
            return exchange.read_window(tensors, slot, position)
        spec = self.spec
        params = RecurrenceParams(scale=1.0, update=spec.update, qk_norm=spec.qk_norm)
        return exchange.read_state(tensors, slot, position, params, self.tensors.get("log_decay"))

    def outcome(
        self, out: Tensor, tensors: StateTensors, requests: Sequence[StateRequest]
    ) -> StateOutcome:
        """What the call has done to slots, where `requests` are these."""
        places = [(r.slot, r.end) for r in requests]
        places += [(r.source, r.computed) for r in requests if r.is_fork]
        try:
            return StateOutcome(out, [self.read(tensors, *place) for place in places])
        except ContractError as error:
            return StateOutcome(out, [], f"after the call, {error}")


def capture_state_call(
    layer: StateLayer, part: str, inputs: Inputs, cache: StateCache, metadata: StateMetadata
) -> RecordedStateCall:
    """Copy a call before it runs; arguments as an observer of `attnlib.instrumentation` gets
    them. Synchronizes."""
    batch = metadata.batch
    requests = list(batch.requests())
    used = sorted({r.slot for r in requests} | {r.source for r in requests if r.computed})
    rows = {slot: row for row, slot in enumerate(used)}
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
        inputs=tuple(x if x is None else unpack_tensor(pack_tensor(x), x.device) for x in inputs),
        query_lens=batch.query_start_loc.diff().tolist(),
        seq_lens=batch.seq_lens.tolist(),
        slots=[rows[own[n].slot] if n in own else -1 for n in numbers],
        sources=[rows.get(own[n].source, -1) if n in own else -1 for n in numbers],
        memory=cache.memory[used].clone(),
    )


def save_state_recording(call: RecordedStateCall, path: str | Path) -> Path:
    """Write a call to a file and create its folder if necessary.

    Returns:
        The path of the file.
    """
    data = {field.name: getattr(call, field.name) for field in fields(call)} | {
        KEY_OF_STATES: _VERSION,
        "spec": plain_fields(call.spec),
        "tensors": {name: x.cpu() for name, x in call.tensors.items()},
        "inputs": [None if x is None else pack_tensor(x) for x in call.inputs],
        "memory": call.memory.cpu(),
    }
    return write_file(data, path)


def is_state_recording(path: str | Path) -> bool:
    """Whether a file is a recorded call of a state layer.

    Raises:
        ContractError: it is not a file of `torch.save`.
    """
    data = read_file(Path(path))
    return isinstance(data, dict) and KEY_OF_STATES in data


def load_state_recording(path: str | Path, device: torch.device | str = "cpu") -> RecordedStateCall:
    """Read a recording.

    Args:
        path: the file.
        device: where to allocate the tensors.

    Raises:
        ContractError: the file is not a recording of this version, or is damaged.
    """
    data = read_file(Path(path))
    if not isinstance(data, dict) or data.get(KEY_OF_STATES) != _VERSION:
        raise ContractError(
            f"{path} is not a recorded state call of version {_VERSION}: record the call again"
        )
    with refuse_damaged(path):
        return RecordedStateCall(
            spec=StateSpec(**spec_fields(data["spec"])),
            part=data["part"],
            scale=float(data["scale"]),
            tensors={name: x.to(device) for name, x in data["tensors"].items()},
            inputs=tuple(x if x is None else unpack_tensor(x, device) for x in data["inputs"]),
            memory=data["memory"].to(device),
            **{name: [int(n) for n in data[name]] for name in _LISTS},
        )
