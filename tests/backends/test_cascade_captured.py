"""Shared prefixes in captured steps: one set of tensors and launches for every later batch.

On a CPU, a replay is a call with the metadata of the capture, as in check G1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import attnlib
from attnlib.backends.cascade.captured import fitting_parts
from attnlib.backends.cascade.schedule import EVERY_PREFIX
from attnlib.backends.triton.metadata import TritonMetadataBuilder
from attnlib.metadata.shared_prefix import SharedPrefix, find_shared_prefixes
from attnlib.selection import merge_attention
from attnlib.spec import CudaGraphSupport

RULE = replace(EVERY_PREFIX, min_part_tokens=4, captured_parts=8)
SPEC = attnlib.AttentionSpec(
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    dtype=torch.float32,
    block_size=4,
    cudagraph=CudaGraphSupport.ALWAYS,
)
FLAT = SPEC.replace(cudagraph=CudaGraphSupport.NEVER)
LIMITS = attnlib.BatchLimits(max_num_reqs=6, max_num_tokens=6, max_seq_len=48)


def _batches() -> list[list[list[int]]]:
    """Block tables of decodes: two levels, nothing shared, one prefix for all, fewer requests."""
    return [
        [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7], [8, 9], [10]],
        [[n, n + 6] for n in range(1, 7)],
        [[1, 2, 3, n] for n in range(4, 10)],
        [[1, 2, 3], [1, 2, 4]],
    ]


@pytest.mark.parametrize("shape", [None, (4, 3)], ids=["parts", "items"])
@pytest.mark.parametrize("has_sink", [False, True])
def test_one_capture_serves_batches_with_and_without_prefixes(
    shape: tuple[int, int] | None, has_sink: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if shape and device.type == "cuda":
        pytest.skip("tests/gpu/test_shared_decode.py captures the kernel")
    monkeypatch.setattr(TritonMetadataBuilder, "shared_decode_shape", property(lambda self: shape))
    sinks = torch.linspace(-1, 1, 4, device=device) if has_sink else None
    spec, flat_spec = (x.replace(has_sink=has_sink) for x in (SPEC, FLAT))
    backend: Any = merge_attention("triton", "triton", RULE)
    layer = attnlib.Attention(spec, backend=backend, device=device, sinks=sinks)
    builder = backend.make_builder(spec, device, limits=LIMITS)
    state = backend.get_state_cls()(builder, LIMITS)
    cache = attnlib.PagedKVCache.allocate(spec, 16, device)
    cache.key_cache.normal_()
    cache.value_cache.normal_()
    rows = [torch.zeros(6, heads, 16, device=device) for heads in (4, 2, 2)]
    captured = state.graph_capture_get_metadata_for_batch(6)
    layer(*rows, cache, captured)

    def run() -> torch.Tensor:
        return layer(*rows, cache, captured)

    replay = run
    if device.type == "cuda":
        graph, result = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            result.append(run())

        def replay() -> torch.Tensor:
            graph.replay()
            return result[0]

    flat = attnlib.Attention(flat_spec, backend="torch", device=device, sinks=sinks)
    shared = []
    for number, table in enumerate(_batches()):
        lengths = [4 * len(blocks) - number % 3 for blocks in table]
        common = attnlib.CommonAttentionMetadata.from_lengths(
            [1] * len(table), lengths, table, 4, device
        )
        host = torch.zeros(len(table), 4, dtype=torch.int32)
        for request, blocks in enumerate(table):
            host[request, : len(blocks)] = torch.tensor(blocks)
        found = find_shared_prefixes(host, torch.tensor(lengths) - 1, 4)
        common = common.replace(shared_prefixes=found)
        torch.manual_seed(number)
        for static in rows:
            static.normal_()
        given = builder.build(0, state.begin_forward(common, 6))
        shared.append(len(given.shared_prefixes))
        for mine, theirs in zip(_tensors(given), _tensors(captured), strict=True):
            assert mine.data_ptr() == theirs.data_ptr(), "a graph reads the old address (G3)"
        got = replay()[: len(table)]
        metadata = flat.backend.make_builder(flat_spec, device).build(0, common)
        want = flat(*(x[: len(table)] for x in rows), cache, metadata)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert shared[0] >= 2 and shared[1] == 0 and shared[2:] == [1, 1]


def _tensors(metadata: Any) -> list[torch.Tensor]:
    items = metadata.items
    if items is not None:
        return [
            items.ranges, items.segments, items.items, items.tokens,
            items.partial_starts, items.partial_rows, metadata.suffix.seq_lens,
            metadata.block_table,
        ]  # fmt: skip
    prefix = metadata.prefix
    return [
        prefix.query_rows, prefix.partial_starts, prefix.partial_rows, metadata.suffix.seq_lens,
        metadata.suffix.block_table, prefix.metadata.seq_lens, prefix.metadata.query_start_loc,
        prefix.metadata.block_table,
    ]  # fmt: skip


def test_graphs_do_not_share_by_default() -> None:
    backend: Any = merge_attention("torch", "torch", EVERY_PREFIX)
    builder = backend.make_builder(
        SPEC.replace(cudagraph=CudaGraphSupport.NEVER), "cpu", limits=LIMITS
    )
    common = attnlib.CommonAttentionMetadata.from_lengths([1], [4], [[1]], 4, "cpu")
    assert builder.build_for_cudagraph_capture(common).prefix is None


@pytest.mark.parametrize(
    ("parts", "rows", "kept", "ends"),
    [
        (8, 100, 2, [4, 8, 12, 16, 20, 24]),
        (3, 100, 2, [16, 24]),
        (8, 6, 2, [16, 24]),
        (8, 5, 1, [16]),
        (1, 100, 1, [16]),
        (8, 3, 0, []),
    ],
)
def test_prefixes_that_do_not_fit_are_left_out(
    parts: int, rows: int, kept: int, ends: list[int]
) -> None:
    """The last level first; the tokens are divided as long as rows and parts suffice."""
    prefixes = [SharedPrefix((0, 1, 2, 3), 0, 16), SharedPrefix((1, 2), 16, 24)]
    found, made = fitting_parts(prefixes, [1] * 4, parts, rows, RULE, 4)
    assert found == prefixes[:kept]
    assert [part.end for part in made] == ends
