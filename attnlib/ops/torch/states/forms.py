"""One step of one request in each form of a slot (T9): read the slot, compute, write the slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.states.batch import StateRequest
from attnlib.ops.states.inputs import RecurrenceParams, StateInputs
from attnlib.ops.states.layout import StateLayout
from attnlib.ops.states.tensors import StateTensors
from attnlib.ops.torch.states.recurrence import HeadInputs, chunk, head_inputs, recur

__all__ = ["RequestStep", "state_at"]

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
        assert positions is not None  # the layer has a recurrence
        positions[request.slot, ..., 0] = self.layout.first_kept(request.computed, request.end)
        positions[request.slot, ..., 1] = request.end
        return out

    def _load(self, position: int) -> Tensor:
        """The stored state at a position of the source; zeros at 0, where nothing is stored."""
        return _load(self.slots, self.request.source, position, self.dtype)

    def _store(self, position: int, state: Tensor) -> None:
        stored = self.slots.state
        assert stored is not None  # as in `run`
        if position:
            stored[self.request.slot, position % stored.shape[1]] = state.to(stored.dtype)

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
        """`tail`: every chunk begins at a multiple of c and has one shape, whatever part of it is
        new, so that its rows have the same bits in every step (T18)."""
        request, layout, size = self.request, self.layout, self.layout.chunk_size
        base = _stored_base(self.slots, self.request)
        known = self._with_tail(base)
        new_base = layout.chunk_start(layout.first_kept(request.computed, request.end))
        state, outs = self._load(base), []
        for start in range(base, request.end, size):
            if start == new_base:
                self._store(new_base, state)
            end = min(start + size, request.end)
            part = _padded(known.rows(slice(start - base, end - base)), size)
            heads = head_inputs(part, self.params, self.dtype)
            out, after = chunk(heads, state, self.params.update)
            outs.append(out[:, : end - start])
            if end - start == size:  # rounded as stored, so that it does not matter when (T13)
                state = after.to(layout.state_dtype).to(self.dtype)
        if new_base == request.end:
            self._store(new_base, state)
        self._write_tail(known, base, new_base)
        return torch.cat(outs, dim=1)[:, request.computed - base :]

    def _with_tail(self, base: int) -> StateInputs:
        """The inputs from `base` on: those of the tail, then the new ones. Queries of the tail,
        whose outputs nobody reads, are 0."""
        rows = self._ring_rows(base, self.request.computed)
        given = self.inputs
        held = {
            name: torch.cat([ring[self.request.source, rows].to(new.dtype), new])
            for name, (ring, new) in self._rings().items()
        }
        query = torch.cat([given.query.new_zeros(len(rows), *given.query.shape[1:]), given.query])
        decay = given.log_decay if given.is_constant else held["tail_log_decay"]
        return StateInputs(
            query, held["tail_key"], held["tail_value"], decay, held.get("tail_beta")
        )

    def _write_tail(self, known: StateInputs, base: int, new_base: int) -> None:
        """Write the inputs from `new_base` on; those before the step only to another slot."""
        request = self.request
        first = max(new_base, request.computed) if request.source == request.slot else new_base
        rows = self._ring_rows(first, request.end)
        for name, (ring, _) in self._rings().items():
            values = getattr(known, name.removeprefix("tail_"))
            ring[request.slot, rows] = values[first - base :].to(ring.dtype)

    def _rings(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The rings of the layout by name, and the new inputs for them."""
        names = [field.name for field in self.layout.fields if field.name.startswith("tail_")]
        return {
            name: (getattr(self.slots, name), getattr(self.inputs, name.removeprefix("tail_")))
            for name in names
        }

    def _ring_rows(self, first: int, end: int) -> Tensor:
        """The rows of the ring that hold positions, `[end - first]`."""
        positions = torch.arange(first, end, device=self.slots.device)
        return positions % self.layout.num_tail_rows


def state_at(
    slots: StateTensors, params: RecurrenceParams, request: StateRequest, log_decay: Tensor | None
) -> Tensor:
    """The state at the position of a request without new tokens, `[Hv, Dv, Dk]` float32. A constant
    decay is `log_decay`.

    Raises:
        ContractError: a tail whose decay is constant and not given.
    """
    layout, position, dtype = slots.layout, request.computed, torch.float32
    base = _stored_base(slots, request) if layout.form == "tail" else position
    state = _load(slots, request.source, base, dtype)
    if base == position:
        return state
    rows = torch.arange(base, position, device=slots.device) % layout.num_tail_rows
    key, value, decay, beta = (
        None if ring is None else ring[request.source, rows]
        for ring in (slots.tail_key, slots.tail_value, slots.tail_log_decay, slots.tail_beta)
    )
    assert key is not None and value is not None  # a tail has both
    decay = log_decay if decay is None else decay
    if decay is None:
        raise ContractError(
            "the decay of this layer is constant and not in the slot: pass log_decay", rule="T20"
        )
    known = StateInputs(torch.zeros_like(key), key, value, decay, beta)
    for start in range(base, position, layout.chunk_size):
        end = min(start + layout.chunk_size, position)
        part = head_inputs(known.rows(slice(start - base, end - base)), params, dtype)
        _, state = chunk(part, state, params.update)
        if end - start == layout.chunk_size:
            state = state.to(layout.state_dtype).to(dtype)
    return state


def _stored_base(slots: StateTensors, request: StateRequest) -> int:
    """The position of the state that the tail of the source begins with."""
    if not request.computed:
        return 0
    assert slots.positions is not None  # the layer has a recurrence
    return slots.layout.chunk_start(int(slots.positions[request.source, 0, 0, 0]))


def _load(slots: StateTensors, slot: int, position: int, dtype: torch.dtype) -> Tensor:
    stored = slots.state
    assert stored is not None  # the layer has a recurrence
    if position == 0:
        return torch.zeros(stored.shape[2:], dtype=dtype, device=stored.device)
    return stored[slot, position % stored.shape[1]].to(dtype)


def _padded(inputs: StateInputs, size: int) -> StateInputs:
    """Rows of zeros up to a full chunk."""
    missing = size - inputs.value.shape[0]
    if not missing:
        return inputs
    return inputs.each(lambda x: torch.cat([x, x.new_zeros(missing, *x.shape[1:])]))
