"""Limits of a device that the heuristics use, read once per device.

Tiles and splits are pure functions of these numbers, so a test can use the numbers of any chip. On
a CPU, under the interpreter, the numbers are those of a fixed small chip, so that short test
sequences span several tiles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from attnlib.errors import BackendUnavailableError
from attnlib.ops.triton.heuristics.tile_table import TileTable

__all__ = [
    "INTERPRETED",
    "DeviceLimits",
    "current_device",
    "device_guard",
    "device_index",
    "limits_of",
    "limits_of_cpu",
    "set_tuned_tiles",
]

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether this process interprets kernels on the CPU. Triton decides it when a kernel is decorated,
that is, at import."""

_NO_GUARD: AbstractContextManager[None] = contextlib.nullcontext()


@dataclass(frozen=True)
class DeviceLimits:
    """Limits of one device.

    Attributes:
        num_sms: streaming multiprocessors (compute units on AMD).
        shared_memory: bytes of shared memory per CTA.
        shared_memory_per_sm: bytes of shared memory per multiprocessor.
        capability: compute capability (major, minor) on NVIDIA, (0, 0) elsewhere.
        has_fp8: whether the chip converts OCP float8 in hardware; if not, the kernels decode bytes.
        is_amd: whether it is an AMD chip.
        tuned: the user's tiles for this device (`set_tuned_tiles`), if any. Part of the limits, so
            that every cache with the limits in its key sees a change.
        name: of its driver; tiles and splits do not depend on it.
    """

    num_sms: int
    shared_memory: int
    shared_memory_per_sm: int
    capability: tuple[int, int]
    has_fp8: bool
    is_amd: bool = False
    tuned: TileTable | None = None
    name: str = ""

    @property
    def products(self) -> str:
        """Matrix instructions for tiles of 64 rows and more.

        "async" reads operands from shared memory (wgmma on Hopper, tcgen05 on data-center
        Blackwell), "sync" is mma.sync, "mfma" is AMD's.
        """
        if self.is_amd:
            return "mfma"
        return "async" if self.capability[0] in (9, 10, 11) else "sync"


INTERPRETER_LIMITS = DeviceLimits(
    num_sms=4,
    shared_memory=99 * 1024,
    shared_memory_per_sm=100 * 1024,
    capability=(0, 0),
    has_fp8=False,
)


def limits_of(tensor: Tensor) -> DeviceLimits:
    """Return the limits of the tensor's device.

    Raises:
        BackendUnavailableError: a tensor on a CPU in a process that does not interpret Triton.
    """
    if tensor.is_cuda:
        return _limits.get(tensor.get_device()) or _cuda_limits(tensor.get_device())
    return device_limits(tensor.device)


def device_limits(device: torch.device) -> DeviceLimits:
    """Return the limits of a device.

    Raises:
        BackendUnavailableError: the device is a CPU and the process does not interpret Triton.
    """
    if device.type == "cuda":
        index = current_device() if device.index is None else device.index
        return _limits.get(index) or _cuda_limits(index)
    if not INTERPRETED and _CPU not in _limits:
        raise BackendUnavailableError(
            f"the Triton kernels were given a tensor on {device}; move it to a GPU, or set "
            "TRITON_INTERPRET=1 before triton is first imported to interpret them on the CPU"
        )
    return _limits.get(_CPU, INTERPRETER_LIMITS)


_CPU = -1
_limits: dict[int, DeviceLimits] = {}
"""The limits of each GPU, read when they are first needed. For tensors of the CPU those of the
interpreter with tiles of the user, or of a GPU that is described (`limits_of_cpu`)."""


@contextlib.contextmanager
def limits_of_cpu(limits: DeviceLimits) -> Iterator[None]:
    """Inside, kernels for tensors of the CPU are chosen for a chip with these limits."""
    before = _limits.get(_CPU)
    _limits[_CPU] = limits
    try:
        yield
    finally:
        del _limits[_CPU]
        if before is not None:
            _limits[_CPU] = before


def _cuda_limits(index: int) -> DeviceLimits:
    """Read and keep the limits of a GPU."""
    properties = torch.cuda.get_device_properties(index)
    is_hip = torch.version.hip is not None
    shared = int(getattr(properties, "shared_memory_per_block_optin", 0) or 64 * 1024)
    per_sm = int(getattr(properties, "shared_memory_per_multiprocessor", 0) or shared)
    capability = (0, 0) if is_hip else (properties.major, properties.minor)
    limits = DeviceLimits(
        num_sms=properties.multi_processor_count,
        shared_memory=shared,
        shared_memory_per_sm=max(per_sm, shared),
        capability=capability,
        has_fp8=capability >= (8, 9),
        is_amd=is_hip,
        name=properties.name,
    )
    return _limits.setdefault(index, limits)


def device_index(tensor: Tensor) -> int:
    """Return the index for `set_tuned_tiles`: the CUDA index, or -1 for the interpreter."""
    return (tensor.device.index or 0) if tensor.is_cuda else _CPU


def set_tuned_tiles(index: int, table: TileTable | None) -> None:
    """Set the user's tile table of a device, which precedes the shipped tables; None removes it.

    Existing plans and launches keep their tiles. The backend calls this before the first one.

    Args:
        index: as returned by `device_index`.
        table: the table.
    """
    if index == _CPU:
        _limits.pop(index, None)
        if table is not None:
            _limits[index] = replace(INTERPRETER_LIMITS, tuned=table)
    elif table is not None or index in _limits:
        limits = _limits.get(index) or _cuda_limits(index)
        if limits.tuned is not table:
            _limits[index] = replace(limits, tuned=table)


current_device: Callable[[], int] = (
    getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device
)
"""The index of the current CUDA device. `torch.cuda.current_device` ends in this C function."""


def device_guard(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context that makes the tensor's device current; does nothing if it is already."""
    index = tensor.get_device()
    if index < 0 or index == current_device():
        return _NO_GUARD
    return torch.cuda.device(tensor.device)


_PDL_PROGRAMS_PER_SM = 16
_WITHOUT_PDL: dict[str, bool] = {"PDL": False}
_WITH_PDL: dict[str, bool] = {"PDL": True, "launch_pdl": True}


def programmatic_launch(limits: DeviceLimits, programs: int = 0) -> dict[str, bool]:
    """Return the named arguments of a kernel that supports programmatic dependent launch (PDL).

    From Hopper on, its launch overlaps the end of the previous kernel. The kernel has a constexpr
    `PDL` and, if it is set, calls `gdc_wait` before it reads anything.

    Args:
        limits: of the device.
        programs: of a grid whose size depends on the batch. Each program waits for itself, so a
            grid of many short programs is slower with PDL: on an H200 a cache write of 8192 tokens
            with 8 heads of 64 takes 10.4 us with it and 6.5 us without.
    """
    overlaps = limits.capability >= (9, 0) and programs <= _PDL_PROGRAMS_PER_SM * limits.num_sms
    return _WITH_PDL if overlaps else _WITHOUT_PDL
