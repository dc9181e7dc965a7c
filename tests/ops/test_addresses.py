"""Addresses of operations outside of layers: read on a CPU, elsewhere under ATTNLIB_VALIDATE."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from attnlib.cache import indices
from attnlib.cache.index_keys import IndexKeyCache
from attnlib.cache.packed_latents import PackedLatentCache
from attnlib.cache.slots import compute_slot_mapping
from attnlib.compat.flashinfer import append_paged_kv_cache
from attnlib.compat.minivllm import store_kvcache
from attnlib.errors import ContractError
from attnlib.ops.addresses import are_readable
from attnlib.ops.paged_attention import PagedAttention
from attnlib.ops.params import AttentionParams

GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
)
Call = Callable[[str], tuple[Callable[[], Any], list[torch.Tensor]]]
"""Device -> the call, and the memory that it must leave as it is."""


def _ints(device: str, *values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _index_keys(device: str) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    cache = IndexKeyCache.allocate(3, 4, 32, torch.float32, device)
    keys, slots = torch.ones(2, 32, device=device), torch.tensor([0, 12], device=device)
    return lambda: cache.write(keys, slots), [cache.keys]


def _latents(device: str) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    cache = PackedLatentCache.allocate(4, 4, device)
    rows = torch.ones(2, 576, dtype=torch.bfloat16, device=device)
    slots = torch.tensor([0, 16], device=device)
    return lambda: cache.write(rows, slots), [cache.data]


def _latent_attention(device: str) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    cache = PackedLatentCache.allocate(4, 4, device)
    query = torch.ones(1, 3, 576, dtype=torch.bfloat16, device=device)
    table = _ints(device, [1, 9])
    starts, lens = _ints(device, 0, 1), _ints(device, 7)
    batch = {"query_start_loc": starts, "seq_lens": lens, "max_query_len": 1, "max_seq_len": 8}
    params = AttentionParams(scale=1.0, causal=True)
    return lambda: cache.attend(query, block_table=table, params=params, **batch), [cache.data]


def _slots(device: str) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    out = torch.full((4,), 7, device=device)
    given = (_ints(device, 0, 1, 4), _ints(device, 9, 3), _ints(device, [9, 2], [4, 0]))
    return lambda: compute_slot_mapping(*given, 4, 4, out), [out]


def _page_lists(device: str) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    table, lens = _ints(device, [2, 1], [0, -1]), _ints(device, 8, 5)
    return lambda: indices.block_table_to_csr(table, lens, 4), []


def _token_slots(device: str) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    slots, lens = _ints(device, [8, 9, 11, 10]), _ints(device, 4)
    return lambda: indices.token_slots_to_block_table(slots, lens, 4), []


def _minivllm(device: str) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    cache = torch.zeros(2, 5, 16, 2, 32, device=device)
    key, slots = torch.ones(2, 2, 32, device=device), torch.tensor([0, 80], device=device)
    return lambda: store_kvcache(key, key, *cache, slots, 16), [cache]


def _paged_attention(device: str) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    cache = torch.zeros(PagedAttention.get_kv_cache_shape(2, 16, 2, 32), device=device)
    views = PagedAttention.split_kv_cache(cache, 2, 32)
    key, slots = torch.ones(1, 2, 32, device=device), torch.tensor([32], device=device)
    write = PagedAttention.write_to_paged_cache
    return lambda: write(key, key, *views, slots, "auto", 1.0, 1.0), [cache]


def _append(device: str) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    cache = torch.zeros(3, 2, 4, 2, 32, device=device)
    key = torch.ones(1, 2, 32, device=device)
    places = (_ints(device, 0), _ints(device, 8))
    lists = (_ints(device, 2, 0), _ints(device, 0, 2), _ints(device, 4))
    return lambda: append_paged_kv_cache(key, key, *places, cache, *lists, "NHD"), [cache]


CALLS: dict[str, tuple[Call, str]] = {
    "index keys": (_index_keys, r"slot_mapping\[1\]=12 is outside the cache"),
    "packed latents": (_latents, r"slot_mapping\[1\]=16 is outside the cache"),
    "attention to packed latents": (_latent_attention, r"block_table\[0\]\[1\]=9 is outside"),
    "slots": (_slots, r"seq_lens\[0\]=9 needs 3 blocks"),
    "page lists": (_page_lists, r"block_table\[1\]\[1\]=-1"),
    "token slots": (_token_slots, r"token_slots\[0\]\[2\]=11"),
    "MinivLLM": (_minivllm, "is outside the cache of 80"),
    "PagedAttention": (_paged_attention, r"slot_mapping\[0\]=32 is outside the cache of 32"),
    "FlashInfer append": (_append, r"positions\[0\]=8 of request 0 is past the pages"),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("name", CALLS)
def test_an_operation_refuses_before_it_writes(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU by default, on a GPU under ATTNLIB_VALIDATE=1."""
    if device == "cuda":
        monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    else:
        monkeypatch.delenv("ATTNLIB_VALIDATE", raising=False)
    make, message = CALLS[name]
    call, memory = make(device)
    before = [part.clone() for part in memory]
    with pytest.raises(ContractError, match=message):
        call()
    assert all(torch.equal(old, new) for old, new in zip(before, memory, strict=True))


@pytest.mark.parametrize("capturing", [False, True])
def test_values_of_a_gpu_are_read_on_request_only(
    capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read a value waits for the GPU, and a capture refuses it."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    fields = {"device": torch.device("cuda"), "is_meta": False, "is_cuda": True}
    tensor = cast(torch.Tensor, SimpleNamespace(**fields))
    monkeypatch.delenv("ATTNLIB_VALIDATE", raising=False)
    assert are_readable(torch.zeros(1)) and not are_readable(torch.zeros(1, device="meta"))
    assert not are_readable(tensor)
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    assert are_readable(tensor) is not capturing
