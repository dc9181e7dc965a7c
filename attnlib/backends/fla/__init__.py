"""The `fla` backend: state layers on the kernels of flash-linear-attention.

This module can be imported without it. Setting, given as `register_backend(..., config=...)`:

    chunk_from   new tokens of the longest request from which chunked kernels run; default 65
"""

from __future__ import annotations

import torch

from attnlib.backends._foreign.imports import environment_facts, is_installed
from attnlib.backends._foreign.packed_states import packed_capabilities
from attnlib.backends.base import AttentionBackend, StateImpl
from attnlib.capabilities import Sizes
from attnlib.device import DeviceInfo

__all__ = ["FlaBackend"]


class FlaBackend(AttentionBackend):
    """flash-linear-attention on NVIDIA GPUs; states in the forms `plain` and `snapshots`."""

    description = "state layers on the kernels of flash-linear-attention"
    state_capabilities = packed_capabilities(
        min_capability=(8, 0),
        dtypes=(torch.float16, torch.bfloat16, torch.float32),
        key_sizes=Sizes(16, 256, 16),
        value_sizes=Sizes(16, 256, 16),
        updates=("delta", "add"),
        decays=("head", "channel", "constant"),
    )

    @staticmethod
    def get_name() -> str:
        return "fla"

    @staticmethod
    def get_state_impl_cls() -> type[StateImpl]:
        from attnlib.backends.fla.impl import FlaStateImpl

        return FlaStateImpl

    @classmethod
    def unavailable(cls, device: DeviceInfo) -> list[str]:
        """Why its functions cannot be used: import, or an earlier release."""
        if not is_installed("fla"):
            return ["fla is not installed: pip install flash-linear-attention"]
        if device.type != "cuda":
            return []  # the declaration reports the device without importing anything
        from attnlib.backends.fla.probe import find_functions

        _, problem = find_functions()
        return [f"{problem} {environment_facts(device, ('fla-core',))}"] if problem else []
