"""Decodes of requests that share a prefix: computed once against computed by each request.

    python -m benchmarks.gpu.shared_prefix --out results/shared_prefix.json

Times are device times of one layer call: replays of a CUDA graph of many calls over copies of the
cache that do not fit the L2 cache. Outputs are compared first. `--rule` also times batches that
share little, to place the limits of `PrefixRule`, and batches of several query tokens per request,
whose prefixes and suffixes are separate launches.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import attnlib
from attnlib.backends.cascade.schedule import EVERY_PREFIX, PrefixRule
from attnlib.bench.provenance import provenance
from attnlib.bench.timer import GraphTimer, measure_in_turn, warm_up
from attnlib.metadata.shared_prefix import find_shared_prefixes
from attnlib.selection import merge_attention

Case = tuple[int, int, int] | tuple[int, int, int, int]
CASES: list[Case] = [
    (64, 8192, 256), (16, 32768, 256), (64, 8192, 1), (8, 16384, 1024), (64, 0, 2048),
]  # fmt: skip
"""(requests, shared tokens, own tokens of each request, query tokens of each; 1 is left out)."""
RULE_CASES: list[Case] = [
    (64, 512, 256), (32, 512, 256), (16, 512, 256), (8, 1024, 256), (256, 512, 256),
    (64, 256, 256), (2, 4096, 256), (4, 2048, 256), (128, 512, 256), (64, 1024, 256),
    (32, 1024, 256), (16, 1024, 256), (64, 512, 2048), (16, 8192, 256, 4), (2, 65536, 256),
    (16, 4096, 256), (8, 4096, 256), (64, 2048, 256), (64, 2048, 256, 4),
]  # fmt: skip
HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 16
_COLD_BYTES = 256 << 20


class Calls:
    """One batch of decodes, by the triton backend with and without a cascade."""

    def __init__(self, requests: int, shared: int, own: int, query: int = 1) -> None:
        torch.manual_seed(0)
        spec = attnlib.AttentionSpec(
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.bfloat16,
            block_size=BLOCK,
        )  # fmt: skip
        columns, more = shared // BLOCK, -(-own // BLOCK)
        blocks = columns + requests * more
        order = torch.randperm(blocks, dtype=torch.int32)
        table = torch.cat(
            [order[:columns].expand(requests, -1), order[columns:].view(requests, more)], 1
        )
        common = attnlib.CommonAttentionMetadata.from_lengths(
            [query] * requests, [shared + own] * requests, table, BLOCK, "cuda"
        )
        context = torch.full((requests,), shared + own - query, dtype=torch.int32)
        prefixes = find_shared_prefixes(table, context, BLOCK)
        self.common = common.replace(shared_prefixes=prefixes)
        self.copies = max(2, -(-_COLD_BYTES // (blocks * BLOCK * KV_HEADS * SIZE * 4)))
        self.caches = [
            attnlib.PagedKVCache.allocate(spec, blocks, "cuda") for _ in range(self.copies)
        ]
        for cache in self.caches:
            cache.key_cache.normal_()
            cache.value_cache.normal_()
        self.rows = [
            torch.randn(requests * query, heads, SIZE, device="cuda", dtype=torch.bfloat16)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        self.spec, self.requests = spec, requests

    @property
    def shared_by_default(self) -> bool:
        """Whether the default rule computes the prefix once."""
        found = attnlib.get_attn_backend(self.spec, "triton", "cuda")
        builder = merge_attention(found, found).make_builder(self.spec, "cuda")
        metadata: Any = builder.build(0, self.common)
        return bool(metadata.shared_prefixes)

    def layer(self, rule: PrefixRule | None = None) -> Any:
        """A function that runs one layer over copy `number`."""
        found = attnlib.get_attn_backend(self.spec, "triton", "cuda")
        if rule is not None:
            found = merge_attention(found, found, rule)
        layer = attnlib.Attention(self.spec, backend=found, device="cuda")
        metadata: Any = found.make_builder(self.spec, "cuda").build(0, self.common)
        assert rule is None or len(metadata.shared_prefixes) == len(self.common.shared_prefixes)
        return lambda number: layer(*self.rows, self.caches[number], metadata)


def measure(case: Case) -> dict[str, Any]:
    """Microseconds of one layer that reads prefixes for each request, and for all together."""
    calls = Calls(*case)
    functions = {"triton": calls.layer(), "shared": calls.layer(EVERY_PREFIX)}
    wanted = functions["triton"](0)
    torch.testing.assert_close(functions["shared"](0), wanted, rtol=2e-2, atol=2e-2)
    device = torch.device("cuda")
    expected = {name: warm_up(call, device) for name, call in functions.items()}
    timers = {
        name: GraphTimer(call, calls.copies, device, expected[name])
        for name, call in functions.items()
    }
    found = [measure_in_turn(timers, expected) for _ in range(2)]
    us = {name: statistics.median(times[name].us for times in found) for name in functions}
    requests, shared, own = case[:3]
    per_token = KV_HEADS * SIZE * 4
    return {
        "requests": requests, "shared": shared, "own": own, "query": (*case, 1)[3],
        "saved_mib": (requests - 1) * shared * per_token / 2**20,
        "shared_by_default": calls.shared_by_default, "us": us,
        "speedup": us["triton"] / us["shared"],
        # Each key and value once.
        "shared_tb_per_s": (shared + requests * own) * per_token / us["shared"] / 1e6,
    }  # fmt: skip


def main() -> None:
    """Check and time all cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--rule", action="store_true", help="also batches that share little")
    parser.add_argument("--commit", help="commit of attnlib, for copies without history")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    document: dict[str, Any] = {
        "provenance": provenance(commit=options.commit),
        "default_rule": dataclasses.asdict(PrefixRule()), "rows": [],
    }  # fmt: skip
    for case in CASES + (RULE_CASES if options.rule else []):
        row = measure(case)
        document["rows"].append(row)
        print(json.dumps(row), flush=True)
        if options.out:
            options.out.write_text(json.dumps(document, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
