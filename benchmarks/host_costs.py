"""Host costs of attnlib: import, repeated selection, building a batch, and layer calls on a GPU.

    python benchmarks/host_costs.py
    python benchmarks/host_costs.py --score-function    # on a GPU: layers with a score function
    python benchmarks/host_costs.py --builds            # on a GPU: builds of batches only
    python benchmarks/host_costs.py --quick             # on a GPU: four cases in about a minute

Writes benchmarks/results/host_costs.json, on a GPU host_costs_gpu.json beside it. GPU rows are host
time only: a round launches its calls into an idle stream and waits for them afterwards. A layer's
overhead is the difference to the bare launches of the same kernels, with the same arguments, in the
same process. `attnlib.warmup` runs before; the last rows count the kernels that are compiled by it
and afterwards. `--quick` compiles only the kernels of its cases and leaves out imports, selection
and the torch backend. PYTHONPATH names the tree to measure: one script measures two trees.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from layer_calls import (
    BATCHES,
    BURST,
    WARM,
    LayerCall,
    launch_microseconds,
    launch_times,
    warm_up,
)

import attnlib
from attnlib.bench.provenance import provenance
from attnlib.score_functions.builtin import alibi_sqrt
from attnlib.testing.compilations import compiled_kernels

IMPORT = (
    "import time, torch; a = time.perf_counter(); import attnlib; print(time.perf_counter() - a)"
)


def microseconds(call: Callable[[], object], number: int) -> float:
    """Median over 7 rounds of the mean of `number` calls."""
    call()
    return statistics.median(timeit.repeat(call, number=number, repeat=7)) / number * 1e6


def host_costs() -> dict[str, float]:
    """What any machine can tell."""
    imports = [
        float(
            subprocess.run(
                [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
            ).stdout
        )
        for _ in range(5)
    ]
    spec = attnlib.AttentionSpec(
        num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.float32, block_size=16
    )
    table = torch.arange(256 * 8, dtype=torch.int32).view(256, 8)
    decodes = attnlib.CommonAttentionMetadata.from_lengths([1] * 256, [100] * 256, table, 16, "cpu")
    mixed = attnlib.CommonAttentionMetadata.from_lengths(
        [1] * 220 + [64] * 36, [100] * 256, table, 16, "cpu"
    )
    builder = attnlib.get_attn_backend(spec, "torch", "cpu").make_builder(spec, "cpu")
    return {
        "import attnlib after torch, ms (target 50)": statistics.median(imports) * 1e3,
        "repeated get_attn_backend, us (target 20)": microseconds(
            lambda: attnlib.get_attn_backend(spec, device="cpu"), 2000
        ),
        "build for 256 decodes, us (target 200)": microseconds(
            lambda: builder.build(0, decodes), 200
        ),
        "build for 220 decodes and 36 prefills, us (target 200)": microseconds(
            lambda: builder.build(0, mixed), 200
        ),
        "CommonAttentionMetadata.from_lengths for 256 decodes, us": microseconds(
            lambda: attnlib.CommonAttentionMetadata.from_lengths(
                [1] * 256, [100] * 256, table, 16, "cpu"
            ),
            100,
        ),
    }


QUICK = (
    "decode of 1 x 8192",
    "decode of 64 x 2048",
    "prefill of 1 x 512",
    "mixed batch of 16 x 2048 and 256",
)
"""The cases of `--quick`, which compile few kernels."""

ABOVE = {"decode": 4, "prefill": 6, "mixed": 6}
"""Microseconds that a layer may take above the bare launches of its kernels."""


def layer_calls(score_function: bool) -> dict[str, LayerCall]:
    """One layer for each batch; with a score function, ALiBi by the root of the distance."""
    fields: dict[str, Any] = {}
    if score_function:
        tensors = {"slope": torch.linspace(0.1, 1, 32, device="cuda")}
        fields = {"score_function": alibi_sqrt(), "layer": {"score_tensors": tensors}}
    return {name: LayerCall(*lengths, **fields) for name, lengths in BATCHES.items()}


def gpu_costs(score_function: bool) -> dict[str, float]:
    """Eager layer calls and `build`, with the triton backend. All rows take turns, so that their
    order does not matter."""
    calls = layer_calls(score_function)
    with compiled_kernels() as in_warm_up:
        warm_up(calls["decode of 1 x 8192"])
    with compiled_kernels() as afterwards:
        costs = {**build_costs(), **layer_costs(calls)}
    if afterwards:
        print(f"compiled after warmup: {afterwards}", file=sys.stderr)
    return {
        **costs,
        "kernels compiled by warmup": len(in_warm_up),
        "of which Gluon": sum(kernel.is_gluon for kernel in in_warm_up),
        "kernels compiled after warmup, all rows (target 0)": len(afterwards),
    }


def quick_costs() -> dict[str, float]:
    """Eager layer calls of the `QUICK` cases and `build`, in fewer rounds and without `warmup`."""
    calls = {name: LayerCall(*BATCHES[name]) for name in QUICK}
    return {**build_costs(rounds=20), **layer_costs(calls, rounds=30)}


def build_costs(rounds: int = 60) -> dict[str, float]:
    """`build` of the triton backend, in microseconds."""
    decodes = LayerCall([1] * 256, [100] * 256)
    mixed = LayerCall([1] * 220 + [64] * 36, [100] * 256)
    builds = launch_microseconds(
        lambda: decodes.builder.build(0, decodes.common),
        lambda: mixed.builder.build(0, mixed.common),
        rounds=rounds,
    )
    return {
        "build for 256 decodes, us (target 11)": builds[0],
        "build for 220 decodes and 36 prefills, us": builds[1],
    }


def layer_costs(calls: dict[str, LayerCall], rounds: int = 80) -> dict[str, float]:
    """Host time of each kind of call, in microseconds."""
    each: list[Callable[[], object]] = []
    for call in calls.values():
        for _ in range(4):
            call()
        each += [call.bare_launches(), call, call.allocating]
    found = launch_times(*each, rounds=rounds)
    firsts = first_layer_costs(calls)
    costs = {}
    for number, name in enumerate(calls):
        bare, inside, allocating = found[3 * number : 3 * number + 3]
        # The difference of each round, because the speed of the machine changes between rounds.
        above = [layer - launches for layer, launches in zip(inside, bare, strict=True)]
        target = ABOVE[name.split()[0]]
        costs |= {
            f"{name}: bare launches, us": statistics.median(bare),
            f"{name}: layer, output given, us": statistics.median(inside),
            f"{name}: above the bare launches, us (target {target})": statistics.median(above),
            f"{name}: layer that allocates its output, us": statistics.median(allocating),
            f"{name}: first layer of a step, us": firsts[name],
        }
    return costs


def first_layer_costs(calls: dict[str, LayerCall]) -> dict[str, float]:
    """Host time of the first layer of a step, in microseconds, over new metadata in every call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(23):
        for name, call in calls.items():
            first = call.first_layers(WARM + BURST)
            torch.cuda.synchronize()
            for _ in range(WARM):
                first()
            began = time.perf_counter()
            for _ in range(BURST):
                first()
            if number >= 3:
                times[name].append((time.perf_counter() - began) / BURST * 1e6)
    torch.cuda.synchronize()
    return {name: statistics.median(found) for name, found in times.items()}


