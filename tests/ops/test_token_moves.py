"""Tokens that move to other slots of a cache."""

from __future__ import annotations

import pytest
import torch

import attnlib
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError

SPEC = attnlib.AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=32, dtype=torch.float32, block_size=4
)


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def filled(spec: attnlib.AttentionSpec, layout: str | None = None) -> PagedKVCache:
    """A cache of 12 tokens, whose memory has other bytes in every element."""
    cache = PagedKVCache.allocate(spec, 3, "cpu", layout=layout)
    for number, view in enumerate(cache.block_views):
        raw = view.view(torch.uint8) if view.dtype.itemsize == 1 else view
        values = torch.arange(raw.numel()).view(raw.shape) * 7 + number
        raw.copy_((values % 251).to(raw.dtype))
    return cache


def tokens(cache: PagedKVCache) -> list[list[torch.Tensor]]:
    """The stored bytes of each slot."""
    sides = [
        (view.view(torch.uint8) if view.dtype.itemsize == 1 else view).flatten(0, 1).clone()
        for view in cache.block_views
    ]
    return [[side[slot] for side in sides] for slot in range(12)]


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        SPEC.replace(kv_cache_dtype="fp8_e4m3"),
        SPEC.replace(kv_cache_dtype="int8_per_token_head", dtype=torch.bfloat16),
        SPEC.replace(kv_cache_dtype="int4_per_group", dtype=torch.bfloat16),
        SPEC.replace(num_kv_heads=1, head_size_v=16, use_mla=True),
    ],
    ids=["float32", "fp8", "int8", "int4", "latent"],
)
def test_tokens_move_with_all_their_bytes(spec: attnlib.AttentionSpec) -> None:
    """All sources are read first; skipped pairs and other slots change nothing."""
    cache = filled(spec)
    before = tokens(cache)
    cache.move_slots(slots(5, 6, 3, 99, 6), slots(6, 5, 11, -1, 0))
    after = tokens(cache)
    origin = {6: 5, 5: 6, 11: 3, 0: 6}
    for slot in range(12):
        for found, expected in zip(after[slot], before[origin.get(slot, slot)], strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("layout", ["NHD", "HND", "NHD_INTERLEAVED"])
def test_layouts(layout: str) -> None:
    cache = filled(SPEC, layout)
    before = tokens(cache)
    cache.move_slots(slots(7), slots(1))
    assert all(map(torch.equal, tokens(cache)[1], before[7]))


def test_nothing_to_move() -> None:
    cache = filled(SPEC)
    before = tokens(cache)
    cache.move_slots(slots(), slots())
    cache.move_slots(slots(4, 5), slots(-1, -1))
    for found, expected in zip(tokens(cache), before, strict=True):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (slots(1, 12), slots(2, 3), r"source slot 12 \(index 1\) is outside the cache of 12 slots"),
        (slots(-1), slots(3), "source slot -1"),
        (slots(1), slots(12), "target slot 12"),
        (slots(1, 2), slots(3, 3), "target slot 3 occurs more than once"),
        (slots(1, 2), slots(3), "2 source slots and 1 target slots"),
        (slots(1).int(), slots(3), "torch.int32"),
        (slots(1).view(1, 1), slots(3), r"\(1, 1\)"),
    ],
)
def test_refused(source: torch.Tensor, target: torch.Tensor, message: str) -> None:
    cache = filled(SPEC)
    before = tokens(cache)
    with pytest.raises(ContractError, match=message):
        cache.move_slots(source, target)
    for found, expected in zip(tokens(cache), before, strict=True):
        assert all(map(torch.equal, found, expected))
