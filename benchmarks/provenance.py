"""Where a figure comes from: hardware, versions, commit and command, for every result file."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = ["provenance"]


def provenance() -> dict[str, Any]:
    """What a result file must say of itself."""
    facts: dict[str, Any] = {
        "command": "python " + " ".join([str(Path(sys.argv[0]).name), *sys.argv[1:]]),
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "threads": torch.get_num_threads(),
        "cpu": _cpu(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0]
    return facts


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip() or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()
