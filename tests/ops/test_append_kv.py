"""Appending keys and values behind the cached ones of each request."""

from __future__ import annotations

import os
from importlib import import_module

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("counterpart", ["torch", "triton"])
@pytest.mark.parametrize(("block_size", "new"), [(1, 3), (4, 1), (4, 3), (16, 1), (16, 3)])
def test_appends_behind_each_request(counterpart: str, block_size: int, new: int) -> None:
    """P1, P3, P4: new tokens follow the cached ones, other elements keep their bits, and tokens
    past the block table or before position 0 are not written."""
    append_kv = import_module(f"attnlib.ops.{counterpart}.append_kv").append_kv
    columns, lengths = 32 // block_size, [0, 5, 31, 40, 17]
    blocks = len(lengths) * columns
    table = torch.randperm(blocks, dtype=torch.int32).view(len(lengths), columns).to(DEVICE)
    caches = [torch.randn(blocks, 2, block_size, d, device=DEVICE).transpose(1, 2) for d in (8, 4)]
    news = [torch.randn(len(lengths), 2, new, d, device=DEVICE).transpose(1, 2) for d in (8, 4)]
    wanted = [cache.clone() for cache in caches]
    for request, length in enumerate(lengths):
        for token in range(new):
            position = length + token
            if position < columns * block_size:
                block = table[request, position // block_size]
                for cache, values in zip(wanted, news, strict=True):
                    cache[block, position % block_size] = values[request, token]
    lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    out = torch.full_like(lens, -7)
    append_kv(*news, *caches, table, lens, out)
    assert out.tolist() == [length + new for length in lengths]
    for cache, want in zip(caches, wanted, strict=True):
        assert torch.equal(cache, want)


@pytest.mark.parametrize("counterpart", ["torch", "triton"])
def test_a_negative_length_writes_only_the_positions_from_0(counterpart: str) -> None:
    append_kv = import_module(f"attnlib.ops.{counterpart}.append_kv").append_kv
    cache, table = torch.zeros(1, 4, 1, 8, device=DEVICE), torch.zeros(1, 1, device=DEVICE)
    news = torch.ones(1, 3, 1, 8, device=DEVICE)
    lens = torch.tensor([-2], dtype=torch.int32, device=DEVICE)
    append_kv(news, news, cache, cache.clone(), table.int(), lens, lens.clone())
    assert cache[0, :, 0, 0].tolist() == [1.0, 0.0, 0.0, 0.0]
