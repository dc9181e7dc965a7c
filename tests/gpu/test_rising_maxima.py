"""Prefills whose maxima rise from tile to tile, which the loop over unmasked tiles must follow."""

from __future__ import annotations

import pytest
import torch

from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.heuristics import hopper_tiles
from attnlib.ops.triton.paged_prefill import paged_prefill
from tests.gpu.devices import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

HEADS, KV_HEADS, BLOCK_SIZE = 16, 4, 16


@pytest.mark.parametrize("growth", [0.0, 40.0, 3000.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    ("head_size", "head_size_v", "short_context"),
    [
        (64, 64, 16384),
        (128, 128, 16384),
        (128, 128, 0),
        (160, 160, 16384),
        (192, 128, 16384),
        (192, 192, 16384),
        (256, 256, 16384),
    ],
)
def test_rising_maxima(
    head_size: int,
    head_size_v: int,
    short_context: int,
    has_sinks: bool,
    growth: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """M4, M5: earlier keys, which are visited later, have larger scores by up to `growth` * 0.5."""
    monkeypatch.setattr(hopper_tiles, "SHORT_CONTEXT", short_context)
    torch.manual_seed(0)
    query_lens, seq_lens = [1100, 1030], [1100, 1500]
    scale = head_size**-0.5
    query = torch.randn(sum(query_lens), HEADS, head_size, device="cuda")
    query[..., 0] = 0.5 / scale
    blocks = [-(-length // BLOCK_SIZE) for length in seq_lens]
    cache = torch.randn(2, sum(blocks), BLOCK_SIZE, KV_HEADS, head_size, device="cuda")
    table = torch.zeros(2, max(blocks), dtype=torch.int32, device="cuda")
    first = 0
    for request, (count, length) in enumerate(zip(blocks, seq_lens, strict=True)):
        table[request, :count] = torch.arange(first, first + count)
        rising = torch.linspace(growth, 0, count * BLOCK_SIZE, device="cuda")
        cache[0, first : first + count, :, :, 0] = rising.view(count, BLOCK_SIZE, 1)
        cache.view(2, -1, KV_HEADS, head_size)[
            :, first * BLOCK_SIZE + length : (first + count) * BLOCK_SIZE
        ] = torch.nan
        first += count
    query, cache = query.bfloat16(), cache.bfloat16()
    key_cache, value_cache = cache[0], cache[1, ..., :head_size_v].contiguous()
    sinks = torch.randn(HEADS, device="cuda") if has_sinks else None
    starts = torch.tensor([0, query_lens[0], sum(query_lens)], dtype=torch.int32, device="cuda")
    out = torch.empty_like(query[..., :head_size_v])
    lse = torch.empty(query.shape[:2], device="cuda")
    # Kernels for layers with and without log-sum-exps differ.
    for returned in (None, lse):
        paged_prefill(
            query, key_cache, value_cache, table, starts,
            torch.tensor(seq_lens, dtype=torch.int32, device="cuda"),
            AttentionParams(scale=scale, sinks=sinks), max_query_len=max(query_lens),
            max_seq_len=max(seq_lens), out=out, lse=returned,
        )  # fmt: skip
        for request, length in enumerate(seq_lens):
            rows = slice(int(starts[request]), int(starts[request + 1]))
            slots = table[request].long()
            keys, values = (
                side[slots].flatten(0, 1)[:length].double().repeat_interleave(4, 1)
                for side in (key_cache, value_cache)
            )
            scores = torch.einsum("qhd,khd->hqk", query[rows].double(), keys) * scale
            positions = torch.arange(length - query_lens[request], length, device="cuda")
            hidden = torch.arange(length, device="cuda") > positions[:, None]
            scores.masked_fill_(hidden, -torch.inf)
            if sinks is not None:
                column = sinks.double()[:, None, None].expand(-1, len(positions), 1)
                scores = torch.cat([scores, column], -1)
            weights = scores.softmax(-1)[..., :length]
            expected = torch.einsum("hqk,khd->qhd", weights, values)
            torch.testing.assert_close(out[rows].double(), expected, rtol=2e-2, atol=2e-2)
            if returned is not None:
                sums = scores.logsumexp(-1).T
                torch.testing.assert_close(lse[rows].double(), sums, rtol=1e-5, atol=1e-4)
