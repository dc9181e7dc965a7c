"""Checks of slots and positions, before a step reads or writes anything."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.states.batch import StateRequest

__all__ = ["check_positions", "check_slots"]


def check_slots(requests: Sequence[StateRequest], num_slots: int) -> None:
    """Whether a batch reads and writes slots of the pool, each written by one request.

    Raises:
        ContractError: a slot outside the pool, a slot of two requests, or a source that another
            request writes (T7, T12).
    """
    writer: dict[int, int] = {}
    for request in requests:
        named = [("state_slots", request.slot)]
        if request.computed:
            named.append(("state_sources", request.source))
        for name, slot in named:
            if not 0 <= slot < num_slots:
                raise ContractError(
                    f"{name}[{request.number}]={slot} is outside the pool of {num_slots} slots "
                    f"(0 to {num_slots - 1}; -1 as a slot is padding)",
                    rule="T7",
                )
        first = writer.setdefault(request.slot, request.number)
        if first != request.number:
            raise ContractError(
                f"state_slots[{first}] and state_slots[{request.number}] are both {request.slot}: "
                "give each request a slot of its own",
                rule="T7",
            )
    for request in requests:
        other = writer.get(request.source, request.number)
        if request.computed and other != request.number:
            raise ContractError(
                f"state_sources[{request.number}]={request.source} is the slot that request "
                f"{other} writes in this step: give that request another slot",
                rule="T12",
            )


def check_positions(requests: Sequence[StateRequest], positions: Tensor, what: str) -> None:
    """Whether the slots can continue from where the requests do (T8).

    Args:
        requests: with slots of the pool.
        positions: `[S, 2]` integers, (low, high) of each slot.
        what: "state" or "window", for messages.

    Raises:
        ContractError: names the request, its position and those of the slot.
    """
    for request in requests:
        if not request.computed:
            continue
        low, high = positions[request.source].tolist()
        if not low <= request.computed <= high:
            raise ContractError(
                f"request {request.number} continues from {request.computed} tokens, and the "
                f"{what} in slot {request.source} can continue from {low} to {high}: pass the slot "
                "of this request, or compute its tokens again from the first one",
                rule="T8",
            )
