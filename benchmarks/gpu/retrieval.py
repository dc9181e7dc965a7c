"""Retrieval of single values among 131072 keys, for each quantized format and kernel.

    python -m benchmarks.gpu.retrieval --processes 8 --out results/retrieval.json
    python -m benchmarks.gpu.retrieval 'fp8_e4m3 *' --list

Each query is a multiple of one of the keys, so that its score with that key is 18 in natural units,
beside a log-sum-exp of the other keys of about 13 (14 with head size 64). A value is found if the
cosine of the output and that value is above 0.95. Keys and values are random normal numbers, which
the cache write rounds.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.cache_write import write_kv
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.paged_decode import paged_decode
from attnlib.ops.triton.paged_prefill import paged_prefill
from attnlib.spec import AttentionSpec
from benchmarks.gpu import rows

KEYS, KV_HEADS, GROUP, SCORE = 131072, 2, 4, 18.0
FORMATS = (
    "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "int4_per_group", "auto",
)  # fmt: skip
OPERATIONS: dict[str, dict[str, Any]] = {
    "decode": {"tokens": 1},
    "prefill of 4096": {"tokens": 4096},
    "prefill of 4096, float8 products": {"tokens": 4096, "allow": True},
    "prefill of 300": {"tokens": 300},
    "decode, portable kernel": {"tokens": 1, "kernels": "portable"},
    "prefill of 300, portable kernel": {"tokens": 300, "kernels": "portable"},
}
REQUESTS = 8
"""Decodes of a batch, which share their blocks."""


def retrieve(
    name: str, size: int, tokens: int, kernels: str = "auto", allow: bool = False
) -> dict[str, Any]:
    """The share of values that are found, the least cosine, and the launch that ran."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    spec = AttentionSpec(
        num_heads=KV_HEADS * GROUP, num_kv_heads=KV_HEADS, head_size=size, dtype=torch.bfloat16,
        kv_cache_dtype=name, block_size=16,
    )  # fmt: skip
    cache = PagedKVCache.allocate(spec, KEYS // 16, device)
    blocks = torch.randperm(KEYS // 16, device=device)
    positions = torch.arange(KEYS, device=device)
    slots = blocks[positions // 16] * 16 + positions % 16
    key, value = torch.randn(2, KEYS, KV_HEADS, size, device=device).bfloat16()
    scales: dict[str, Any] = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    write_kv(key, value, cache.key_cache, cache.value_cache, slots, **scales)
    reqs = REQUESTS if tokens == 1 else 1
    count = reqs * tokens
    needles = torch.randperm(KEYS - tokens, device=device)[:count]
    found_keys = key[needles].float()
    factor = SCORE * size**0.5 / found_keys.square().sum(2, keepdim=True)
    query = (found_keys * factor).repeat_interleave(GROUP, 1).bfloat16()
    params = AttentionParams(scale=size**-0.5, allow_fp8_queries=allow, **scales)
    out = torch.empty_like(query)
    LAUNCHES.clear()
    (paged_decode if tokens == 1 else paged_prefill)(
        query, cache.key_cache, cache.value_cache, blocks.int().expand(reqs, -1).contiguous(),
        torch.arange(0, count + 1, tokens, device=device, dtype=torch.int32),
        torch.full((reqs,), KEYS, device=device, dtype=torch.int32), params, max_query_len=tokens,
        max_seq_len=KEYS, out=out, kernels=kernels,
    )  # fmt: skip
    expected = value[needles].float().repeat_interleave(GROUP, 1)
    cosine = torch.nn.functional.cosine_similarity(out.float(), expected, dim=-1)
    return {
        "launch": ", ".join(sorted({type(launch).__name__ for launch in LAUNCHES.values()})),
        "queries": count, "found": float((cosine > 0.95).float().mean()),
        "least_cosine": float(cosine.min()),
    }  # fmt: skip


def all_rows() -> dict[str, tuple[str, int, str]]:
    """Name -> (format, head size, operation)."""
    found = [
        (name, size, operation)
        for name in FORMATS
        for size in ((128, 64) if name == "fp8_e4m3" else (128,))
        for operation, arguments in OPERATIONS.items()
        if not arguments.get("allow") or (name, size) == ("fp8_e4m3", 128)
    ]
    return {f"{row[0]} {row[1]} {row[2]}": row for row in found}


def measure(row: str) -> dict[str, Any]:
    """The result of one row."""
    name, size, operation = all_rows()[row]
    facts = {"format": name, "head_size": size, "keys": KEYS, "operation": operation}
    return {**facts, **retrieve(name, size, **OPERATIONS[operation])}


def main() -> int:
    """Run the chosen rows."""
    parser = rows.parser(__doc__)
    parser.add_argument("--processes", type=int, default=1, help="rows that run at the same time")
    options = parser.parse_args()
    return rows.run(options, all_rows(), measure, options.processes)


if __name__ == "__main__":
    sys.exit(main())
