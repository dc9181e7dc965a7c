"""Batch-invariant layers compared with the same layers without: rows of the anchors suite.

    python -m benchmarks.gpu.batch_invariant --out results/batch_invariant.json

Times are device times of one attention call of the `triton` backend, without the cache write:
replays of a CUDA graph of many calls over copies of the cache that do not fit the L2 cache, both
variants in turn. Outputs are compared first. `--compile-only` compares the outputs and times
nothing, in several processes, so that a second run finds compiled kernels.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch

import attnlib
from attnlib.bench.inputs import CaseInputs, make_inputs
from attnlib.bench.suites import SUITES, known_cases
from attnlib.bench.timer import GraphTimer, measure_in_turn, warm_up
from benchmarks.gpu import rows

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


def compare(inputs: CaseInputs) -> dict[str, Any]:
    """The functions of `calls`, whose outputs agree."""
    functions = calls(inputs)
    outputs = {name: function(0) for name, function in functions.items()}
    torch.testing.assert_close(outputs["invariant"], outputs["fast"], rtol=3e-2, atol=3e-2)
    return functions


@torch.no_grad()
def compile_row(row: str) -> dict[str, Any]:
    """Run both variants of one row once."""
    compare(make_inputs(known_cases()[row], DEVICE))
    return {}


@torch.no_grad()
def measure(row: str) -> dict[str, Any]:
    """Microseconds of both variants of one row."""
    gc.collect()  # the copies of the cache of the last row
    torch.cuda.empty_cache()
    inputs = make_inputs(known_cases()[row], DEVICE)
    functions = compare(inputs)
    expected = {name: warm_up(call, DEVICE) for name, call in functions.items()}
    copies = len(inputs.caches)
    timers = {
        name: GraphTimer(call, copies, DEVICE, expected[name]) for name, call in functions.items()
    }
    found = measure_in_turn(timers, expected)
    us = {name: round(measured.us, 2) for name, measured in found.items()}
    return {"us": us, "ratio": round(us["invariant"] / us["fast"], 3)}


def main() -> int:
    """Check and time the chosen rows."""
    parser = rows.parser(__doc__)
    parser.add_argument("--compile-only", action="store_true", help="time nothing")
    parser.add_argument("--processes", type=int, default=8, help="of --compile-only")
    options = parser.parse_args()
    options.rows = options.rows or [case.name for case in SUITES["anchors"]]
    if options.compile_only:
        return rows.run(options, known_cases(), compile_row, options.processes)
    return rows.run(options, known_cases(), measure)


if __name__ == "__main__":
    sys.exit(main())
