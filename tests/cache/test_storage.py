"""Construction of caches: sizes, existing views, scales; copies between caches."""

import pytest
import torch

import attnlib
from attnlib.cache.storage import PagedKVCache, Scale
from attnlib.errors import ContractError
from attnlib.spec import AttentionSpec

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=8, dtype=torch.float32, block_size=4)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (torch.zeros(2, 4, 2), torch.zeros(2, 4, 2, 8), r"key_cache has shape \(2, 4, 2\).*\[P1\]"),
        (torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 3, 8), "must agree in blocks"),
        (
            torch.zeros(2, 4, 2, 8),
            torch.zeros(2, 4, 2, 8, dtype=torch.float16),
            "must agree in dtype",
        ),
        (
            torch.zeros(2, 4, 8, 2).transpose(2, 3),
            torch.zeros(2, 4, 2, 8),
            "the last stride must be 1",
        ),
    ],
)
def test_existing_views_are_checked(key: torch.Tensor, value: torch.Tensor, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        PagedKVCache.from_views(key, value)


def test_scales_are_checked() -> None:
    """M9: per tensor or per KV head, float32."""
    views = torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2, 8)
    stored = [view.to(torch.float8_e4m3fn) for view in views]
    assert PagedKVCache.from_views(stored[0], stored[1], k_scale=2).k_scale == 2.0
    for scale in (2, torch.ones(())):
        with pytest.raises(ContractError, match="k_scale=.* of a cache of torch.float32: writes"):
            PagedKVCache.from_views(*views, k_scale=scale)
    with pytest.raises(ContractError, match=r"k_scale is torch.float32 \(3,\).*\[2\] \(KV heads\)"):
        PagedKVCache.from_views(*stored, k_scale=torch.ones(3))


def test_invalid_allocations() -> None:
    spec = AttentionSpec(num_heads=4, head_size=8, dtype=torch.float32)
    with pytest.raises(ContractError, match="num_blocks=0"):
        PagedKVCache.allocate(spec, 0, "cpu")
    with pytest.raises(ContractError, match="attn_type=encoder_only keeps no keys: call"):
        PagedKVCache.allocate(spec.replace(attn_type="encoder_only"), 2, "cpu")


def _quantized(k_scale: Scale, v_scale: Scale = 1.0) -> PagedKVCache:
    spec = AttentionSpec(
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        dtype=torch.float32,
        block_size=4,
        kv_cache_dtype="fp8",
    )
    cache = PagedKVCache.allocate(spec, 3, "cpu", k_scale=k_scale, v_scale=v_scale)
    cache.key_cache.copy_(torch.randn(cache.key_cache.shape).to(cache.dtype))
    return cache


@pytest.mark.parametrize(
    ("source", "destination"),
    [(0.01, 1.0), (torch.tensor(0.5), 0.25), (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))],
)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_quantized_blocks_do_not_move_to_another_scale(
    name: str, source: Scale, destination: Scale
) -> None:
    """M9: stored bytes have another value under another scale."""
    scales = {"k_scale": 1.0, "v_scale": 1.0}
    first, second = (
        _quantized(**{**scales, name: source}),
        _quantized(**{**scales, name: destination}),
    )
    before = second.key_cache.float().clone()
    with pytest.raises(ContractError, match=rf"{name} is .* in the source and .*\[M9\]"):
        first.swap_blocks(second, [(0, 1)])
    assert torch.equal(second.key_cache.float(), before)


@pytest.mark.parametrize(
    ("source", "destination"), [(0.5, torch.tensor(0.5)), (torch.tensor([2.0, 2.0]), 2.0)]
)
def test_quantized_blocks_move_between_equal_scales(source: Scale, destination: Scale) -> None:
    """Scales are compared by value, whatever their type."""
    first, second = _quantized(source), _quantized(destination)
    first.swap_blocks(second, [(0, 1)])
    assert torch.equal(second.key_cache[1].float(), first.key_cache[0].float())


def test_a_view_that_does_not_fit_the_other_one_is_refused_at_its_next_use() -> None:
    """P1: both views may be replaced one after the other, so the pair is checked when it is used,
    before anything is written."""
    layer = attnlib.Attention(SPEC, backend="torch", device="cpu")
    cache = PagedKVCache.allocate(SPEC, 4, "cpu")
    batch = attnlib.CommonAttentionMetadata.from_lengths([2], [2], [[3]], SPEC.block_size, "cpu")
    metadata = layer.backend.make_builder(SPEC, "cpu").build(0, batch)
    q = torch.randn(2, SPEC.num_heads, SPEC.head_size)
    kv = torch.randn(2, SPEC.num_kv_heads, SPEC.head_size)
    layer(q, kv, kv, cache, metadata)
    before = cache.key_cache.clone()
    cache.value_cache = cache.value_cache[:3]
    for use in (
        lambda: layer(q, 2 * kv, kv, cache, metadata),
        lambda: cache.copy_blocks([(0, 3)]),
        lambda: cache.zero_blocks([3]),
        lambda: cache.nbytes,
    ):
        with pytest.raises(ContractError, match="must agree in blocks"):
            use()
    assert torch.equal(cache.key_cache, before)
    cache.key_cache = cache.key_cache[:3]
    cache.copy_blocks([(0, 2)])
