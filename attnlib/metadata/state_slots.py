"""Slots of states from lists, for `CommonAttentionMetadata.from_lengths`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.metadata.int32 import int32_values
from attnlib.ops.addresses import as_id
from attnlib.ops.states.batch import step_requests
from attnlib.ops.states.checks import check_slots

__all__ = ["state_slot_fields"]

Slots = Sequence[int] | Tensor | None


def state_slot_fields(
    slots: Slots, sources: Slots, queries: Tensor, sequences: Tensor, device: torch.device
) -> dict[str, Any]:
    """The fields `state_slots` and `state_sources` that are given, on the device.

    Args:
        slots, sources: as of `from_lengths`.
        queries, sequences: `[R]` on the host, new tokens and all tokens of each request.
        device: of the batch.

    Raises:
        ContractError: sources without slots, no integers, or, in lists: a slot that two requests
            write, or a source that another request writes.
    """
    if sources is not None and slots is None:
        raise ContractError(
            "state_sources without state_slots: pass the slot that each request writes", rule="T12"
        )
    named = {"state_slots": slots, "state_sources": sources}
    fields = {
        name: _on_device(name, values, device)
        for name, values in named.items()
        if values is not None
    }
    if isinstance(slots, Sequence):
        read = sources if isinstance(sources, Sequence) else slots
        both = ([as_id("state slot", x, n) for n, x in enumerate(ids)] for ids in (slots, read))
        requests = step_requests(queries.tolist(), sequences.tolist(), *both)
        check_slots([*requests], None)
    return fields


def _on_device(name: str, values: Sequence[int] | Tensor, device: torch.device) -> Any:
    if not isinstance(values, Tensor):
        return int32_values(name, values, "T7").reshape(-1).to(device, non_blocking=True)
    if values.device.type == "cpu":
        return int32_values(name, values, "T7").to(device)
    if values.dtype not in (torch.int32, torch.int64):  # their values are not read
        raise ContractError(f"{name} is {values.dtype}; it must hold integers", rule="T7")
    if values.dtype == torch.int64:  # a slot that int32 cannot hold must not become another
        limits = torch.iinfo(torch.int32)
        values = values.clamp(limits.min, limits.max)
    return values.to(device, torch.int32)
