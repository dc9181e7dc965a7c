"""The slots of one state layer: allocation, copies, positions, exchange in canonical form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnlib.compile.objects import register_tensor_id
from attnlib.device import explains_device
from attnlib.errors import ContractError
from attnlib.ops.addresses import as_count
from attnlib.ops.states import RecurrenceParams, StateLayout, StateTensors
from attnlib.ops.states.checks import slot_ids, slot_pairs, slot_places
from attnlib.ops.torch.states import exchange
from attnlib.spec import StateSpec

__all__ = ["CanonicalStates", "StateCache", "state_layout"]

_FORMS = ("plain", "tail")
"""Forms for a spec that names none; one of them fits every spec."""
_CHUNK_SIZE = 16

SlotPairs = Sequence[tuple[int, int]] | Tensor
"""`[n, 2]` integers: (source, destination)."""


def state_layout(spec: StateSpec) -> StateLayout:
    """The layout of the slots of a layer. A spec that leaves form and chunk size open has `plain`
    slots where these serve it, else a tail, and chunks of 16 tokens; `StateLayer.spec` holds what
    its backend chose."""
    StateSpec.check_kind(spec, "StateCache")
    values = {field.name: getattr(spec, field.name) for field in fields(StateLayout)}
    values["form"] = spec.form or next(form for form in _FORMS if spec.fits(form))
    values["chunk_size"] = spec.chunk_size or _CHUNK_SIZE
    return StateLayout(**values)


class CanonicalStates(NamedTuple):
    """States of n requests in the form that all backends and engines can exchange (T20).

    Attributes:
        states: `[n, Hv, Dv, Dk]` float32, Dk dense; None without a recurrence.
        windows: `[n, C, W - 1]` in the dtype of the layer, oldest first; None without a
            convolution.
    """

    states: Tensor | None
    windows: Tensor | None


class StateCache:
    """The slots of one layer. What a slot holds is described by `StateTensors`.

    Args:
        spec: of the layer; `StateLayer.spec` names the form and chunk size of its backend.
        memory: `[S, bytes per slot or more]` uint8, slots dense and at multiples of 16 bytes, for
            example the blocks of a pool. It may hold anything (T14).
        first_slot: slots before it are refused: block 0 of a pool is its null block (P12).

    Attributes:
        spec: of the layer.
        layout: of a slot.
        memory: as given.
        tensors: views of it.
        handle: id of this cache for torch.compile.

    Raises:
        ContractError: memory of another form.
    """

    def __init__(self, spec: StateSpec, memory: Tensor, first_slot: int = 0) -> None:
        self.spec = spec
        self.layout = state_layout(spec)
        if not isinstance(memory, Tensor):
            raise ContractError(f"memory is a {type(memory).__name__}; it must be a torch.Tensor")
        self.memory = memory[..., : self.layout.bytes_per_slot]
        self.tensors = StateTensors.from_bytes(self.layout, self.memory, first_slot)
        self.signature = (self.layout, len(memory), memory.stride(0), memory.device)
        self.handle = register_tensor_id(self)

    @classmethod
    @explains_device
    @torch.inference_mode(False)  # writable in and outside of inference mode
    def allocate(
        cls, spec: StateSpec, num_slots: int, *, device: torch.device | str | None = None
    ) -> StateCache:
        """New slots, which no request can continue from yet. Only their positions are written.

        Args:
            spec: of the layer.
            num_slots: requests, forks and checkpoints that can be held at once.
            device: None means the default device of torch.

        Raises:
            ContractError: `num_slots` is below 1.
        """
        num_slots = as_count("num_slots", num_slots, 1)
        size = (num_slots, state_layout(spec).bytes_per_slot)
        cache = cls(spec, torch.empty(size, dtype=torch.uint8, device=device))
        for positions in (cache.tensors.positions, cache.tensors.window_positions):
            if positions is not None:
                positions.fill_(-1)
        return cache

    def __repr__(self) -> str:
        return (
            f"StateCache({self.num_slots} slots of {self.bytes_per_slot} bytes, "
            f"form={self.layout.form}, device={self.device})"
        )

    def __getstate__(self) -> dict[str, Any]:
        first = self.tensors.valid.start
        return {"spec": self.spec, "memory": self.memory, "first_slot": first}

    def __setstate__(self, state: dict[str, Any]) -> None:
        StateCache.__init__(self, **state)

    @property
    def num_slots(self) -> int:
        """S."""
        return self.memory.shape[0]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one request in this layer."""
        return self.layout.bytes_per_slot

    @property
    def device(self) -> torch.device:
        """Where the slots are."""
        return self.memory.device

    def positions(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """The positions (low, high) that slots can continue from (T8), window and state taken
        together. Synchronizes."""
        index, tensors = self._index("slots", slots), self.tensors
        of_states = None if tensors.positions is None else tensors.positions[:, 0, 0]
        both = (of_states, tensors.window_positions)
        pairs = [pair[index] for pair in both if pair is not None]
        lows = torch.stack([pair[:, 0] for pair in pairs]).amax(0)
        highs = torch.stack([pair[:, 1] for pair in pairs]).amin(0)
        return list(zip(lows.tolist(), highs.tolist(), strict=True))

    def copy_slots(self, pairs: SlotPairs, target: StateCache | None = None) -> None:
        """Copy slots as bytes, positions included. To read one slot and write another in a step,
        `state_sources` needs no copy (T12).

        Args:
            pairs: `[n, 2]`, (source, destination); no destination is a source.
            target: the cache of the destinations, of equal layout; None for this one.

        Raises:
            ContractError: slots outside a cache or no integers, another layout, or a destination
                that is a source or named twice. Nothing is written then.
        """
        other = self if target is None else target
        if other.layout != self.layout:
            raise ContractError(
                f"slots of {self!r} do not fit {other!r}: allocate both for one spec", rule="T9"
            )
        rows = slot_pairs(pairs)
        sources = self._index("sources", [source for source, _ in rows])
        targets = other._index("destinations", [end for _, end in rows])
        written = {end for _, end in rows}
        mixed = other is self and written & {source for source, _ in rows}
        if mixed or len(written) < len(rows):
            raise ContractError(
                f"copy_slots pairs {rows}: each destination must be named once, and be no source",
                rule="T12",
            )
        other.memory[targets] = self.memory[sources].to(other.device)

    def export(
        self, slots: Sequence[int], positions: Sequence[int], *, log_decay: Tensor | None = None
    ) -> CanonicalStates:
        """States in the canonical form (T20). Synchronizes.

        Args:
            slots: the slot of each request.
            positions: its tokens; one that the slot can continue from.
            log_decay: `[Hv]` of the layer, for tails with a constant decay.

        Raises:
            ContractError: slots outside the cache, or positions that they cannot continue from.
        """
        spec, tensors = self.spec, self.tensors
        params = RecurrenceParams(scale=1.0, update=spec.update, qk_norm=spec.qk_norm)
        places = slot_places(slots, positions, self.tensors.valid)
        states = windows = None
        if spec.has_recurrence:
            each = [exchange.read_state(tensors, *place, params, log_decay) for place in places]
            states = torch.stack(each) if each else None
        if spec.has_convolution:
            each = [exchange.read_window(tensors, *place) for place in places]
            windows = torch.stack(each) if each else None
        return CanonicalStates(states, windows)

    def load(self, slots: Sequence[int], positions: Sequence[int], given: CanonicalStates) -> None:
        """Store canonical states; the next step continues from exactly these positions.

        Args:
            slots: where to store each state.
            positions: the tokens that each state stands for; multiples of the chunk size in the
                form `tail`.
            given: one state and window per slot, as the layer has them.

        Raises:
            ContractError: slots outside the cache or named twice, another shape, or a position in a
                chunk. Nothing is written then.
        """
        places = slot_places(slots, positions, self.tensors.valid, distinct=True)
        states = windows = None
        if self.spec.has_recurrence:
            states = _required("states", given.states, len(places))
            exchange.check_states(self.tensors, places, states)
        if self.spec.has_convolution:
            windows = _required("windows", given.windows, len(places))
            exchange.check_windows(self.tensors, windows)
        for row, place in enumerate(places):
            if states is not None:
                exchange.write_state(self.tensors, *place, states[row])
            if windows is not None:
                exchange.write_window(self.tensors, *place, windows[row])

    def _index(self, name: str, slots: Sequence[int]) -> Tensor:
        found = slot_ids(name, slots, self.tensors.valid)
        return torch.tensor(found, dtype=torch.int64, device=self.device)


def _required(name: str, tensor: Tensor | None, rows: int) -> Tensor:
    if not isinstance(tensor, Tensor) or len(tensor) != rows:
        given = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ContractError(
            f"{name} of shape {given}, and the layer needs one for each of {rows} slots", rule="T20"
        )
    return tensor
