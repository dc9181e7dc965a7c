"""What a cache may be made of: sizes, foreign views, scales."""

import pytest
import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.spec import AttentionSpec


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
def test_foreign_views_are_checked(key: torch.Tensor, value: torch.Tensor, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        PagedKVCache.from_views(key, value)


def test_scales_are_checked() -> None:
    """M9: per tensor or per KV head, float32."""
    views = torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2, 8)
    assert PagedKVCache.from_views(*views, k_scale=2).k_scale == 2.0
    with pytest.raises(ContractError, match=r"k_scale is torch.float32 \(3,\).*\[2\] \(KV heads\)"):
        PagedKVCache.from_views(*views, k_scale=torch.ones(3))


def test_impossible_allocations() -> None:
    spec = AttentionSpec(num_heads=4, head_size=8, dtype=torch.float32)
    with pytest.raises(ContractError, match="num_blocks=0"):
        PagedKVCache.allocate(spec, 0, "cpu")
    with pytest.raises(ContractError, match="needs no cache"):
        PagedKVCache.allocate(spec.replace(attn_type="encoder_only"), 2, "cpu")
