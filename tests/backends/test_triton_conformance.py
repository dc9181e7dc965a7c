"""`attnlib verify triton --quick` in Triton's interpreter on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_triton_backend_passes_under_the_interpreter(tmp_path: Path) -> None:
    """H1: no failures; unsupported cases and cases not run have a reason."""
    target = tmp_path / "report.json"
    arguments = ["triton", "--quick", "--device", "cpu", "--json", str(target)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_interpreter", "verify", *arguments],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    report = json.loads(target.read_text())
    assert report["counts"]["fail"] == 0
    assert report["counts"]["pass"] > 150
    skipped = [
        result for result in report["results"] if result["outcome"] in ("unsupported", "not run")
    ]
    assert all(result["message"] for result in skipped)
