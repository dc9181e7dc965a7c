"""Check each backend in a subprocess.

Importing a compiled package may crash the process, and a kernel that fails makes every later kernel
of the same CUDA context fail too. Neither may affect the check of another backend.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlib.cli.gluon import gluon_remarks
from attnlib.cli.smoke_test import smoke_test
from attnlib.device import resolve_device
from attnlib.selection.registry import Registration, availability, lookup

__all__ = ["check_backend", "check_in_subprocesses"]

TIMEOUT_SECONDS = 300.0
"""Limit for all backends together: compiling FlashInfer's first kernel takes minutes."""


def check_backend(entry: Registration) -> dict[str, Any]:
    """Check a backend in this process.

    Returns:
        "name", "works" (bool), "finding" (one line) and "remarks" (a list of lines).
    """
    device = resolve_device(None)
    backend, reasons = availability(entry, device)
    if backend is None or reasons:
        return _finding(entry.name, f"unavailable: {'; '.join(reasons)}")
    found = _finding(entry.name, smoke_test(backend, device))
    return {**found, "remarks": gluon_remarks(backend, device) if found["works"] else []}


def check_in_subprocesses(
    entries: Sequence[Registration], timeout: float = TIMEOUT_SECONDS
) -> list[dict[str, Any]]:
    """`check_backend` for each entry, concurrently, each in a subprocess.

    Backends that only this process registered are checked here: a subprocess does not know them.
    """
    children = {
        entry.name: _start(entry.name)
        for entry in entries
        if entry.is_plugin or entry.origin == "built in"
    }
    deadline = time.monotonic() + timeout
    return [
        _collect(entry.name, children[entry.name], deadline, timeout)
        if entry.name in children
        else check_backend(entry)
        for entry in entries
    ]


def _command(name: str) -> list[str]:
    return [sys.executable, "-m", "attnlib.cli.subprocess_check", name]


def _start(name: str) -> subprocess.Popen[str]:
    root = str(
        Path(__file__).parents[2]
    )  # subprocesses must import this attnlib, also if it is not installed
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen(
        _command(name), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def _collect(
    name: str, child: subprocess.Popen[str], deadline: float, timeout: float
) -> dict[str, Any]:
    try:
        out, err = child.communicate(timeout=max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return _finding(name, f"did not finish within {timeout:g} s")
    if child.returncode < 0:
        return _finding(
            name, f"crashed its process: {signal.Signals(-child.returncode).name}{_last_line(err)}"
        )
    if child.returncode:
        return _finding(name, f"ended its process with status {child.returncode}{_last_line(err)}")
    try:
        found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return _finding(name, f"ended its process without a finding{_last_line(err)}")
    return found


def _finding(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "works": text.startswith("ran "), "finding": text, "remarks": []}


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return f" ({lines[-1]})" if lines else ""


def _main(name: str) -> None:
    entry = lookup(name)
    assert entry is not None, f"no backend {name!r} is registered here"
    # The parent reads the last line only: packages may print text when they are imported.
    print(json.dumps(check_backend(entry)))


if __name__ == "__main__":
    _main(sys.argv[1])
