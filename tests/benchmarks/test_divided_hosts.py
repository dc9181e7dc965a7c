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
    """Every row is named: models, their tokens, and both backends."""
    printed = _run(tmp_path, str(FOLDER / "divided.sh"), str(tmp_path / "out"), "4", "0")
    rows = [line for line in printed.splitlines() if line.startswith("not run: ")]
    scripts = [row.split()[3].rpartition("/")[2] for row in rows]
    assert scripts == ["models.py", *["run_engine.py"] * 5, *["vllm_throughput.py"] * 3]
    names = {row.split()[4].rpartition("/")[2] for row in rows[1:6]}
    assert {"gemma2-mqa_context_parallel.json", "latent_context_parallel_CUSTOM.json"} < names
    rates = [row.partition("--backend ")[2].split() for row in rows[6:]]
    given = {(row[0], row[row.index("--context-parallel") + 1]) for row in rates}
    assert given == {("CUSTOM", "4"), ("FLASH_ATTN", "4"), ("CUSTOM", "1")}
    assert all("--gpus 4" in row and "--turns" in row for row in rows[6:])


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