def parts_of(arguments: argparse.Namespace, on_gpu: bool) -> list[Callable[[], dict[str, float]]]:
    """What to measure."""
    if arguments.quick:
        return [quick_costs]
    if arguments.builds:
        return [build_costs]
    of_layers = [lambda: gpu_costs(arguments.score_function)] if on_gpu else []
    return of_layers if arguments.score_function else [*of_layers, host_costs]


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--score-function", action="store_true", help="layers with a score function, on a GPU only"
    )
    parser.add_argument(
        "--builds", action="store_true", help="only the builds of batches, on a GPU only"
    )
    parser.add_argument("--quick", action="store_true", help="four cases and builds, on a GPU only")
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--commit", help="commit, where there is no repository")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and (arguments.quick or arguments.builds or arguments.score_function):
        parser.error("these costs need a GPU")
    name = "host_costs_gpu.json" if on_gpu else "host_costs.json"
    target = arguments.out or Path(__file__).parent / "results" / name
    print(f"attnlib of {Path(attnlib.__file__).parents[1]}", file=sys.stderr)
    costs: dict[str, float] = {}
    for part in parts_of(arguments, on_gpu):
        with torch.inference_mode():
            found = part()
        costs |= found
        for name, value in found.items():
            print(f"{name:<72} {value:8.1f}", flush=True)
        facts = provenance(commit=arguments.commit)
        target.write_text(json.dumps({**facts, "costs": costs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
