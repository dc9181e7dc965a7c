"""Caches that were made in `torch.inference_mode`, which torch refuses to write outside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnlib
from attnlib.cache.hybrid import HybridKVCache
from attnlib.cache.hybrid_groups import KVCacheGroup
from attnlib.cache.index_keys import IndexKeyCache
from attnlib.cache.packed_latents import PackedLatentCache
from attnlib.errors import ContractError
from attnlib.parallel import Interleaved, ParallelAttention, RankGroup, divided_batch
from attnlib.spec import AttentionSpec, StateSpec

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, block_size=16)
STATES = StateSpec(
    num_heads=4, num_key_heads=2, key_size=16, value_size=16, qk_norm=True, conv_channels=128,
    conv_width=4, dtype=torch.float32,
)  # fmt: skip


def _pages(**changes: Any) -> torch.Tensor:
    return attnlib.PagedKVCache.allocate(SPEC.replace(**changes), 4, "cpu").key_cache


@pytest.mark.parametrize(
    "make",
    [
        _pages,
        lambda: _pages(kv_cache_dtype="int8_per_token_head"),
        lambda: attnlib.StateCache.allocate(STATES, 2, device="cpu").memory,
        lambda: IndexKeyCache.allocate(2, 16, 16, torch.float32, "cpu").keys,
        lambda: PackedLatentCache.allocate(2, 16, "cpu").data,
        lambda: HybridKVCache({"a": KVCacheGroup(SPEC)}, 2, "cpu").caches["a"][0].key_cache,
        lambda: attnlib.BlockTable(2, 2, "cpu").num_blocks_per_row,
    ],
    ids=["cache", "pages", "states", "index keys", "packed latents", "pool", "table"],
)
def test_memory_of_the_library_is_writable_everywhere(make: Callable[[], torch.Tensor]) -> None:
    with torch.inference_mode():
        made = make()
    assert not made.is_inference()
    made.zero_()


def test_writes_to_other_memory_are_refused_before_them() -> None:
    layer = attnlib.Attention(SPEC, backend="torch", device="cpu")
    with torch.inference_mode():
        memory = torch.zeros(2, 4, 16, 2, 16)
        cache = attnlib.PagedKVCache.from_views(*memory)
    common = attnlib.CommonAttentionMetadata.from_lengths([2], [2], [[1]], 16, "cpu")
    metadata = layer.backend.make_builder(SPEC, "cpu").build(0, common)
    query, key = torch.randn(2, 64), torch.randn(2, 32)
    with (
        torch.no_grad(),
        pytest.raises(ContractError, match="memory of key_cache was made in torch.infer"),
    ):
        layer(query, key, key, cache, metadata)
    with pytest.raises(ContractError, match="memory of blocks was made in torch.inference_mode"):
        cache.copy_blocks([(0, 1)])
    with pytest.raises(ContractError, match="memory of blocks was made in torch.inference_mode"):
        cache.zero_blocks([1])
    with pytest.raises(ContractError, match="memory of blocks was made in torch.inference_mode"):
        cache.move_slots(torch.tensor([0]), torch.tensor([1]))
    assert not memory.any()
    with torch.inference_mode():
        layer(query, key, key, cache, metadata)
    assert memory[:, 1, :2].all()


def test_states_in_other_memory_are_refused_before_a_step() -> None:
    layer = attnlib.StateLayer(
        STATES, backend="torch", conv_weight=torch.randn(128, 4), device="cpu"
    )
    with torch.inference_mode():
        memory = torch.zeros(2, layer.layout.bytes_per_slot, dtype=torch.uint8)
        cache = attnlib.StateCache(layer.spec, memory)
    common = attnlib.CommonAttentionMetadata.from_lengths([3], [3], device="cpu", state_slots=[1])
    metadata = layer.backend.make_builder(layer.spec, "cpu").build(0, common)
    x, gates = torch.randn(3, 128), (-torch.rand(3, 4), torch.rand(3, 4))
    with (
        torch.no_grad(),
        pytest.raises(ContractError, match="memory of windows was made in torch.infer"),
    ):
        layer.convolve(x, cache, metadata)
    with torch.no_grad(), pytest.raises(ContractError, match="was made in torch.inference_mode"):
        layer(*x.split([32, 32, 64], 1), *gates, cache, metadata)
    assert not memory.any()
    with torch.inference_mode():
        layer(*layer.convolve(x, cache, metadata).split([32, 32, 64], 1), *gates, cache, metadata)
    assert memory[1].any()


def test_outputs_of_inference_mode_are_refused_before_a_write() -> None:
    layer = attnlib.Attention(SPEC, backend="torch", device="cpu")
    cache = attnlib.PagedKVCache.allocate(SPEC, 2, "cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths([2], [2], [[1]], 16, "cpu")
    metadata = layer.backend.make_builder(SPEC, "cpu").build(0, common)
    query, key = torch.randn(2, 64), torch.randn(2, 32)
    with torch.inference_mode():
        output = torch.empty(2, 64)
    refused = pytest.raises(ContractError, match="memory of output was made in torch.inference_m")
    with torch.no_grad(), refused:
        layer(query, key, key, cache, metadata, output=output)
    assert not cache.key_cache.any()
    for _ in range(3):  # of a kind of call that is known
        layer(query, key, key, cache, metadata, output=torch.empty(2, 64))
    before = cache.key_cache.clone()
    with torch.no_grad(), pytest.raises(ContractError, match="memory of output was made"):
        layer(query, key + 1, key, cache, metadata, output=output)
    assert torch.equal(cache.key_cache, before)


def test_outputs_of_steps_in_inference_mode_are_refused_before_the_window_moves() -> None:
    layer = attnlib.StateLayer(
        STATES, backend="torch", conv_weight=torch.randn(128, 4), device="cpu"
    )
    cache = attnlib.StateCache.allocate(layer.spec, 2, device="cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths([3], [3], device="cpu", state_slots=[1])
    metadata = layer.backend.make_builder(layer.spec, "cpu").build(0, common)
    x, gates = torch.randn(3, 128), (-torch.rand(3, 4), torch.rand(3, 4))
    with torch.inference_mode():
        window, output = torch.empty(3, 128), torch.empty(3, 64)
    before = cache.memory.clone()
    refused = pytest.raises(ContractError, match="memory of output was made in torch.inference_m")
    with torch.no_grad(), refused:
        layer.convolve(x, cache, metadata, output=window)
    with torch.no_grad(), refused:
        layer(*x.split([32, 32, 64], 1), *gates, cache, metadata, output=output)
    assert torch.equal(cache.memory, before)


def test_outputs_of_divided_layers_in_inference_mode_are_refused_before_a_write() -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        layer = ParallelAttention(SPEC, RankGroup(), Interleaved(1), backend="torch", device="cpu")
        cache = attnlib.PagedKVCache.allocate(SPEC, 2, "cpu")
        metadata = layer.make_builder().build(divided_batch([2], [2], [[1]], "cpu"))
        query, key = torch.randn(2, 64), torch.randn(2, 32)
        with torch.inference_mode():
            output = torch.empty(2, 64)
        with torch.no_grad(), pytest.raises(ContractError, match="memory of output was made"):
            layer(query, key, key, cache, metadata, output=output)
        assert not cache.key_cache.any()
        layer(query, key, key, cache, metadata, output=torch.empty(2, 64))
        assert cache.key_cache.any()
    finally:
        torch.distributed.destroy_process_group()
