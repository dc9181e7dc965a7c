"""Exchanges by memory that cannot end: the host learns which, and no kernel waits for ever (X8)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.gpu.devices import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

LATE = "RankLostError: rank 0 of 2 waited 1 s for rank 1 in exchange 2 of"
ERRORS = {
    "queries": f"{LATE} queries by memory",
    "results": f"{LATE} results by memory",
    "streams": "ContractError: rank 0 of 2: exchange 2 of queries by memory ran at the same time",
}


@pytest.mark.parametrize("case", ERRORS)
def test_the_host_learns_of_it(case: str) -> None:
    """By its log, before CUDA's error, and by the next exchange."""
    command = [sys.executable, "-m", "tests.gpu.exchange_errors", case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 3, done.stdout + done.stderr[-3000:]
    assert lines[1].startswith("CUDA:"), lines
    assert lines[2].startswith(ERRORS[case]), lines
    assert ERRORS[case].partition(": ")[2] in done.stderr
