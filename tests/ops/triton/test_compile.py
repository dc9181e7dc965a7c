"""Every portable kernel and every tile table entry, compiled for chips that are not available.

A few processes compile the cases of `cross_compile`; the tests check the results. By default that
is a sample: each kernel for each kind of matrix instruction (for each vendor, if it has no matrix
product), its variants in rotation, and of the table entries for one kind of kernel the largest
tile, for one of its targets. `--every-target`
compiles every case and entry for all of its targets, with 16-bit and float8 caches and each score
function.
The Hopper kernels are in `hopper/test_compile.py`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from attnlib.ops.triton.heuristics.tile_table import TileEntry
from tests.ops.triton.cross_compile import (
    CASES,
    PROCESSES,
    SCORE_CASES,
    compile_in_process,
    entry_cases,
    entry_fits,
    formats_of,
    largest_tiles,
    write_table,
)

pytestmark = pytest.mark.slow  # compiles for more than a minute

ROOT = Path(__file__).parents[3]
LIMITS = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
KINDS = (("sm_80", "sm_89", "sm_120"), ("sm_90",), ("sm_100",), ("gfx942",))
"""Targets with one kind of matrix instruction: mma.sync, wgmma, tcgen05, and AMD's."""
VENDORS = (("sm_80", "sm_89", "sm_90", "sm_100", "sm_120"), ("gfx942",))
SMALL = [
    "write",
    "write-fp8",
    "write-latent",
    "rotary-write",
    "rotary-write-e4m3",
    "append",
    "append-rows",
    "slots",
    "visible-keys",
    "merge",
    "merge-rows",
    "peer-words",
    "packed-write",
    "packed-write-fp8",
    "pages-write-int8",
    "pages-write-fp8",
    "pages-write-int4",
    "pages-write-int8-nvfp4",
    "rotate-heads",
    "rotate-heads-80-f16",
    "packed-latent-write",
    "packed-counters",
    "convert",
    "convert-int8",
    "convert-int8-int4-rotated",
    "float8-copy",
    "convolution",
    "pages-write-int8-rotated",
    "pages-rotary-int8-int4",
    "pages-rotary-nvfp4",
]
"""Cases of kernels without matrix products."""
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
    "invariant-decode-latent",
    "invariant-decode-all",
    "invariant-decode-128",
    "invariant-prefill-128",
    "invariant-prefill-256",
    "varlen-64-window",
    "context-80-window",
    "context-128",
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
    "pages-decode-int8",
    "pages-decode-int4",
    "pages-decode-fp8-all",
    "pages-decode-int4-f16",
    "pages-decode-int8-f32",
    "pages-prefill-int8",
    "pages-prefill-int4-all",
    "pages-prefill-fp8",
    "pages-decode-open4",
    "pages-decode-open8-steps",
    "pages-decode-tables",
    "pages-prefill-open8",
    "packed-latent-64",
    "packed-latent-selected",
    "packed-latent-all",
]
STATES = ["state-64-whole", "state-64-channels", "state-64-add", "state-64-f32"]
"""Cases of kernels of state layers, one for each kind of matrix instruction."""
HOPPER_SAMPLE = [
    "varying", "decode-all", "decode-latent-all", "prefill-latent", "prefill-all",
    "prefill-64-32-e4m3",
]  # fmt: skip
"""Cases whose instructions are checked, and the decodes and prefills with most features."""
SCORE_SAMPLE = [
    f"{('decode', 'prefill')[number % 2]}-{(64, 128)[number // 2 % 2]}-{function}"
    for number, function in enumerate(dict.fromkeys(name.split("-")[2] for name in SCORE_CASES))
]
"""Each score function in one operation with one head size, in turn."""
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
LARGE_SPILLED = {
    "prefill-all": 904,  # sm_120; 520 on sm_100 and 720 on sm_89
    "invariant-prefill-all": 512,  # gfx942
    "invariant-decode-all": 448,  # gfx942
    "pages-prefill-open8": 436,  # gfx942 with Triton 3.6; 3.9 needs less than 300
    "pages-prefill-open8-table": 444,  # the same
    "prefill-128-f32": 448,  # as the table entry for float32
    "fused-128-channels": 328,  # sm_80; four parts of decays, and the convolution before them
    "fused-128-whole": 360,  # sm_90; a program keeps what all value rows share, in 168 registers
    "state-128-whole": 336,  # the same
    "state-128-long": 344,  # the same, of two warps, which was the fastest on an H200
    "state-128": 376,  # sm_90, sm_120; steps with drafts prepare chunks in their loop
    "fused-128": 376,  # the same
    "state-128-c32": 640,  # sm_80 needs 608; twice the rows of a chunk
    "state-64-chunks": 608,  # sm_80 needs 576 with Triton 3.6; the same
    "state-256": 704,  # sm_120; a program keeps 64 x 256 elements of the state
    "packed-prefill-all": 368,  # sm_100; 336 on sm_90: a scale for each row, in two loops
}
"""The same of cases that need more on some targets: all features at once, and float32 queries."""

