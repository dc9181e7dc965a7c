"""P1, P2: a layout is an order in memory, never another shape."""

import itertools

import pytest
import torch

from attnlib.cache.layout import LAYOUTS, get_kv_cache_layout, negotiate_layout, set_kv_cache_layout
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import EnvironmentVariableError, LayoutMismatchError
from attnlib.spec import AttentionSpec


def _spec(head_size_v: int = 8, **changes) -> AttentionSpec:
    return AttentionSpec(
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        head_size_v=head_size_v,
        dtype=torch.float32,
        block_size=4,
        **changes,
    )


@pytest.fixture(autouse=True)
def _no_override():
    yield
    set_kv_cache_layout(None)


@pytest.mark.parametrize(("layout", "head_size_v"), list(itertools.product(LAYOUTS, (8, 5))))
def test_views_cover_the_pool_once(layout: str, head_size_v: int) -> None:
    """P1: keys and values have their logical shapes in every layout and do not overlap."""
    cache = PagedKVCache.allocate(_spec(head_size_v), 3, "cpu", layout)
    assert cache.key_cache.shape == (3, 4, 2, 8) and cache.value_cache.shape == (
        3,
        4,
        2,
        head_size_v,
    )
    assert cache.key_cache.stride(3) == cache.value_cache.stride(3) == 1
    count = cache.key_cache.numel() + cache.value_cache.numel()
    cache.key_cache.copy_(torch.arange(cache.key_cache.numel()).view_as(cache.key_cache))
    cache.value_cache.copy_(
        -1.0 - torch.arange(cache.value_cache.numel()).view_as(cache.value_cache)
    )
    pool = cache.key_cache.untyped_storage()
    assert pool.nbytes() == count * 4, "the allocation holds exactly the elements"
    assert cache.key_cache.flatten().tolist() == list(range(cache.key_cache.numel()))
    assert cache.value_cache.flatten().tolist() == [
        -1.0 - i for i in range(cache.value_cache.numel())
    ]
    assert PagedKVCache.from_views(cache.key_cache, cache.value_cache).layout == layout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stride_order_is_the_permutation_it_says(layout: str) -> None:
    """P2: allocating by `stride_order` gives the same strides as the layout (equal head sizes)."""
    logical, order = (2, 3, 4, 2, 8), LAYOUTS[layout].stride_order
    physical = torch.empty([logical[axis] for axis in order])
    view = physical.permute([order.index(axis) for axis in range(5)])
    k_strides, v_strides, offset = LAYOUTS[layout].strides(3, 4, 2, 8, 8)
    assert view[0].stride() == k_strides and view[1].stride() == v_strides
    assert view[1].storage_offset() == offset


def test_override_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLIB_KV_CACHE_LAYOUT", "hnd")
    assert get_kv_cache_layout() == "HND"
    assert PagedKVCache.allocate(_spec(), 1, "cpu").layout == "HND"
    set_kv_cache_layout("NHD_PACKED")
    assert PagedKVCache.allocate(_spec(), 1, "cpu").layout == "NHD_PACKED"
    assert PagedKVCache.allocate(_spec(), 1, "cpu", "NHD").layout == "NHD", "an argument wins"
    monkeypatch.setenv("ATTNLIB_KV_CACHE_LAYOUT", "NDH")
    set_kv_cache_layout(None)
    with pytest.raises(EnvironmentVariableError, match="ATTNLIB_KV_CACHE_LAYOUT='NDH'.*NHD_PACKED"):
        get_kv_cache_layout()


def test_negotiation_lists_all_demands() -> None:
    assert negotiate_layout([("a", ("HND", "NHD")), ("b", ("NHD", "HND"))]) == "HND"
    assert negotiate_layout([("a", ("ANY",)), ("b", ("HND",))]) == "HND"
    assert negotiate_layout([("a", ("NHD", "HND"))], requested="HND") == "HND"
    with pytest.raises(LayoutMismatchError, match="flash reads NHD; other reads HND"):
        negotiate_layout([("flash", ("NHD",)), ("other", ("HND",))])
    with pytest.raises(LayoutMismatchError, match="HND is requested, but flash reads NHD"):
        negotiate_layout([("flash", ("NHD",))], requested="HND")
    with pytest.raises(LayoutMismatchError, match="'XYZ' is unknown"):
        PagedKVCache.allocate(_spec(), 1, "cpu", "XYZ")


def test_mla_values_are_a_prefix_of_the_keys() -> None:
    """P1: K and V may alias."""
    spec = AttentionSpec(
        num_heads=4,
        num_kv_heads=1,
        head_size=8,
        head_size_v=6,
        dtype=torch.float32,
        block_size=4,
        use_mla=True,
    )
    cache = PagedKVCache.allocate(spec, 2, "cpu")
    cache.key_cache.normal_()
    assert cache.values_alias_keys and torch.equal(cache.value_cache, cache.key_cache[..., :6])
