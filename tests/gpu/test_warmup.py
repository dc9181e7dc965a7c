"""After `warmup`, no batch compiles a kernel."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import attnlib
from attnlib.backends.cascade.schedule import EVERY_PREFIX
from attnlib.cache.storage import PagedKVCache
from attnlib.layer import Attention
from attnlib.layer.warmup import warmup
from attnlib.layer.warmup_batches import new_tensors
from attnlib.metadata.shared_prefix import SharedPrefix
from attnlib.selection import merge_attention
from attnlib.testing.compilations import compiled_kernels
from attnlib.workspace import BatchLimits
from tests.gpu.devices import backend_or_skip, batch_of, needs_gpu, spec_of

pytestmark = [pytest.mark.gpu, needs_gpu]

LIMITS = BatchLimits(max_num_reqs=32, max_num_tokens=2048, max_seq_len=4096)


LATENTS = {
    "num_heads": 16, "num_kv_heads": 1, "head_size": 576, "head_size_v": 512, "use_mla": True,
    "block_size": 64,
}  # fmt: skip


@pytest.mark.parametrize("changes", [{"sliding_window": 1000}, {}, LATENTS], ids=str)
@torch.inference_mode()
def test_a_random_sweep_compiles_nothing(changes: dict[str, Any]) -> None:
    """500 random batches of decodes, verify steps, prefills and mixtures compile no kernel. Without
    a window, prefills of few query tokens over more than 2048 keys divide them."""
    pytest.importorskip("triton")
    spec = spec_of(needs_lse=True, **changes)
    backend = backend_or_skip("triton", spec)
    layer, cache = (
        Attention(spec, backend=backend, device="cuda"),
        PagedKVCache.allocate(spec, 9000, "cuda"),
    )
    builder = backend.make_builder(spec, "cuda", limits=LIMITS)
    warmup(layer, cache, LIMITS, builder=builder)
    with compiled_kernels() as compiled:
        for seed in range(500):
            common = _random_batch(spec, seed)
            new = new_tensors(spec, common.num_actual_tokens, cache.device, fused=True)
            layer(*new, cache, builder.build(0, common), seed % 2 == 0)
    torch.cuda.synchronize()
    assert not compiled, (
        f"{len(compiled)} kernels were compiled after warm-up, the first: {compiled[0].name}"
    )


def _random_batch(spec, seed):
    draw = random.Random(seed)
    decodes = draw.randint(0, 24)
    queries = [draw.choice((1, 1, 1, 2, 5, 8)) for _ in range(decodes)] + [
        draw.randint(9, 400) for _ in range(draw.randint(0 if decodes else 1, 3))
    ]
    sequences = [min(query + draw.randint(0, 3000), LIMITS.max_seq_len) for query in queries]
    common = batch_of(spec, queries, sequences, 9000, seed)
    table = torch.zeros(
        len(queries), LIMITS.max_seq_len // spec.block_size, dtype=torch.int32, device="cuda"
    )
    assert common.block_table_tensor is not None
    table[:, : common.block_table_tensor.shape[1]] = (
        common.block_table_tensor
    )  # the table of a runner has a fixed width
    return common.replace(block_table_tensor=table)


@torch.inference_mode()
def test_shared_prefixes_compile_nothing() -> None:
    """Random batches of requests that share a prefix: decodes, verification steps, prefills."""
    pytest.importorskip("triton")
    spec = spec_of()
    found = backend_or_skip("triton", spec)
    pair = merge_attention(found, found, EVERY_PREFIX)
    cache = PagedKVCache.allocate(spec, 9000, "cuda")
    layer = Attention(spec, backend=pair, device="cuda")
    builder = pair.make_builder(spec, "cuda", limits=LIMITS)
    warmup(layer, cache, LIMITS, builder=builder)
    draw, block = random.Random(5), spec.block_size
    with compiled_kernels() as compiled:
        for _ in range(60):
            requests = draw.randint(2, LIMITS.max_num_reqs)
            most = min(200, LIMITS.max_num_tokens // requests)
            query = draw.choice((1, 1, draw.randint(2, 8), most))
            prefix = draw.randint(1, 200) * block
            own = query + draw.randint(0, 500)
            columns = LIMITS.max_seq_len // block
            table = torch.arange(columns).expand(requests, -1).clone()
            table[:, prefix // block :] += 256 * torch.arange(1, requests + 1)[:, None]
            common = attnlib.CommonAttentionMetadata.from_lengths(
                [query] * requests, [prefix + own] * requests, table.int(), block, "cuda"
            )
            everyone = SharedPrefix(tuple(range(requests)), 0, prefix)
            metadata = builder.build(0, common.replace(shared_prefixes=(everyone,)))
            assert metadata.shared_prefixes
            size = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size
            fused = torch.randn(requests * query, size, dtype=spec.dtype, device="cuda")
            split = [spec.num_heads * spec.head_size, *[spec.num_kv_heads * spec.head_size] * 2]
            layer(*fused.split(split, dim=1), cache, metadata)
    torch.cuda.synchronize()
    assert not compiled, (
        f"{len(compiled)} kernels were compiled after warm-up, the first: {compiled[0].name}"
    )
