"""Prefill with a threshold of weights below which tiles of keys are left out (M18).

    python benchmarks/gpu/skip_softmax.py --out results/skip_softmax.json

The keys of a share of the tiles are small, so that their weights are below the threshold in all
rows; random keys alone leave no tile out and show the cost of the comparison. Each row compares the
kernel with and without the threshold on the same tensors: time, the root mean square of the output
error relative to the output, and the largest LSE error. Times are medians of replays of a CUDA
graph, in turn.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from attnlib.bench.provenance import provenance
from attnlib.bench.timer import GraphTimer, measure_in_turn, warm_up
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.heuristics.device import limits_of
from attnlib.ops.triton.hopper.dispatch import num_counters
from attnlib.ops.triton.paged_prefill import paged_prefill

HEADS, KV_HEADS, SIZE, BLOCK_SIZE, TILE = 32, 8, 128, 16, 128
THRESHOLD = 2.0**-10
CASES = [(length, small, kernels) for kernels in ("auto", "portable")
         for length in (8192, 32768) for small in (0.0, 0.5, 0.75, 0.9)]  # fmt: skip
"""(tokens, share of tiles with small keys, kernels); portable kernels with 8192 tokens only."""


def make_call(
    length: int, small: float, kernels: str, threshold: float
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The prefill of one request, its output and its LSE."""
    torch.manual_seed(0)
    device, blocks = torch.device("cuda"), length // BLOCK_SIZE
    query = torch.randn(length, HEADS, SIZE, device=device, dtype=torch.bfloat16)
    key, value = (
        torch.randn(blocks, BLOCK_SIZE, KV_HEADS, SIZE, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    is_small = torch.rand(length // TILE, device=device) < small
    key *= torch.where(is_small, 0.05, 1.0).repeat_interleave(TILE // BLOCK_SIZE)[
        :, None, None, None
    ]
    table = torch.arange(blocks, device=device, dtype=torch.int32).view(1, -1)
    starts = torch.tensor([0, length], device=device, dtype=torch.int32)
    lengths = torch.tensor([length], device=device, dtype=torch.int32)
    out = torch.empty_like(query)
    lse = torch.empty(length, HEADS, device=device)
    number = num_counters(limits_of(query))
    counters = torch.zeros(number, device=device, dtype=torch.int32)
    # Scores have a standard deviation of 6, so that every row has large weights.
    params = AttentionParams(scale=6 * SIZE**-0.5, skip_softmax_threshold=threshold)

    def call(_: int = 0) -> torch.Tensor:
        paged_prefill(
            query, key, value, table, starts, lengths, params, max_query_len=length,
            max_seq_len=length, out=out, lse=lse, counters=counters, kernels=kernels,
        )  # fmt: skip
        return out

    return call, out, lse


def main() -> None:
    """Time all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--commit", help="commit of attnlib, for copies without history")
    options = parser.parse_args()
    document: dict[str, Any] = {
        "provenance": provenance(commit=options.commit), "threshold": THRESHOLD, "rows": [],
    }  # fmt: skip
    device = torch.device("cuda")
    for length, small, kernels in CASES:
        if kernels == "portable" and length > 8192:
            continue
        made = {
            "exact": make_call(length, small, kernels, 0.0),
            "threshold": make_call(length, small, kernels, THRESHOLD),
        }
        expected = {name: warm_up(call, device) for name, (call, *_) in made.items()}
        (_, exact, exact_lse), (_, out, lse) = made.values()
        error = float((out.float() - exact.float()).norm() / exact.float().norm())
        lse_error = float((lse - exact_lse).abs().max())
        timers = {n: GraphTimer(made[n][0], 1, device, expected[n]) for n in made}
        us = {name: found.us for name, found in measure_in_turn(timers, expected).items()}
        row = {
            "tokens": length, "small_tiles": small, "kernels": kernels, "us": us,
            "ratio": us["threshold"] / us["exact"], "output_error": error, "lse_error": lse_error,
        }  # fmt: skip
        document["rows"].append(row)
        print(json.dumps(row), flush=True)
        if options.out:
            options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
