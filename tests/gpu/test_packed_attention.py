"""`PagedAttention` on a GPU: no host sync, and CUDA graphs that replay with other lengths."""

from __future__ import annotations

import pytest
import torch

from attnlib.ops.paged_attention import PagedAttention
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.packed_attention import packed_decode, packed_prefill
from tests.gpu.devices import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

REQUESTS, HEADS, KV_HEADS, SIZE, BLOCK, COLUMNS = 4, 8, 2, 128, 16, 40


def test_a_graph_replays_with_other_lengths_and_nothing_waits_for_the_device() -> None:
    """G1: write, prefix and decode are captured once and replayed for other batches."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    shape = PagedAttention.get_kv_cache_shape(REQUESTS * COLUMNS, BLOCK, KV_HEADS, SIZE)
    kv_cache = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)
    caches = PagedAttention.split_kv_cache(kv_cache, KV_HEADS, SIZE)
    table = torch.randperm(REQUESTS * COLUMNS, device=device).view(REQUESTS, COLUMNS).int()
    longest = COLUMNS * BLOCK
    keys, values = (
        torch.randn(REQUESTS * longest, KV_HEADS, SIZE, dtype=torch.bfloat16, device=device)
        for _ in range(2)
    )
    positions = torch.arange(longest, device=device)
    all_slots = (table.long()[:, positions // BLOCK] * BLOCK + positions % BLOCK).flatten()
    slots = torch.full_like(all_slots, -1)
    seq_lens = torch.full((REQUESTS,), 2, dtype=torch.int32, device=device)
    starts = torch.arange(REQUESTS + 1, dtype=torch.int32, device=device) * 2
    query = torch.randn(REQUESTS * 2, HEADS, SIZE, dtype=torch.bfloat16, device=device)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        PagedAttention.write_to_paged_cache(keys, values, *caches, slots, "auto", 1.0, 1.0)
        decoded = PagedAttention.forward_decode(
            query[:REQUESTS], *caches, table, seq_lens, longest, "auto", KV_HEADS, 0.1, None, 1.0,
            1.0,
        )  # fmt: skip
        prefixed = PagedAttention.forward_prefix(
            query, keys[: REQUESTS * 2], values[: REQUESTS * 2], "auto", *caches, table, starts,
            seq_lens, 2, None, 100, 1.0, 1.0,
        )  # fmt: skip
        return decoded, prefixed

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoded, prefixed = step()

    for lengths in ((640, 3, 17, 250), (2, 2, 2, 2), (64, 65, 639, 5)):
        kv_cache.fill_(float("nan"))
        lens = torch.tensor(lengths, device=device)
        seq_lens.copy_(lens)
        slots.copy_(torch.where((positions < lens[:, None]).flatten(), all_slots, -1))
        graph.replay()
        wanted = torch.empty_like(decoded)
        packed_decode(
            query[:REQUESTS], *caches, table, seq_lens, AttentionParams(scale=0.1),
            max_seq_len=longest, out=wanted,
        )  # fmt: skip
        torch.testing.assert_close(decoded, wanted, atol=2e-2, rtol=2e-2)
        wanted = torch.empty_like(prefixed)
        packed_prefill(
            query, keys[: REQUESTS * 2], values[: REQUESTS * 2], *caches, table, starts, seq_lens,
            AttentionParams(scale=SIZE**-0.5, window=(99, -1)), max_query_len=2, out=wanted,
        )  # fmt: skip
        torch.testing.assert_close(prefixed, wanted, atol=2e-2, rtol=2e-2)
