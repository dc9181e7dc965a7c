"""Caches of other engines as views: attention through them equals attention over an NHD cache."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attnlib
from attnlib.errors import ContractError

B, N, H, D = 6, 16, 2, 32
SPEC = attnlib.AttentionSpec(
    num_heads=4, num_kv_heads=H, head_size=D, dtype=torch.float32, block_size=N
)
Made = tuple[attnlib.PagedKVCache, list[torch.Tensor]]
"""A cache and the engine's allocations that it views."""


def _vllm_outer() -> Made:
    memory = torch.zeros(2, B, N, H, D)
    return attnlib.PagedKVCache.from_vllm(memory), [memory]


def _vllm_inner() -> Made:
    memory = torch.zeros(B, 2, N, H, D)
    return attnlib.PagedKVCache.from_vllm(memory), [memory]


def _vllm_inner_hnd() -> Made:
    memory = torch.zeros(B, 2, H, N, D)
    return attnlib.PagedKVCache.from_vllm(memory.transpose(2, 3)), [memory]


def _vllm_packed_hnd() -> Made:
    memory = torch.zeros(B, H, N, 2 * D)
    return attnlib.PagedKVCache.from_vllm(memory), [memory]


def _vllm_packed_nhd() -> Made:
    memory = torch.zeros(B, N, H, 2 * D)
    return attnlib.PagedKVCache.from_vllm(memory.transpose(1, 2)), [memory]


def _sglang() -> Made:
    memory = [torch.zeros((B - 1) * N + N, H, D) for _ in range(2)]
    return attnlib.PagedKVCache.from_sglang(*memory, page_size=N), memory


def _sglang_partial_page() -> Made:
    memory = [torch.zeros(B * N + 3, H, D) for _ in range(2)]
    return attnlib.PagedKVCache.from_sglang(*memory, page_size=N), memory


def _flashinfer_nhd() -> Made:
    memory = torch.zeros(B, 2, N, H, D)
    return attnlib.PagedKVCache.from_flashinfer(memory), [memory]


def _flashinfer_hnd() -> Made:
    memory = torch.zeros(B, 2, H, N, D)
    return attnlib.PagedKVCache.from_flashinfer(memory, "HND"), [memory]


def _flashinfer_pair() -> Made:
    memory = [torch.zeros(B, H, N, D) for _ in range(2)]
    return attnlib.PagedKVCache.from_flashinfer((memory[0], memory[1]), "HND"), memory


def _tensorrt_buffer() -> Made:
    memory = torch.zeros(B, 2, N, H, D)
    return attnlib.PagedKVCache.from_tensorrt_llm(memory, "NHD"), [memory]


def _tensorrt_pool(kv_layout: str) -> Made:
    memory = torch.zeros(B, 3, 2, N * H * D)  # three layers
    cache = attnlib.PagedKVCache.from_tensorrt_llm(
        memory[:, 1], kv_layout, num_kv_heads=H, head_size=D
    )
    return cache, [memory]


def _transformers_517() -> Made:
    memory = [torch.zeros(B * N, H, D) for _ in range(2)]
    paged = SimpleNamespace(
        layer_index_to_group_indices={3: (0, 1)},
        sliding_windows={3: 1},
        key_cache=[None, memory[0]],
        value_cache=[None, memory[1]],
        block_size=N,
    )
    return attnlib.PagedKVCache.from_transformers(paged, 3), memory


CASES: dict[str, tuple[Callable[[], Made], str | None]] = {
    "vllm [2, B, N, H, D]": (_vllm_outer, "NHD"),
    "vllm [B, 2, N, H, D]": (_vllm_inner, "NHD_INTERLEAVED"),
    "vllm [B, 2, N, H, D] in HND order": (_vllm_inner_hnd, "HND_INTERLEAVED"),
    "vllm packed HND": (_vllm_packed_hnd, "HND_PACKED"),
    "vllm packed NHD": (_vllm_packed_nhd, "NHD_PACKED"),
    "sglang": (_sglang, "NHD"),
    "sglang with rows past the last page": (_sglang_partial_page, "NHD"),
    "flashinfer NHD": (_flashinfer_nhd, "NHD_INTERLEAVED"),
    "flashinfer HND": (_flashinfer_hnd, "HND_INTERLEAVED"),
    "flashinfer pair": (_flashinfer_pair, "HND"),
    "tensorrt_llm get_buffers": (_tensorrt_buffer, "NHD_INTERLEAVED"),
    "tensorrt_llm pool NHD": (lambda: _tensorrt_pool("NHD"), None),
    "tensorrt_llm pool HND": (lambda: _tensorrt_pool("HND"), None),
    "transformers 5.17": (_transformers_517, "NHD"),
}


