"""Divided layers on the GPUs of one host against one GPU, and against their parts.

    torchrun --nproc-per-node 4 -m benchmarks.parallel --groups 4 2 --limit-seconds 220 --out FILE
    torchrun --nproc-per-node 2 -m benchmarks.parallel --shrink 512 --repeats 2   # gloo, on a CPU

prints a JSON line per row, and keeps all of them in FILE, as it goes: a run that ends early leaves
its rows. `--groups` divides the processes into groups of so many ranks, one size after the other;
all groups of a size run the same rows at once, and the first one reports. A row whose exchanges
hang ends the run after `--row-seconds`; slow calls are repeated less often, so that a row takes
about that long at most.

For each decode: the layer on one GPU with all heads and keys, and the divided layer. `bound` is
`attention`, that of the slowest rank to its keys, and `exchange_at_rate`, the received bytes (X6)
at the measured rate of a large exchange; the divided layer should reach 85% of it
(`share_of_bound`). `share_of_parts` compares it with `attention` and `measured_exchange`, which
includes latencies. `ranks` has the parts on each rank: its attention, the whole layer, the
exchange, that of queries and of results alone, and bare collectives of as many bytes; `kernels`
what the first rank launches in one call, with `--profile`. For the prefill of a prompt, and of its
last part over the rest: one GPU, the ring, gathered keys, and the attention in each; four GPUs
should be 3.2 times as fast as one. `met` says so, on GPUs. Times are medians in microseconds: of
decodes per call of a CUDA graph of ten calls, whose keys are not in the L2 cache; of `single_calls`
and prefills from the host, on the slowest rank.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from attnlib.parallel import ExchangeMethod
from benchmarks.parallel.decode import decode
from benchmarks.parallel.prefill import prefill
from benchmarks.parallel.ranks import Ranks, all_ranks

DECODES = ("2x64", "4x128", "16x32", "1x1024")
"""Requests, and thousands of tokens of each (1024 per thousand)."""
PREFILLS = ((128, 0), (8, 120))
"""Thousands of new tokens, and of tokens in the cache."""
SHARE, SPEEDUP = 0.85, {4: 3.2}
"""What must be reached: of the bound of decodes, and of prompts by number of ranks."""


def decodes(ranks: Ranks, rate: dict[str, float]) -> Iterator[dict[str, Any]]:
    for name in ranks.options.decodes:
        requests, thousands = map(int, name.split("x"))
        length = thousands * 1024 // ranks.options.shrink
        for exchange in ranks.options.exchange:
            if ranks.is_late():
                return
            row = decode(ranks, requests, length, rate, exchange)
            if ranks.on_gpu:
                row["met"] = row["share_of_bound"] >= SHARE
            yield row


def prefills(ranks: Ranks) -> Iterator[dict[str, Any]]:
    target = SPEEDUP.get(ranks.group.world_size)
    for new, context in PREFILLS:
        shrink = ranks.options.shrink
        if ranks.is_late():
            return
        row = prefill(ranks, new * 1024 // shrink, context * 1024 // shrink)
        if target is not None and not context and ranks.on_gpu:
            row["met"] = max(row["ring_speedup"], row["all_gather_speedup"]) >= target
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-heads", type=int, default=32, help="query heads of all ranks")
    parser.add_argument("--num-kv-heads", type=int, default=4, help="KV heads, on every rank")
    parser.add_argument("--head-size", type=int, default=128)
    methods = [method.value for method in ExchangeMethod]
    parser.add_argument("--exchange", nargs="+", choices=methods, default=[None])
    parser.add_argument("--only", choices=["decode", "prefill"])
    rows = "requests x thousands of tokens"
    parser.add_argument("--decodes", nargs="+", default=DECODES, help=rows)
    parser.add_argument("--profile", action="store_true", help="record the kernels of decodes")
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths by this")
    parser.add_argument("--repeats", type=int, default=20)
    sizes = "ranks of a group, such as 4 2; all processes by default"
    parser.add_argument("--groups", nargs="+", type=int, help=sizes)
    parser.add_argument("--out", type=Path)
    limit = "start no row after so many seconds"
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help=limit)
    seconds = "that a row takes at most; an exchange that takes longer ends the run"
    parser.add_argument("--row-seconds", type=float, default=90, help=seconds)
    options = parser.parse_args()
    faulthandler.enable()  # NCCL ends a process by a signal
    with torch.inference_mode():
        run(options)
    dist.destroy_process_group()


def run(options: argparse.Namespace) -> None:
    """All rows of all groups."""
    groups = all_ranks(options)
    first = groups[0]
    result: dict[str, Any] = {
        "ranks": [ranks.group.world_size for ranks in groups],
        "spec": str(first.spec),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if first.on_gpu else "cpu, gloo",
        "bytes_per_us": {},
    }
    rates = []
    for ranks in groups:
        rates.append(ranks.rate())
        rounded = {name: round(value, 1) for name, value in rates[-1].items()}
        result["bytes_per_us"][f"{ranks.group.world_size} ranks"] = rounded
    write(result, result["bytes_per_us"], options.out)
    for name in ("decode", "prefill"):
        if options.only not in (None, name):
            continue
        result[name] = []
        for ranks, rate in zip(groups, rates, strict=True):
            for row in decodes(ranks, rate) if name == "decode" else prefills(ranks):
                result[name].append(row)
                write(result, {name: row}, options.out)
    result["complete"] = not first.is_late()
    write(result, {"complete": result["complete"]}, options.out)


def write(result: dict[str, Any], new: dict[str, Any], out: Path | None) -> None:
    """Print what is new, and keep all that is known so far: a time limit may end the run."""
    if dist.get_rank() == 0:
        print(json.dumps(new), flush=True)
        if out is not None:
            out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
