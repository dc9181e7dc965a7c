"""ATTNLIB_VALIDATE=1 refuses one builder on two streams; steps with scales do not synchronize."""

from __future__ import annotations

import pytest
import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.debug.streams import check_stream
from attnlib.errors import ContractError
from attnlib.layer import Attention
from attnlib.metadata.common import CommonAttentionMetadata
from tests.gpu.devices import backend_or_skip, needs_gpu, spec_of

pytestmark = [pytest.mark.gpu, needs_gpu]


def _common(requests: int = 4, length: int = 4096) -> CommonAttentionMetadata:
    blocks = -(-length // 16)
    table = [[row * blocks + column for column in range(blocks)] for row in range(requests)]
    return CommonAttentionMetadata.from_lengths(
        [1] * requests, [length] * requests, table, 16, "cuda"
    )


def test_overlapping_streams_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that wait for each other are not."""
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    spec = spec_of()
    backend = backend_or_skip("triton", spec)
    layer = Attention(spec, backend=backend, device="cuda")
    builder = backend.make_builder(spec, "cuda")
    common = _common()
    cache = PagedKVCache.allocate(spec, 1024, "cuda")
    tensors = [
        torch.randn(4, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)
    ]
    metadata = builder.build(0, common)
    if metadata.workspace is None and metadata.counters is None:
        pytest.skip("this batch uses no workspace")
    layer(*tensors, cache, metadata)
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        finish = check_stream(metadata, tensors[0].device)
        assert finish is not None
        torch.cuda._sleep(2_000_000_000)
        finish()  # as after launches that are still running
    with torch.cuda.stream(second), pytest.raises(ContractError, match="one builder per stream"):
        layer(*tensors, cache, metadata)
    second.wait_stream(first)
    with torch.cuda.stream(second):
        layer(*tensors, cache, metadata)
    torch.cuda.synchronize()


def test_steps_with_calculated_scales_do_not_synchronize() -> None:
    """The first step does: the host must know whether it wrote anything to compute scales from."""
    spec = spec_of(kv_cache_dtype="fp8")
    backend = backend_or_skip("triton", spec)
    layer = Attention(spec, backend=backend, device="cuda")
    cache = PagedKVCache.allocate(spec, 1024, "cuda")
    metadata = backend.make_builder(spec, "cuda").build(0, _common())
    metadata.enable_kv_scales_calculation = True
    q, k, v = (
        500 * torch.randn(4, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)
    )
    layer(q, k, v, cache, metadata)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(q, 2 * k, v, cache, metadata)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(cache.k_scale) == pytest.approx(float(k.abs().max()) / 448)
