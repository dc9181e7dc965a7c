"""Decode over the packed cache of vLLM's PagedAttention against the same decode over NHD.

    python benchmarks/gpu/packed_decode.py --out results/packed_decode.json
    python benchmarks/gpu/packed_decode.py --cases 0 1 3 5 7 9 12     # a minute
    python benchmarks/gpu/packed_decode.py --tiles 0 1 2 3          # other tiles, for tuning

Both read the same keys and values: `PagedAttention.forward_decode` over `[B, Hkv, D / x, N, x]`,
and `ops.triton.paged_decode` (which uses the Hopper kernel where it is faster) over
`[B, N, Hkv, D]`. The outputs are compared before anything is timed. Times are medians of replays of
a CUDA graph of many calls, in turn, over copies of the cache that do not fit the L2 cache. The last
line is the geometric mean over the cases of the time of the portable kernel over the packed cache,
relative to that of the interface, which takes the Hopper kernel.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnlib.bench.provenance import provenance
from attnlib.bench.timer import GraphTimer, measure_in_turn, warm_up
from attnlib.ops.paged_attention import PagedAttention
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton import packed_attention
from attnlib.ops.triton.heuristics.device import limits_of
from attnlib.ops.triton.heuristics.tiles import Tile
from attnlib.ops.triton.hopper.dispatch import num_counters
from attnlib.ops.triton.launch import packed as packed_launch
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.paged_decode import paged_decode

HEADS, KV_HEADS, SIZE, BLOCK_SIZE = 32, 8, 128, 16
CASES = [(1, 1024), (1, 8192), (1, 32768), (8, 2048), (8, 8192), (32, 1024), (32, 4096),
         (64, 2048), (128, 1024), (128, 4096), (256, 1024), (1, 128), (32, 128), (256, 128),
         (256, 256)]  # fmt: skip
TILES = [Tile(16, n, warps, stages) for n, warps, stages in
         ((64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 3), (32, 2, 4), (16, 1, 4), (32, 1, 3),
          (64, 2, 3))]  # fmt: skip
_COLD_BYTES = 256 << 20
"""Bytes of keys and values that the calls read in turn, several times the L2 cache."""

_WORKSPACE_BYTES = 256 << 20


@dataclass
class Inputs:
    """One batch, and copies of a cache in both layouts."""

    query: torch.Tensor
    table: torch.Tensor
    seq_lens: torch.Tensor
    starts: torch.Tensor
    max_seq_len: int
    packed: list[tuple[torch.Tensor, torch.Tensor]]
    nhd: list[tuple[torch.Tensor, torch.Tensor]]


def make_inputs(num_reqs: int, seq_len: int) -> Inputs:
    """Random keys and values; blocks in random order."""
    torch.manual_seed(0)
    columns = -(-seq_len // BLOCK_SIZE)
    num_blocks = num_reqs * columns
    num_bytes = 2 * num_blocks * BLOCK_SIZE * KV_HEADS * SIZE * 2
    shape = (num_blocks, BLOCK_SIZE, KV_HEADS, SIZE)
    packed, nhd = [], []
    for _ in range(max(2, -(-_COLD_BYTES // num_bytes))):
        key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        kv_cache = torch.empty(
            PagedAttention.get_kv_cache_shape(num_blocks, BLOCK_SIZE, KV_HEADS, SIZE),
            device="cuda", dtype=torch.bfloat16,
        )  # fmt: skip
        caches = PagedAttention.split_kv_cache(kv_cache, KV_HEADS, SIZE)
        slots = torch.arange(num_blocks * BLOCK_SIZE, device="cuda")
        PagedAttention.write_to_paged_cache(
            key.flatten(0, 1), value.flatten(0, 1), *caches, slots, "auto", 1.0, 1.0
        )
        packed.append(caches)
        nhd.append((key, value))
    return Inputs(
        torch.randn(num_reqs, HEADS, SIZE, device="cuda", dtype=torch.bfloat16),
        torch.randperm(num_blocks, device="cuda").view(num_reqs, columns).int(),
        torch.full((num_reqs,), seq_len, device="cuda", dtype=torch.int32),
        torch.arange(num_reqs + 1, device="cuda", dtype=torch.int32),
        seq_len, packed, nhd,
    )  # fmt: skip


def packed_call(inputs: Inputs, kernels: str = "auto") -> Any:
    """Decode over copy `number` of the packed cache, by the interface or by given kernels."""
    params = AttentionParams(scale=SIZE**-0.5)

    def call(number: int) -> torch.Tensor:
        return PagedAttention.forward_decode(
            inputs.query, *inputs.packed[number], inputs.table, inputs.seq_lens,
            inputs.max_seq_len, "auto", KV_HEADS, SIZE**-0.5, None, 1.0, 1.0,
        )  # fmt: skip

    def portable_call(number: int) -> torch.Tensor:
        out = torch.empty_like(inputs.query)
        packed_attention.packed_decode(
            inputs.query, *inputs.packed[number], inputs.table, inputs.seq_lens, params,
            max_seq_len=inputs.max_seq_len, out=out, kernels=kernels,
        )  # fmt: skip
        return out

    return call if kernels == "auto" else portable_call


def nhd_call(inputs: Inputs, kernels: str) -> Any:
    """Decode over copy `number` of the NHD cache, with the workspace and counters of a builder."""
    number = num_counters(limits_of(inputs.query))
    counters = torch.zeros(number, device="cuda", dtype=torch.int32)
    params, out = AttentionParams(scale=SIZE**-0.5), torch.empty_like(inputs.query)
    workspace = torch.empty(_WORKSPACE_BYTES, device="cuda", dtype=torch.uint8)

    def call(number: int) -> torch.Tensor:
        paged_decode(
            inputs.query, *inputs.nhd[number], inputs.table, inputs.starts, inputs.seq_lens, params,
            max_query_len=1, max_seq_len=inputs.max_seq_len, out=out, workspace=workspace,
            counters=counters, kernels=kernels,
        )  # fmt: skip
        return out

    return call


def measure(calls: dict[str, Any], copies: int) -> dict[str, float]:
    """Microseconds of each call."""
    device = torch.device("cuda")
    expected = {name: warm_up(call, device) for name, call in calls.items()}
    timers = {
        name: GraphTimer(call, copies, device, expected[name]) for name, call in calls.items()
    }
    return {name: found.us for name, found in measure_in_turn(timers, expected).items()}


def main() -> None:
    """Check and time all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--tiles", type=int, nargs="*", default=[], help="also time these TILES")
    numbers = range(len(CASES))
    parser.add_argument("--cases", type=int, nargs="*", default=numbers, help="cases by number")
    parser.add_argument("--commit", help="commit of attnlib, for copies without history")
    options = parser.parse_args()
    document: dict[str, Any] = {"provenance": provenance(commit=options.commit), "rows": []}
    default = packed_launch.packed_tile  # type: ignore[attr-defined]
    for num_reqs, seq_len in (CASES[number] for number in options.cases):
        inputs = make_inputs(num_reqs, seq_len)
        calls = {
            "packed": packed_call(inputs),
            "packed portable": packed_call(inputs, "portable"),
            "nhd": nhd_call(inputs, "auto"),
            "nhd portable": nhd_call(inputs, "portable"),
        }
        error = max(
            float((calls["packed"](0).float() - calls[name](0).float()).abs().max())
            for name in ("packed portable", "nhd", "nhd portable")
        )
        assert error < 1e-2, f"{num_reqs} x {seq_len}: the outputs differ by {error}"
        times = measure(calls, len(inputs.packed))
        row = {"requests": num_reqs, "seq_len": seq_len, "max_error": error, "us": times,
               "packed_to_nhd": times["packed"] / times["nhd"],
               "portable_to_packed": times["packed portable"] / times["packed"]}  # fmt: skip
        if options.tiles:
            row["tiles"] = {}
            for tile in (TILES[number] for number in options.tiles):
                packed_launch.packed_tile = lambda *_, tile=tile: tile  # type: ignore[attr-defined]
                LAUNCHES.clear()
                found = measure({"packed": packed_call(inputs, "portable")}, len(inputs.packed))
                found = found["packed"]
                name = f"{tile.block_n}x{tile.num_warps}x{tile.num_stages}"
                row["tiles"][name] = found
            packed_launch.packed_tile = default  # type: ignore[attr-defined]
            LAUNCHES.clear()
        document["rows"].append(row)
        print(json.dumps(row), flush=True)
        if options.out:
            options.out.write_text(json.dumps(document, indent=1) + "\n")
    gain = statistics.geometric_mean(row["portable_to_packed"] for row in document["rows"])
    print(f"portable / packed, geometric mean of {len(document['rows'])} cases: {gain:.3f}")


if __name__ == "__main__":
    main()
