"""Each backend is examined in a process of its own.

Somebody else's compiled module may end the process that imports it, and a kernel that fails leaves a CUDA context in which every later kernel fails
too. A doctor must survive the first and must not blame the next backend for the second, so both happen in children; their end is a finding.
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
"""A first kernel may have to be compiled (FlashInfer's takes minutes); beyond this something hangs."""


def check_backend(entry: Registration) -> dict[str, Any]:
    """Name, whether it works, what was found, and what is worth a remark beside it, in this process."""
    device = resolve_device(None)
    backend, missing = availability(entry, device)
    if backend is None or missing:
        return _finding(entry.name, f"unavailable: {'; '.join(missing)}")
    found = _finding(entry.name, smoke_test(backend, device))
    return {**found, "remarks": gluon_remarks(backend, device) if found["works"] else []}


def check_in_subprocesses(
    entries: Sequence[Registration], timeout: float = TIMEOUT_SECONDS
) -> list[dict[str, Any]]:
    """`check_backend` for each entry, all at once, each in a process of its own. What only this process registered is examined here."""
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
    here = str(Path(__file__).parents[2])  # the same attnlib as this one, installed or not
    path = os.pathsep.join(part for part in (here, os.environ.get("PYTHONPATH", "")) if part)
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
    print(
        json.dumps(check_backend(entry))
    )  # the last line: whatever a package prints at import comes before it


if __name__ == "__main__":
    _main(sys.argv[1])
