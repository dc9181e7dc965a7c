"""Facts about a device, found without initializing CUDA.

A process that has initialized CUDA cannot fork workers, so backend selection must not initialize
it. Compute capability and name therefore come from NVML, a driver library that needs no CUDA
context. If NVML is not available (ROCm, some containers), torch is queried, which does initialize
the device.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

import torch

from attnlib.errors import ContractError

__all__ = ["DeviceInfo", "current_device_index", "device_info", "explains_device", "resolve_device"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_CAPABILITIES = {
    (7, 0): ("V100",),
    (7, 5): ("T4",),
    (8, 0): ("A30", "A100", "A800"),
    (8, 6): ("A10", "A10G", "A40"),
    (8, 9): ("L4", "L40", "L40S"),
    (9, 0): ("H20", "H100", "H200", "H800", "GH200"),
    (10, 0): ("B200", "GB200"),
    (10, 3): ("B300", "GB300"),
}
"""Compute capability -> models of data center GPUs, for devices of other machines by name."""


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
            f"machine with device='sm_90' or device='H200'"
        ]

    @property
    def torch_device(self) -> torch.device:
        """The torch device that these facts describe."""
        return torch.device("cpu") if self.type == "cpu" else torch.device(self.type, self.index)

    def __str__(self) -> str:
        if self.type == "cpu":
            return self.type
        if self.type != "cuda":
            shown = self.type if self.index == 0 else f"{self.type}:{self.index}"
            return f"{shown} (hypothetical device)" if self.is_hypothetical else shown
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
            device. "sm_90" means an NVIDIA GPU of that compute capability on another machine, and
            "H200" or "NVIDIA H100 NVL" one of that name, for which measured rankings apply.
            "gfx942" means an AMD GPU of that architecture on another machine.

    Raises:
        ContractError: torch does not know the device.
    """
    if isinstance(device, DeviceInfo):
        return device
    architecture = re.fullmatch(r"sm_?([12]?\d)(\d)a?", device) if isinstance(device, str) else None
    if architecture:
        capability = (int(architecture[1]), int(architecture[2]))
        return DeviceInfo("cuda", 0, capability, is_hypothetical=True)
    if isinstance(device, str) and re.fullmatch(r"gfx[0-9a-f]{3,5}", device):
        return DeviceInfo("cuda", 0, is_rocm=True, name=device, is_hypothetical=True)
    named = _device_by_name(device) if isinstance(device, str) else None
    if named is not None:
        return named
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        raise ContractError(
            f"device={device!r:.60} is not known; use 'cpu', 'cuda', 'cuda:1', another torch "
            f"device, or, for a GPU of another machine, 'sm_90', 'gfx942' or a name with one of "
            f"{', '.join(model for models in _CAPABILITIES.values() for model in models)}"
        ) from None
    return device_info(device.type, -1 if device.index is None else device.index)


def explains_device(make: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a function that makes tensors on its argument `device`: a device that torch does not
    know or find raises a ContractError with the next action, in place of torch's error."""

    @wraps(make)
    def explained(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return make(*args, **kwargs)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            given = inspect.signature(make).bind_partial(*args, **kwargs).arguments
            device = given.get("device")
            info = resolve_device(device)
            if info.is_missing or info.is_hypothetical:
                absent = f"device={device!r} is not on this machine: use 'cpu', 'cuda', 'cuda:1'"
                raise ContractError(*info.unavailable_reasons or (absent,)) from error
            raise

    return explained


def _device_by_name(name: str) -> DeviceInfo | None:
    """The GPU of another machine with a name like that of the driver ("NVIDIA H100 NVL"), in any
    case; None if no word of it is a known model."""
    words = name.split()
    if words and words[0].lower() == "nvidia":
        words = words[1:]
    # A driver joins the model to its package: "NVIDIA A100-SXM4-80GB".
    model = words[0].partition("-")[0].upper() if words else ""
    for capability, models in _CAPABILITIES.items():
        if model in models:
            words[0] = model + words[0][len(model) :]
            return DeviceInfo(
                "cuda", 0, capability, name=" ".join(["NVIDIA", *words]), is_hypothetical=True
            )
    return None


def current_device_index() -> int:
    """Index of the current CUDA device; 0 while CUDA is not initialized."""
    return torch.cuda.current_device() if _cuda_started() else 0


def device_info(kind: str, index: int) -> DeviceInfo:
    """Facts about device `index` of type `kind`; index -1 means the current device."""
    if kind == "cpu":
        return DeviceInfo(type=kind)
    if kind != "cuda":
        return DeviceInfo(type=kind, index=max(index, 0), is_hypothetical=not _is_present(kind))
    # The current device may change at any time, so only facts about a fixed index are cached.
    return _cuda_device_info(current_device_index() if index < 0 else index)


def _is_present(kind: str) -> bool:
    """Whether torch finds a device of a type other than CUDA on this machine."""
    module = getattr(torch, kind, None)  # torch.xpu, torch.mps, and those of extensions
    is_available = getattr(module, "is_available", None)
    if is_available is None:
        return kind == "mps" and torch.backends.mps.is_available()
    return bool(is_available())


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
