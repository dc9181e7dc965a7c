"""Every kernel compiled, through its launcher, for chips that are not here.

A process per target compiles the cases of `cross_compile`; the tests read what became of them.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
LIMITS = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
SMALL = ["write", "write-fp8", "slots", "merge"]
MAIN = ["decode-64", "decode-128", "decode-256", "decode-128-e4m3", "prefill-64", "prefill-128", "prefill-256",
        "prefill-128-e4m3", "varlen-64-window"]  # fmt: skip
HOPPER = ["varying", "decode-96", "decode-128-page128", "decode-128-verify", "decode-128-e5m2", "decode-all",
          "prefill-192", "prefill-all"]  # fmt: skip
SPILL_CEILING = 300
"""Bytes of local memory per thread. The full-featured kernels come near it; plain ones stay far below."""


def _compiled(target: str) -> dict[str, Any]:
    """What became of the target's cases; the first call starts all targets, two at a time."""
    return _started()[target].result()


@functools.cache
def _started() -> dict[str, Future[dict[str, Any]]]:
    pool = ThreadPoolExecutor(2)
    return {target: pool.submit(_compile, target) for target in LIMITS}


def _compile(target: str) -> dict[str, Any]:
    cases = SMALL + MAIN + (HOPPER if target == "sm_90" else [])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.ops.triton.cross_compile", target, *cases],
                         capture_output=True, text=True, cwd=ROOT, env=environment, check=False)  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert [result["case"] for result in results] == cases
    return {result["case"]: result for result in results}


@pytest.mark.parametrize("target", LIMITS)
def test_compiles_within_the_chip(target: str) -> None:
    """Q1, P6: every case compiles for the target, fits its shared memory, and spills little where that can be told."""
    for case, result in _compiled(target).items():
        assert "error" not in result, f"{case} for {target}: {result['error']}"
        for kernel in result["kernels"]:
            assert kernel["shared"] <= LIMITS[target] * 1024, (case, kernel)
            assert kernel["spilled"] is None or kernel["spilled"] <= SPILL_CEILING, (case, kernel)
            assert target == "gfx942" or kernel["registers"] is not None, (case, kernel)


@pytest.mark.parametrize("target", LIMITS)
def test_the_estimate_of_shared_memory_is_an_upper_one(target: str) -> None:
    """P6: what the tile chooser reckons with is at least what the compiler takes."""
    checked = 0
    for case, result in _compiled(target).items():
        for kernel in result["kernels"]:
            if kernel["estimate"] is not None:
                assert kernel["shared"] <= kernel["estimate"], (case, kernel)
                checked += 1
    assert checked >= len(MAIN)


def test_lengths_do_not_compile_anything() -> None:
    """P1 of the field notes: other numbers of requests, tokens, columns, splits, lengths and window sizes meet the same
    compiled kernels."""
    kernels = _compiled("sm_90")["varying"]["kernels"]
    assert len(kernels) == 9
    assert len({(kernel["kernel"], kernel["hash"]) for kernel in kernels}) == 3


@pytest.mark.parametrize("case", ["prefill-64", "prefill-128", "prefill-256", "prefill-128-e4m3"])
def test_prefill_multiplies_asynchronously_on_hopper(case: str) -> None:
    """Tiles of 64 rows and more go through wgmma, fed by cp.async."""
    (kernel,) = _compiled("sm_90")[case]["kernels"]
    assert kernel["instructions"]["wgmma.mma_async"] > 0
    assert kernel["instructions"]["cp.async.cg"] > 0
    assert "mma.sync" not in kernel["instructions"]


@pytest.mark.parametrize("case", ["decode-64", "decode-128", "decode-256", "decode-96", "decode-all"])
def test_decode_loads_ahead(case: str) -> None:
    """Keys and values arrive through cp.async with 16 bytes a thread: the loop over pages is pipelined."""
    decode = _compiled("sm_90")[case]["kernels"][0]
    assert decode["instructions"]["cp.async.cg"] >= 8
    assert decode["instructions"]["mma.sync"] > 0
