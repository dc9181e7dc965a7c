"""What attnlib costs on the host: importing it, choosing a backend again, building a batch of 256 requests, and on a GPU one `Attention` call.

    python benchmarks/host_costs.py

Writes benchmarks/results/host_costs.json, on a GPU host_costs_gpu.json beside it. GPU rows are the host's time alone: the calls of a round are
launched into an idle stream and waited for afterwards.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path

import torch
from provenance import provenance

import attnlib

IMPORT = (
    "import time, torch; a = time.perf_counter(); import attnlib; print(time.perf_counter() - a)"
)
BURST = 64
"""Calls in one round on a GPU: fewer launches than a stream holds before it makes the host wait."""


def microseconds(call: Callable[[], object], number: int) -> float:
    """Median over 7 rounds of the mean of `number` calls."""
    call()
    return statistics.median(timeit.repeat(call, number=number, repeat=7)) / number * 1e6


def launch_microseconds(call: Callable[[], object], rounds: int = 40) -> float:
    """Median over the rounds of the host's mean time for one of `BURST` calls, after three rounds to warm up."""
    times = []
    for number in range(rounds + 3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(BURST):
            call()
        if number >= 3:
            times.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return statistics.median(times) / BURST * 1e6


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
        "import attnlib after torch, ms (bar 50)": statistics.median(imports) * 1e3,
        "repeated get_attn_backend, us (bar 20)": microseconds(
            lambda: attnlib.get_attn_backend(spec, device="cpu"), 2000
        ),
        "build for 256 decodes, us (bar 200)": microseconds(lambda: builder.build(0, decodes), 200),
        "build for 220 decodes and 36 prefills, us (bar 200)": microseconds(
            lambda: builder.build(0, mixed), 200
        ),
        "CommonAttentionMetadata.from_lengths for 256 decodes, us": microseconds(
            lambda: attnlib.CommonAttentionMetadata.from_lengths(
                [1] * 256, [100] * 256, table, 16, "cpu"
            ),
            100,
        ),
    }


def decode_call(num_reqs: int, seq_len: int, flat: bool, output: bool) -> Callable[[], object]:
    """One eager call of a Llama-like layer of the triton backend: cache write and decode."""
    spec = attnlib.AttentionSpec(
        num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, block_size=16
    )
    blocks = num_reqs * seq_len // 16
    table = torch.randperm(blocks).to(torch.int32).view(num_reqs, -1)
    layer = attnlib.Attention(spec, backend="triton", device="cuda")
    cache = attnlib.PagedKVCache.allocate(spec, blocks, "cuda")
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [1] * num_reqs, [seq_len] * num_reqs, table, 16, "cuda"
    )
    metadata = layer.backend.make_builder(spec, "cuda").build(0, common)
    sizes = [(num_reqs, heads * 128) if flat else (num_reqs, heads, 128) for heads in (32, 8, 8)]
    query, key, value = (torch.randn(size, device="cuda").to(torch.bfloat16) for size in sizes)
    out = torch.empty_like(query) if output else None
    return lambda: layer(query, key, value, cache, metadata, output=out)


def gpu_costs() -> dict[str, float]:
    """Eager decode calls by their parts, and `build`, with the triton backend."""
    from attnlib.ops.triton.launch import bound as launch

    spec = attnlib.AttentionSpec(
        num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, block_size=16
    )
    table = torch.arange(256 * 8, dtype=torch.int32).view(256, 8)
    builder = attnlib.get_attn_backend(spec, "triton", "cuda").make_builder(spec, "cuda")
    decodes = attnlib.CommonAttentionMetadata.from_lengths(
        [1] * 256, [100] * 256, table, 16, "cuda"
    )
    mixed = attnlib.CommonAttentionMetadata.from_lengths(
        [1] * 220 + [64] * 36, [100] * 256, table, 16, "cuda"
    )
    costs = {
        "GPU build for 256 decodes, us (bar 60)": launch_microseconds(
            lambda: builder.build(0, decodes)
        ),
        "GPU build for 220 decodes and 36 prefills, us (bar 60)": launch_microseconds(
            lambda: builder.build(0, mixed)
        ),
    }
    for num_reqs, seq_len in ((1, 1024), (1, 8192), (64, 128)):
        name = f"GPU Attention call, decode of {num_reqs} x {seq_len}"
        costs[f"{name}, us (bar 30)"] = launch_microseconds(
            decode_call(num_reqs, seq_len, False, False)
        )
        costs[f"{name}, flat q, k, v, us"] = launch_microseconds(
            decode_call(num_reqs, seq_len, True, False)
        )
        costs[f"{name}, output given, us"] = launch_microseconds(
            decode_call(num_reqs, seq_len, False, True)
        )
        own = launch.undisturbed
        launch.undisturbed = lambda: False
        try:
            costs[f"{name}, launched by Triton, us"] = launch_microseconds(
                decode_call(num_reqs, seq_len, False, False)
            )
        finally:
            launch.undisturbed = own
    return costs


def main() -> None:
    """Measure and write the result file."""
    on_gpu = torch.cuda.is_available()
    with torch.inference_mode():
        costs = {**host_costs(), **(gpu_costs() if on_gpu else {})}
    for name, value in costs.items():
        print(f"{name:<72} {value:8.1f}")
    target = (
        Path(__file__).parent / "results" / ("host_costs_gpu.json" if on_gpu else "host_costs.json")
    )
    target.write_text(json.dumps({**provenance(), "costs": costs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
