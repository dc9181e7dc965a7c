"""The commands for divided keys under vLLM, without vLLM."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks" / "hosts"


def _run(tmp_path: Path, *command: str) -> str:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho no GPU\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_limit_starts_nothing(tmp_path: Path) -> None:
    """Every row is named: models, their tokens, and both backends in turn."""
    printed = _run(tmp_path, str(FOLDER / "divided.sh"), str(tmp_path / "out"), "4", "0")
    rows = [line for line in printed.splitlines() if line.startswith("not run: ")]
    assert [row.split()[3].rpartition("/")[2] for row in rows] == [
        "models.py", "run_engine.py", *["vllm_throughput.py"] * 5
    ]  # fmt: skip
    backends = [row.partition("--backend ")[2].split()[0] for row in rows[2:]]
    assert backends == ["CUSTOM", "FLASH_ATTN", "CUSTOM", "FLASH_ATTN", "CUSTOM"]
    ranks = [row.partition("--context-parallel ")[2].split()[0] for row in rows[2:]]
    assert ranks == ["4", "4", "4", "4", "1"]
    assert all("--gpus 4" in row for row in rows[2:])


def test_cases_divide_windows_and_latents(tmp_path: Path) -> None:
    target = tmp_path / "cases.json"
    script = str(FOLDER / "vllm_gpu_cases.py")
    _run(tmp_path, "python", script, str(tmp_path), str(target), "divided", "2")
    cases = json.loads(target.read_text())
    models = {Path(case["model"]).name for case in cases.values()}
    assert models == {"mqa", "gemma2-mqa", "deepseek"}
    for name, case in cases.items():
        given = case["arguments"]
        assert given["tensor_parallel_size"] == 2
        assert given["decode_context_parallel_size"] == 1 + ("context" in name)
        assert given.get("disable_hybrid_kv_cache_manager", False) == ("gemma2" in name)
