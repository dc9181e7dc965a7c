"""`PagedAttention` on a GPU: no host sync, and CUDA graphs that replay with other lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.ops.block_sparse import BlockSparsePattern
from attnlib.ops.paged_attention import PagedAttention
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.packed_attention import packed_decode, packed_prefill
from attnlib.ops.triton.hopper.decode_launches import HopperDecode
from attnlib.ops.triton.launch.cache import LAUNCHES
from tests.gpu.devices import needs_gpu
from tests.ops.triton.test_packed_attention import Case

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


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="the Gluon kernels need a Hopper GPU",
)

LENGTHS = (700, 1, 0, 64, 129, 2049)


def hopper_launches() -> list[HopperDecode]:
    """The prepared launches of the Hopper decode over packed caches."""
    kept = (value[1] for value in LAUNCHES.values() if isinstance(value, tuple) and len(value) > 1)
    return [launch for launch in kept if isinstance(launch, HopperDecode)]


@needs_hopper
@pytest.mark.parametrize("size", [64, 80, 96, 112, 120, 128, 192, 256])
def test_the_hopper_kernel_serves_every_head_size(size: int) -> None:
    """P3, P5, M7: NaN and invalid block ids past each request's end are not read."""
    LAUNCHES.clear()
    case = Case(
        torch.device("cuda"), LENGTHS, heads=(8, 2), size=size, block_size=16, dtype=torch.bfloat16
    )
    case.decode()
    assert len(hopper_launches()) == 1


@needs_hopper
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_hopper_kernel_serves_block_sizes(block_size: int, dtype: torch.dtype) -> None:
    """Several boxes per tile, and several tiles per block."""
    LAUNCHES.clear()
    case = Case(
        torch.device("cuda"), LENGTHS, heads=(8, 2), size=128, block_size=block_size, dtype=dtype
    )
    case.decode()
    assert len(hopper_launches()) == 1


@needs_hopper
def test_counters_are_clear_in_every_call_and_replay() -> None:
    """Batches of many requests combine splits in the decode kernel, back to back without a wait."""
    torch.manual_seed(0)
    requests, longest = 40, COLUMNS * BLOCK
    shape = PagedAttention.get_kv_cache_shape(requests * COLUMNS, BLOCK, 8, SIZE)
    kv_cache = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    caches = PagedAttention.split_kv_cache(kv_cache, 8, SIZE)
    table = torch.randperm(requests * COLUMNS, device="cuda").view(requests, COLUMNS).int()
    query = torch.randn(requests, 32, SIZE, dtype=torch.bfloat16, device="cuda")
    batches = torch.randint(1, longest + 1, (12, requests), dtype=torch.int32, device="cuda")
    batches[0], lens = longest, torch.empty(requests, dtype=torch.int32, device="cuda")

    def decodes() -> list[torch.Tensor]:
        results = []
        for batch in batches:
            lens.copy_(batch)
            results.append(PagedAttention.forward_decode(
                query, *caches, table, lens, longest, "auto", 8, 0.1, None, 1.0, 1.0
            ))  # fmt: skip
        return results

    LAUNCHES.clear()
    eager = decodes()
    assert [launch.combine for launch in hopper_launches()] == [None]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decodes()
    for _ in range(3):
        for result in captured:
            result.zero_()
        graph.replay()
    torch.cuda.synchronize()
    for batch, result, replayed in zip(batches, eager, captured, strict=True):
        wanted = torch.empty_like(query)
        packed_decode(
            query, *caches, table, batch, AttentionParams(scale=0.1), max_seq_len=longest,
            out=wanted,
        )  # fmt: skip
        torch.testing.assert_close(result, wanted, atol=2e-2, rtol=2e-2)
        assert torch.equal(replayed, result)


@needs_hopper
@pytest.mark.parametrize("heads", [(1, 1), (5, 5), (32, 1), (24, 3), (64, 8)])
@pytest.mark.parametrize("requests", [1, 3, 200])
def test_the_hopper_kernel_serves_groups_and_batches(heads: tuple[int, int], requests: int) -> None:
    """GQA and MQA; one request, a batch in one pass over the lengths, and one in several."""
    LAUNCHES.clear()
    lengths = [(37 * i) % 300 + (1500 if i == 1 else 0) for i in range(1, requests + 1)]
    case = Case(
        torch.device("cuda"), lengths, heads=heads, size=128, block_size=16, dtype=torch.bfloat16
    )
    case.decode()
    assert len(hopper_launches()) == 1


@needs_hopper
def test_other_calls_go_to_the_portable_kernel() -> None:
    """ALiBi, patterns, int64 tables, small heads, float8 and more than 32 heads per KV head."""
    LAUNCHES.clear()
    device = torch.device("cuda")
    fields: dict[str, Any] = {"heads": (8, 2), "block_size": 16, "dtype": torch.bfloat16}
    case = Case(device, (100, 7), size=128, **fields)
    case.decode(alibi_slopes=case.slopes)
    case.decode(BlockSparsePattern(1, 3, 16, 0, 8, 2, tp_rank=0))
    case.table = case.table.long()
    case.decode()
    Case(device, (100, 7), size=32, **fields).decode()
    Case(device, (100, 7), size=128, **fields, kv_cache_dtype="fp8").decode()
    Case(device, (100, 7), size=128, **{**fields, "heads": (40, 1)}).decode()
    assert not hopper_launches()
