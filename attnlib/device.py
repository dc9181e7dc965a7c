"""Facts about a device, found without initializing CUDA.

A process that has initialized CUDA cannot fork workers, so backend selection must not initialize
it. Compute capability and name therefore come from NVML, a driver library that needs no CUDA
context. If NVML is not available (ROCm, some containers), torch is queried, which does initialize
the device.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from functools import lru_cache

import torch

from attnlib.errors import ContractError

__all__ = ["DeviceInfo", "current_device_index", "device_info", "resolve_device"]


@dataclass(frozen=True)
class DeviceInfo:
    """Facts about one device. Construct one to select a backend for hardware that is not present.

    Attributes:
        type: torch device type, "cpu" or "cuda" (ROCm devices are "cuda" with `is_rocm`).
        index: device index; 0 on a CPU.
        capability: compute capability (major, minor); None on a CPU or if it cannot be determined.
        is_rocm: True for an AMD device.
        name: device name as reported by the driver.
        is_hypothetical: True if the device is not expected on this machine. Its requirements on
            the machine (driver, compilers) are not checked.
        is_missing: True if the device was requested, but neither the driver nor torch finds it.
    """

    type: str
    index: int = 0
    capability: tuple[int, int] | None = None
    is_rocm: bool = False
    name: str = ""
    is_hypothetical: bool = False
    is_missing: bool = False

    @property
    def unavailable_reasons(self) -> list[str]:
        """Why no backend can run on it, with the next action; empty unless it is missing."""
        if not self.is_missing:
            return []
        return [
            f"no CUDA device {self.index} is visible to torch {torch.__version__}: check the "
            f"driver and CUDA_VISIBLE_DEVICES, use device='cpu', or select for a GPU of another "
            f"machine with device='sm_90'"
        ]

    @property
    def torch_device(self) -> torch.device:
        """The torch device that these facts describe."""
        return torch.device("cpu") if self.type == "cpu" else torch.device(self.type, self.index)

    def __str__(self) -> str:
        if self.type != "cuda":
            return self.type
        if self.is_missing:
            return f"cuda:{self.index} (not found)"
        architecture = (
            f"sm_{self.capability[0]}{self.capability[1]}"
            if self.capability
            else "ROCm"
            if self.is_rocm
            else "unknown compute capability"
        )
        if self.is_hypothetical:
            known = f"{self.name}, {architecture}" if self.name else architecture
            return f"{known} (hypothetical device)"
        return f"cuda:{self.index} ({self.name or 'unknown'}, {architecture})"


def resolve_device(device: torch.device | str | DeviceInfo | None) -> DeviceInfo:
    """Facts about `device`.

    Args:
        device: None means a GPU if torch finds one, else the CPU. "cuda" means the current CUDA
            device. "sm_90" means an NVIDIA GPU of that compute capability on another machine.

    Raises:
        ContractError: torch does not know the device.
    """
    if isinstance(device, DeviceInfo):
        return device
    architecture = re.fullmatch(r"sm_?(\d+)(\d)a?", device) if isinstance(device, str) else None
    if architecture:
        capability = (int(architecture[1]), int(architecture[2]))
        return DeviceInfo("cuda", 0, capability, is_hypothetical=True)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ContractError(
            f"device={device!r} is not known; use 'cpu', 'cuda', 'cuda:1', another torch device, "
            f"or 'sm_90' for a GPU that is not on this machine"
        ) from None
    return device_info(device.type, -1 if device.index is None else device.index)


def current_device_index() -> int:
    """Index of the current CUDA device; 0 while CUDA is not initialized."""
    return torch.cuda.current_device() if _cuda_started() else 0


def device_info(kind: str, index: int) -> DeviceInfo:
    """Facts about device `index` of type `kind`; index -1 means the current device."""
    if kind != "cuda":
        return DeviceInfo(type=kind)
    # The current device may change at any time, so only facts about a fixed index are cached.
    return _cuda_device_info(current_device_index() if index < 0 else index)


@lru_cache(maxsize=64)
def _cuda_device_info(index: int) -> DeviceInfo:
    is_rocm = torch.version.hip is not None
    facts = None if _cuda_started() or is_rocm else _from_nvml(index)
    if facts is None and torch.cuda.is_available() and index < torch.cuda.device_count():
        facts = torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index)
    if facts is None:
        return DeviceInfo(type="cuda", index=index, is_rocm=is_rocm, is_missing=True)
    return DeviceInfo(type="cuda", index=index, capability=facts[0], is_rocm=is_rocm, name=facts[1])


def _cuda_started() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _from_nvml(index: int) -> tuple[tuple[int, int], str] | None:
    """(capability, name) from NVML; None if NVML or the index of the physical device is unknown."""
    physical = _physical_index(index)
    if physical is None:
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
        handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        name = ctypes.create_string_buffer(96)
        failed = (
            nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(physical), ctypes.byref(handle))
            or nvml.nvmlDeviceGetCudaComputeCapability(
                handle, ctypes.byref(major), ctypes.byref(minor)
            )
            or nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(96))
        )
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return None if failed else ((major.value, minor.value), name.value.decode(errors="replace"))


def _physical_index(index: int) -> int | None:
    """The NVML index of a CUDA device: NVML ignores CUDA_VISIBLE_DEVICES, which renumbers devices.

    None for UUIDs and MIG names; torch resolves those.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return index
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if index >= len(entries) or not entries[index].isdigit():
        return None
    return int(entries[index])
