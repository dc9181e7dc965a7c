"""Checks of slots and positions, before a step reads or writes anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.addresses import as_count, as_id, as_ids
from attnlib.ops.checks import check_writable
from attnlib.ops.states.batch import StateBatch, StateRequest
from attnlib.ops.states.tensors import StateTensors

__all__ = [
    "check_positions",
    "check_slots",
    "checked_requests",
    "slot_ids",
    "slot_pairs",
    "slot_places",
]


def slot_ids(name: str, slots: Sequence[int], valid: range) -> list[int]:
    """Slots as integers.

    Raises:
        ContractError: no integers, or a slot outside the cache.
    """
    found = [as_id(name, slot, place) for place, slot in enumerate(as_ids(name, slots))]
    for place, slot in enumerate(found):
        if slot not in valid:
            raise ContractError(
                f"{name}[{place}]={slot} is outside the cache of {valid.stop} slots "
                f"({valid.start} to {valid.stop - 1})",
                rule="T7",
            )
    return found


def slot_pairs(pairs: Any) -> list[tuple[int, int]]:
    """(source, destination) of a copy, from pairs or a tensor `[n, 2]`.

    Raises:
        ContractError: no pairs of integers.
    """
    rows = pairs.tolist() if isinstance(pairs, Tensor) else pairs
    try:
        return [(as_id("source slot", a), as_id("destination slot", b)) for a, b in rows]
    except (TypeError, ValueError) as error:
        raise ContractError(
            f"copy_slots takes (source, destination) pairs, got {pairs!r}: {error}", rule="T7"
        ) from None


def slot_places(
    slots: Sequence[int], positions: Sequence[int], valid: range, *, distinct: bool = False
) -> list[tuple[int, int]]:
    """(slot, position) of requests.

    Raises:
        ContractError: slots outside the cache, a position below 0, lists of two lengths, or, with
            `distinct`, a slot of two requests.
    """
    found = slot_ids("slots", slots, valid)
    ends = [as_count(f"positions[{place}]", one) for place, one in enumerate(positions)]
    if len(found) != len(ends) or (distinct and len(set(found)) < len(found)):
        raise ContractError(
            f"slots {found} with positions {ends}: pass one position for each slot, and each slot "
            "once",
            rule="T7",
        )
    return list(zip(found, ends, strict=True))


def checked_requests(batch: StateBatch, slots: StateTensors, *parts: str) -> list[StateRequest]:
    """The requests of a batch, which pass `check_slots`, and `check_positions` for the parts of a
    slot: "window", "state". Synchronizes."""
    requests = list(batch.requests())
    check_slots(requests, slots.valid)
    check_writable(windows=slots.window_positions, states=slots.positions)
    if "window" in parts and slots.window_positions is not None:
        check_positions(requests, slots.window_positions, "window")
    if "state" in parts and slots.positions is not None:
        check_positions(requests, slots.positions[:, 0, 0], "state")
    return requests


def check_slots(requests: Sequence[StateRequest], valid: range | None) -> None:
    """Whether a batch reads and writes slots of the pool, each written by one request.

    Args:
        requests: of the batch.
        valid: slots of the pool; None if they are not known.

    Raises:
        ContractError: a slot outside the pool, a slot of two requests, a source that another
            request writes (T7, T12), or fewer tokens than new ones (M1).
    """
    writer: dict[int, int] = {}
    for request in requests:
        if request.computed < 0:
            raise ContractError(
                f"seq_lens[{request.number}]={request.end} is below the number of new tokens, "
                f"{request.end - request.computed}: it counts context and new tokens",
                rule="M1",
            )
        named = [("state_slots", request.slot)]
        if request.computed:
            named.append(("state_sources", request.source))
        for name, slot in named:
            if slot < 0 or (valid is not None and slot not in valid):
                limit = "is negative: pass a slot of the pool (-1 as a slot is padding)"
                if valid is not None:
                    limit = (
                        f"is outside the pool of {valid.stop} slots ({valid.start} to "
                        f"{valid.stop - 1}; -1 as a slot is padding)"
                    )
                raise ContractError(f"{name}[{request.number}]={slot} {limit}", rule="T7")
        first = writer.setdefault(request.slot, request.number)
        if first != request.number:
            raise ContractError(
                f"state_slots[{first}] and state_slots[{request.number}] are both {request.slot}: "
                "give each request its own slot",
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