ENTRIES = entry_cases()


def _fitting(entry: TileEntry) -> list[str]:
    return [target for target in LIMITS if entry_fits(entry, target)]


def entry_plan(every_target: bool) -> dict[str, list[str]]:
    """Return target -> cases of table entries that are compiled for it.

    In a sample, each is compiled for the last of its targets. Those for wgmma and tcgen05 are
    compiled for sm_100, because `HOPPER_SAMPLE` has the same operations for sm_90.
    """
    plan: dict[str, list[str]] = {target: [] for target in LIMITS}
    sample = sampled_entries()
    for name, entry in ENTRIES.items():
        fitting = _fitting(entry)
        if not every_target:
            fitting = fitting[-1:] if name in sample else []
        for target in fitting:
            formats = formats_of(entry, target)
            plan[target] += [name + ending for ending in (formats if every_target else formats[:1])]
    return plan


def sampled_entries() -> set[str]:
    """Return the largest tiles, without those for float32 and for chips that lack float8."""
    names = largest_tiles(ENTRIES)
    return {name for name in names if {"16-bit", "fp8"} & set(ENTRIES[name].elements)}


def main_cases(target: str) -> list[str]:
    """Return cases of `MAIN` for a target: some of each operation in rotation.

    Targets of one kind share the operations. Those of which a table entry or a case of
    `HOPPER_SAMPLE` is compiled for the kind need no other case.
    """
    by_operation: dict[str, list[str]] = {}
    for name in MAIN:
        by_operation.setdefault(_operation(name), []).append(name)
    turn, kind = next((turn, kind) for turn, kind in enumerate(KINDS) if target in kind)
    for operation in SAME_KERNELS.union(*map(other_operations, kind)):
        by_operation.pop(operation, None)
    chosen = [
        names[turn :: len(KINDS)] or [names[turn % len(names)]] for names in by_operation.values()
    ]
    return [name for names in chosen[kind.index(target) :: len(kind)] for name in names]


def small_cases(target: str) -> list[str]:
    """Return the cases of `SMALL` for a target, in turn for the targets of one vendor."""
    vendor = next(vendor for vendor in VENDORS if target in vendor)
    return SMALL[vendor.index(target) :: len(vendor)]


def state_cases(target: str) -> list[str]:
    """Return a case of `STATES`, of a row decode and of a fused step for the first target of each
    kind, and long chunks and copied states for Hopper."""
    turns = [turn for turn, kind in enumerate(KINDS) if target == kind[0]]
    cases = [name for turn in turns for name in (STATES[turn], "state-64-rows", "fused-64")]
    names = ("long", "long-channels", "chunks", "chunks-channels", "copied", "channels-copied")
    hopper = [f"state-128-{name}" for name in names]
    hopper.append("fused-mamba2-copied")
    return [*cases, *hopper] if target == "sm_90" else cases


SAME_KERNELS = {"varlen", "invariant-prefill"}
"""Operations whose kernels are those of prefills and of batch-invariant decodes."""


def _operation(case: str) -> str:
    """Return the operation of a case; batch-invariant variants count as operations."""
    prefix = "invariant-" if case.startswith("invariant-") else ""
    return prefix + CASES[case][0]


def other_operations(target: str) -> set[str]:
    """Return the operations whose kernel the sampled table entries and `HOPPER_SAMPLE` compile for
    a target."""
    entries = [ENTRIES[name.removesuffix(":fp8")] for name in entry_plan(False)[target]]
    found = {"decode" if entry.op == "latent" else entry.op for entry in entries}
    named = HOPPER_SAMPLE if target == "sm_90" else []
    return found.union(_operation(name) for name in named if name != "varying")


