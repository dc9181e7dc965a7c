"""The Hopper kernels and every table entry for them compiled for sm_90 without the chip: it fits, its products stay asynchronous."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.ops.triton.hopper.cross_compile import entry_cases

ROOT = Path(__file__).parents[4]
CASES = ["128-page128", "128-page256", "128-group5", "128-all", "64-sinks-window", "192-128", "256-page128-cap",
         "decode-128-page128", "decode-128-mqa", "decode-128-all", "decode-64-sinks", "decode-192-128", "decode-256-cap"]  # fmt: skip
STACK_CEILING = 300
"""Bytes of local memory per thread; nearly all of it is used between tiles of queries, not in the loops over keys. Table
entries state a ceiling of their own."""

ENTRIES = entry_cases()


@functools.cache
def _compiled() -> dict[str, dict[str, Any]]:
    """What became of every case, compiled by two processes side by side."""
    cases = [*CASES, *ENTRIES]
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(_compile, (cases[::2], cases[1::2])))
    return {result["case"]: result for part in parts for result in part}


def _compile(cases: list[str]) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.ops.triton.hopper.cross_compile", *cases],
                         capture_output=True, text=True, cwd=ROOT, env=environment, check=False)  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("case", [*CASES, *ENTRIES])
def test_compiles_for_the_chip(case: str) -> None:
    """P6 of the speed rules: every shape compiles, fits the shared memory that was reckoned, and multiplies by wgmma."""
    result = _compiled()[case]
    assert "error" not in result, result["error"]
    assert result["shared"] <= result["estimate"] <= 227 * 1024, result
    assert result["wgmma"] > 0 and result["stack"] <= (
        ENTRIES[case].spills if case in ENTRIES else STACK_CEILING
    ), result


@pytest.mark.parametrize("case", [case for case in (*CASES, *ENTRIES) if "decode" in case])
def test_decodes_have_a_multiprocessor_to_themselves(case: str) -> None:
    """By registers, however small the tile is: 8 warps with more than half of them."""
    assert _compiled()[case]["registers"] * 256 > 65536 // 2


@pytest.mark.parametrize("case", [*CASES, *ENTRIES])
def test_the_loops_over_keys_stay_asynchronous_and_in_registers(case: str) -> None:
    """No product is serialised by ptxas (C7510, C7512). The loop without masks of each consumer, which is where the time
    goes, never touches local memory, and masked loops reload a few scalars at most."""
    result = _compiled()[case]
    assert result["warnings"] == []
    if "decode" in case:
        assert result["loops"] and max(result["loops"]) <= 8, (
            "one loop with two branches in its one consumer"
        )
        return
    assert len(result["loops"]) >= 4, "two loops for each of two consumers"
    spare = {"128-all": 1, "128-group5": 3}.get(
        case, 0
    )  # every feature at once, or queries that no box can load, leave scalars without registers
    # Three consumers have 160 registers each: Triton 3.9 keeps the masked loops, which run once or twice for a tile, partly in memory.
    most = 48 if len(result["loops"]) in (6, 9) and result["registers"] <= 128 else 8
    assert max(sorted(result["loops"])[:2]) <= spare and max(result["loops"]) <= most, result[
        "loops"
    ]
