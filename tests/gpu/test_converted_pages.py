"""The Hopper prefill over copies of pages with scales equals the torch backend."""

from __future__ import annotations

import pytest
import torch

import attnlib
from attnlib.kv_dtype import PAGE_FORMATS
from tests.gpu.devices import needs_gpu

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
        reason="needs compute capability 9.0",
    ),
]

DEVICE = "cuda"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(PAGE_FORMATS))
def test_prefill_over_copies(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers of three steps: launched by Triton, then directly."""
    from attnlib.ops.triton.hopper import sizes
    from attnlib.ops.triton.launch.cache import LAUNCHES

    monkeypatch.setattr(sizes, "COPIED_TOKENS", 1)
    LAUNCHES.clear()
    torch.manual_seed(0)
    spec = attnlib.AttentionSpec(
        num_heads=16, num_kv_heads=4, head_size=128, dtype=dtype, kv_cache_dtype=name, block_size=16
    )
    query_lens, seq_lens = [300, 9, 77, 1], [1000, 9, 2077, 640]
    table = torch.randperm(4 * 130).int().view(4, -1)
    slots = torch.arange(4 * 130 * 16, device=DEVICE)
    layers = {
        backend: attnlib.Attention(spec, backend=backend, device=DEVICE)
        for backend in ("torch", "triton")
    }
    for _ in range(3):
        common = attnlib.CommonAttentionMetadata.from_lengths(
            query_lens, seq_lens, table, 16, DEVICE
        )
        built = {
            backend: layer.backend.make_builder(spec, DEVICE).build(0, common)
            for backend, layer in layers.items()
        }
        for _ in range(2):
            cache = attnlib.PagedKVCache.allocate(spec, 4 * 130, DEVICE)
            keys, values = (
                torch.randn(len(slots), 4, 128, device=DEVICE).mul(
                    torch.rand(len(slots), 4, 1, device=DEVICE) * 2
                )
                for _ in range(2)
            )
            layers["torch"].impl.write_kv(keys.to(dtype), values.to(dtype), cache, slots)
            query = torch.randn(sum(query_lens), 16, 128, device=DEVICE, dtype=dtype)
            expected, got = (
                layer(query, None, None, cache, built[backend]).float()
                for backend, layer in layers.items()
            )
            error = (got - expected).norm() / expected.norm()
            assert error < (8e-3 if dtype == torch.bfloat16 else 2e-3), error
    kinds = {type(x.prefill).__name__ for x in LAUNCHES.values() if hasattr(x, "of_layer")}
    assert "ConvertedPrefill" in kinds
    LAUNCHES.clear()
