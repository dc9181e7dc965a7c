"""The `triton` backend for a GPU that this machine does not have, on tensors of the CPU."""

from __future__ import annotations

from attnlib.backends.triton import TritonBackend
from attnlib.device import DeviceInfo
from attnlib.spec import AttentionSpec

__all__ = ["DescribedTritonBackend"]


class DescribedTritonBackend(TritonBackend):
    """Chooses and compiles kernels inside `attnlib.ops.triton.launch.described.described_gpu`.
    Whether the GPU supports a layer is asked of `TritonBackend`."""

    @classmethod
    def unavailable(cls, device: DeviceInfo) -> list[str]:
        """Nothing is missing: nothing is launched."""
        return []

    @classmethod
    def supports_combination(cls, spec: AttentionSpec, device: DeviceInfo) -> list[str]:
        """As on a GPU."""
        return []
