"""Names and call forms for code written for vLLM."""

from __future__ import annotations

import pytest
import torch

import attnlib
from attnlib.backends.torch import TorchBackend
from attnlib.errors import ContractError, UnsupportedConfigError


@pytest.fixture(autouse=True)
def _no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)


def test_the_arguments_of_vllms_get_attn_backend() -> None:
    """Positional and named."""
    assert (
        attnlib.get_attn_backend(64, torch.float32, "auto", 16, False, use_mla=False, has_sink=True)
        is TorchBackend
    )
    assert (
        attnlib.get_attn_backend(
            head_size=64, dtype=torch.float32, kv_cache_dtype=None, block_size=16
        )
        is TorchBackend
    )
    assert attnlib.get_attn_backend(64, torch.float32, None, 16) is attnlib.get_attn_backend(
        64, torch.float32, None, block_size=16
    )
    with pytest.raises(ContractError, match="spec='torch' must be an attnlib.AttentionSpec"):
        attnlib.get_attn_backend("torch")
    with pytest.raises(ContractError, match="spec=None must be"):
        attnlib.get_attn_backend()


def test_a_model_without_attention_gets_a_placeholder() -> None:
    """As in vLLM: a class that builds metadata and sizes a cache, but runs no layer."""
    backend = attnlib.get_attn_backend(64, torch.float32, "auto", 16, True)
    assert backend is attnlib.get_attn_backend(
        64, torch.float32, "auto", 16, is_attention_free=True
    )
    assert backend.get_name() == "no_attention"
    assert backend.get_kv_cache_shape(10, 16, 2, 64) == (1, 1, 1, 1, 1)
    backend.copy_blocks([torch.zeros(1)], [(0, 1)])
    backend.swap_blocks(torch.zeros(1), torch.zeros(1), [(0, 1)])
    spec = attnlib.AttentionSpec(num_heads=1, head_size=64, dtype=torch.float32)
    common = attnlib.CommonAttentionMetadata.from_lengths([2], [2], [[0]], 16, device="cpu")
    assert backend.make_builder(spec, "cpu").build(0, common).num_actual_tokens == 2
    with pytest.raises(UnsupportedConfigError, match="runs no layer"):
        backend.get_impl_cls()(spec)
    assert "no_attention" not in attnlib.list_backends()
