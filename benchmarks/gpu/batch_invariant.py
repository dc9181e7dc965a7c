"""Batch-invariant layers compared with the same layers without: rows of the anchors suite.

    python -m benchmarks.gpu.batch_invariant --out results/batch_invariant.json

Times are device times of one attention call of the `triton` backend, without the cache write:
replays of a CUDA graph of many calls over copies of the cache that do not fit the L2 cache, both
variants in turn. Outputs are compared first. `--compile-only` runs every call once, in several
processes, so that a second run finds compiled kernels.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import attnlib
from attnlib.bench.case import BenchCase
from attnlib.bench.inputs import CaseInputs, make_inputs
from attnlib.bench.provenance import provenance
from attnlib.bench.suites import choose_cases
from attnlib.bench.timer import GraphTimer, measure_in_turn, warm_up

DEVICE = torch.device("cuda")


def calls(inputs: CaseInputs) -> dict[str, Any]:
    """A function for each variant that runs one attention call over copy `number`."""
    found = {}
    for name, invariant in (("fast", False), ("invariant", True)):
        spec = inputs.spec.replace(batch_invariant=invariant)
        layer = attnlib.Attention(
            spec, backend="triton", device=DEVICE, scale=inputs.params.scale,
            sinks=inputs.params.sinks,
        )  # fmt: skip
        metadata: Any = layer.backend.make_builder(spec, DEVICE).build(0, inputs.common)
        found[name] = lambda number, layer=layer, metadata=metadata: layer(
            inputs.query, None, None, inputs.caches[number], metadata
        )
    return found


def measure(case: BenchCase, compile_only: bool) -> dict[str, Any]:
    """Microseconds of both variants of one row."""
    inputs = make_inputs(case, DEVICE)
    functions = calls(inputs)
    outputs = {name: function(0) for name, function in functions.items()}
    torch.testing.assert_close(outputs["invariant"], outputs["fast"], rtol=3e-2, atol=3e-2)
    if compile_only:
        return {"case": case.name}
    expected = {name: warm_up(call, DEVICE) for name, call in functions.items()}
    copies = len(inputs.caches)
    timers = {
        name: GraphTimer(call, copies, DEVICE, expected[name]) for name, call in functions.items()
    }
    found = measure_in_turn(timers, expected)
    us = {name: round(measured.us, 2) for name, measured in found.items()}
    return {"case": case.name, "us": us, "ratio": round(us["invariant"] / us["fast"], 3)}


def main() -> None:
    """Check and time all rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", help="names or patterns (default: the anchors suite)")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--compile-only", action="store_true", help="run every call once")
    parser.add_argument("--processes", type=int, default=8, help="of --compile-only")
    parser.add_argument("--commit", help="commit of attnlib, for copies without history")
    options = parser.parse_args()
    cases = choose_cases(options.rows, None if options.rows else "anchors", "anchors")
    if options.compile_only and len(cases) > 1:
        names = [case.name for case in cases]
        shares = [names[n :: options.processes] for n in range(options.processes)]
        command = [sys.executable, "-m", "benchmarks.gpu.batch_invariant", "--compile-only"]
        started = [
            subprocess.Popen([*command, "--processes", "0", *share]) for share in shares if share
        ] if options.processes else []  # fmt: skip
        for process in started:
            process.wait()
        if started:
            return
    torch.set_grad_enabled(False)
    document: dict[str, Any] = {"provenance": provenance(commit=options.commit), "rows": []}
    for case in cases:
        try:
            row = measure(case, options.compile_only)
        except Exception as error:
            row = {"case": case.name, "error": f"{type(error).__name__}: {error}"[:300]}
        document["rows"].append(row)
        print(json.dumps(row), flush=True)
        if options.out:
            options.out.write_text(json.dumps(document, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
