"""`flash_attn_with_kvcache`: appends and decodes back to back, whose launches overlap (PDL)."""

from __future__ import annotations

import pytest
import torch

import attnlib
from attnlib.compat import flash_attn_with_kvcache
from tests.gpu.devices import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

STEPS, HEADS, KV_HEADS, SIZE = 48, 32, 8, 128


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("requests", "length"), [(1, 1000), (8, 200), (200, 60)])
def test_each_decode_sees_the_token_appended_before_it(
    graph: bool, requests: int, length: int
) -> None:
    """Each query comes from the output before, so no launch may start its work too early: outputs
    and caches have the bits of calls with a synchronization between them."""
    torch.manual_seed(0)
    columns = -(-(length + STEPS) // 16)
    shape = (requests * columns, 16, KV_HEADS, SIZE)
    caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    table = torch.randperm(shape[0], device="cuda").view(requests, columns).int()
    first = torch.randn(requests, 1, HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    lens = torch.empty(requests, device="cuda", dtype=torch.int32)

    def steps(caches: list[torch.Tensor], wait: bool) -> torch.Tensor:
        lens.fill_(length)
        query = first
        for _ in range(STEPS):
            key, value = query[:, :, :KV_HEADS], query[:, :, -KV_HEADS:]
            out = flash_attn_with_kvcache(
                query, *caches, key, value, cache_seqlens=lens, block_table=table, causal=True
            )
            query = out + first
            lens.add_(1)
            if wait:
                torch.cuda.synchronize()
        return query

    with attnlib.use_backend("triton"), torch.no_grad():
        expected_caches = [x.clone() for x in caches]
        expected = steps(expected_caches, wait=True)
        if graph:
            recorded, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            content = [x.clone() for x in caches]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                steps(content, wait=False)  # launches of this stream are made before the capture
            torch.cuda.synchronize()
            with torch.cuda.graph(recorded):
                result = steps(content, wait=False)
            for _ in range(3):
                for x, y in zip(content, caches, strict=True):
                    x.copy_(y)
                recorded.replay()
        else:
            content = [x.clone() for x in caches]
            result = steps(content, wait=False)
        torch.cuda.synchronize()
    assert torch.equal(result, expected)
    for x, y in zip(content, expected_caches, strict=True):
        assert torch.equal(x, y)
