"""Provenance of a result: hardware, versions, commit and command."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = ["provenance"]

_PACKAGES = (
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "vllm",
    "sgl-kernel",
    "flashinfer-python",
    "flash-linear-attention",
    "transformers",
)


def provenance(
    command: str | None = None, commit: str | None = None, device: torch.device | None = None
) -> dict[str, Any]:
    """The facts that every result file records.

    Args:
        command: the command that reproduces the result; None means the arguments of this process.
        commit: the commit of attnlib, for copies without history; None asks git.
        device: the GPU to record; None means the current one of torch, if there is one.
    """
    facts: dict[str, Any] = {
        "command": command or "python " + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "attnlib": _version("attnlib"),
        "commit": commit or _commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "threads": torch.get_num_threads(),
        "cpu": _cpu(),
    }
    facts["environment"] = {
        name: Path(value).name if os.sep in value else value  # no local paths in result files
        for name, value in sorted(os.environ.items())
        if name.startswith("ATTNLIB_") or name == "TRITON_INTERPRET"
    }
    facts["packages"] = {
        name: found for name in _PACKAGES if (found := _version(name)) != "not installed"
    }
    if torch.cuda.is_available() and (device is None or device.type == "cuda"):
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["capability"] = list(torch.cuda.get_device_capability(device))
        facts["cuda"] = torch.version.cuda or "none"
        facts["driver"] = (
            _output(
                "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
            ).splitlines()
            or ["unknown"]
        )[0]
    return facts


def _commit() -> str:
    """The commit of the checkout, with "+changes" if the sources differ from it.

    "unknown" outside a checkout.
    """
    root = Path(__file__).parent.parent.parent
    if not (root / ".git").exists():
        return "unknown"
    commit = _output("git", "rev-parse", "--short", "HEAD")
    changed = _output("git", "status", "--porcelain", "--", "attnlib") not in ("", "unknown")
    return f"{commit}+changes" if changed else commit


def _output(*command: str) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent.parent.parent,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [
            line.split(":")[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        if info.exists()
        else []
    )
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()
