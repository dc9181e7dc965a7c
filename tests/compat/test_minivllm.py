"""MinivLLM's layer; tests/compat/seeds has its ordinary use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attnlib.compat import minivllm
from attnlib.errors import ContractError
from tests.ops.naive import naive_varlen_attention


@pytest.fixture(autouse=True)
def _empty_context() -> Iterator[None]:
    yield
    minivllm.reset_context()


def test_a_context_without_what_the_step_needs() -> None:
    layer, q, k = minivllm.Attention(4, 32, 1.0, 2), torch.randn(3, 128), torch.randn(3, 64)
    minivllm.set_context(True)
    with pytest.raises(ContractError, match="the context has no cu_seqlens_q"):
        layer(q, k, k)
    layer.k_cache = layer.v_cache = torch.zeros(2, 16, 2, 32)
    minivllm.set_context(False, context_lens=torch.tensor([1, 1, 1]))
    with pytest.raises(ContractError, match="the context has no block_tables"):
        layer(q, k, k)


def test_nothing_is_written_without_a_cache_or_slots() -> None:
    """Profiling runs before the engine assigns a cache."""
    layer, q, k = minivllm.Attention(4, 32, 1.0, 2), torch.randn(3, 4, 32), torch.randn(3, 2, 32)
    starts = torch.tensor([0, 3])
    minivllm.set_context(True, cu_seqlens_q=starts, slot_mapping=torch.arange(3))
    assert layer(q, k, k).shape == (3, 128) and layer.k_cache.numel() == 0
    layer.k_cache, layer.v_cache = torch.zeros(2, 2, 16, 2, 32)
    minivllm.set_context(True, cu_seqlens_q=starts)
    layer(q, k, k)
    assert not layer.k_cache.any()


def test_prefill_over_a_cached_prefix() -> None:
    """With block tables, new tokens see the cached keys before them, too."""
    torch.manual_seed(0)
    layer = minivllm.Attention(4, 32, 1.0, 2)
    layer.k_cache, layer.v_cache = torch.zeros(2, 3, 16, 2, 32)
    q, k, v = torch.randn(20, 4, 32), torch.randn(20, 2, 32), torch.randn(20, 2, 32)
    slots = torch.tensor([2 * 16 + i for i in range(16)] + [16 + i for i in range(4)])
    table = torch.tensor([[2, 1]])
    whole = torch.tensor([0, 20])
    minivllm.set_context(True, cu_seqlens_q=whole, slot_mapping=slots)
    wanted, _ = naive_varlen_attention(q, k, v, whole, whole, scale=32**-0.5, causal=True)
    layer(q, k, v)
    minivllm.set_context(
        True, cu_seqlens_q=torch.tensor([0, 5]), cu_seqlens_k=whole, max_seqlen_q=5,
        slot_mapping=slots[15:], block_tables=table,
    )  # fmt: skip
    out = layer(q[15:], k[15:], v[15:])
    torch.testing.assert_close(out.view(5, 4, 32).double(), wanted[15:], atol=2e-5, rtol=2e-5)
