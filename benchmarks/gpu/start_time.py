"""Start of a server process with and without kernels of `attnlib compile`.

    python benchmarks/gpu/start_time.py --out start_time.json

Compiles the kernels of one layer of an 8B model without a GPU, moves the folder, and starts three
server processes, each with an empty cache of Triton: without and with that folder, and again with
the cache of the second one. A server warms up within its limits and then serves random batches. Its
time counts from the start of the process to the end of the warm-up. Late kernels are those that a
batch needed first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Measure, or serve in a process of a measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write JSON here")
    parser.add_argument("--limits", type=int, nargs=3, default=(256, 8192, 32768),
                        metavar=("REQS", "TOKENS", "KEYS"), help="of a batch")  # fmt: skip
    parser.add_argument("--kv-cache-dtype", default="auto", help="format of the cache")
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.started:
        print(json.dumps(serve(options)))
        return
    result = measure(options.limits, options.kv_cache_dtype)
    print(json.dumps(result, indent=1))
    if options.out:
        from attnlib.bench.provenance import provenance

        text = json.dumps({"provenance": provenance(), **result}, indent=1)
        options.out.write_text(text + "\n")


def measure(limits: Any, kv_cache_dtype: str) -> dict[str, Any]:
    """Seconds and kernels of the compilation and of each server."""
    import torch

    chip = torch.cuda.get_device_name()
    count = torch.cuda.get_device_properties(0).multi_processor_count
    names = ("--max-num-reqs", "--max-num-tokens", "--max-seq-len")
    flags = [text for name, n in zip(names, limits, strict=True) for text in (name, str(n))]
    flags += ["--num-sms", str(count), "--kv-cache-dtype", kv_cache_dtype]
    with tempfile.TemporaryDirectory() as folder:
        written, shipped = Path(folder, "written"), Path(folder, "shipped")
        environment = {**os.environ, "TRITON_CACHE_DIR": f"{folder}/build"}
        environment.pop("ATTNLIB_KERNELS", None)
        command = [sys.executable, "-m", "attnlib", "compile", "--device", chip, "--json", *flags]
        compiled = run(
            [*command, "--out", str(written)], {**environment, "CUDA_VISIBLE_DEVICES": ""}
        )
        written.rename(shipped)
        given = [*map(str, limits)]
        serve_command = [sys.executable, __file__, "--limits", *given]
        serve_command += ["--kv-cache-dtype", kv_cache_dtype]
        servers = {}
        for name, cache, kernels in (
            ("empty cache", "one", ""),
            ("shipped kernels", "two", str(shipped)),
            ("warm cache", "two", ""),
        ):
            variables = {"TRITON_CACHE_DIR": f"{folder}/{cache}", "ATTNLIB_KERNELS": kernels}
            started = ["--started", repr(time.time())]
            servers[name] = run([*serve_command, *started], {**environment, **variables})
    return {
        "chip": chip,
        "limits": list(limits),
        "compile": {"seconds": compiled["seconds"], "kernels": len(compiled["kernels"])},
        "servers": servers,
    }


def run(command: list[str], environment: dict[str, str]) -> Any:
    """The JSON that a process prints last."""
    environment = {**environment, "PYTHONPATH": f"{ROOT}:{environment.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout[done.stdout.index("{") :])


def serve(options: argparse.Namespace) -> dict[str, Any]:
    """Warm up and serve."""
    import torch

    import attnlib
    from attnlib.layer.warmup import warmup
    from attnlib.ops.triton.launch.compilations import compiled_kernels
    from attnlib.workspace import BatchLimits

    names = ("max_num_reqs", "max_num_tokens", "max_seq_len")
    limits = BatchLimits(**dict(zip(names, options.limits, strict=True)))
    spec = attnlib.AttentionSpec(
        num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, block_size=16,
        kv_cache_dtype=options.kv_cache_dtype,
    )  # fmt: skip
    layer = attnlib.Attention(spec, backend="triton", device="cuda")
    cache = attnlib.PagedKVCache.allocate(spec, 1024, "cuda")
    builder = layer.backend.make_builder(spec, torch.device("cuda"), limits=limits)
    report = warmup(layer, cache, limits, builder=builder)
    seconds = time.time() - options.started
    draw = random.Random(0)
    with compiled_kernels() as late, torch.no_grad():
        for _ in range(100):
            step(layer, cache, builder, limits, draw)
    torch.cuda.synchronize()
    return {
        "seconds": round(seconds, 2),
        "warmup_seconds": round(report.seconds, 2),
        "found": report.kernels_found,
        "compiled": report.kernels_compiled,
        "late": [kernel.name for kernel in late],
    }


def step(layer: Any, cache: Any, builder: Any, limits: Any, draw: random.Random) -> None:
    """One random batch: decodes, verification steps, prefills, and mixtures. Nothing is written."""
    import torch

    from attnlib.metadata.common import CommonAttentionMetadata

    spec = layer.spec
    queries = [draw.choice((1, 1, 2, 8)) for _ in range(draw.randint(0, limits.max_num_reqs // 4))]
    left = limits.max_num_tokens - sum(queries)
    if not queries or (left > 9 and draw.random() < 0.5):
        queries.append(draw.randint(9, min(left, limits.max_seq_len)))
    contexts = (0, 5, 300, 3000)
    lengths = [min(query + draw.choice(contexts), limits.max_seq_len) for query in queries]
    columns = -(-limits.max_seq_len // spec.block_size)
    table = torch.zeros(len(queries), columns, dtype=torch.int32)
    common = CommonAttentionMetadata.from_lengths(queries, lengths, table, spec.block_size, "cuda")
    common.slot_mapping.fill_(-1)
    sizes = [spec.num_heads * spec.head_size, *[spec.num_kv_heads * spec.head_size] * 2]
    rows = torch.zeros(common.num_actual_tokens, sum(sizes), dtype=spec.dtype, device="cuda")
    layer(*rows.split(sizes, dim=1), cache, builder.build(0, common))


if __name__ == "__main__":
    main()
