"""Open KV formats on a GPU (P16): reads by the portable kernels, writes by the formats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import attnlib
from attnlib.kv_formats import KVFormat, register_kv_format, unregister_kv_format
from attnlib.object_path import load_object
from attnlib.testing.conformance import run_conformance
from tests.gpu.devices import needs_gpu
from tests.kv_formats.conftest import MODULE
from tests.kv_formats.device_formats import CUBES, SQUARES, STEPS

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.fixture(params=["tests:squares", "tests:steps", "tests:cubes", "example:rotated4"])
def stored(request: pytest.FixtureRequest) -> Iterator[KVFormat]:
    """Numbers that instructions compute, of equal steps, and of tables for 8 and 4 bits."""
    formats = (SQUARES, STEPS, CUBES, load_object(f"{MODULE}:ROTATED_4BIT"))
    found = register_kv_format(next(one for one in formats if one.name == request.param))
    yield found
    unregister_kv_format(found.name)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_conformance(stored: KVFormat, backend: str) -> None:
    report = run_conformance(backend, device="cuda", kv_format=stored.name)
    assert report.passed, str(report)


def test_a_captured_step_writes_and_reads(stored: KVFormat) -> None:
    """`encode` of these formats does not synchronize, so that a graph can hold it."""
    fields: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128}
    spec = attnlib.AttentionSpec(**fields, dtype=torch.bfloat16, kv_cache_dtype=stored.name)
    layer = attnlib.Attention(spec, backend="triton", device="cuda")
    cache = attnlib.PagedKVCache.allocate(spec, 4, "cuda")
    table = [[0, 0], [1, 2]]
    batch = attnlib.CommonAttentionMetadata.from_lengths([1, 1], [9, 20], table, 16, "cuda")
    metadata = layer.backend.make_builder(spec, "cuda").build(0, batch)
    q, k, v = (
        torch.randn(2, heads * 128, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2)
    )
    wanted = layer(q, k, v, cache, metadata).clone()  # compiles
    assert cache.pages is not None
    pages = cache.pages.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer(q, k, v, cache, metadata)
    cache.pages.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, wanted) and torch.equal(cache.pages, pages)


def test_keys_and_values_with_tables_of_their_own() -> None:
    """Two tables in shared memory, of half as many copies: decodes and a prefill."""
    values = load_object(f"{MODULE}:ROTATED_4BIT")
    for one in (CUBES, values):
        register_kv_format(one)
    try:
        spec = attnlib.AttentionSpec(
            num_heads=8, num_kv_heads=2, head_size=128, dtype=torch.bfloat16,
            kv_cache_dtype=CUBES.name, value_cache_dtype=values.name,
        )  # fmt: skip
        draw = torch.Generator("cuda").manual_seed(0)
        for queries, lengths in (([1, 1], [300, 77]), ([40, 1, 90], [40, 200, 130])):
            rows, tokens = sum(queries), range(len(lengths))
            table = [[20 * request + block for block in range(20)] for request in tokens]
            q, k, v = (
                torch.randn(rows, heads * 128, dtype=torch.bfloat16, device="cuda", generator=draw)
                for heads in (8, 2, 2)
            )
            before = torch.randn(60 * 16, 2, 128, device="cuda", generator=draw).bfloat16()
            outputs = []
            for backend in ("torch", "triton"):
                layer = attnlib.Attention(spec, backend=backend, device="cuda")
                cache = attnlib.PagedKVCache.allocate(spec, 60, "cuda")
                slots = torch.arange(60 * 16, device="cuda")
                layer.impl.write_kv(before, before.roll(1, 0), cache, slots)
                batch = attnlib.CommonAttentionMetadata.from_lengths(
                    queries, lengths, table, 16, "cuda"
                )
                metadata = layer.backend.make_builder(spec, "cuda").build(0, batch)
                outputs.append(layer(q, k, v, cache, metadata).float())
            error = (outputs[0] - outputs[1]).abs().max() / outputs[0].abs().max()
            assert error < 0.01
    finally:
        for one in (CUBES, values):
            unregister_kv_format(one.name)
