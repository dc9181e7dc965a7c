"""Whether FlashInfer has kernels, or what compiles them (J2).

This module only looks for files; it downloads, builds and configures nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attnlib.backends._foreign.imports import environment_facts, is_installed, package_version
from attnlib.device import DeviceInfo

__all__ = ["toolchain_problems", "unavailable_reasons"]

_DISTRIBUTIONS = ("flashinfer-python", "flashinfer-jit-cache", "flashinfer-cubin")


def unavailable_reasons(
    device: DeviceInfo, find: Callable[[tuple[int, int] | None], tuple[Any, str]]
) -> list[str]:
    """Why FlashInfer cannot be used: import, interface, or no way to obtain its kernels.

    Args:
        device: where it would run.
        find: of the compute capability: what is used of FlashInfer, which has its `release`, and
            why it cannot be used, or "".
    """
    if not is_installed("flashinfer"):
        return ["flashinfer is not installed: pip install flashinfer-python"]
    if device.type != "cuda":
        return []  # the declaration reports the device without importing anything
    found, problem = find(device.capability)
    if problem:
        return [f"{problem} {environment_facts(device, _DISTRIBUTIONS)}"]
    return toolchain_problems(found.release)


def toolchain_problems(release: str) -> list[str]:
    """Why FlashInfer has neither prebuilt kernels nor a compiler; empty if it has one of them."""
    cached = package_version("flashinfer-jit-cache")
    if cached and release and cached.startswith(release):
        return []
    if _has_prebuilt_files():
        return []
    problems = []
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        problems.append(
            "FLASHINFER_DISABLE_JIT is set and no prebuilt kernels are installed: "
            "unset it, or install flashinfer-jit-cache"
        )
    nvcc = _nvcc()
    if not nvcc.is_file():
        problems.append(
            f"flashinfer compiles its kernels and nvcc is not at {nvcc}: "
            "set CUDA_HOME to a CUDA toolkit, or install flashinfer-jit-cache"
        )
    if shutil.which("ninja") is None:
        problems.append(
            "flashinfer compiles its kernels with ninja, which is not on PATH: "
            "pip install ninja, or install flashinfer-jit-cache"
        )
    if problems and cached:
        problems.append(
            f"flashinfer-jit-cache {cached} does not match flashinfer {release}: "
            "install the same release of both"
        )
    return problems


def _nvcc() -> Path:
    """The nvcc that FlashInfer uses: FLASHINFER_NVCC, CUDA_HOME, CUDA_PATH, PATH, the default."""
    if os.environ.get("FLASHINFER_NVCC"):
        return Path(os.environ["FLASHINFER_NVCC"])
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return Path(home) / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    return Path(on_path) if on_path else Path("/usr/local/cuda/bin/nvcc")


def _has_prebuilt_files() -> bool:
    """Whether the package contains prebuilt kernels."""
    try:
        spec = find_spec("flashinfer")
    except (ImportError, ValueError):
        return False
    if spec is None or not spec.origin:
        return False
    return any((Path(spec.origin).parent / "data" / "aot").glob("**/*.so"))
