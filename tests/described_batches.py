"""The kernels of random batches on described GPUs, next to those of a warm-up; nothing is compiled.

    python -m tests.described_batches

Batches are of all lengths within the limits: decodes, verification steps, prefills whose keys are
divided or not, mixtures, and captured batches. The last line is a JSON object: kind of layer ->
names of the kernels that the batches use, and of those that the warm-up lacks.
"""

from __future__ import annotations

import json
import logging
import math
import random
from typing import Any

import torch

from attnlib.ahead_of_time import DescribedLayer, DescribedServer, needed_kernels
from attnlib.backends.triton.described import DescribedTritonBackend
from attnlib.cache.storage import PagedKVCache
from attnlib.device import resolve_device
from attnlib.layer import Attention
from attnlib.layer.warmup_batches import new_tensors
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.ops.triton.launch.described import NeededKernel, described_gpu
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits

__all__ = ["KINDS"]

LIMITS = BatchLimits(max_num_reqs=16, max_num_tokens=1024, max_seq_len=100_000)
OTHER_LIMITS = {
    "many decodes": BatchLimits(max_num_reqs=160, max_num_tokens=1024, max_seq_len=100_000),
    "long prefills": BatchLimits(max_num_reqs=16, max_num_tokens=4096, max_seq_len=100_000),
    "one request": BatchLimits(max_num_reqs=1, max_num_tokens=1024, max_seq_len=8192),
}
LATENTS: dict[str, Any] = {
    "num_kv_heads": 1,
    "head_size": 576,
    "head_size_v": 512,
    "use_mla": True,
    "block_size": 64,
}
WIDE: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    # From 4096 query rows on, tiles have three consumers.
    "two tiles": ("H100", {"num_heads": 32, "num_kv_heads": 4, "head_size": 64}),
    "one KV head": (
        "H100",
        {"num_heads": 8, "num_kv_heads": 1, "head_size": 64, "needs_lse": True},
    ),
    "portable": ("sm_80", {"num_heads": 8, "num_kv_heads": 2, "head_size": 64}),
    "16 latent heads": ("H100", {"num_heads": 16, **LATENTS}),
    "128 latent heads": ("H100", {"num_heads": 128, **LATENTS}),
    # Decodes rotate in their kernels, beside prefills in other launches.
    "rotated": (
        "H100",
        {
            "num_heads": 32,
            "num_kv_heads": 8,
            "head_size": 128,
            "kv_cache_dtype": "int8_per_token_head",
            "kv_rotation": "hadamard",
        },
    ),
    # Tiles depend on the latents of a multiprocessor.
    "16 float8 latent heads": ("H100", {"num_heads": 16, **LATENTS, "kv_cache_dtype": "fp8"}),
    # Long chunks read copies, unless their keys are too many.
    "float8": ("H100", {**WIDE, "kv_cache_dtype": "fp8"}),
    "float8, blocks of one": ("H100", {**WIDE, "kv_cache_dtype": "fp8", "block_size": 1}),
    # Eight decodes for each multiprocessor have another tile beside a prefill than alone.
    "float8, many decodes": ("H100", {**WIDE, "kv_cache_dtype": "fp8"}),
    "mxfp4": ("H100", {**WIDE, "kv_cache_dtype": "mxfp4"}),
    # Portable prefills do not run beside decodes, whose splits are then combined in their kernel
    # from 16 requests on: 9 to 15 need another kernel.
    "int8, many decodes": (
        "H100",
        {**WIDE, "head_size": 64, "kv_cache_dtype": "int8_per_token_head"},
    ),
    # Groups of 12 have work tiles of one head, and decodes beside them few CTAs.
    "float8, long prefills": (
        "H100",
        {"num_heads": 24, "num_kv_heads": 2, "head_size": 128, "kv_cache_dtype": "fp8"},
    ),
    # Several tokens of up to 32 requests have a tile of their own beside a prefill.
    "window, many decodes": (
        "H100",
        {"num_heads": 16, "num_kv_heads": 8, "head_size": 128, "sliding_window": 128},
    ),
    # No prefill has a decode before it.
    "one request": ("H100", {"num_heads": 10, "num_kv_heads": 2, "head_size": 80}),
}
DRAWS = 300


def batch_of(draw: random.Random, limits: BatchLimits) -> list[int]:
    """Query lengths."""
    kind = draw.choice(("decodes", "prefills", "mixed"))
    queries, longest = [], math.log2(limits.max_num_tokens) - 0.5
    if kind != "prefills":
        lengths = draw.choice(((1,), (1, 1, 1, 2, 3, 5, 8)))
        count = draw.randint(1, max(1, limits.max_num_reqs - 3))
        queries += [draw.choice(lengths) for _ in range(count)]
    if kind != "decodes":
        queries += [int(2 ** draw.uniform(3.2, longest)) for _ in range(draw.choice((1, 1, 2, 3)))]
    while sum(queries) > limits.max_num_tokens or len(queries) > limits.max_num_reqs:
        queries.pop()
    return queries


def used_kernels(spec: AttentionSpec, server: DescribedServer) -> list[NeededKernel]:
    """The kernels of random batches."""
    found: list[NeededKernel] = []
    draw, device = random.Random(0), torch.device("cpu")
    with described_gpu(server.chip(), lambda kernel, compile: found.append(kernel)):
        layer = Attention(spec, backend=DescribedTritonBackend, device="cpu")
        cache = PagedKVCache.allocate(spec, 2, "cpu")
        builder = layer.backend.make_builder(spec, device, limits=server.limits)
        for _ in range(DRAWS):
            queries = batch_of(draw, server.limits)
            bound = min(int(2 ** draw.uniform(4, 16.6)), server.limits.max_seq_len)
            bound = max(*queries, 1, bound)
            table = torch.zeros(
                len(queries), -(-server.limits.max_seq_len // spec.block_size)
            ).int()
            batch = (queries, queries, table, spec.block_size, device)
            common = CommonAttentionMetadata.from_lengths(*batch, max_seq_len=bound)
            metadata = (
                builder.build_for_cudagraph_capture(common)
                if draw.random() < 0.2
                else builder.build(0, common)
            )
            lse = spec.needs_lse and draw.random() < 0.5
            layer(*new_tensors(spec, sum(queries), device, True), cache, metadata, lse)
    return found


def main() -> None:
    """Print the names."""
    logging.disable(logging.WARNING)
    result = {}
    for kind, (device, sizes) in KINDS.items():
        spec = AttentionSpec(**{"dtype": torch.bfloat16, "block_size": 16, **sizes})
        limits = OTHER_LIMITS.get(kind.split(", ")[-1], LIMITS)
        server = DescribedServer(resolve_device(device), limits)
        known = {kernel.key for kernel in needed_kernels(server, [DescribedLayer(spec)])}
        with torch.no_grad():
            used = used_kernels(spec, server)
        lacking = [kernel.name for kernel in used if kernel.key not in known]
        result[kind] = {"used": sorted(kernel.name for kernel in used), "lacking": lacking}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
