"""The three functions of MinivLLM's attention layer."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

import attnlib.ops
from attnlib.errors import ContractError
from attnlib.ops import flash_attention_prefill, minivllm, paged_attention_decode, store_kvcache
from tests.ops.naive import naive_varlen_attention

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 6, 2, 32, 8, 10


@pytest.fixture(params=["torch", "triton"])
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The functions over both counterparts; Triton in its interpreter."""
    if request.param == "triton" and torch.cuda.is_available():
        pytest.skip("interpreted without a GPU; tests/gpu/test_seed_operations.py runs on one")

    def load(module: str, name: str, rows: torch.Tensor) -> object:
        found: ModuleType = __import__(f"attnlib.ops.{request.param}.{module}", fromlist=[name])
        return getattr(found, name)

    monkeypatch.setattr(minivllm, "operation", load)
    return str(request.param)


def starts(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def test_the_functions_of_the_package() -> None:
    assert attnlib.ops.__all__ == sorted(attnlib.ops.__all__)
    for name in attnlib.ops.__all__:
        assert getattr(attnlib.ops, name) is not None
    with pytest.raises(AttributeError, match="its names are AttentionParams"):
        attnlib.ops.flash_attention  # noqa: B018  # the attribute access is the test


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_a_slot_of_any_integer_dtype(package: str, dtype: torch.dtype) -> None:
    """P4: slot = block * N + offset; -1 writes nothing."""
    cache = torch.full((2, BLOCKS, BLOCK, KV_HEADS, SIZE), math.nan)
    key, value = torch.randn(3, KV_HEADS, SIZE), torch.randn(3, KV_HEADS, SIZE)
    slots = torch.tensor([11, -1, 79], dtype=dtype)
    store_kvcache(key, value, cache[0], cache[1], slots, BLOCK)
    for token, (block, offset) in ((0, (1, 3)), (2, (9, 7))):
        assert torch.equal(cache[0, block, offset], key[token])
        assert torch.equal(cache[1, block, offset], value[token])
    assert int((~cache.isnan()).sum()) == 2 * 2 * KV_HEADS * SIZE


def test_prefill(package: str) -> None:
    """Causal attention within each sequence, with GQA; the result is a new tensor."""
    query = torch.randn(12, HEADS, SIZE)
    key, value = torch.randn(12, KV_HEADS, SIZE), torch.randn(12, KV_HEADS, SIZE)
    out = flash_attention_prefill(query, key, value, starts(5, 7), 0.2, HEADS, KV_HEADS, SIZE)
    wanted, _ = naive_varlen_attention(
        query, key, value, starts(5, 7), starts(5, 7), scale=0.2, causal=True
    )
    torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_decode(package: str, dtype: torch.dtype) -> None:
    """P3: unused entries of the table are -1; tables and lengths of any integer dtype."""
    lens = (19, 3)
    table = torch.tensor([[4, 2, 7], [1, -1, -1]], dtype=dtype)
    keys, values = (torch.randn(sum(lens), KV_HEADS, SIZE) for _ in range(2))
    cache = torch.full((2, BLOCKS, BLOCK, KV_HEADS, SIZE), math.nan)
    slots = [
        int(table[r, p // BLOCK]) * BLOCK + p % BLOCK for r, n in enumerate(lens) for p in range(n)
    ]
    store_kvcache(keys, values, cache[0], cache[1], torch.tensor(slots), BLOCK)
    query = torch.randn(2, HEADS, SIZE)
    out = paged_attention_decode(
        query, cache[0], cache[1], table, torch.tensor(lens, dtype=dtype), 0.3, HEADS, KV_HEADS,
        SIZE, BLOCK,
    )  # fmt: skip
    wanted, _ = naive_varlen_attention(query, keys, values, starts(1, 1), starts(*lens), scale=0.3)
    torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=2e-5)


def test_wrong_sizes_are_refused_by_name() -> None:
    """Before anything is written or launched."""
    cache, key = torch.zeros(BLOCKS, BLOCK, KV_HEADS, SIZE), torch.zeros(3, KV_HEADS, SIZE)
    query, slots = torch.zeros(3, HEADS, SIZE), torch.zeros(3)
    with pytest.raises(ContractError, match="slot_mapping has dtype torch.float32"):
        store_kvcache(key, key, cache, cache, slots, BLOCK)
    with pytest.raises(ContractError, match="with block_size=16 it must be"):
        store_kvcache(key, key, cache, cache, slots.long(), 16)
    with pytest.raises(ContractError, match="k has shape .* the arguments say 6 heads of size 32"):
        flash_attention_prefill(query, key, key, starts(3), 1.0, HEADS, HEADS, SIZE)
    table, lens = torch.zeros(3, 1).int(), torch.ones(3)
    with pytest.raises(ContractError, match="context_lens has dtype torch.float32"):
        paged_attention_decode(query, cache, cache, table, lens, 1.0, HEADS, KV_HEADS, SIZE, BLOCK)
    with pytest.raises(ContractError, match="query has shape"):
        paged_attention_decode(
            query, cache, cache, table, lens.int(), 1.0, HEADS, KV_HEADS, 64, BLOCK
        )


def test_addresses_outside_of_the_cache_are_refused() -> None:
    """P3, P4: on a CPU before anything is written."""
    cache = torch.zeros(2, BLOCKS, BLOCK, KV_HEADS, SIZE)
    key, query = torch.ones(2, KV_HEADS, SIZE), torch.zeros(2, HEADS, SIZE)
    for slots, message in (([0, BLOCKS * BLOCK], "is outside the cache of 80"), ([0, 1, 2], "has")):
        with pytest.raises(ContractError, match=message):
            store_kvcache(key, key, *cache, torch.tensor(slots), BLOCK)
    with pytest.raises(ContractError, match="value has shape"):
        store_kvcache(key, key[..., :4], *cache, torch.tensor([0, 1]), BLOCK)
    assert not cache.any()
    with pytest.raises(ContractError, match="cu_seqlens ends at 3, past the 2 rows"):
        flash_attention_prefill(query, key, key, starts(3), 1.0, HEADS, KV_HEADS, SIZE)
    for table, lens, message in (
        ([[0], [BLOCKS]], [1, 1], r"block_table\[1\]\[0\]=10 is outside"),
        ([[0], [-1]], [1, 1], r"block_table\[1\]\[0\]=-1 is outside"),
        ([[0], [1]], [1, 9], r"context_lens\[1\]=9 needs 2 blocks"),
        ([[0]], [1], r"must be \[2, blocks\]"),
    ):
        with pytest.raises(ContractError, match=message):
            paged_attention_decode(
                query, *cache, torch.tensor(table), torch.tensor(lens), 1.0, HEADS, KV_HEADS, SIZE,
                BLOCK,
            )  # fmt: skip
