"""Decodes of requests that share a prefix: computed once against computed by each request.

    python -m benchmarks.gpu.shared_prefix --out results/shared_prefix.json

Times are device times of one layer call: replays of a CUDA graph of many calls over copies of the
cache that do not fit the L2 cache. Outputs are compared first. `--rule` also times batches that
share little, to place the limit of `PrefixRule.min_saved_bytes`.
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
from attnlib.backends.cascade.schedule import PrefixRule
from attnlib.bench.provenance import provenance
from attnlib.bench.timer import GraphTimer, measure_in_turn, warm_up
from attnlib.metadata.shared_prefix import find_shared_prefixes

CASES = [(64, 8192, 256), (16, 32768, 256), (64, 8192, 1), (8, 16384, 1024), (64, 0, 2048)]
"""(requests, shared tokens, own tokens of each request)."""
RULE_CASES = [
    (2, 16384, 256), (2, 65536, 256), (4, 16384, 256), (8, 4096, 256), (16, 4096, 256),
    (32, 1024, 256), (32, 2048, 256), (64, 512, 256), (64, 1024, 256), (64, 2048, 256),
]  # fmt: skip
RULES = {
    "cascade, decode kernels": PrefixRule(min_saved_bytes=0, max_decode_parts=8),
    "cascade, prefill kernels": PrefixRule(min_saved_bytes=0, max_decode_parts=0),
}
HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 16
_COLD_BYTES = 256 << 20


class Calls:
    """One batch of decodes, by the triton backend with and without a cascade."""

    def __init__(self, requests: int, shared: int, own: int) -> None:
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
            [1] * requests, [shared + own] * requests, table, BLOCK, "cuda"
        )
        context = torch.full((requests,), shared + own - 1, dtype=torch.int32)
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
            torch.randn(requests, heads, SIZE, device="cuda", dtype=torch.bfloat16)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        self.spec, self.requests = spec, requests

    def layer(self, rule: PrefixRule | None = None) -> Any:
        """A function that runs one layer over copy `number`."""
        found = attnlib.get_attn_backend(self.spec, "triton", "cuda")
        if rule is not None:
            found = attnlib.merge_attention(found, found, rule)
        layer = attnlib.Attention(self.spec, backend=found, device="cuda")
        metadata: Any = found.make_builder(self.spec, "cuda").build(0, self.common)
        assert rule is None or (metadata.prefix is None) == (not self.common.shared_prefixes)
        return lambda number: layer(*self.rows, self.caches[number], metadata)


def measure(case: tuple[int, int, int]) -> dict[str, Any]:
    """Microseconds of one layer without a cascade, and with the prefix on either kernel."""
    calls = Calls(*case)
    functions = {"triton": calls.layer()}
    functions |= {name: calls.layer(rule) for name, rule in RULES.items()}
    wanted = functions["triton"](0)
    for name, function in functions.items():
        torch.testing.assert_close(function(0), wanted, rtol=2e-2, atol=2e-2, msg=name)
    device = torch.device("cuda")
    expected = {name: warm_up(call, device) for name, call in functions.items()}
    timers = {
        name: GraphTimer(call, calls.copies, device, expected[name])
        for name, call in functions.items()
    }
    found = [measure_in_turn(timers, expected) for _ in range(2)]
    us = {name: statistics.median(times[name].us for times in found) for name in functions}
    requests, shared, own = case
    saved = (requests - 1) * shared * KV_HEADS * SIZE * 4
    return {
        "requests": requests, "shared": shared, "own": own, "saved_mib": saved / 2**20, "us": us,
        "speedup": us["triton"] / min(us[name] for name in RULES),
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
