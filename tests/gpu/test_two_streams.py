"""Two key streams (M17) on a GPU: at DeepSeek V4's sizes, and in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from attnlib import Attention, CommonAttentionMetadata
from attnlib.cache.storage import PagedKVCache
from attnlib.metadata.compressed import CompressedKeys, EntryBatch
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.sparse.compressed_entries import CompressedEntries
from attnlib.sparse.key_selection import KeySelection, SelectedKeys
from attnlib.spec import AttentionSpec
from tests.gpu.devices import backend_or_skip, needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

PAGES, COLUMNS, ENTRY_COLUMNS = 300, 64, 16


def _spec(selection: KeySelection | None, heads: int = 64) -> AttentionSpec:
    return AttentionSpec(
        num_heads=heads, num_kv_heads=1, head_size=512, dtype=torch.bfloat16, block_size=64,
        use_mla=True, sliding_window=128, has_sink=True, needs_lse=True,
        compressed_entries=CompressedEntries(compress_rate=4, selection=selection),
    )  # fmt: skip


def _caches(spec: AttentionSpec) -> tuple[PagedKVCache, PagedKVCache]:
    draw = torch.Generator("cuda").manual_seed(0)
    plain = spec.replace(compressed_entries=None)
    caches = tuple(PagedKVCache.allocate(plain, PAGES, "cuda") for _ in range(2))
    for cache in caches:
        latents = cache.key_cache
        latents.copy_(torch.randn(latents.shape, device="cuda", generator=draw))
    return caches[0], caches[1]


def _lists(count: int, most: int) -> SelectedKeys:
    """Distinct entries below 1024, some of them hidden."""
    rows = [torch.randperm(1024, device="cuda")[:most] for _ in range(count)]
    return SelectedKeys(torch.stack(rows)[:, None].int())


def _common(query_lens: list[int], seq_lens: list[int], bound: int) -> CommonAttentionMetadata:
    table = torch.randperm(PAGES)[: len(seq_lens) * COLUMNS].view(len(seq_lens), COLUMNS)
    return CommonAttentionMetadata.from_lengths(
        query_lens, seq_lens, table.int(), 64, "cuda", max_seq_len=bound
    )


def _table(requests: int) -> torch.Tensor:
    blocks = torch.randperm(PAGES)[: requests * ENTRY_COLUMNS]
    return blocks.view(requests, ENTRY_COLUMNS).int().cuda()


@pytest.mark.parametrize("heads", [12, 64, 128])
@pytest.mark.parametrize("selection", [None, KeySelection(max_blocks=128)])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [([1, 1, 1], [4000, 3, 700]), ([1, 90, 3], [2000, 90, 555])]
)
def test_the_triton_backend_agrees_with_torch(
    selection: KeySelection | None, query_lens: list[int], seq_lens: list[int], heads: int
) -> None:
    torch.manual_seed(0)
    spec = _spec(selection, heads)
    cache, entries = _caches(spec)
    common, table = _common(query_lens, seq_lens, 4096), _table(len(seq_lens))
    tokens = sum(query_lens)
    query = torch.randn(tokens, heads, 512, device="cuda", dtype=torch.bfloat16)
    lists = None if selection is None else _lists(tokens, 128)
    sinks, found = torch.randn(heads, device="cuda"), []
    for name in ("triton", "torch"):
        layer = Attention(
            spec, backend=backend_or_skip(name, spec), sinks=sinks, scale=0.06, device="cuda"
        )
        metadata = layer.backend.make_builder(spec, "cuda").build(0, common)
        given = CompressedKeys(entries, EntryBatch.build(common, table, 4), lists)
        found.append(
            layer(query, None, None, cache, metadata, return_lse=True, compressed_keys=given)
        )
    if torch.cuda.get_device_capability()[0] == 9:
        launches = [v for k, v in LAUNCHES.items() if isinstance(k, tuple) and k[0] == "streams"]
        assert launches and launches[-1].attend is not None
    (out, lse), (expected, expected_lse) = found
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-2)


@pytest.mark.parametrize("selection", [None, KeySelection(max_blocks=128)])
def test_a_graph_counts_the_entries_of_each_replay(selection: KeySelection | None) -> None:
    """Lengths, blocks and lists change between replays; the batch of the entries is captured."""
    torch.manual_seed(0)
    spec = _spec(selection)
    backend = backend_or_skip("triton", spec)
    cache, entries = _caches(spec)
    layer = Attention(spec, backend=backend, sinks=torch.randn(64, device="cuda"), device="cuda")
    builder = backend.make_builder(spec, "cuda")
    common, table = _common([1, 1, 1], [100, 50, 7], 4096), _table(3)
    query = torch.randn(3, 64, 512, device="cuda", dtype=torch.bfloat16)
    lists = None if selection is None else _lists(3, 128)
    captured = builder.build_for_cudagraph_capture(common)

    def step(metadata: object) -> torch.Tensor:
        given = CompressedKeys(entries, EntryBatch.build(common, table, 4), lists)
        out: torch.Tensor = layer(query, None, None, cache, metadata, compressed_keys=given)
        return out

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(captured)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(captured)
    assert common.block_table_tensor is not None
    for seq_lens in ([4000, 1, 515], [129, 4096, 64]):
        common.seq_lens.copy_(torch.tensor(seq_lens, dtype=torch.int32))
        other = _common([1, 1, 1], seq_lens, 4096)
        assert other.block_table_tensor is not None
        common.block_table_tensor.copy_(other.block_table_tensor)
        table.copy_(_table(3))
        if lists is not None:
            lists.indices.copy_(_lists(3, 128).indices)
        graph.replay()
        expected = step(backend.make_builder(spec, "cuda").build(0, common.replace(
            seq_lens_cpu=common.seq_lens.cpu(), num_computed_tokens_cpu=None,
        )))  # fmt: skip
        torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
