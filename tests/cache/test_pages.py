"""P13: pages that hold elements and scales."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import attnlib
from attnlib.cache.block_size import split_blocks
from attnlib.cache.pages import PAGE_LAYOUTS, page_sizes
from attnlib.errors import ContractError, LayoutMismatchError
from attnlib.kv_dtype import PAGE_FORMATS

SPEC = attnlib.AttentionSpec(
    num_heads=6, num_kv_heads=3, head_size=64, head_size_v=32, dtype=torch.float32,
    kv_cache_dtype="int8_per_token_head", block_size=5,
)  # fmt: skip
NAMES = tuple(PAGE_FORMATS)


def _filled(spec: attnlib.AttentionSpec, blocks: int = 4) -> attnlib.PagedKVCache:
    cache = attnlib.PagedKVCache.allocate(spec, blocks, "cpu")
    torch.manual_seed(0)
    size = spec.block_size * blocks
    key, value = torch.randn(size, 3, 64), torch.randn(size, 3, 32)
    attnlib.Attention(spec, backend="torch", device="cpu").impl.write_kv(
        key, value, cache, torch.arange(size)
    )
    return cache


@pytest.mark.parametrize("layout", PAGE_LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_page_are_disjoint_and_aligned(name: str, layout: str) -> None:
    spec = SPEC.replace(kv_cache_dtype=name)
    cache = attnlib.PagedKVCache.allocate(spec, 3, "cpu", layout)
    assert cache.pages is not None and cache.layout == layout
    sizes = page_sizes((spec.kv_format, spec.value_format), 5, 3, 64, 32, layout)
    assert cache.pages.shape == (3, sizes.num_bytes) and sizes.num_bytes % 16 == 0
    assert sizes.row or not any(part % 16 for part in sizes)
    assert sizes.num_bytes - spec.kv_bytes_per_token * 5 < 4 * 16
    seen = torch.zeros_like(cache.pages)
    for view in (cache.key_cache, cache.value_cache, cache.k_scale, cache.v_scale):
        assert isinstance(view, torch.Tensor) and view.shape[:3] == (3, 5, 3)
        cache.pages.zero_()
        raw = view.view(torch.uint8) if view.element_size() == 1 else view
        raw.fill_(255 if raw.dtype is torch.uint8 else float("nan"))
        seen += (cache.pages != 0).to(torch.uint8)
    assert int(seen.max()) == 1, "parts overlap"
    heads_first = layout != "NHD_INTERLEAVED"
    assert (cache.key_cache.stride(1) < cache.key_cache.stride(2)) == heads_first


@pytest.mark.parametrize(
    ("sizes", "row"),
    [
        (("int8_per_token_head", 64, 64), 136), (("int4_per_group", 128, 128), 144),
        (("nvfp4", 64, 64), 72), (("mxfp4", 32, 32), 34),
        (("int4_per_group", 8, 16), 32),  # 12 bytes of elements; scales start at 16
        (("nvfp4", 16, 32), 28),  # 27 bytes, and words of two
    ],
)  # fmt: skip
def test_a_row_has_the_bytes_of_a_head(sizes: tuple[str, int, int], row: int) -> None:
    """HND_ROWS: the bytes of a head of a token follow each other: memory can be cut by heads."""
    name, size, size_v = sizes
    fields = {"kv_cache_dtype": name, "head_size": size, "head_size_v": size_v}
    cache = attnlib.PagedKVCache.allocate(SPEC.replace(**fields), 2, "cpu", "HND_ROWS")
    assert cache.pages is not None and cache.pages.shape[1] == -(-15 * row // 16) * 16
    assert cache.key_cache[0, 1, 0].data_ptr() - cache.key_cache.data_ptr() == row
    assert cache.value_cache[0, 0, 1].data_ptr() - cache.value_cache.data_ptr() == 5 * row
    for scales in (cache.k_scale, cache.v_scale):
        assert isinstance(scales, torch.Tensor)
        together = PAGE_FORMATS[name].groups_per_head * scales.element_size()
        assert (scales[0, 1, 1].data_ptr() - cache.pages.data_ptr()) % max(1, together) == 0
    cache.pages.copy_(torch.arange(cache.pages.numel()).view_as(cache.pages) % 251)
    memory = torch.zeros(2, -(-5 * row // 16) * 16, dtype=torch.uint8)  # of the rank of one head
    memory[:, : 5 * row] = cache.pages[:, 5 * row : 10 * row]
    part = SPEC.replace(**fields, num_heads=2, num_kv_heads=1)
    cut = attnlib.PagedKVCache.from_pages(memory, part, "HND_ROWS")
    for mine, whole in zip(cut.block_views, cache.block_views, strict=True):
        assert torch.equal(_as_bytes(mine), _as_bytes(whole[:, :, 1:2]))


def _as_bytes(view: torch.Tensor) -> torch.Tensor:
    return view.contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_a_page_are_the_block(name: str) -> None:
    """Copied bytes, `copy_blocks`, `swap_blocks`, pickles and copies carry the scales along."""
    spec = SPEC.replace(kv_cache_dtype=name)
    cache = _filled(spec)
    assert cache.pages is not None
    pool = torch.zeros_like(cache.pages)
    pool[[2, 0]] = cache.pages[[1, 3]]
    moved = attnlib.PagedKVCache.from_pages(pool, spec)
    for mine, theirs in ((2, 1), (0, 3)):
        for view in ("key_cache", "value_cache", "k_scale", "v_scale"):
            first, second = getattr(moved, view)[mine], getattr(cache, view)[theirs]
            assert torch.equal(first.float(), second.float()), view
    copied = copy.deepcopy(cache)
    copied.copy_blocks([(1, 2), (3, 0)])
    assert torch.equal(copied.pages[[2, 0]], pool[[2, 0]])
    other = attnlib.PagedKVCache.allocate(spec, 5, "cpu", "NHD_INTERLEAVED")
    cache.swap_blocks(other, [(1, 4)])
    assert torch.equal(other.k_scale[4], cache.k_scale[1])
    assert torch.equal(other.key_cache[4].float(), cache.key_cache[1].float())
    cache.zero_blocks([1])
    assert not cache.pages[1].any() and cache.pages[2].any()
    again = pickle.loads(pickle.dumps(cache))
    assert torch.equal(again.pages, cache.pages) and again.page_format == cache.page_format
    again.k_scale.fill_(2.0)
    assert not torch.equal(again.pages, cache.pages), "views and pages share memory"


def test_what_is_refused() -> None:
    cache = attnlib.PagedKVCache.allocate(SPEC, 4, "cpu")
    with pytest.raises(ContractError, match="computes a scale for each token and head: pass no"):
        attnlib.PagedKVCache.allocate(SPEC, 4, "cpu", k_scale=0.5)
    with pytest.raises(ContractError, match="k_scale is 0.5 .* has its scales in the page"):
        cache.k_scale = 0.5
    with pytest.raises(LayoutMismatchError, match="'NHD' is not a layout of int8_per"):
        attnlib.PagedKVCache.allocate(SPEC, 4, "cpu", "NHD")
    with pytest.raises(LayoutMismatchError, match="'HND_ROWS' is unknown, or one of pages with"):
        attnlib.PagedKVCache.allocate(SPEC.replace(kv_cache_dtype="auto"), 4, "cpu", "HND_ROWS")
    with pytest.raises(ContractError, match="must be uint8 .blocks, at least 1568"):
        attnlib.PagedKVCache.from_pages(torch.zeros(4, 100, dtype=torch.uint8), SPEC)
    with pytest.raises(ContractError, match="must start at multiples of 16 bytes"):
        pool = torch.zeros(4, 1700, dtype=torch.uint8)
        attnlib.PagedKVCache.from_pages(pool, SPEC)
    with pytest.raises(ContractError, match="has no scales in the page: use allocate"):
        pool = torch.zeros(4, 1700, dtype=torch.uint8)
        attnlib.PagedKVCache.from_pages(pool, SPEC.replace(kv_cache_dtype="fp8"))
    with pytest.raises(LayoutMismatchError, match="hold elements and scales and cannot be split"):
        split_blocks(cache, 1)
    with pytest.raises(ContractError, match="page_formats is .*fp8_per_token_head"):
        fp8 = attnlib.PagedKVCache.allocate(SPEC.replace(kv_cache_dtype=NAMES[1]), 4, "cpu")
        fp8.swap_blocks(attnlib.PagedKVCache.allocate(SPEC.replace(kv_cache_dtype="fp8"), 4), [])


def test_a_layer_refuses_scales_and_other_caches() -> None:
    with pytest.raises(ContractError, match="k_scale is given, but kv_cache_dtype=int8_per_token"):
        attnlib.Attention(SPEC, backend="torch", device="cpu", k_scale=0.5)
    layer = attnlib.Attention(SPEC, backend="torch", device="cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths([1], [1], [[0]], 5, "cpu")
    step = layer.backend.make_builder(SPEC, "cpu").build(0, common)
    step.enable_kv_scales_calculation = True  # nothing to calculate
    q, k, v = torch.randn(1, 6, 64), torch.randn(1, 3, 64), torch.randn(1, 3, 32)
    cache = attnlib.PagedKVCache.allocate(SPEC, 4, "cpu")
    scales = cache.k_scale
    layer(q, k, v, cache, step)
    assert cache.k_scale is scales and layer.k_scale == 1.0
    other = attnlib.PagedKVCache.allocate(SPEC.replace(kv_cache_dtype=NAMES[1]), 4, "cpu")
    with pytest.raises(ContractError, match="stores fp8_per_token_head, the spec says int8_per_to"):
        layer(q, k, v, other, step)
    assert not other.pages.any()


def test_views_with_separate_scales() -> None:
    """Rows that end with their scale, as in vLLM's padded heads, are views like any others."""
    rows = torch.zeros(4, 5, 3, 2, 44, dtype=torch.uint8)
    key, value = (rows[..., side, :40].view(torch.int8) for side in (0, 1))
    scales = [rows[..., side, 40:].view(torch.float32) for side in (0, 1)]
    cache = attnlib.PagedKVCache.from_views(key, value, k_scale=scales[0], v_scale=scales[1])
    assert cache.page_format is PAGE_FORMATS["int8_per_token_head"] and cache.pages is None
    spec = SPEC.replace(head_size=40, head_size_v=40)
    layer = attnlib.Attention(spec, backend="torch", device="cpu")
    new = torch.randn(20, 3, 40)
    layer.impl.write_kv(new, -new, cache, torch.arange(20))
    back = cache.key_cache.float() * cache.k_scale
    assert (back.reshape(20, 3, 40) - new).abs().max() < new.abs().max() / 200
