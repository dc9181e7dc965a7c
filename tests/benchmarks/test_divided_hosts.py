"""The commands for divided keys under vLLM, without vLLM."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "hosts"


def _run(tmp_path: Path, *command: str) -> str:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho no GPU\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("gpus", ["4", "4 2"])
def test_a_limit_starts_nothing(tmp_path: Path, gpus: str) -> None:
    """Every row is named: models, their tokens, and both backends on each number of GPUs."""
    script, counts = str(FOLDER / "divided.sh"), gpus.split()
    printed = _run(tmp_path, script, str(tmp_path / "out"), gpus, "0")
    rows = [line.split() for line in printed.splitlines() if line.startswith("not run: ")]
    scripts = Counter(Path(word).name for row in rows for word in row if word.endswith(".py"))
    runs = 1 + 2 * len(counts)
    assert scripts == {"models.py": 1, "run_engine.py": 5, "vllm_throughput.py": runs}
    tokens = [row for row in rows if "flock" in row]
    names = {Path(row[-2]).name for row in tokens}
    assert {"gemma2-mqa_context_parallel.json", "latent_context_parallel_CUSTOM.json"} < names
    rates = [row for row in rows if "--backend" in row]
    options = "--backend", "--gpus", "--context-parallel"
    given = {tuple(row[row.index(option) + 1] for option in options) for row in rates}
    assert given == {("CUSTOM", counts[0], "1")} | {
        (backend, count, count) for backend in ("CUSTOM", "FLASH_ATTN") for count in counts
    }
    lock = str(tmp_path / "out" / "turns")
    assert all(lock in row for row in (*tokens, *rates)) and len(rates) == runs


def test_no_call_is_timed_while_tokens_are_written(tmp_path: Path) -> None:
    """The lock of the shell is that of the engines."""
    file, order, began = tmp_path / "turns", tmp_path / "order", tmp_path / "began"
    wait = f"touch {began}; sleep 0.5; echo tokens >> {order}"
    with subprocess.Popen(["flock", "--shared", "--close", str(file), "sh", "-c", wait]) as tokens:
        while not began.exists():
            time.sleep(0.01)
        with file.open("a") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            order.write_text((order.read_text() if order.exists() else "") + "call")
        assert tokens.wait() == 0
    assert order.read_text() == "tokens\ncall"


def test_cases_divide_windows_and_latents(tmp_path: Path) -> None:
    target = tmp_path / "cases"
    script = str(FOLDER / "vllm_gpu_cases.py")
    _run(tmp_path, "python", script, str(tmp_path), str(target), "divided", "2")
    files = [json.loads(file.read_text()) for file in target.iterdir()]
    cases = {name: case for each in files for name, case in each.items()}
    assert len(cases) == len(files) == 5
    models = {Path(case["model"]).name for case in cases.values()}
    assert models == {"mqa", "gemma2-mqa", "deepseek"}
    for name, case in cases.items():
        given = case["arguments"]
        assert given["tensor_parallel_size"] == 2
        assert given["decode_context_parallel_size"] == 1 + ("context" in name)
        assert given.get("disable_hybrid_kv_cache_manager", False) == ("gemma2" in name)
