"""Paged attention on a CPU compared with SDPA over contiguous keys and values, in one process.

    python benchmarks/cpu_attention.py

The baseline is the faster one of `scaled_dot_product_attention` with `enable_gqa` and with expanded
heads. Paged calls use randomly permuted and consecutive block tables. Writes
benchmarks/results/cpu_attention.json.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import attnlib
from attnlib.bench.provenance import provenance

F = torch.nn.functional
HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 16
REPEATS = 15


def interleaved(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each call; the calls alternate, so that other load affects all of them."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def row(
    title: str, reqs: int, query_len: int, seq_len: int, dtype: torch.dtype, limit: float
) -> dict[str, object]:
    """Measure the paged call and the baseline.

    Print and return the ratio, which should be below `limit`.
    """
    torch.manual_seed(0)
    spec = attnlib.AttentionSpec(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=dtype, block_size=BLOCK
    )
    layer = attnlib.Attention(spec, backend="torch", device="cpu")
    per_request = seq_len // BLOCK
    cache = attnlib.PagedKVCache.allocate(spec, reqs * per_request, "cpu")
    cache.key_cache.normal_()
    cache.value_cache.normal_()
    query = torch.randn(reqs * query_len, HEADS, SIZE, dtype=dtype)
    steps = {}
    for name, order in (
        ("shuffled", torch.randperm(reqs * per_request)),
        ("consecutive", torch.arange(reqs * per_request)),
    ):
        table = order.view(reqs, per_request).int()
        batch = attnlib.CommonAttentionMetadata.from_lengths(
            [query_len] * reqs, [seq_len] * reqs, table, BLOCK, "cpu"
        )
        steps[name] = layer.backend.make_builder(spec, "cpu").build(0, batch)
    q = query.view(reqs, query_len, HEADS, SIZE).transpose(1, 2)
    k, v = (
        view.view(reqs, seq_len, KV_HEADS, SIZE).transpose(1, 2).contiguous()
        for view in (cache.key_cache, cache.value_cache)
    )
    wide_k, wide_v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    causal = query_len > 1
    times = interleaved(
        {
            **{
                name: lambda step=step: layer(query, None, None, cache, step)
                for name, step in steps.items()
            },
            "SDPA, enable_gqa": lambda: F.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=True
            ),
            "SDPA, expanded": lambda: F.scaled_dot_product_attention(
                q, wide_k, wide_v, is_causal=causal
            ),
        }
    )
    best = min(times["SDPA, enable_gqa"], times["SDPA, expanded"])
    ratios = {name: times[name] / best for name in steps}
    reference = (
        F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        .transpose(1, 2)
        .reshape_as(query)
    )
    error = float(
        (layer(query, None, None, cache, steps["consecutive"]) - reference).float().norm()
        / reference.float().norm()
    )
    print(
        f"{title:<34} {times['shuffled'] * 1e3:9.2f} ms shuffled  "
        f"{times['consecutive'] * 1e3:9.2f} ms consecutive  {best * 1e3:9.2f} ms SDPA  "
        f"ratio {ratios['shuffled']:.2f} / {ratios['consecutive']:.2f} (limit {limit})  "
        f"error {error:.0e}"
    )
    return {
        "row": title,
        "milliseconds": {name: seconds * 1e3 for name, seconds in times.items()},
        "ratio": ratios,
        "limit": limit,
        "error": error,
    }


def main() -> None:
    """Measure all rows and write the result file."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        rows.append(row(f"decode 8 x 2k, {name}", 8, 1, 2048, dtype, 1.5))
        rows.append(row(f"prefill 1 x 2k, {name}", 1, 2048, 2048, dtype, 1.2))
    target = Path(__file__).parent / "results" / "cpu_attention.json"
    target.write_text(
        json.dumps(
            {
                **provenance(),
                "shape": f"{HEADS}/{KV_HEADS} heads of {SIZE}, blocks of {BLOCK}",
                "rows": rows,
            },
            indent=1,
        )
        + "\n"
    )
    print(
        f"wrote {target.relative_to(Path.cwd()) if target.is_relative_to(Path.cwd()) else target}"
    )


if __name__ == "__main__":
    main()
