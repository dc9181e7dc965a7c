"""Backends are checked in subprocesses, which may crash or hang."""

from __future__ import annotations

import sys

import pytest

from attnlib.cli import subprocess_check
from attnlib.selection.registry import Registration


@pytest.mark.parametrize(
    ("program", "finding"),
    [
        ("import os; os.abort()", "crashed its process: SIGABRT"),
        ("raise SystemExit(3)", "ended its process with status 3"),
        (
            "raise RuntimeError('no kernel image')",
            "ended its process with status 1 (RuntimeError: no kernel image)",
        ),
        ("print('hello')", "ended its process without a finding"),
        ("import time; time.sleep(60)", "did not finish within 0.5 s"),
    ],
)
def test_a_subprocess_that_ends_early_is_a_finding(
    program: str, finding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I4: the doctor continues with the next backend."""
    monkeypatch.setattr(subprocess_check, "_command", lambda name: [sys.executable, "-c", program])
    timeout = 0.5 if "sleep" in program else 60.0
    (row,) = subprocess_check.check_in_subprocesses([Registration("fragile", "x:Y")], timeout)
    assert row == {"name": "fragile", "works": False, "finding": finding, "remarks": []}
