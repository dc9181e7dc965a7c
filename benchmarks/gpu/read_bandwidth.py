"""How fast a GPU reads memory, the limit of decodes and of attention to selected latents.

Decodes read every cached key and value once. Selected latents are gathered from the L2 cache.

    python benchmarks/gpu/read_bandwidth.py [--gigabytes 2.114] [--out read_bandwidth.json]

Kernels that only read and add. Times are medians of CUDA graph replays.

`contiguous` rows read buffers of the size of one layer's cache in turn, so that nothing is left in
the L2 cache. The default is the cache of 32 requests of 16 128 tokens with 8 KV heads of 128 in
bfloat16. Each row is one variant: persistent programs that read contiguous parts, or that take
tiles in turn, with several tile sizes, warps and loads in flight.

`gather` rows read 2048 of 32k latents of 1152 bytes for each of 4096 queries, one program per
query, as `selected_keys.py --rows latent` selects them: in random order, and in ascending order,
in which `select_keys` writes lists. With `nearby` lists all queries select among 8k latents.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from attnlib.bench.key_lists import spread_lists
from attnlib.sparse.key_selection import KeySelection


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


@triton.jit
def gather_kernel(
    latents, lists, sums, ENTRIES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr
):
    """Each program adds the 288 words of the latents in its list and stores the sum."""
    program = tl.program_id(0).to(tl.int64)
    # 288 words are 256 and 32, because tiles have powers of 2 as sizes.
    total = tl.zeros([ROWS, 256], tl.int32)
    rest = tl.zeros([ROWS, 32], tl.int32)
    for start in tl.range(0, ENTRIES, ROWS, num_stages=STAGES):
        entry = tl.load(lists + program * ENTRIES + start + tl.arange(0, ROWS))
        first = latents + entry.to(tl.int64)[:, None] * 288
        total += tl.load(first + tl.arange(0, 256)[None, :])
        rest += tl.load(first + 256 + tl.arange(0, 32)[None, :])
    tl.store(sums + program, tl.sum(tl.sum(total, 1)) + tl.sum(tl.sum(rest, 1)))


VARIANTS = [
    {"tile": tile, "warps": warps, "programs_per_sm": programs, "strided": strided,
     "stages": stages}
    for tile, warps, programs, stages in (
        (4096, 4, 8, 1), (8192, 8, 4, 1), (16384, 8, 2, 1), (4096, 4, 4, 4), (8192, 8, 2, 4),
        (8192, 8, 3, 3), (16384, 16, 1, 3),
    )
    for strided in (True, False)
]  # fmt: skip


GATHER_VARIANTS = [
    {"latents": latents, "warps": warps, "stages": stages}
    for latents, warps, stages in ((8, 4, 1), (16, 4, 1), (16, 8, 1), (32, 8, 1), (16, 4, 4))
]
QUERIES, CONTEXT, SELECTED, WORDS = 4096, 32 << 10, 2048, 288


def replay(run: Callable[[], None], replays: int) -> float:
    """Median of the microseconds of a replay of `run`."""
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
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times[1:])


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

    return replay(run, replays) / len(buffers)


def measure_gather(
    latents: torch.Tensor, lists: torch.Tensor, variant: dict[str, Any], replays: int
) -> float:
    """Microseconds to read the latents of all lists."""
    sums = torch.zeros(QUERIES, dtype=torch.int32, device=lists.device)

    def run() -> None:
        gather_kernel[(QUERIES,)](
            latents, lists, sums, ENTRIES=SELECTED, ROWS=variant["latents"],
            STAGES=variant["stages"], num_warps=variant["warps"],
        )  # fmt: skip

    us = replay(run, replays)
    expected = latents[lists[-1].long()].sum(dtype=torch.int32)
    assert int(sums[-1]) == int(expected), "the kernel did not read the listed latents"
    return us


def contiguous_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all variants of contiguous reads."""
    elements = int(options.gigabytes * 1e9) // 4 // 16384 * 16384
    buffers = [
        torch.randint(1 << 30, (elements,), dtype=torch.int32, device="cuda")
        for _ in range(options.buffers)
    ]
    rows = []
    for variant in VARIANTS:
        us = measure(buffers, variant, options.replays)
        rows.append({**variant, "us": round(us, 1), "tb_per_s": round(elements * 4e-6 / us, 3)})
        print(rows[-1], flush=True)
    return sorted(rows, key=lambda row: float(row["us"]))


def gather_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all variants of gathers."""
    torch.manual_seed(0)
    latents = torch.randint(1 << 12, (CONTEXT, WORDS), dtype=torch.int32, device="cuda")
    lengths = torch.arange(CONTEXT - QUERIES + 1, CONTEXT + 1, device="cuda")
    random = spread_lists(1, KeySelection(max_blocks=SELECTED), lengths)[:, 0].clamp(min=0)
    orders = {
        "random": random, "ascending": random.sort(-1).values, "nearby": random % (CONTEXT // 4)
    }  # fmt: skip
    rows = []
    for name, lists in orders.items():
        for variant in GATHER_VARIANTS:
            us = measure_gather(latents, lists.contiguous(), variant, options.replays)
            rate = QUERIES * SELECTED * WORDS * 4e-6 / us
            rows.append({"lists": name, **variant, "us": round(us, 1), "tb_per_s": round(rate, 3)})
            print(rows[-1], flush=True)
    return sorted(rows, key=lambda row: (row["lists"], float(row["us"])))


def main() -> None:
    """Measure all variants and print the fastest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="*", default=["contiguous", "gather"])
    parser.add_argument("--gigabytes", type=float, default=2.114, help="of one buffer")
    parser.add_argument("--buffers", type=int, default=8)
    parser.add_argument("--replays", type=int, default=6)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python benchmarks/gpu/read_bandwidth.py --rows " + " ".join(options.rows),
        "commit": options.commit, "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__, "triton": triton.__version__,
    }  # fmt: skip
    if "contiguous" in options.rows:
        result["bytes"] = int(options.gigabytes * 1e9) // 4 // 16384 * 16384 * 4
        result["rows"] = contiguous_rows(options)
        print("fastest:", result["rows"][0], flush=True)
    if "gather" in options.rows:
        result["gathered_bytes"] = QUERIES * SELECTED * WORDS * 4
        result["gather_rows"] = gather_rows(options)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
