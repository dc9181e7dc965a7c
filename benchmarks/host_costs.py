"""What attnlib costs on the host: importing it, choosing a backend again, building a batch of 256 requests.

    python benchmarks/host_costs.py

Writes benchmarks/results/host_costs.json.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable
from pathlib import Path

import torch
from provenance import provenance

import attnlib

IMPORT = "import time, torch; a = time.perf_counter(); import attnlib; print(time.perf_counter() - a)"


def microseconds(call: Callable[[], object], number: int) -> float:
    """Median over 7 rounds of the mean of `number` calls."""
    call()
    return statistics.median(timeit.repeat(call, number=number, repeat=7)) / number * 1e6


def main() -> None:
    """Measure and write the result file."""
    imports = [float(subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout) for _ in range(5)]
    spec = attnlib.AttentionSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.float32, block_size=16)
    table = torch.arange(256 * 8, dtype=torch.int32).view(256, 8)
    decodes = attnlib.CommonAttentionMetadata.from_lengths([1] * 256, [100] * 256, table, 16, "cpu")
    mixed = attnlib.CommonAttentionMetadata.from_lengths([1] * 220 + [64] * 36, [100] * 256, table, 16, "cpu")
    builder = attnlib.get_attn_backend(spec, "torch", "cpu").make_builder(spec, "cpu")
    costs = {
        "import attnlib after torch, ms (bar 50)": statistics.median(imports) * 1e3,
        "repeated get_attn_backend, us (bar 20)": microseconds(lambda: attnlib.get_attn_backend(spec, device="cpu"), 2000),
        "build for 256 decodes, us (bar 200)": microseconds(lambda: builder.build(0, decodes), 200),
        "build for 220 decodes and 36 prefills, us (bar 200)": microseconds(lambda: builder.build(0, mixed), 200),
        "CommonAttentionMetadata.from_lengths for 256 decodes, us": microseconds(
            lambda: attnlib.CommonAttentionMetadata.from_lengths([1] * 256, [100] * 256, table, 16, "cpu"), 100
        ),
    }
    for name, value in costs.items():
        print(f"{name:<60} {value:8.1f}")
    target = Path(__file__).parent / "results" / "host_costs.json"
    target.write_text(json.dumps({**provenance(), "costs": costs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
