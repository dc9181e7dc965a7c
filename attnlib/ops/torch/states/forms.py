"""One step of one request in each form of a slot (T9): read the slot, compute, write the slot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.states.batch import StateRequest
from attnlib.ops.states.inputs import RecurrenceParams, StateInputs
from attnlib.ops.states.layout import StateLayout
from attnlib.ops.states.tensors import StateTensors
from attnlib.ops.torch.states.recurrence import HeadInputs, chunk, head_inputs, recur

__all__ = ["RequestStep", "state_at", "store_state"]

_MOST_ROWS = {"channel": 16}
"""Tokens per chunk of the forms without a tail, by decay: a chunk of channel decays has n * n * Dk
factors per head. Others have `_ROWS`."""
_ROWS = 64


@dataclass(frozen=True)
class RequestStep:
    """One step of one request: the inputs are those of its new tokens, the dtype is that of the
    computation."""

    slots: StateTensors
    params: RecurrenceParams
    request: StateRequest
    inputs: StateInputs
    dtype: torch.dtype

    @property
    def layout(self) -> StateLayout:
        """Of the slots."""
        return self.slots.layout

    def run(self) -> Tensor:
        """Outputs `[Hv, n, Dv]` without the skip; the slot is written."""
        out = self._run_tail() if self.layout.form == "tail" else self._run_states()
        positions, request = self.slots.positions, self.request
        positions[request.slot, ..., 0] = self.layout.first_kept(request.computed, request.end)
        positions[request.slot, ..., 1] = request.end
        return out

    def _load(self, position: int) -> Tensor:
        """The stored state at a position of the source; zeros at 0, where nothing is stored."""
        return _load(self.slots, self.request.source, position, self.dtype)

    def _store(self, position: int, state: Tensor) -> None:
        store_state(self.slots, self.request.slot, position, state)

    def _run_states(self) -> Tensor:
        """`plain` and `snapshots`: only the last D tokens need a state each."""
        request, first = self.request, self.request.computed
        state = self._load(first)
        kept = self.layout.first_kept(first, request.end)
        outs, position = [], first
        most = _MOST_ROWS.get(self.layout.decay, _ROWS)
        while position < kept:
            end = min(kept, position + most)
            part = self._prepared(position, end)
            if end - position == 1:
                out, states = recur(part, state, self.params.update)
                state = states[0]
            else:
                out, state = chunk(part, state, self.params.update)
            outs.append(out)
            position = end
        if request.source != request.slot or kept > first:
            self._store(kept, state)
        out, states = recur(self._prepared(kept, request.end), state, self.params.update)
        for place, each in enumerate(states):
            self._store(kept + 1 + place, each)
        return torch.cat([*outs, out], dim=1)

    def _prepared(self, first: int, end: int) -> HeadInputs:
        rows = slice(first - self.request.computed, end - self.request.computed)
        return head_inputs(self.inputs.rows(rows), self.params, self.dtype)

    def _run_tail(self) -> Tensor:
        """`tail`: chunks from the stored state on, see `_run_chunks`."""
        request, layout = self.request, self.layout
        base = _stored_base(self.slots, request)
        known, state = self._with_tail(base), self._load(base)
        new_base, outs = layout.chunk_start(layout.first_kept(request.computed, request.end)), []
        if new_base == base:
            self._store(base, state)
        for end, out, after in _run_chunks(known, base, state, self.params, layout):
            if end == new_base:
                self._store(end, after)
            outs.append(out)
        self._write_tail(known, base, new_base)
        return torch.cat(outs, dim=1)[:, request.computed - base :]

    def _with_tail(self, base: int) -> StateInputs:
        """The inputs from `base` on: those of the tail, then the new ones. Queries of the tail,
        whose outputs nobody reads, are 0."""
        given, request = self.inputs, self.request
        held = _held_inputs(self.slots, request.source, base, request.computed)
        held["query"] = given.query.new_zeros(request.computed - base, *given.query.shape[1:])
        new = {name: getattr(given, name) for name in held}
        return given._replace(
            **{name: torch.cat([held[name].to(x.dtype), x]) for name, x in new.items()}
        )

    def _write_tail(self, known: StateInputs, base: int, new_base: int) -> None:
        """Write the inputs from `new_base` on; those before the step only to another slot."""
        request = self.request
        first = max(new_base, request.computed) if request.source == request.slot else new_base
        rows = _ring_rows(self.slots, first, request.end)
        for name, ring in _rings(self.slots).items():
            ring[request.slot, rows] = getattr(known, name)[first - base :].to(ring.dtype)


def state_at(
    slots: StateTensors, params: RecurrenceParams, request: StateRequest, log_decay: Tensor | None
) -> Tensor:
    """The state at the position of a request without new tokens, `[Hv, Dv, Dk]` float32. A constant
    decay is `log_decay`.

    Raises:
        ContractError: a tail whose decay is constant and not given.
    """
    layout, position = slots.layout, request.computed
    base = _stored_base(slots, request) if layout.form == "tail" else position
    state = _load(slots, request.source, base, torch.float32)
    if base == position:
        return state
    held = _held_inputs(slots, request.source, base, position)
    decay = held.get("log_decay", log_decay)
    if decay is None:
        raise ContractError(
            "the decay of this layer is constant and not in the slot: pass log_decay", rule="T20"
        )
    key, value, beta = held["key"], held["value"], held.get("beta")
    if decay.dim() == 1:  # rows of zeros past the last token do not decay
        decay = decay.expand(len(key), -1)
    known = StateInputs(torch.zeros_like(key), key, value, decay, beta)
    return [*_run_chunks(known, base, state, params, layout)][-1][2]


def _run_chunks(
    known: StateInputs, base: int, state: Tensor, params: RecurrenceParams, layout: StateLayout
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The position behind each chunk of the inputs from `base` on, its outputs, and the state after
    it. Every chunk begins at a multiple of c and has one shape, whatever part of it is new, so that
    its rows have the same bits in every step (T18)."""
    size, count = layout.chunk_size, known.value.shape[0]
    for first in range(0, count, size):
        end = min(first + size, count)
        part = _padded(known.rows(slice(first, end)), size)
        out, state = chunk(head_inputs(part, params, state.dtype), state, params.update)
        if end - first == size:  # rounded as stored, so that it does not matter when (T13)
            state = state.to(layout.state_dtype).to(state.dtype)
        yield base + end, out[:, : end - first], state


