"""Why Triton cannot run in this process. Importable without triton."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import os
import re
import shutil

__all__ = ["interpreter_reasons", "toolchain_reasons"]


def interpreter_reasons() -> list[str]:
    """Why Triton's interpreter cannot run: it is switched off, or does not work with this numpy.

    Triton 3.6's interpreter converts one-element arrays to Python scalars, which numpy 2.4 rejects.
    """
    reasons = []
    if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        reasons.append(
            "a CPU needs Triton's interpreter (slow, for tests): set TRITON_INTERPRET=1 before "
            "triton is imported"
        )
    installed = {name: _version(name) for name in ("triton", "numpy")}
    if not installed["numpy"]:
        reasons.append("Triton's interpreter needs numpy: pip install numpy")
    elif (0,) < installed["triton"] < (3, 7) and installed["numpy"] >= (2, 4):
        triton, numpy = (".".join(map(str, version)) for version in installed.values())
        reasons.append(
            f"the interpreter of Triton {triton} fails with numpy {numpy}: "
            f'pip install "triton>=3.7", or pip install "numpy<2.4"'
        )
    return reasons


def _version(package: str) -> tuple[int, ...]:
    """(major, minor) of an installed distribution; empty if there is none. Imports nothing."""
    try:
        found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return ()
    return (int(found[1]), int(found[2])) if found else ()


def toolchain_reasons() -> list[str]:
    """What Triton's launcher lacks: a C compiler or the driver library (J1)."""
    reasons = []
    compiler = (
        os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    )
    if not compiler or not (os.path.isfile(compiler) or shutil.which(compiler)):
        reasons.append(
            "no C compiler for Triton's launcher: install gcc or clang, or set CC to one"
        )
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        if ctypes.util.find_library("cuda") is None:
            reasons.append(
                "libcuda.so.1 is not found: install the NVIDIA driver, or add its directory to "
                "LD_LIBRARY_PATH"
            )
    return reasons
