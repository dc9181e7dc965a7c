"""`benchmarks/hosts/one_gpu.py` with a script in place of vLLM."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import one_gpu, vllm_gpu_cases
from tests.hosts.models import DECODERS

_SCRIPT = """
import json, os, pathlib, sys, time
given = sys.argv[1:]
cache = pathlib.Path(os.environ["TRITON_CACHE_DIR"])
row = {"backend": given[1], "had": cache.exists(), "kernels": os.environ.get("ATTNLIB_KERNELS")}
if "--start-parts" in given:
    pathlib.Path(given[given.index("--start-parts") + 1]).write_text("{}")
if "int8_per_token_head" in given:
    told = "Triton kernel JIT compilation during inference: "
    row["late"] = [told + "hopper_decode_kernel", told + "rejection_greedy_sample_kernel"]
cache.mkdir(parents=True, exist_ok=True)
with open(given[-1], "a") as file:
    file.write(json.dumps(row) + "\\n")
if "fp8" in given:
    sys.path.insert(0, WATCH)
    from watch import Watch

    def stall():
        time.sleep(600)

    with Watch().part("deep"):
        with Watch(interval=0.1).part("call of 32 prompts", lambda: "7 steps"):
            stall()
sys.exit("a kernel was compiled" if "gemma3" in given else 0)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    watch = f"WATCH = {str(one_gpu.HERE)!r}"
    (scripts / "vllm_throughput.py").write_text(watch + _SCRIPT)
    monkeypatch.setattr(one_gpu, "HERE", scripts)
    monkeypatch.setattr(one_gpu, "wait_for_memory", lambda: None)

    def measure(*patterns: str, limit: float = 60) -> tuple[int, dict[str, Any]]:
        arguments = [*patterns, "--out", str(tmp_path / "x.json"), "--limit-seconds", str(limit)]
        monkeypatch.setattr(sys, "argv", ["one_gpu", *arguments, "--commit", "abc"])
        status = one_gpu.main()
        written = json.loads((tmp_path / "x.json").read_text())["rows"]
        return status, {row.pop("row"): row for row in written}

    return measure


def test_starts_with_and_without_kernels_have_a_cache_for_each_backend(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNLIB_KERNELS", "shipped")
    for is_filled in (False, True):
        status, found = run("start-empty/*", "start-full/*", "start-parts/*", "start-shipped/*")
        assert status == 0 and len(found) == 7
        for row, result in found.items():
            (workload,) = result["workloads"]
            kind, _, name = row.partition("/")
            assert workload["had"] is (is_filled and kind == "start-full" or kind == "start-parts")
            assert workload["backend"] == {"attnlib": "CUSTOM", "flash": "FLASH_ATTN"}[name]
            assert workload["kernels"] == (None if kind == "start-empty" else "shipped")
        assert len(list((tmp_path / "x.logs").glob("start-parts-*.json"))) == 2


def test_a_kernel_that_is_new_while_attnlib_serves_is_an_error(run: Any) -> None:
    status, found = run("int8/attnlib")
    error = found["int8/attnlib"]["error"]  # vLLM's own kernels are none
    assert status == 1 and error.endswith(": hopper_decode_kernel") and "|" not in error
    assert len(found["int8/attnlib"]["workloads"]) == 1


def test_rows_that_fail_or_take_too_long_keep_their_workloads(run: Any, tmp_path: Path) -> None:
    began = time.monotonic()
    status, found = run("gemma3/attnlib", "fp8/flash", "bfloat16/flash", limit=3)
    assert status == 1 and time.monotonic() - began < 30
    assert found["gemma3/attnlib"]["error"] == "exit 1: a kernel was compiled"
    part = r"stopped after 3 s: call of 32 prompts, \d s 7 steps"
    frames = r"scripts/vllm_throughput.py:\d+ stall < scripts/vllm_throughput.py:\d+ <module>"
    assert re.fullmatch(rf"{part} \| in {frames}", found["fp8/flash"]["error"])
    assert found["bfloat16/flash"] == {"error": "not run: no time"}
    for row in ("gemma3/attnlib", "fp8/flash"):
        assert len(found[row]["workloads"]) == 1
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) == 2


def test_engines_have_arguments_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(one_gpu.__file__).parent))
    import vllm_throughput

    for row, engine in one_gpu.ENGINES.items():
        command = ["--backend", engine.backend or "CUSTOM", *engine.arguments.split()]
        arguments = vllm_throughput.command_line().parse_args([*command, "--out", "x"])
        for workload in arguments.workloads:
            assert vllm_throughput.lengths(workload), row


def test_cases_of_tokens_name_models_that_are_written(tmp_path: Path) -> None:
    for names, kind in one_gpu.TOKENS.values():
        cases = vllm_gpu_cases.latent(tmp_path) if kind else vllm_gpu_cases.cases(tmp_path)
        assert {Path(case["model"]).name for case in cases.values()} == {*names} <= {*DECODERS}
