"""Host costs of attnlib: import, repeated selection, building a batch, and layer calls on a GPU.

    python benchmarks/host_costs.py

Writes benchmarks/results/host_costs.json, on a GPU host_costs_gpu.json beside it. GPU rows are host
time only: a round launches its calls into an idle stream and waits for them afterwards. A layer's
overhead is the difference to the bare launches of the same kernels, with the same arguments, in the
same process.
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
from typing import Any

import torch

import attnlib
from attnlib.bench.provenance import provenance

IMPORT = (
    "import time, torch; a = time.perf_counter(); import attnlib; print(time.perf_counter() - a)"
)
BURST = 64
"""Calls in one round on a GPU: fewer launches than a stream holds before it makes the host wait."""


def microseconds(call: Callable[[], object], number: int) -> float:
    """Median over 7 rounds of the mean of `number` calls."""
    call()
    return statistics.median(timeit.repeat(call, number=number, repeat=7)) / number * 1e6


def launch_microseconds(*calls: Callable[[], object], rounds: int = 60) -> list[float]:
    """For each call, the median over the rounds of the host's mean time for one of `BURST` calls.

    The calls take turns, so that a change of the machine's speed affects all of them alike.
    """
    times: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 3):
        for call, found in zip(calls, times, strict=True):
            torch.cuda.synchronize()
            call()
            began = time.perf_counter()
            for _ in range(BURST):
                call()
            if number >= 3:
                found.append((time.perf_counter() - began) / BURST * 1e6)
    torch.cuda.synchronize()
    return [statistics.median(found) for found in times]


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


BATCHES = {
    "decode of 1 x 1024": ([1], [1024]),
    "decode of 1 x 8192": ([1], [8192]),
    "decode of 64 x 128": ([1] * 64, [128] * 64),
    "decode of 64 x 2048": ([1] * 64, [2048] * 64),
    "prefill of 1 x 512": ([512], [512]),
    "prefill of 4 x 256 over 2048": ([256] * 4, [2048] * 4),
    "mixed batch of 16 x 2048 and 256": ([1] * 16 + [256], [2048] * 16 + [256]),
    "mixed batch of 16 x 128 and 256": ([1] * 16 + [256], [128] * 16 + [256]),
}
ABOVE = {"decode": 4, "prefill": 6, "mixed": 6}
"""Microseconds that a layer may take above the bare launches of its kernels."""


class LayerCall:
    """Eager calls of a Llama-like layer of the triton backend over one batch: cache write and
    attention, through the `nn.Module`."""

    def __init__(self, query_lens: list[int], seq_lens: list[int]) -> None:
        self.spec = attnlib.AttentionSpec(
            num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, block_size=16
        )
        pages = [-(-length // 16) for length in seq_lens]
        order = iter(torch.randperm(sum(pages)).tolist())
        table = [[next(order) for _ in range(count)] for count in pages]
        self.common = attnlib.CommonAttentionMetadata.from_lengths(
            query_lens, seq_lens, table, 16, "cuda"
        )
        self.layer = attnlib.Attention(self.spec, backend="triton", device="cuda")
        self.cache = attnlib.PagedKVCache.allocate(self.spec, sum(pages), "cuda")
        self.builder = self.layer.backend.make_builder(self.spec, "cuda")
        self.metadata = self.builder.build(0, self.common)
        sizes = [(sum(query_lens), heads, 128) for heads in (32, 8, 8)]
        self.tensors = [torch.randn(size, device="cuda").to(torch.bfloat16) for size in sizes]
        self.out = torch.empty_like(self.tensors[0])

    def __call__(self) -> None:
        """One call into an existing output."""
        self.layer(*self.tensors, self.cache, self.metadata, output=self.out)

    def allocating(self) -> None:
        """One call that allocates its output."""
        self.layer(*self.tensors, self.cache, self.metadata)

    def first_layer(self) -> None:
        """One call as the first layer of a step: over metadata that was just built."""
        self.metadata.drop_plans()
        self()

    def bare_launches(self) -> Callable[[], None]:
        """The kernels of one call by the driver call alone, with all arguments at hand."""
        from attnlib.backends.triton import plan
        from attnlib.ops.triton.launch.bound import current_stream

        calls: list[tuple[Callable[..., None], tuple[object, ...]]] = []

        def recording(
            parts: Any, index: int, num_values: int, fixed: dict[Any, Any]
        ) -> Callable[..., bool]:
            """`bind_sequence` in Python."""
            given = [number for number in range(num_values) if number not in fixed]

            def run(*tensors: torch.Tensor | None) -> bool:
                values: dict[int, Any] = dict(fixed)
                for number, tensor in zip(given, tensors, strict=True):
                    values[number] = None if tensor is None else tensor.data_ptr()
                for bound, offsets in parts:
                    moved = {n: values[n] + size for n, size in offsets.items() if values[n]}
                    own = [{**values, **moved}[n] for n in range(num_values)]
                    for launch, changing in bound.calls(own):
                        arguments = (current_stream(index), *changing)
                        calls.append((launch, arguments))
                        launch(*arguments)
                return True

            return run

        bind = plan.bind_sequence
        plan.bind_sequence = recording
        self.metadata.drop_plans()
        try:
            for _ in range(4):
                calls.clear()
                self()
        finally:
            plan.bind_sequence = bind
            self.metadata.drop_plans()
        assert calls, "no kernel was launched directly"
        recorded = tuple(calls)

        def launch() -> None:
            for function, arguments in recorded:
                function(*arguments)

        return launch


def layer_costs(name: str) -> dict[str, float]:
    """Host time of one kind of call, in microseconds."""
    call = LayerCall(*BATCHES[name])
    launches = call.bare_launches()
    for _ in range(4):
        call()
    bare, inside, allocating = launch_microseconds(launches, call, call.allocating)
    (first,) = launch_microseconds(call.first_layer, rounds=20)
    target = ABOVE[name.split()[0]]
    return {
        f"{name}: bare launches, us": bare,
        f"{name}: layer, output given, us": inside,
        f"{name}: above the bare launches, us (target {target})": inside - bare,
        f"{name}: layer that allocates its output, us": allocating,
        f"{name}: first layer of a step, us": first,
    }


def gpu_costs() -> dict[str, float]:
    """Eager layer calls and `build`, with the triton backend."""
    decodes = LayerCall([1] * 256, [100] * 256)
    mixed = LayerCall([1] * 220 + [64] * 36, [100] * 256)
    builds = launch_microseconds(
        lambda: decodes.builder.build(0, decodes.common),
        lambda: mixed.builder.build(0, mixed.common),
    )
    costs = {
        "build for 256 decodes, us (target 11)": builds[0],
        "build for 220 decodes and 36 prefills, us": builds[1],
    }
    for name in BATCHES:
        costs.update(layer_costs(name))
    return costs


def main() -> None:
    """Measure and write the result file."""
    on_gpu = torch.cuda.is_available()
    with torch.inference_mode():
        costs = {**host_costs(), **(gpu_costs() if on_gpu else {})}
    for name, value in costs.items():
        print(f"{name:<72} {value:8.1f}", flush=True)
    target = (
        Path(__file__).parent / "results" / ("host_costs_gpu.json" if on_gpu else "host_costs.json")
    )
    target.write_text(json.dumps({**provenance(), "costs": costs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
