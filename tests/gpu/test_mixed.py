"""Mixed batches on Hopper: concurrent decode and prefill parts equal sequential ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.backends.triton.metadata import TritonMetadata
from attnlib.cache.storage import PagedKVCache
from attnlib.layer import Attention
from attnlib.spec import AttentionSpec
from tests.gpu.devices import backend_or_skip, batch_of, needs_gpu

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
        reason="no Hopper chip: one half after the other",
    ),
]

BATCHES: dict[str, tuple[list[int], list[int]]] = {
    "long-decodes": (
        [1] * 12 + [300, 77],
        [3000, 900, 4000, 513, 2000, 300, 3500, 700, 256, 1024, 2048, 4096, 300, 900],
    ),
    "verify-steps": ([4, 2, 8, 3, 1] + [500], [2000, 700, 900, 4000, 3000, 2500]),
    "longer-prefill": ([1] * 3 + [2000], [300, 400, 500, 2600]),
    "short-prefill": ([1] * 40 + [9], [1500 + 17 * i for i in range(40)] + [9]),
}
SPECS: dict[str, dict[str, Any]] = {
    "usual": {},
    "sinks-window": {"num_heads": 64, "head_size": 64, "has_sink": True, "sliding_window": 700},
    "wide-cap": {"num_heads": 16, "head_size": 256, "logits_soft_cap": 30.0, "block_size": 64},
    "mqa": {"num_kv_heads": 1, "num_heads": 8},
    "blocks-of-1": {"block_size": 1},
}


def _step(
    name: str, spec: AttentionSpec
) -> tuple[Attention, PagedKVCache, TritonMetadata, torch.Tensor]:
    backend = backend_or_skip("triton", spec)
    torch.manual_seed(0)
    query_lens, seq_lens = BATCHES[name]
    blocks = len(seq_lens) * -(-max(seq_lens) // spec.block_size)
    sinks = torch.randn(spec.num_heads, device="cuda") if spec.has_sink else None
    layer = Attention(spec, backend=backend, sinks=sinks, device="cuda")
    cache = PagedKVCache.allocate(spec, blocks, "cuda")
    cache.key_cache.normal_()
    cache.value_cache.normal_()
    metadata = backend.make_builder(spec, "cuda").build(
        0, batch_of(spec, query_lens, seq_lens, blocks, seed=0)
    )
    query = torch.randn(sum(query_lens), spec.num_heads, spec.head_size, device="cuda").to(
        spec.dtype
    )
    return layer, cache, metadata, query


def _attend(
    layer: Attention,
    cache: PagedKVCache,
    metadata: TritonMetadata,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    layer.impl.forward(query, cache, metadata, out, lse)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", SPECS)
def test_concurrent_parts_equal_sequential_parts(
    batch: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnlib.backends.triton import prepare
    from attnlib.ops.triton.launch.cache import LAUNCHES

    spec = AttentionSpec(
        **{
            "num_heads": 32,
            "num_kv_heads": 8,
            "head_size": 128,
            "dtype": torch.bfloat16,
            "block_size": 16,
            **SPECS[kind],
        }
    )
    layer, cache, metadata, query = _step(batch, spec)
    out, lse = (
        torch.full_like(query, float("nan")),
        torch.full(query.shape[:2], float("nan"), device="cuda"),
    )
    _attend(layer, cache, metadata, query, out, lse)
    plans = list(metadata.plans.values())
    assert plans and all(plan._launches.concurrent for plan in plans)

    with monkeypatch.context() as patched:
        patched.setattr(prepare, "can_run_concurrently", lambda *_: False)
        LAUNCHES.clear()
        metadata.plans.clear()
        sequential, sequential_lse = torch.empty_like(out), torch.empty_like(lse)
        _attend(layer, cache, metadata, query, sequential, sequential_lse)
    LAUNCHES.clear()
    metadata.plans.clear()
    torch.testing.assert_close(out.float(), sequential.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, sequential_lse, atol=1e-3, rtol=1e-3)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # The decodes of a step must not start before the prefills of the step before have finished.
        for _ in range(3):
            _attend(layer, cache, metadata, query, out, lse)
    first, first_lse = out.clone(), lse.clone()
    for _ in range(20):
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first) and torch.equal(lse, first_lse), (
            "equal bits, whichever part finishes first"
        )
    part = metadata.prefill_metadata
    assert part is not None and part.counters is not None and not part.counters.any(), (
        "the shared counter is reset"
    )


def test_both_parts_see_the_cache_write_before_them() -> None:
    """The prefill part waits for the cache write, but not for the decode part."""
    spec = AttentionSpec(
        num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, block_size=16
    )
    layer, cache, metadata, query = _step("long-decodes", spec)
    kept = cache.key_cache.clone(), cache.value_cache.clone()
    results = []
    for _ in range(2):
        key, value = (
            torch.randn(query.shape[0], 8, 128, device="cuda").to(spec.dtype) for _ in range(2)
        )
        graph = torch.cuda.CUDAGraph()
        layer(query, key, value, cache, metadata)
        with torch.cuda.graph(graph):
            together = layer(query, key, value, cache, metadata)
        for tensor, old in zip((cache.key_cache, cache.value_cache), kept, strict=True):
            tensor.copy_(old)
        graph.replay()
        torch.cuda.synchronize()
        out, lse = torch.empty_like(query), torch.empty(query.shape[:2], device="cuda")
        _attend(layer, cache, metadata, query, out, lse)  # all keys are written now
        assert torch.equal(out, together)
        results.append(out)
    assert not torch.equal(*results)
