"""torch.compile with fullgraph on a GPU: every backend equals eager for several batches."""

from __future__ import annotations

import pytest
import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.layer import Attention
from tests.gpu.devices import ON_GPU, backend_or_skip, batch_of, needs_gpu, spec_of

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.mark.parametrize("name", [*ON_GPU, "torch"])
@torch.inference_mode()
def test_fullgraph_equals_eager(name: str) -> None:
    torch._dynamo.reset()
    spec = spec_of(needs_lse=True)
    backend = backend_or_skip(name, spec)
    layer, builder = (
        Attention(spec, backend=backend, device="cuda"),
        backend.make_builder(spec, "cuda"),
    )
    weight = (
        torch.randn(
            256,
            (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size,
            dtype=spec.dtype,
            device="cuda",
        )
        / 16
    )

    def block(hidden, cache, metadata):
        sizes = [spec.num_heads * spec.head_size, *[spec.num_kv_heads * spec.head_size] * 2]
        out, lse = layer(*(hidden @ weight).split(sizes, dim=-1), cache, metadata, return_lse=True)
        return out * 2 + 1, lse.exp()

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    caches = [PagedKVCache.allocate(spec, 64, "cuda") for _ in range(2)]
    for seed, (queries, sequences) in enumerate(
        (([30, 9], [30, 40]), ([1, 1, 1], [50, 3, 77]), ([1, 17], [20, 17]))
    ):
        step = builder.build(0, batch_of(spec, queries, sequences, 64, seed))
        hidden = torch.randn(sum(queries), 256, dtype=spec.dtype, device="cuda")
        for actual, expected in zip(
            compiled(hidden, caches[0], step), block(hidden, caches[1], step), strict=True
        ):
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
