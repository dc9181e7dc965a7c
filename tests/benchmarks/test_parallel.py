"""The benchmark of divided layers runs with gloo on a CPU, with all of its rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def _run(found: Path, world_size: int, *more: str) -> dict[str, Any]:
    options = "--shrink 1024 --repeats 1 --num-heads 8 --num-kv-heads 2 --head-size 16 --out"
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
    arguments = ["-m", "benchmarks.parallel", *options.split(), str(found), *more]
    done = subprocess.run(
        [sys.executable, *command, *arguments],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result: dict[str, Any] = json.loads(found.read_text())
    return result


@pytest.mark.slow
def test_no_row_starts_after_the_limit(tmp_path: Path) -> None:
    result = _run(tmp_path / "found.json", 1, "--limit-seconds", "0")
    assert result["decode"] == result["prefill"] == [] and not result["complete"]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_of_a_small_run(tmp_path: Path, world_size: int) -> None:
    result = _run(tmp_path / "found.json", world_size)
    decodes = [(row["requests"], row["length"]) for row in result["decode"]]
    assert decodes == [(2, 64), (4, 128), (16, 32), (1, 1024)]
    assert [(row["new"], row["context"]) for row in result["prefill"]] == [(128, 0), (8, 120)]
    for row in (*result["decode"], *result["prefill"]):
        assert row["one_gpu"] > 0 and "met" not in row  # targets are for GPUs
    assert bool(result["bytes_per_us"]) == (world_size > 1)
    assert result["complete"]
