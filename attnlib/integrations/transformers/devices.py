"""The kind of device that a call is served for."""

from __future__ import annotations

import torch

__all__ = ["kind_of"]


def kind_of(device: torch.device) -> str:
    """`device.type`. What only a CPU serves, and what a GPU serves without host reads, ask for it
    as `devices.kind_of`, so that a test on a CPU takes the ways of a GPU by replacing this."""
    return device.type
