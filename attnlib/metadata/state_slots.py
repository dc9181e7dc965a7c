"""Slots of states from lists, for `CommonAttentionMetadata.from_lengths`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attnlib.errors import ContractError
from attnlib.metadata.lengths import int32_values

__all__ = ["state_slot_fields"]

Slots = Sequence[int] | torch.Tensor | None


def state_slot_fields(slots: Slots, sources: Slots, device: torch.device) -> dict[str, Any]:
    """The fields `state_slots` and `state_sources` that are given, on the device.

    Raises:
        ContractError: sources without slots, or, in lists: no integers, a slot of two requests, or
            a source that another request writes.
    """
    if sources is not None and slots is None:
        raise ContractError(
            "state_sources without state_slots: pass the slot that each request writes", rule="T12"
        )
    if isinstance(slots, Sequence):
        _check_slots(slots, sources if isinstance(sources, Sequence) else slots)
    named = {"state_slots": slots, "state_sources": sources}
    return {
        name: values.to(device, torch.int32)
        if isinstance(values, torch.Tensor)
        else int32_values(name, values, "T7").reshape(-1).to(device, non_blocking=True)
        for name, values in named.items()
        if values is not None
    }


def _check_slots(slots: Sequence[int], sources: Sequence[int]) -> None:
    writer: dict[int, int] = {}
    for request, slot in enumerate(slots):
        if slot >= 0 and (first := writer.setdefault(slot, request)) != request:
            raise ContractError(
                f"state_slots[{first}] and state_slots[{request}] are both {slot}: give each "
                "request a slot of its own",
                rule="T7",
            )
    for request, (slot, source) in enumerate(zip(slots, sources, strict=False)):
        other = writer.get(source, request)
        if slot >= 0 and other != request:
            raise ContractError(
                f"state_sources[{request}]={source} is the slot that request {other} writes in "
                "this step: give that request another slot",
                rule="T12",
            )
