"""The cache write of a plug-in backend on a GPU is the Triton kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.backends.attention_impl import AttentionImpl
from attnlib.cache.storage import PagedKVCache
from attnlib.ops.torch.cache_write import write_kv as reference_write
from attnlib.ops.triton.launch.cache import LAUNCHES
from tests.gpu.devices import needs_gpu, spec_of

pytestmark = [pytest.mark.gpu, needs_gpu]


class Plugin(AttentionImpl):
    """A backend that defines `forward` alone."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("stored", ["auto", "fp8_e4m3"])
def test_a_plug_in_writes_with_the_triton_kernel(stored: str) -> None:
    """P4: the slots hold what torch operations write."""
    spec = spec_of(kv_cache_dtype=stored)
    caches = [PagedKVCache.allocate(spec, 4, "cuda") for _ in range(2)]
    for cache in caches:
        for pages in (cache.key_cache, cache.value_cache):
            pages.view(torch.uint8).zero_()
    sizes = [(5, spec.num_kv_heads, size) for size in (spec.head_size, spec.head_size_v)]
    key, value = (torch.randn(size, device="cuda").to(spec.dtype) for size in sizes)
    slots = torch.tensor([17, -1, 3, 40, 0], device="cuda")
    LAUNCHES.clear()
    Plugin(spec).write_kv(key, value, caches[0], slots)
    assert LAUNCHES, "no Triton launch was prepared"
    expected = caches[1]
    views = (expected.key_cache, expected.value_cache)
    scales = {"k_scale": expected.k_scale, "v_scale": expected.v_scale}
    reference_write(key, value, *views, slots, **scales)
    for found, other in zip((caches[0].key_cache, caches[0].value_cache), views, strict=True):
        assert torch.equal(found.view(torch.uint8), other.view(torch.uint8))
