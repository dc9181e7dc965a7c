"""A block size that is known after the layer exists, and scales of one element."""

import pytest
import torch

import attnlib
from attnlib.backends.torch import TorchBackend
from attnlib.capabilities import Sizes
from attnlib.errors import ContractError, UnsupportedConfigError

SPEC = attnlib.AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, block_size=16
)
BACKENDS = ["torch", "prefill:torch,decode:triton"]


def _run(layer: attnlib.Attention, cache: attnlib.PagedKVCache) -> torch.Tensor:
    size = layer.spec.block_size
    rows = [list(range(4)), list(range(4, 8))]
    common = attnlib.CommonAttentionMetadata.from_lengths([1, 9], [size + 1, 9], rows, size, "cpu")
    torch.manual_seed(0)
    q, k, v = (torch.randn(10, heads, 16) for heads in (4, 2, 2))
    builder = layer.backend.make_builder(layer.spec, "cpu")
    out: torch.Tensor = layer(q, k, v, cache, builder.build(0, common))
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
def test_a_block_size_that_is_known_late(backend: str) -> None:
    """The layer is used with one block size, then with another; both results are right."""
    late = attnlib.Attention(SPEC, backend=backend, device="cpu")
    _run(late, attnlib.PagedKVCache.allocate(SPEC, 8, "cpu"))
    late.set_block_size(32)
    spec = SPEC.replace(block_size=32)
    assert late.spec == late.impl.spec == spec
    early = attnlib.Attention(spec, backend="torch", device="cpu")
    results = [_run(x, attnlib.PagedKVCache.allocate(spec, 8, "cpu")) for x in (late, early)]
    torch.testing.assert_close(*results)


def test_an_unsupported_block_size_changes_nothing() -> None:
    class Limited(TorchBackend):
        capabilities = TorchBackend.capabilities.__class__(
            **{**TorchBackend.capabilities.stated(), "block_sizes": Sizes(16, 16)}
        )

        @staticmethod
        def get_name() -> str:
            return "limited"

    layer = attnlib.Attention(SPEC, backend=Limited, device="cpu")
    with pytest.raises(UnsupportedConfigError, match="block_size=32 not supported") as caught:
        layer.set_block_size(32)
    assert [r.field for r in caught.value.rejections] == ["block_size"]
    with pytest.raises(ContractError, match="block_size=0"):
        layer.set_block_size(0)
    assert layer.spec == layer.impl.spec == SPEC


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_scale_of_one_element_is_a_scale_per_tensor(backend: str, num_kv_heads: int) -> None:
    """A float, a 0-d tensor and `[1]` give one result, from the layer and from the cache."""
    pytest.importorskip("triton")
    spec = SPEC.replace(kv_cache_dtype="fp8", num_kv_heads=num_kv_heads)
    results = []
    for scale in (0.25, torch.tensor(0.25), torch.tensor([0.25])):
        for of_layer, of_cache in ((scale, 1.0), (1.0, scale), (scale, torch.tensor([0.25]))):
            layer = attnlib.Attention(
                spec, backend=backend, device="cpu", k_scale=of_layer, v_scale=of_layer
            )
            cache = attnlib.PagedKVCache.allocate(
                spec, 8, "cpu", k_scale=of_cache, v_scale=of_cache
            )
            common = attnlib.CommonAttentionMetadata.from_lengths([2], [2], [[3]], 16, "cpu")
            torch.manual_seed(0)
            q, k, v = (torch.randn(2, heads, 16) for heads in (4, num_kv_heads, num_kv_heads))
            step = layer.backend.make_builder(spec, "cpu").build(0, common)
            results.append(layer(q, k, v, cache, step))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)
