"""Decodes that read keys while the kernel before them still has to write their queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnlib
from attnlib.ops.split_states import SplitStates
from tests.gpu.devices import batch_of, needs_gpu, spec_of
from tests.ops.triton.hopper.early_decodes import combine_splits

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
cuda = pytest.importorskip("triton.language.extra.cuda")

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
        reason="needs compute capability 9.0",
    ),
]

LAYERS: dict[str, tuple[int, dict[str, Any]]] = {
    "a combine kernel": (2, {}),
    "combined in the kernel": (80, {}),
    "blocks of 1": (3, {"block_size": 1}),
    "float8": (4, {"kv_cache_dtype": "fp8_e4m3"}),
    "int8": (5, {"kv_cache_dtype": "int8_per_token_head"}),
    "sinks, window": (3, {"has_sink": True, "sliding_window": 700}),
}
WAIT_NS = 100_000


@triton.jit
def _write_late(source, target, wait_ns, size, BLOCK: tl.constexpr):
    """Lets the next kernel start, and copies 2 bytes after 2 bytes when the time has passed."""
    cuda.gdc_wait()
    cuda.gdc_launch_dependents()
    began = cuda.globaltimer()
    while cuda.globaltimer() - began < wait_ns:
        pass
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place, mask=place < size), mask=place < size)


@pytest.mark.parametrize("kind", ["layer", "captured layer", "uncombined"])
@pytest.mark.parametrize("name", LAYERS)
def test_queries_that_are_written_late(name: str, kind: str) -> None:
    """M4, M5: outputs and LSEs have the bits of decodes that wait before they read anything; those
    of splits that are combined here are close."""
    torch.manual_seed(0)
    requests, options = LAYERS[name]
    spec = spec_of(num_heads=16, num_kv_heads=4, needs_lse=True, **options)
    lengths = [3000 + 17 * number for number in range(requests)]
    columns = -(-max(lengths) // spec.block_size)
    common = batch_of(spec, [1] * requests, lengths, requests * columns, 0)
    sinks = torch.randn(16, device="cuda") if spec.has_sink else None
    layer = attnlib.Attention(spec, backend="triton", device="cuda", sinks=sinks)
    cache = attnlib.PagedKVCache.allocate(spec, requests * columns, "cuda")
    keys, values = torch.randn(2, sum(lengths), 4, 128, device="cuda", dtype=spec.dtype)
    builder = layer.backend.make_builder(spec, "cuda")
    fill = batch_of(spec, lengths, lengths, requests * columns, 0)
    prompts = torch.randn(sum(lengths), 16, 128, device="cuda", dtype=spec.dtype)
    layer(prompts, keys, values, cache, builder.build(0, fill))
    batch = builder.build(0, common)
    assert batch.decode_schedule.uses_hopper
    early = batch.behind_queries()
    assert early.early and not batch.early
    query = torch.randn(requests, 16, 128, device="cuda", dtype=spec.dtype)
    late = torch.full_like(query, torch.nan)
    wanted = layer(query, None, None, cache, batch, True)
    for like in (query, late):  # compiles
        layer(like, None, None, cache, early, True)
    source, target = query.view(torch.int16), late.view(torch.int16)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        grid = (triton.cdiv(source.numel(), 1024),)
        _write_late[grid](source, target, WAIT_NS, source.numel(), BLOCK=1024, launch_pdl=True)
        if kind == "uncombined" and not spec.has_sink:
            return uncombined()
        out: tuple[torch.Tensor, torch.Tensor] = layer(late, None, None, cache, early, True)
        return out

    def uncombined() -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.empty_like(late), torch.empty(late.shape[:2], device="cuda")
        splits = layer.impl.forward_uncombined(  # type: ignore[attr-defined]  # of this backend
            late, cache, early, *found
        )
        assert (splits is None) == (requests > 32)
        out, lse = (x.cpu() for x in found)
        if splits is not None:
            given = (x.cpu() for x in splits[:-1])
            combine_splits(SplitStates(*given, splits.rows), out, lse, 4)
        return out.cuda(), lse.cuda()

    step()
    graph, captured = torch.cuda.CUDAGraph(), kind == "captured layer"
    if captured:
        with torch.cuda.graph(graph):
            found = step()
    for _ in range(20):
        late.fill_(torch.nan)
        if captured:
            graph.replay()
        else:
            found = step()
        torch.cuda.synchronize()
        for ours, theirs in zip(found, wanted, strict=True):
            if kind != "uncombined":
                assert torch.equal(ours, theirs)
            tolerance = 2e-2 if ours.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
