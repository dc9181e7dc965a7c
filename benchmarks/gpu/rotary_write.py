"""Norm and rotation of queries and keys and the cache write: one launch against separate ones.

    python -m benchmarks.gpu.rotary_write --out results/rotary_write.json

The separate launches, in two forms:

- "torch": `rms_norm` (weight in float32) of queries, `rms_norm` of keys, the rotation of
  transformers, `write_kv`.
- "kernels": four Triton launches of this library: norm of the queries, norm of the keys, rotation
  of both (they are adjacent in memory), `write_kv`.

"compiled" is the norm and rotation of "torch" by torch.compile, then `write_kv`. Times are those of
one layer: medians of rounds in turn, once as replays of a CUDA graph of many calls, once as eager
calls back to back. The bits of the fused call and of "kernels" are compared first, and so are those
of `ops.torch`; the share of elements of "torch" that differ is recorded.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import attnlib
from attnlib.bench.provenance import provenance
from attnlib.bench.timer import EagerTimer, GraphTimer, measure_in_turn, warm_up
from attnlib.ops.rotary import HeadNorm
from attnlib.ops.torch import rotary_write as reference
from attnlib.ops.triton.cache_write import write_kv
from attnlib.ops.triton.rotary_write import rotate, rotate_and_write

HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 16
CASES = [(64, "auto"), (64, "fp8_e4m3"), (1, "auto"), (8, "auto"), (256, "auto"), (2048, "auto"),
         (8192, "auto")]  # fmt: skip
"""(tokens, cache dtype)."""
_EPS = 1e-6


def _halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotation of transformers, for `[T, H, D]` and full-width cos and sin."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def _norm_and_rotate(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor,
    cos: torch.Tensor, sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    q, k = F.rms_norm(q, (SIZE,), q_weight, _EPS), F.rms_norm(k, (SIZE,), k_weight, _EPS)
    return _halves(q, cos, sin), _halves(k, cos, sin)


class Calls:
    """One decode step of one layer, as functions of a copy of the cache."""

    def __init__(self, tokens: int, stored: str, compiled: bool) -> None:
        torch.manual_seed(0)
        spec = attnlib.AttentionSpec(
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.bfloat16,
            block_size=BLOCK, kv_cache_dtype=stored,
        )  # fmt: skip
        fused = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * SIZE, device="cuda").bfloat16()
        parts = fused.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], dim=1)
        self.q, self.k, self.v = (part.unflatten(1, (-1, SIZE)) for part in parts)
        angles = torch.randn(tokens, SIZE // 2, device="cuda")
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        self.wide = [torch.cat((x, x), -1) for x in (self.cos, self.sin)]
        weights = (torch.rand(SIZE, device="cuda").bfloat16() + 0.5 for _ in range(2))
        self.q_norm, self.k_norm = (
            HeadNorm(weight, _EPS, multiply_in_float32=True) for weight in weights
        )
        blocks = 2 * max(tokens, 64)
        self.caches = [attnlib.PagedKVCache.allocate(spec, blocks, "cuda") for _ in range(4)]
        self.slots = torch.randperm(blocks * BLOCK, device="cuda")[:tokens]
        self.scale = {"k_scale": 0.5, "v_scale": 0.5} if stored != "auto" else {}
        lengths = [17] * tokens
        batch = attnlib.CommonAttentionMetadata.from_lengths(
            [1] * tokens, lengths, torch.arange(2 * tokens).view(-1, 2).int(), BLOCK, "cuda"
        )
        self.layer = attnlib.Attention(spec, backend="triton", device="cuda", **self.scale)
        self.metadata: Any = self.layer.backend.make_builder(spec, "cuda").build(0, batch)
        self.metadata.slot_mapping = self.slots
        self.both = torch.empty(tokens, HEADS + KV_HEADS, SIZE, device="cuda").bfloat16()
        self.functions: dict[str, Callable[[int], Any]] = {
            "fused": self.fused, "layer": self.by_layer, "torch": self.torch,
            "kernels": self.kernels,
        }  # fmt: skip
        if compiled:
            self._compiled = torch.compile(_norm_and_rotate)
            self.functions["compiled"] = self.compiled

    def fused(self, number: int, operation: Any = rotate_and_write) -> torch.Tensor:
        """One launch."""
        cache = self.caches[number]
        out: torch.Tensor = operation(
            self.q, self.k, self.v, cache.key_cache, cache.value_cache, self.slots, self.cos,
            self.sin, q_norm=self.q_norm, k_norm=self.k_norm, **self.scale,
        )  # fmt: skip
        return out

    def by_layer(self, number: int) -> torch.Tensor:
        """The same launch, by the method of a layer."""
        return self.layer.rotate_and_write_kv(
            self.q, self.k, self.v, self.caches[number], self.metadata, self.cos, self.sin,
            q_norm=self.q_norm, k_norm=self.k_norm,
        )  # fmt: skip

    def kernels(self, number: int) -> torch.Tensor:
        """Norm, norm, rotation, write."""
        rotate(self.q, None, None, norm=self.q_norm, out=self.both[:, :HEADS])
        rotate(self.k, None, None, norm=self.k_norm, out=self.both[:, HEADS:])
        rotated = rotate(self.both, self.cos, self.sin)
        self._write(rotated[:, HEADS:], number)
        return rotated[:, :HEADS]

    def torch(self, number: int) -> torch.Tensor:
        """Torch operations, then the write."""
        q, k = _norm_and_rotate(self.q, self.k, self.q_norm.weight, self.k_norm.weight, *self.wide)
        self._write(k, number)
        return q

    def compiled(self, number: int) -> torch.Tensor:
        """Compiled torch operations, then the write."""
        q, k = self._compiled(self.q, self.k, self.q_norm.weight, self.k_norm.weight, *self.wide)
        self._write(k, number)
        return q

    def _write(self, key: torch.Tensor, number: int) -> None:
        cache = self.caches[number]
        write_kv(key, self.v, cache.key_cache, cache.value_cache, self.slots, **self.scale)

    def compare(self) -> float:
        """Check that bits are equal; returns the share of elements of "torch" that are not."""
        results = []
        for number, call in enumerate((
            self.fused, self.kernels, lambda n: self.fused(n, reference.rotate_and_write),
            self.torch,
        )):  # fmt: skip
            cache = self.caches[number]
            cache.zero_blocks(list(range(cache.num_blocks)))
            out = call(number)
            stored = [x.view(torch.uint8) for x in (cache.key_cache, cache.value_cache)]
            results.append([out, *(x.clone() for x in stored)])
        for name, other in (("kernels", results[1]), ("ops.torch", results[2])):
            for one, two in zip(results[0], other, strict=True):
                assert torch.equal(one, two), f"fused and {name} have other bits"
        return float((results[0][0] != results[3][0]).float().mean())


def measure(tokens: int, stored: str, compiled: bool) -> dict[str, Any]:
    """Compare, then time one case."""
    calls = Calls(tokens, stored, compiled)
    differ = calls.compare()
    device = torch.device("cuda")
    expected = {name: warm_up(call, device) for name, call in calls.functions.items()}
    graphs = {
        name: GraphTimer(call, 4, device, expected[name])
        for name, call in calls.functions.items()
        if name != "layer"
    }
    eager = {
        name: EagerTimer(call, 4, device, expected[name]) for name, call in calls.functions.items()
    }
    us = {
        "graph": {n: m.us for n, m in measure_in_turn(graphs, expected).items()},
        "eager": {n: m.us for n, m in measure_in_turn(eager, expected).items()},
    }
    row: dict[str, Any] = {"tokens": tokens, "cache": stored, "us": us, "torch_differs": differ}
    for kind, times in us.items():
        fused = times["fused" if kind == "graph" else "layer"]
        row[f"{kind}_ratio"] = fused / min(times["torch"], times["kernels"])
        if compiled:
            row[f"{kind}_ratio_compiled"] = fused / times["compiled"]
    return row


def main() -> None:
    """Check and time all cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--compiled", action="store_true", help="also time torch.compile")
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of the cases")
    parser.add_argument("--commit", help="commit of attnlib, for copies without history")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    chosen = range(len(CASES)) if options.cases is None else options.cases
    document: dict[str, Any] = {
        "provenance": provenance(commit=options.commit),
        "layer": {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE},
        "rows": [],
    }
    for number in chosen:
        row = measure(*CASES[number], options.compiled)
        document["rows"].append(row)
        print(json.dumps(row), flush=True)
        if options.out:
            options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
