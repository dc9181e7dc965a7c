"""What selection needs to know about a device, found out without starting CUDA.

A process that starts CUDA cannot fork workers any more, so choosing a backend must not do it: compute capability and name come from NVML (a
driver library that needs no context). Only where NVML is missing (ROCm, some containers) is torch asked, which does start the device.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from functools import lru_cache

import torch

from attnlib.errors import ContractError

__all__ = ["DeviceInfo", "device_info", "resolve_device"]


@dataclass(frozen=True)
class DeviceInfo:
    """Facts about one device; tests make their own to ask what would be chosen on hardware that is not there.

    Attributes:
        type: torch's device type, "cpu" or "cuda" (ROCm devices are "cuda" with `is_rocm`).
        index: device index, 0 on a CPU.
        capability: compute capability (major, minor); None on a CPU, and where it cannot be found out.
        is_rocm: True for an AMD device.
        name: what the driver calls it.
        imagined: the device is not here; what it would need of this machine (drivers, compilers) is not looked for.
        missing: the device was asked for as a real one, and neither the driver nor torch sees it.
    """

    type: str
    index: int = 0
    capability: tuple[int, int] | None = None
    is_rocm: bool = False
    name: str = ""
    imagined: bool = False
    missing: bool = False

    @property
    def gaps(self) -> list[str]:
        """Why nothing can run on it, with the next action: one reason when it is missing, none otherwise."""
        if not self.missing:
            return []
        return [
            f"no CUDA device {self.index} is visible (driver, CUDA_VISIBLE_DEVICES, torch {torch.__version__}): use device='cpu', "
            "or ask about a GPU that is elsewhere by device='sm_90'"
        ]

    @property
    def torch_device(self) -> torch.device:
        """The torch device that these facts are about."""
        return torch.device("cpu") if self.type == "cpu" else torch.device(self.type, self.index)

    def __str__(self) -> str:
        if self.type == "cpu":
            return "cpu"
        if self.missing:
            return f"{self.type}:{self.index} (not visible here)"
        capability = (
            f"sm_{self.capability[0]}{self.capability[1]}"
            if self.capability
            else "capability unknown"
        )
        return f"{self.type}:{self.index} ({self.name or 'unknown'}, {capability})"


def resolve_device(device: torch.device | str | DeviceInfo | None) -> DeviceInfo:
    """Facts about `device`; None means a GPU where torch sees one, else the CPU. "sm_90" stands for an NVIDIA GPU of that kind that is not here.

    Raises:
        ContractError: torch knows no such device.
    """
    if isinstance(device, DeviceInfo):
        return device
    imagined = re.fullmatch(r"sm_?(\d+)(\d)a?", device) if isinstance(device, str) else None
    if imagined:
        return DeviceInfo(
            "cuda", 0, (int(imagined[1]), int(imagined[2])), name="imagined", imagined=True
        )
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ContractError(
            f"device={device!r} is not known; use 'cpu', 'cuda', 'cuda:1', another of torch's, or 'sm_90' to imagine a GPU"
        ) from None
    return device_info(device.type, -1 if device.index is None else device.index)


@lru_cache(maxsize=64)
def device_info(kind: str, index: int) -> DeviceInfo:
    """Facts about device `index` of `kind`; index -1 means the current device (0 while CUDA has not started)."""
    if kind != "cuda":
        return DeviceInfo(type=kind)
    if index < 0:
        index = torch.cuda.current_device() if _cuda_started() else 0
    is_rocm = torch.version.hip is not None
    facts = None if _cuda_started() or is_rocm else _from_nvml(index)
    if facts is None and torch.cuda.is_available() and index < torch.cuda.device_count():
        facts = torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index)
    if facts is None:
        return DeviceInfo(
            type="cuda", index=index, is_rocm=is_rocm, name="no such device", missing=True
        )
    return DeviceInfo(type="cuda", index=index, capability=facts[0], is_rocm=is_rocm, name=facts[1])


def _cuda_started() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _from_nvml(index: int) -> tuple[tuple[int, int], str] | None:
    """(capability, name) by NVML, or None when it is missing or the visible device cannot be mapped to a physical one."""
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
    """NVML numbers all devices; CUDA_VISIBLE_DEVICES renumbers them for this process. UUIDs and MIG names are left to torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return index
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if index >= len(entries) or not entries[index].isdigit():
        return None
    return int(entries[index])