Compiled = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[Compiled]:
    """Function from a target to the results of its cases, which begin to compile at once."""
    results = _started(request.config.getoption("--every-target"))
    yield results
    if table := request.config.getoption("--compile-table"):
        rows = [
            (target, case, kernel["kernel"], kernel["registers"], kernel["spilled"],
             max_spilled(case), kernel["shared"])
            for target in LIMITS
            for case, result in results(target).items()
            for kernel in result.get("kernels", ())
        ]  # fmt: skip
        write_table(Path(table), rows)


@functools.cache
def _started(every_target: bool) -> Compiled:
    plan, pool = entry_plan(every_target), ThreadPoolExecutor(PROCESSES)
    score = dict.fromkeys(LIMITS, list(SCORE_CASES)) if every_target else SCORE
    cases = {t: [*score[t], *plan[t]] for t in LIMITS}
    for target, names in cases.items():
        sample = [*small_cases(target), *main_cases(target), *state_cases(target)]
        names += CASES if every_target else sample
    cases["sm_90"] += HOPPER_SAMPLE
    cases = {target: list(dict.fromkeys(names)) for target, names in cases.items()}
    module = "tests.ops.triton.cross_compile"
    # As few processes as run at the same time, because a new one takes seconds to import torch.
    targets = sorted(LIMITS, key="sm_90".__ne__)
    parts = [(target, case) for target in targets for case in cases[target]]
    size = -(-len(parts) // PROCESSES)
    futures = [
        pool.submit(compile_in_process, module, *_arguments(parts[first : first + size]))
        for first in range(0, len(parts), size)
    ]

    @functools.cache
    def results(target: str) -> dict[str, Any]:
        every = [result for future in futures for result in future.result()]
        found = {result["case"]: result for result in every if result["target"] == target}
        assert set(found) == set(cases[target])
        return found

    return results


def _arguments(parts: list[tuple[str, str]]) -> Iterator[str]:
    """Yield each case, after its target where that is another one than before."""
    before = None
    for target, case in parts:
        if target != before:
            yield target
        yield case
        before = target


def max_spilled(case: str) -> int:
    """Return the limit of a kernel's bytes of local memory per thread."""
    if case.startswith("entry:"):
        return ENTRIES[case.removesuffix(":fp8")].spills
    return LARGE_SPILLED.get(case, MAX_SPILLED)


@pytest.mark.parametrize("target", LIMITS)
def test_compiles_within_the_chip(target: str, compiled: Compiled) -> None:
    """Q1, P6: every kernel compiles, fits the shared memory of its target, and spills little."""
    for case, result in compiled(target).items():
        assert "error" not in result, f"{case} for {target}: {result['error']}"
        for kernel in result["kernels"]:
            assert kernel["shared"] <= LIMITS[target] * 1024, (case, kernel)
            assert kernel["registers"] is not None and kernel["spilled"] is not None, (case, kernel)
            # Tests of the entries check their tile too.
            assert case.startswith("entry:") or kernel["spilled"] <= max_spilled(case), kernel


@pytest.mark.parametrize("targets", [*KINDS, *VENDORS], ids=" ".join)
def test_every_kernel_is_compiled(targets: tuple[str, ...], compiled: Compiled) -> None:
    """Q1: for each kind of matrix instruction; those without matrix products for each vendor."""
    results = [result for target in targets for result in compiled(target).values()]
    found = {kernel["kernel"] for result in results for kernel in result.get("kernels", ())}
    needed = KERNELS if targets in VENDORS else KERNELS - _small_kernels(compiled)
    assert len(needed) >= 6 and found >= needed, needed - found


def _small_kernels(compiled: Compiled) -> set[str]:
    """Return the kernels of `SMALL`, which have no matrix product."""
    kernels = [
        kernel
        for target in LIMITS
        for case, result in compiled(target).items()
        if case in SMALL
        for kernel in result.get("kernels", ())
    ]
    for kernel in kernels:
        assert not {"mma.sync", "wgmma.mma_async", "tcgen05.mma"} & set(kernel["instructions"])
    return {kernel["kernel"] for kernel in kernels}


@pytest.mark.parametrize("target", LIMITS)
def test_estimate_of_shared_memory_is_an_upper_bound(target: str, compiled: Compiled) -> None:
    """P6: the tile choice never selects a tile that does not fit."""
    checked = 0
    for case, result in compiled(target).items():
        for kernel in result["kernels"]:
            if kernel["estimate"] is not None:
                assert kernel["shared"] <= kernel["estimate"], (case, kernel)
                checked += 1
    attention = [name for name in MAIN if name in compiled(target)]
    assert checked >= len(attention) > 0


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
            result = compiled(target)[case]
            assert "error" not in result, f"{case} for {target}: {result['error']}"
            kernel = result["kernels"][0]
            assert kernel["tile"] == dict(entry.tile), (
                f"{case} for {target}: the entry's tile was not launched"
            )
            assert kernel["spilled"] <= max_spilled(case), f"{case} for {target}: {kernel}"
            checked += 1
    if not checked and _fitting(entry):
        assert name not in sampled_entries()
        pytest.skip("compiled with --every-target")
    assert checked, f"{name} fits none of its targets"


def test_sample_of_cases_covers_all_targets() -> None:
    """Each operation is compiled for each kind of target, each of its cases for at least one.

    Each score function is compiled, and in each operation and with each head size some are.
    """
    split = [name.split("-") for names in SCORE.values() for name in names]
    every = [name.split("-") for name in SCORE_CASES]
    for part in range(3):
        assert {names[part] for names in split} == {names[part] for names in every}
    operations = {_operation(name) for name in MAIN} - SAME_KERNELS
    sample = {target: main_cases(target) for target in LIMITS}
    for kind in KINDS:
        names = [name for target in kind for name in sample[target]]
        assert set(map(_operation, names)).union(*map(other_operations, kind)) == operations, kind
    compiled = {name for names in sample.values() for name in names} | set(HOPPER_SAMPLE)
    # Of decodes and prefills, the entries of the tables are compiled.
    others = {"decode", "prefill", *SAME_KERNELS}
    assert {name for name in MAIN if _operation(name) not in others} <= compiled


def test_sample_of_entries_covers_all_problems() -> None:
    """And with `--every-target` all entries, formats and targets are covered."""
    sample, whole = entry_plan(False), entry_plan(True)
    named = {name.removesuffix(":fp8") for names in sample.values() for name in names}
    assert named == sampled_entries()
    for entry in ENTRIES.values():
        same = [e for e in map(ENTRIES.get, named) if e.op == entry.op]
        assert any(set(entry.products) <= set(e.products) for e in same), entry
    assert all(set(sample[target]) <= set(whole[target]) for target in LIMITS)
    assert {
        (name.removesuffix(":fp8"), target) for target, names in whole.items() for name in names
    } == {(name, target) for name, entry in ENTRIES.items() for target in _fitting(entry)}


def test_lengths_do_not_cause_compilations(compiled: Compiled) -> None:
    """P1 of the field notes: numbers of requests, tokens, columns and splits, lengths and window
    sizes do not select a kernel."""
    kernels = compiled("sm_90")["varying"]["kernels"]
    assert len(kernels) == 9
    assert len({(kernel["kernel"], kernel["hash"]) for kernel in kernels}) == 3


@pytest.mark.parametrize("case", ["prefill-all", "prefill-64-32-e4m3"])
def test_prefill_uses_wgmma_on_hopper(case: str, compiled: Compiled) -> None:
    """Tiles of 64 rows and more use WGMMA and cp.async."""
    (kernel,) = compiled("sm_90")[case]["kernels"]
    assert kernel["instructions"]["wgmma.mma_async"] > 0
    assert kernel["instructions"]["cp.async.cg"] > 0
    assert "mma.sync" not in kernel["instructions"]


def test_descriptors_on_hopper_come_from_constants(compiled: Compiled) -> None:
    """ptxas 12.8 computes them from other registers in some kernels; see `sass`."""
    checked = 0
    for case, result in compiled("sm_90").items():
        for kernel in result["kernels"]:
            assert not kernel["descriptors"], (case, kernel)
            checked += kernel["descriptors"] is not None
    assert checked >= 8


@pytest.mark.parametrize("case", ["decode-all", "decode-latent-all"])
def test_decode_pipelines_its_loads(case: str, compiled: Compiled) -> None:
    """Keys and values are loaded by cp.async with 16 bytes per thread."""
    decode = compiled("sm_90")[case]["kernels"][0]
    assert decode["instructions"]["cp.async.cg"] >= 8
    assert decode["instructions"]["mma.sync"] > 0
