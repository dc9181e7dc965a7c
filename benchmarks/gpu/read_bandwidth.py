"""How fast a GPU reads memory: the limit of decodes, which read every cached key and value once.

    python benchmarks/gpu/read_bandwidth.py [--gigabytes 2.114] [--out read_bandwidth.json]

Kernels that only read and add, over buffers of the size of one layer's cache, in turn, so that
nothing is left in the L2 cache. The default is the cache of 32 requests of 16 128 tokens with 8 KV
heads of 128 in bfloat16. Each row is one variant: persistent programs that read contiguous parts,
or that take tiles in turn, with several tile sizes, warps and loads in flight. Times are medians of
CUDA graph replays.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def read_kernel(
    source, sums, tiles, TILE: tl.constexpr, STRIDED: tl.constexpr, STAGES: tl.constexpr
):
    """Each program adds its tiles of `source` and stores one sum per element of a tile."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    if STRIDED:
        first, last, step = program, tiles, programs
    else:
        per_program = tl.cdiv(tiles, programs)
        first, step = program * per_program, 1
        last = tl.minimum(first + per_program, tiles)
    offsets = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.int32)
    for tile in tl.range(first, last, step, num_stages=STAGES):
        total += tl.load(source + tile * TILE + offsets)
    tl.store(sums + program, tl.sum(total, 0))


VARIANTS = [
    {"tile": tile, "warps": warps, "programs_per_sm": programs, "strided": strided,
     "stages": stages}
    for tile, warps, programs, stages in (
        (4096, 4, 8, 1), (8192, 8, 4, 1), (16384, 8, 2, 1), (4096, 4, 4, 4), (8192, 8, 2, 4),
        (8192, 8, 3, 3), (16384, 16, 1, 3),
    )
    for strided in (True, False)
]  # fmt: skip


def measure(buffers: list[torch.Tensor], variant: dict[str, Any], replays: int) -> float:
    """Microseconds to read one buffer."""
    device = buffers[0].device
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    programs *= variant["programs_per_sm"]
    sums = torch.zeros(programs, dtype=torch.int32, device=device)

    def run() -> None:
        for buffer in buffers:
            read_kernel[(programs,)](
                buffer, sums, buffer.numel() // variant["tile"], TILE=variant["tile"],
                STRIDED=variant["strided"], STAGES=variant["stages"], num_warps=variant["warps"],
            )  # fmt: skip

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(buffers))
    return statistics.median(times[1:])


def main() -> None:
    """Measure all variants and print the fastest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.114, help="of one buffer")
    parser.add_argument("--buffers", type=int, default=8)
    parser.add_argument("--replays", type=int, default=6)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    elements = int(arguments.gigabytes * 1e9) // 4 // 16384 * 16384
    buffers = [
        torch.randint(1 << 30, (elements,), dtype=torch.int32, device="cuda")
        for _ in range(arguments.buffers)
    ]
    rows = []
    for variant in VARIANTS:
        us = measure(buffers, variant, arguments.replays)
        rows.append({**variant, "us": round(us, 1), "tb_per_s": round(elements * 4e-6 / us, 3)})
        print(rows[-1], flush=True)
    rows.sort(key=lambda row: row["us"])
    print("fastest:", rows[0], flush=True)
    result = {
        "command": "python benchmarks/gpu/read_bandwidth.py", "commit": arguments.commit,
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "bytes": elements * 4, "rows": rows,
    }  # fmt: skip
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
