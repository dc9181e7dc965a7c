"""The warm-up of expanded prefills."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.mla import latent_attention
from attnlib.mla.latent_attention import LatentAttention
from attnlib.mla.warmup import warm_up_expanded
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits

SPEC = AttentionSpec(
    num_heads=3, num_kv_heads=1, head_size=64, head_size_v=48, dtype=torch.float32, use_mla=True
)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((4, 128, 256), [(1, 16), (1, 32), (1, 64), (2, 16), (2, 32), (2, 64)]),
        ((4, 40, 256), [(1, 16), (1, 32), (2, 16)]),
        ((1, 128, 256), [(1, 16), (1, 32), (1, 64)]),
        ((4, 15, 256), []),
    ],
)
def test_prefills_without_and_with_context(
    limits: tuple[int, int, int], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests and query lengths from `expand_from` on, within the limits; nothing is written."""
    layer = LatentAttention(
        SPEC, torch.randn(3, 44, 48), 24, backend="torch", device="cpu", expand_from=16
    )
    cache = PagedKVCache.allocate(SPEC, 2, "cpu")
    held = cache.key_cache.normal_().clone()
    expand, seen = latent_attention.attend_expanded, []

    def recorded(self: Any, query: Any, latent: Any, cache: Any, batch: Any, out: Any) -> None:
        lengths = batch.seq_lens_cpu.tolist()
        seen.append((len(lengths), batch.max_query_len, lengths[0] > batch.max_query_len))
        expand(self, query, latent, cache, batch, out)

    monkeypatch.setattr(latent_attention, "attend_expanded", recorded)
    sizes = zip(("max_num_reqs", "max_num_tokens", "max_seq_len"), limits, strict=True)
    warm_up_expanded(layer, cache, BatchLimits(**dict(sizes)))
    assert seen == [(*size, context) for size in expected for context in (False, True)]
    assert torch.equal(cache.key_cache, held)
