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
        ContractError: sources without slots, no integers, or, in lists: a slot of two requests, or
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
        name: _on_device(name, values, device)
        for name, values in named.items()
        if values is not None
    }


def _on_device(name: str, values: Sequence[int] | torch.Tensor, device: torch.device) -> Any:
    if not isinstance(values, torch.Tensor):
        return int32_values(name, values, "T7").reshape(-1).to(device, non_blocking=True)
    if values.device.type == "cpu":
        return int32_values(name, values, "T7").to(device)
    if values.dtype not in (torch.int32, torch.int64):  # their values are not read
        raise ContractError(f"{name} is {values.dtype}; it must hold integers", rule="T7")
    if values.dtype == torch.int64:  # a slot that int32 cannot hold must not become another
        limits = torch.iinfo(torch.int32)
        values = values.clamp(limits.min, limits.max)
    return values.to(device, torch.int32)


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
