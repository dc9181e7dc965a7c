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
    with pytest.raises(UnsupportedConfigError, match="needs no attention backend"):
        attnlib.get_attn_backend(64, torch.float32, "auto", 16, True)
    with pytest.raises(ContractError, match="spec='torch' must be an attnlib.AttentionSpec"):
        attnlib.get_attn_backend("torch")
    with pytest.raises(ContractError, match="spec=None must be"):
        attnlib.get_attn_backend()
