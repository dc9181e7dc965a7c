"""Kernels of several trees of attnlib in turn, in one process.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.gpu.compare_trees /tmp/before . --cases decode-1x1k mixed-60x4k-and-2k

The clock of a chip changes with its load and temperature, so that runs one after the other also
differ by that. Here the packages are copied under other names, each prepares the cases of `attnlib
bench` by its own code, and rounds of all of them alternate. A row has the median time of each tree
and the median of its ratios to the first tree. Calls of a few microseconds depend on where their
tensors are: whichever of two trees came second took 1.03 of the time in `decode-1x1k` on an H200.
Compare both orders, as in `BEFORE AFTER AFTER BEFORE`. Outputs are compared with those of the first
tree, not with the oracle. On a CPU calls are eager, which is for tests of this script.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import re
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from attnlib.bench.provenance import provenance

MODULES = ("backends", "inputs", "runner", "suites", "timer")
TOLERANCE = 2e-2
"""Largest difference between outputs of two trees; inputs are standard normal."""


def copy_package(tree: Path, name: str, folder: Path) -> None:
    """Copy the package of a tree under another name."""
    target = folder / name
    shutil.copytree(tree / "attnlib", target, ignore=shutil.ignore_patterns("__pycache__"))
    for source in target.rglob("*.py"):
        text = source.read_text()
        source.write_text(re.sub(r"\battnlib\b", name, text))


def modules_of(name: str) -> dict[str, Any]:
    """The modules of `attnlib.bench` that a copy is measured with."""
    return {module: importlib.import_module(f"{name}.bench.{module}") for module in MODULES}


def prepare(bench: dict[str, Any], text: str, backend: str, device: torch.device) -> Any:
    """The runner of a case, after its first call."""
    (case,) = bench["suites"].choose_cases([text], None, "anchors")
    (one,) = bench["backends"].find_backends([backend], device)
    return bench["runner"].make_runner(case, one, bench["inputs"].make_inputs(case, device))


def compare(
    packages: dict[str, dict[str, Any]], text: str, backend: str, device: torch.device, rounds: int
) -> dict[str, Any]:
    """One row: median times, and medians of the ratios to the first tree.

    Args:
        packages: `modules_of` each tree.
        text: name of a case, or a case.
        backend: of `attnlib bench`.
        device: where to measure.
        rounds: rounds of each tree.

    Raises:
        ValueError: outputs differ.
    """
    runners = {}
    for label, modules in packages.items():
        torch.manual_seed(0)  # lists of selected keys come from the global generator
        runners[label] = prepare(modules, text, backend, device)
    expected = next(iter(runners.values())).output.float()
    timers: dict[str, Any] = {}
    for label, runner in runners.items():
        error = float((runner.output.float() - expected).abs().max())
        if not error < TOLERANCE:
            raise ValueError(f"the output of {label} differs by {error} from the first tree")
        timing = packages[label]["timer"]
        kind = timing.GraphTimer if device.type == "cuda" else timing.EagerTimer
        took = timing.warm_up(runner.attend, device)
        timers[label] = kind(runner.attend, len(runner.inputs.caches), device, took)
    found: dict[str, list[float]] = {label: [] for label in timers}
    for number in range(rounds):
        order = list(timers)
        for label in order[:: -1 if number % 2 else 1]:
            found[label].append(timers[label].round()[0])
    first = next(iter(found.values()))
    return {
        "us": {label: round(statistics.median(us), 2) for label, us in found.items()},
        "ratio": {
            label: round(statistics.median(a / b for a, b in zip(us, first, strict=True)), 4)
            for label, us in found.items()
        },
    }


def main() -> int:
    """Compare the trees on each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="+", type=Path, help="folders that contain attnlib/")
    parser.add_argument("--cases", nargs="+", required=True, metavar="CASE")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    options = parser.parse_args()
    device, rows = torch.device(options.device), []
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        sys.path.insert(0, folder)
        packages = {}
        for number, tree in enumerate(options.trees):
            copy_package(tree, f"attnlib_tree{number}", Path(folder))
            packages[f"{number} {tree}"] = modules_of(f"attnlib_tree{number}")
        for text in options.cases:
            try:
                row = compare(packages, text, options.backend, device, options.rounds)
            except Exception as error:  # the other cases are measured
                row = {"error": f"{type(error).__name__}: {error}"[:300]}
            rows.append({"row": text, **row})
            print(json.dumps(rows[-1]), flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if options.out:
        document = {"provenance": provenance(), "rows": rows}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