def _attend(cache: attnlib.PagedKVCache, backend: str) -> torch.Tensor:
    torch.manual_seed(0)
    for view in (cache.key_cache, cache.value_cache):
        view.copy_(torch.randn(B, N, H, D))
    layer = attnlib.Attention(SPEC, backend=backend, device="cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [1, 9], [40, 12], [[5, 0, 3], [2]], N, "cpu"
    )
    q, k, v = (torch.randn(10, heads, D) for heads in (4, H, H))
    step = layer.backend.make_builder(SPEC, "cpu").build(0, common)
    output: torch.Tensor = layer(q, k, v, cache, step)
    return output


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_attention_equals_that_over_an_nhd_cache(name: str, backend: str) -> None:
    """The same outputs and contents, and every byte lies in the engine's memory."""
    pytest.importorskip("triton")
    make, layout = CASES[name]
    cache, memory = make()
    plain = attnlib.PagedKVCache.allocate(SPEC, B, "cpu", "NHD")
    torch.testing.assert_close(_attend(cache, backend), _attend(plain, backend))
    assert cache.layout == layout
    assert torch.equal(cache.key_cache, plain.key_cache)
    assert torch.equal(cache.value_cache, plain.value_cache)
    ranges = [
        range(x.untyped_storage().data_ptr(),
              x.untyped_storage().data_ptr() + x.untyped_storage().nbytes())
        for x in memory
    ]  # fmt: skip
    for view in (cache.key_cache, cache.value_cache):
        assert any(view.data_ptr() in allocation for allocation in ranges), "no copy"
    stored = sum(int(x.count_nonzero()) for x in memory)
    assert stored == int(cache.key_cache.count_nonzero() + cache.value_cache.count_nonzero())


@pytest.mark.parametrize(
    ("memory", "make"),
    [
        (torch.zeros(2, B, N, H, D, dtype=torch.uint8),
         lambda x, **more: attnlib.PagedKVCache.from_vllm(x, **more)),
        (torch.zeros(B * N, H, D, dtype=torch.uint8),
         lambda x, **more: attnlib.PagedKVCache.from_sglang(x, x.clone(), N, **more)),
        (torch.zeros(B, 2, N, H, D, dtype=torch.uint8),
         lambda x, **more: attnlib.PagedKVCache.from_flashinfer(x, **more)),
        (torch.zeros(B, 2, N, H, D, dtype=torch.uint8),
         lambda x, **more: attnlib.PagedKVCache.from_tensorrt_llm(x, "NHD", **more)),
    ],
    ids=["vllm", "sglang", "flashinfer", "tensorrt_llm"],
)  # fmt: skip
def test_bytes_hold_8_bit_floats(memory: torch.Tensor, make: Callable[..., Any]) -> None:
    scale = torch.tensor([0.5])
    cache = make(memory, dtype=torch.float8_e4m3fn, k_scale=scale, v_scale=2.0)
    assert cache.dtype == torch.float8_e4m3fn and (cache.num_blocks, cache.block_size) == (B, N)
    assert float(cache.k_scale) == 0.5 and cache.v_scale == 2.0
    with pytest.raises(ContractError, match="pass the dtype that the bytes hold"):
        make(memory)
    with pytest.raises(ContractError, match="the sizes differ"):
        make(memory, dtype=torch.float16)


