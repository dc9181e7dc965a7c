"""Every portable kernel and every tile table entry, compiled for chips that are not available.

One process per target compiles the cases of `cross_compile`; the tests check the results. By
default each kernel is compiled for each target, each case for Hopper and at least one other target,
and each table entry for one of its targets, in rotation. With `--every-target` every case and entry
is compiled for all of its targets, with 16-bit and float8 caches. The Hopper kernels are in
`hopper/test_compile.py`.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from attnlib.ops.triton.heuristics.tile_table import TileEntry
from tests.ops.triton.cross_compile import CASES, SCORE_CASES, entry_cases, entry_fits, formats_of

pytestmark = pytest.mark.slow  # compiles for more than a minute

ROOT = Path(__file__).parents[3]
LIMITS = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
SMALL = [
    "write",
    "write-fp8",
    "write-latent",
    "rotary-write",
    "rotary-write-e4m3",
    "append",
    "slots",
    "merge",
    "merge-rows",
    "packed-write",
    "packed-write-fp8",
]
MAIN = [
    "decode-64",
    "decode-256",
    "decode-128-e4m3",
    "decode-latent",
    "decode-latent-e4m3",
    "prefill-128",
    "prefill-256",
    "prefill-128-e4m3",
    "prefill-latent",
    "invariant-decode-128",
    "invariant-decode-256",
    "invariant-decode-latent",
    "invariant-prefill-128",
    "invariant-prefill-256",
    "varlen-64-window",
    "context-128",
    "context-80-window",
    "selected-blocks",
    "selected-all",
    "selected-shared",
    "selected-latent",
    "selected-latent-many",
    "indexer-tokens",
    "indexer-blocks",
    "selected-f32",
    "packed-decode-128",
    "packed-decode-all",
    "packed-decode-256-e4m3",
    "packed-decode-f32",
    "packed-prefill-128",
    "packed-prefill-all",
    "packed-prefill-f32",
]
HOPPER = [
    "varying", "decode-96", "decode-128", "decode-128-page128", "decode-128-verify",
    "decode-128-e5m2", "decode-latent-128", "decode-latent-all", "prefill-latent-e4m3",
    "decode-all", "prefill-64", "prefill-192", "prefill-all", "prefill-128-16-e5m2",
    "prefill-64-32-e4m3", "prefill-96-e5m2", "invariant-decode-64", "invariant-decode-all",
    "invariant-prefill-128-e4m3", "invariant-prefill-f32", "invariant-prefill-all",
]  # fmt: skip
SCORE_SAMPLE = [
    names[number % len(names)]
    for number, names in enumerate(
        [name for name in SCORE_CASES if (name.split("-")[0], name.split("-")[2]) == pair]
        for pair in dict.fromkeys((n.split("-")[0], n.split("-")[2]) for n in SCORE_CASES)
    )
]
"""Each score function in each operation, with one of the head sizes in turn."""
SCORE = {target: SCORE_SAMPLE[index :: len(LIMITS)] for index, target in enumerate(LIMITS)}
"""Cases with a score function, each for one target; all for all targets with `--every-target`."""
KERNELS = {
    name
    for path in (ROOT / "attnlib" / "ops" / "triton" / "kernels").glob("*.py")
    for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
}
"""All portable kernels, read from the sources, so that the cases cannot miss one."""
MAX_SPILLED = 300
"""Bytes of local memory per thread of a case. Kernels with all features come near it; others stay
far below. Table entries have limits of their own."""

ENTRIES = entry_cases()


def main_cases(target: str, every_target: bool) -> list[str]:
    """Return the cases of `MAIN` for a target: all, or some of each operation in rotation."""
    if every_target or target == "sm_90":
        return MAIN
    by_operation: dict[str, list[str]] = {}
    for name in MAIN:
        by_operation.setdefault(CASES[name][0], []).append(name)
    others = [name for name in LIMITS if name != "sm_90"]
    turn = others.index(target)
    chosen = [names[turn :: len(others)] or [names[turn % len(names)]]
              for names in by_operation.values()]  # fmt: skip
    return [name for names in chosen for name in names]


def _fitting(entry: TileEntry) -> list[str]:
    return [target for target in LIMITS if entry_fits(entry, target)]


def entry_plan(every_target: bool) -> dict[str, list[str]]:
    """Return target -> cases of table entries that are compiled for it."""
    plan: dict[str, list[str]] = {target: [] for target in LIMITS}
    for number, (name, entry) in enumerate(ENTRIES.items()):
        fitting = _fitting(entry)
        for target in (
            fitting if every_target else fitting[number % len(fitting) :][:1] if fitting else []
        ):
            formats = formats_of(entry, target)
            plan[target] += [name + ending for ending in (formats if every_target else formats[:1])]
    return plan


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[str, Future[dict[str, Any]]]:
    """Return target -> results of its cases; two targets are compiled at a time."""
    return _started(request.config.getoption("--every-target"))


@functools.cache
def _started(every_target: bool) -> dict[str, Future[dict[str, Any]]]:
    pool, plan = ThreadPoolExecutor(2), entry_plan(every_target)
    score = dict.fromkeys(LIMITS, list(SCORE_CASES)) if every_target else SCORE
    cases = {t: [*SMALL, *main_cases(t, every_target), *score[t], *plan[t]] for t in LIMITS}
    cases["sm_90"] += HOPPER
    return {t: pool.submit(_compile, t, cases[t]) for t in sorted(LIMITS, key="sm_90".__ne__)}


def _compile(target: str, cases: list[str]) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    module = "tests.ops.triton.cross_compile"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, target, *cases],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert [result["case"] for result in results] == cases
    return {result["case"]: result for result in results}


Compiled = dict[str, Future[dict[str, Any]]]


@pytest.mark.parametrize("target", LIMITS)
def test_compiles_within_the_chip(target: str, compiled: Compiled) -> None:
    """Q1, P6: every kernel compiles for every target, fits its shared memory, and spills little."""
    compiled_kernels = set()
    for case, result in compiled[target].result().items():
        assert "error" not in result, f"{case} for {target}: {result['error']}"
        for kernel in result["kernels"]:
            compiled_kernels.add(kernel["kernel"])
            assert kernel["shared"] <= LIMITS[target] * 1024, (case, kernel)
            assert kernel["registers"] is not None and kernel["spilled"] is not None, (case, kernel)
            assert case.startswith("entry:") or kernel["spilled"] <= MAX_SPILLED, (case, kernel)
    assert len(KERNELS) >= 6 and compiled_kernels >= KERNELS, KERNELS - compiled_kernels


@pytest.mark.parametrize("target", LIMITS)
def test_estimate_of_shared_memory_is_an_upper_bound(target: str, compiled: Compiled) -> None:
    """P6: the tile choice never selects a tile that does not fit."""
    checked = 0
    for case, result in compiled[target].result().items():
        for kernel in result["kernels"]:
            if kernel["estimate"] is not None:
                assert kernel["shared"] <= kernel["estimate"], (case, kernel)
                checked += 1
    attention = [name for name in MAIN if name in compiled[target].result()]
    assert checked >= len(attention) >= 6


@pytest.mark.parametrize("name", ENTRIES)
def test_every_table_entry_compiles_within_its_spills(
    name: str, compiled: Compiled, request: pytest.FixtureRequest
) -> None:
    """Speed rules: each entry fits one of its targets, where its tile spills at most `spills`."""
    entry, checked = ENTRIES[name], 0
    for target, cases in entry_plan(request.config.getoption("--every-target")).items():
        for case in cases:
            if case.removesuffix(":fp8") != name:
                continue
            result = compiled[target].result()[case]
            assert "error" not in result, f"{case} for {target}: {result['error']}"
            kernel = result["kernels"][0]
            assert kernel["tile"] == dict(entry.tile), (
                f"{case} for {target}: the entry's tile was not launched"
            )
            assert kernel["spilled"] <= entry.spills, f"{case} for {target}: {kernel}"
            checked += 1
    assert checked, f"{name} fits none of its targets"


def test_sample_of_cases_covers_all_targets() -> None:
    """Each case is compiled for Hopper and at least one other target, each operation for all.

    Each score function is compiled in each operation, and with each head size some are.
    """
    split = [name.split("-") for names in SCORE.values() for name in names]
    every = [name.split("-") for name in SCORE_CASES]
    assert {(op, function) for op, _, function in split} == {(op, f) for op, _, f in every}
    assert {(op, size) for op, size, _ in split} == {(op, size) for op, size, _ in every}
    sample = {target: main_cases(target, every_target=False) for target in LIMITS}
    operations = {CASES[name][0] for name in MAIN}
    for target, names in sample.items():
        assert {CASES[name][0] for name in names} == operations, target
        assert main_cases(target, every_target=True) == MAIN
    for name in MAIN:
        others = [target for target, names in sample.items() if name in names]
        assert "sm_90" in others and len(others) >= 2, name


def test_sample_of_entries_covers_all_targets() -> None:
    """And with `--every-target` all entries, formats and targets are covered."""
    sample, whole = entry_plan(False), entry_plan(True)
    assert all(sample.values()) and {
        name.removesuffix(":fp8") for names in sample.values() for name in names
    } == set(ENTRIES)
    assert all(set(sample[target]) <= set(whole[target]) for target in LIMITS)
    assert {
        (name.removesuffix(":fp8"), target) for target, names in whole.items() for name in names
    } == {(name, target) for name, entry in ENTRIES.items() for target in _fitting(entry)}


def test_lengths_do_not_cause_compilations(compiled: Compiled) -> None:
    """P1 of the field notes: numbers of requests, tokens, columns and splits, lengths and window
    sizes do not select a kernel."""
    kernels = compiled["sm_90"].result()["varying"]["kernels"]
    assert len(kernels) == 9
    assert len({(kernel["kernel"], kernel["hash"]) for kernel in kernels}) == 3


@pytest.mark.parametrize("case", ["prefill-64", "prefill-128", "prefill-256", "prefill-128-e4m3"])
def test_prefill_uses_wgmma_on_hopper(case: str, compiled: Compiled) -> None:
    """Tiles of 64 rows and more use WGMMA and cp.async."""
    (kernel,) = compiled["sm_90"].result()[case]["kernels"]
    assert kernel["instructions"]["wgmma.mma_async"] > 0
    assert kernel["instructions"]["cp.async.cg"] > 0
    assert "mma.sync" not in kernel["instructions"]


def test_descriptors_on_hopper_come_from_constants(compiled: Compiled) -> None:
    """ptxas 12.8 computes them from other registers in some kernels; see `sass`."""
    checked = 0
    for case, result in compiled["sm_90"].result().items():
        for kernel in result["kernels"]:
            assert not kernel["descriptors"], (case, kernel)
            checked += kernel["descriptors"] is not None
    assert checked >= 8


@pytest.mark.parametrize(
    "case", ["decode-64", "decode-128", "decode-256", "decode-96", "decode-all"]
)
def test_decode_pipelines_its_loads(case: str, compiled: Compiled) -> None:
    """Keys and values are loaded by cp.async with 16 bytes per thread."""
    decode = compiled["sm_90"].result()[case]["kernels"][0]
    assert decode["instructions"]["cp.async.cg"] >= 8
    assert decode["instructions"]["mma.sync"] > 0
