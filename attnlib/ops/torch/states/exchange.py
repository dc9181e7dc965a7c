"""States in the canonical form (T20), out of and into slots of every form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.states.batch import StateRequest
from attnlib.ops.states.checks import check_positions
from attnlib.ops.states.inputs import RecurrenceParams
from attnlib.ops.states.tensors import StateTensors
from attnlib.ops.torch.states.forms import state_at, store_state
from attnlib.ops.torch.states.short_convolution import inputs_before

__all__ = [
    "check_states",
    "check_windows",
    "read_state",
    "read_window",
    "write_state",
    "write_window",
]


@torch.no_grad()
def read_state(
    slots: StateTensors,
    slot: int,
    position: int,
    params: RecurrenceParams,
    log_decay: Tensor | None = None,
) -> Tensor:
    """The state of a slot after `position` tokens, `[Hv, Dv, Dk]` float32, with Dk dense.

    Args:
        slots: of the layer.
        slot: the slot.
        position: tokens, 0 included.
        params: of the recurrence, with which a tail is replayed.
        log_decay: `[Hv]`, for a tail of a layer with a constant decay.

    Raises:
        ContractError: the slot cannot continue from `position` (T8).
    """
    request = StateRequest(0, 0, position, position, slot, slot)
    check_positions([request], slots.positions[:, 0, 0], "state")
    return state_at(slots, params, request, log_decay)


@torch.no_grad()
def read_window(slots: StateTensors, slot: int, position: int) -> Tensor:
    """The window of a slot after `position` tokens, `[C, W - 1]`, oldest first; 0 before the
    request.

    Raises:
        ContractError: the slot cannot continue from `position` (T8).
    """
    request = StateRequest(0, 0, position, position, slot, slot)
    check_positions([request], slots.window_positions, "window")
    return inputs_before(slots, request).mT.contiguous()


@torch.no_grad()
def write_state(slots: StateTensors, slot: int, position: int, state: Tensor) -> None:
    """Store a canonical state as that after `position` tokens.

    Raises:
        ContractError: a tail cannot begin at `position`, or a state of another shape. Nothing is
            written then.
    """
    check_states(slots, [(slot, position)], state[None])
    store_state(slots, slot, position, state)
    slots.positions[slot] = position


@torch.no_grad()
def write_window(slots: StateTensors, slot: int, position: int, window: Tensor) -> None:
    """Store a canonical window as that after `position` tokens.

    Raises:
        ContractError: a window of another shape.
    """
    check_windows(slots, window[None])
    ring, width = slots.window, slots.layout.conv_width - 1
    held = torch.arange(max(position - width, 0), position, device=ring.device)
    ring[slot, held % ring.shape[1]] = window[:, width - len(held) :].mT.to(ring.dtype)
    slots.window_positions[slot] = position


def check_states(slots: StateTensors, places: Sequence[tuple[int, int]], states: Tensor) -> None:
    """Whether canonical states `[n, Hv, Dv, Dk]` can be stored in (slot, position) of `places`.

    Raises:
        ContractError: a tail cannot begin at a position, or states of another shape.
    """
    layout = slots.layout
    for _, position in places:
        if layout.form == "tail" and position % layout.chunk_size:
            raise ContractError(
                f"a state after {position} tokens cannot become that of a tail, which begins at "
                f"multiples of chunk_size={layout.chunk_size}: import it at "
                f"{layout.chunk_start(position)} tokens and compute the rest",
                rule="T20",
            )
    _check_shapes("states", states, slots.state.shape[2:])


def check_windows(slots: StateTensors, windows: Tensor) -> None:
    """Whether canonical windows `[n, C, W - 1]` fit the slots.

    Raises:
        ContractError: windows of another shape.
    """
    _check_shapes("windows", windows, (slots.layout.conv_channels, slots.layout.conv_width - 1))


def _check_shapes(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape[1:] != shape:
        raise ContractError(
            f"{name} have shape {tuple(tensor.shape[1:])}; it must be {tuple(shape)}", rule="T20"
        )