def test_unequal_head_sizes_of_a_packed_cache() -> None:
    cache = attnlib.PagedKVCache.from_vllm(torch.zeros(B, H, N, 24 + 16), head_size=24)
    assert (cache.head_size, cache.head_size_v) == (24, 16)


Cache = attnlib.PagedKVCache
_SLIDING = SimpleNamespace(supports_block_table=False)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "two blocks": (lambda: Cache.from_vllm(torch.zeros(2, 2, N, H, D)), "are both 2.*kv_dim=0"),
    "no kv": (lambda: Cache.from_vllm(torch.zeros(3, 4, N, H, D)), "are not 2"),
    "other dim": (
        lambda: Cache.from_vllm(torch.zeros(2, B, N, H, D), kv_dim=1),
        r"are not 2 \(kv_dim=1\)",
    ),
    "three dimensions": (lambda: Cache.from_vllm(torch.zeros(B, N, D)), "or packed 4-D"),
    "odd": (lambda: Cache.from_vllm(torch.zeros(B, H, N, 7)), "cannot be split at head_size=None"),
    "all keys": (
        lambda: Cache.from_vllm(torch.zeros(B, H, N, 8), head_size=8),
        "cannot be split at head_size=8",
    ),
    "page": (
        lambda: Cache.from_sglang(torch.zeros(8, H, D), torch.zeros(8, H, D), 16),
        "page_size=16 must be from 1 to the 8 rows of k_buffer",
    ),
    "pages": (
        lambda: Cache.from_sglang(torch.zeros(8, 2, H, D), torch.zeros(8, 2, H, D), 4),
        r"k_buffer has shape \(8, 2, 2, 32\)",
    ),
    "layout": (lambda: Cache.from_flashinfer(torch.zeros(B, 2, N, H, D), "NDH"), "'NHD' or 'HND'"),
    "no halves": (lambda: Cache.from_flashinfer(torch.zeros(B, N, H, D)), r"\[B, 2, N, Hkv, D\]"),
    "pair": (
        lambda: Cache.from_flashinfer((torch.zeros(B, N, D), torch.zeros(B, N, D))),
        "paged_k_cache has shape",
    ),
    "pool": (
        lambda: Cache.from_tensorrt_llm(torch.zeros(B, 2, 100), "HND", num_kv_heads=3, head_size=8),
        "100 elements per page, not a multiple of num_kv_heads=3 times head_size=8",
    ),
    "unknown layer": (
        lambda: Cache.from_transformers(SimpleNamespace(layer_to_allocator={}), 4),
        "layer 4 is not in this cache",
    ),
    "sliding layer": (
        lambda: Cache.from_transformers(SimpleNamespace(layer_to_allocator={4: _SLIDING}), 4),
        "layer 4 is a sliding layer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_shapes_are_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ContractError, match=message):
        make()


def test_an_ambiguous_cache_is_served_with_its_dimension() -> None:
    memory = torch.arange(2 * 2 * N * H * D, dtype=torch.float32).view(2, 2, N, H, D)
    outer, inner = (Cache.from_vllm(memory, kv_dim=dim) for dim in (0, 1))
    assert torch.equal(outer.key_cache, memory[0]) and torch.equal(inner.key_cache, memory[:, 0])


def test_caches_that_are_no_tensors_are_refused() -> None:
    """An engine has not allocated its cache yet, or names a dtype by text."""
    make = attnlib.PagedKVCache
    wrong: Any
    for wrong in (None, [1, 2], (None, None), torch.zeros(4, 4).to_sparse()):
        for call in (
            lambda wrong=wrong: make.from_vllm(wrong),
            lambda wrong=wrong: make.from_sglang(wrong, wrong, 4),
            lambda wrong=wrong: make.from_flashinfer(wrong),
        ):
            with pytest.raises(ContractError, match="must be (a dense tensor|one tensor|\\[B, 2)"):
                call()
    text: Any = "float8_e4m3fn"
    with pytest.raises(ContractError, match="dtype='float8_e4m3fn' must be a dtype"):
        make.from_vllm(torch.zeros(2, 4, 4, 2, 8, dtype=torch.uint8), dtype=text)