def _rings(slots: StateTensors) -> dict[str, Tensor]:
    """The rings of a tail, by the names of `StateInputs`."""
    names = [field.name for field in slots.layout.fields if field.name.startswith("tail_")]
    return {name.removeprefix("tail_"): getattr(slots, name) for name in names}


def _ring_rows(slots: StateTensors, first: int, end: int) -> Tensor:
    """The rows of a ring that hold positions, `[end - first]`."""
    return torch.arange(first, end, device=slots.device) % slots.layout.num_tail_rows


def _held_inputs(slots: StateTensors, slot: int, base: int, end: int) -> dict[str, Tensor]:
    """The inputs of positions in the tail of a slot, by name."""
    rows = _ring_rows(slots, base, end)
    return {name: ring[slot, rows] for name, ring in _rings(slots).items()}


def _stored_base(slots: StateTensors, request: StateRequest) -> int:
    """The position of the state that the tail of the source begins with."""
    if not request.computed:
        return 0
    return slots.layout.chunk_start(int(slots.positions[request.source, 0, 0, 0]))


def _load(slots: StateTensors, slot: int, position: int, dtype: torch.dtype) -> Tensor:
    stored = slots.state
    if position == 0:
        return torch.zeros(stored.shape[2:], dtype=dtype, device=stored.device)
    return stored[slot, position % stored.shape[1]].to(dtype)


def store_state(slots: StateTensors, slot: int, position: int, state: Tensor) -> None:
    """Store the state after `position` tokens; that after 0 tokens is never read."""
    if position:
        stored = slots.state
        stored[slot, position % stored.shape[1]] = state.to(stored.dtype)


def _padded(inputs: StateInputs, size: int) -> StateInputs:
    """Rows of zeros up to a full chunk."""
    missing = size - inputs.value.shape[0]
    if not missing:
        return inputs
    return inputs.each(lambda x: torch.cat([x, x.new_zeros(missing, *x.shape[1:])]))
