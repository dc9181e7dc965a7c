"""The Hopper decode of requests that share prefixes, against the torch backend."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import attnlib
from attnlib.backends.cascade.schedule import EVERY_PREFIX
from attnlib.metadata.shared_prefix import find_shared_prefixes
from attnlib.ops.triton.heuristics.hopper_decode_tiles import DecodeTile
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.selection import merge_attention
from attnlib.spec import AttentionSpec, CudaGraphSupport
from tests.gpu.devices import backend_or_skip, needs_gpu, spec_of

pytestmark = [pytest.mark.gpu, needs_gpu]

CASES: dict[str, dict[str, Any]] = {
    "usual": {"num_heads": 32, "num_kv_heads": 8},
    "sinks, cap": {"num_heads": 8, "num_kv_heads": 2, "has_sink": True, "logits_soft_cap": 20.0},
    "head size 64": {"num_heads": 64, "num_kv_heads": 8, "head_size": 64},
    "head size 112, group of 5": {"num_heads": 10, "num_kv_heads": 2, "head_size": 112},
    "one KV head": {"num_heads": 32, "num_kv_heads": 1, "block_size": 64},
    "group of 1, float16": {"num_heads": 16, "num_kv_heads": 16, "dtype": torch.float16},
    "pages of 256": {"num_heads": 8, "num_kv_heads": 4, "block_size": 256},
}


class Tree:
    """Decodes whose block tables are paths in a tree of two levels, with NaN in all other blocks
    and past the end of each request."""

    def __init__(self, spec: AttentionSpec, seed: int) -> None:
        draw, block = random.Random(seed), spec.block_size
        requests = draw.choice((2, 5, 17, 40, 70))
        trunk = list(range(1, 1 + draw.randint(1, max(1, 2000 // block))))
        branches: list[list[int]] = []
        used = trunk[-1] + 1
        for _ in range(3):
            count = draw.randint(0, max(1, 300 // block))
            branches.append(list(range(used, used + count)))
            used += count
        rows, lengths = [], []
        for _ in range(requests):
            shared = trunk + draw.choice(branches) if draw.random() < 0.9 else []
            own = draw.randint(1, 400)
            count = -(-own // block)
            rows.append(shared + list(range(used, used + count)))
            lengths.append(len(shared) * block + own)
            used += count
        order = torch.randperm(used, generator=torch.Generator().manual_seed(seed)).int()
        width = max(map(len, rows))
        table = torch.stack([order[torch.tensor(row + [0] * (width - len(row)))] for row in rows])
        common = attnlib.CommonAttentionMetadata.from_lengths(
            [1] * requests, lengths, table, block, "cuda"
        )
        context = torch.tensor(lengths) - 1
        self.common = common.replace(shared_prefixes=find_shared_prefixes(table, context, block))
        self.cache = attnlib.PagedKVCache.allocate(spec, used, "cuda")
        for part in (self.cache.key_cache, self.cache.value_cache):
            part.normal_()
            unused = torch.ones(used, dtype=torch.bool)
            for row, length in zip(rows, lengths, strict=True):
                unused[order[torch.tensor(row)]] = False
                part[order[row[-1]], length - (len(row) - 1) * block :] = torch.nan
            part[unused.to(part.device)] = torch.nan
        self.last_blocks = [int(order[row[-1]]) for row in rows]
        self.rows = [
            torch.randn(requests, heads, spec.head_size, device="cuda", dtype=spec.dtype)
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        ]


def _use_tile(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the backend use tiles of this many keys."""
    plan = pytest.importorskip("attnlib.ops.triton.hopper.shared_decode_plan")
    tile = DecodeTile(keys, 3 if keys == 64 else 2, 2)
    monkeypatch.setattr(plan, "shared_decode_tile", lambda *sizes: tile)
    LAUNCHES.clear()


@pytest.mark.parametrize("tile_keys", [64, 128])
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_it_agrees_with_torch(name: str, tile_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """M13, P5: forests of prefixes, few and many rows per prefix, and requests without one."""
    spec = spec_of(needs_lse=True, **CASES[name])
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel needs compute capability 9.0")
    _use_tile(tile_keys, monkeypatch)
    found = backend_or_skip("triton", spec)
    pair = merge_attention(found, found, EVERY_PREFIX)
    sinks = torch.randn(spec.num_heads, device="cuda") if spec.has_sink else None
    layers = [
        attnlib.Attention(spec, backend=backend, device="cuda", sinks=sinks)
        for backend in (pair, attnlib.get_attn_backend(spec, "torch", "cuda"))
    ]
    for seed in (0, 4, 5, 7):
        torch.manual_seed(seed)
        tree = Tree(spec, seed)
        states = []
        for layer in layers:
            metadata: Any = layer.backend.make_builder(spec, "cuda").build(0, tree.common)
            for _ in range(2):  # by Triton, then directly
                states.append(layer(*tree.rows, tree.cache, metadata, return_lse=True))
        assert tree.common.shared_prefixes
        (got, lse), (again, lse_again), (want, want_lse), _ = states
        torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=2e-3)
        assert torch.equal(got, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize(("size", "step"), [(24, 2), (128, 4)])
def test_partial_results_are_merged(size: int, step: int) -> None:
    """M4, M6: each token gets its splits and, once, the sink; rows without a request are 0."""
    kernels = pytest.importorskip("attnlib.ops.triton.hopper.kernels.merge_rows")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel needs compute capability 9.0")
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(7, 3, size, generator=generator)
    lses = 3 * torch.randn(7, 3, generator=generator)
    lses[2, 1], parts[2, 1] = -torch.inf, torch.nan  # a split without keys
    rows = [[3], [6, 0, 2], [2, 1, 5, 4, 3], []]
    starts = torch.tensor([0, 1, 4, 9, 9], dtype=torch.int32)
    index = torch.tensor([row for group in rows for row in group], dtype=torch.int32)
    sinks = torch.randn(3, generator=generator)
    out = torch.full((5, 3, size), torch.nan, dtype=torch.bfloat16, device="cuda")
    lse = torch.full((5, 3), torch.nan, device="cuda")
    for sink in (None, sinks):
        kernels.hopper_merge_rows_kernel[(5, 2)](
            parts.cuda(), (lses / math.log(2)).cuda(), starts.cuda(), index.cuda(),
            None if sink is None else sink.cuda(), out, lse, 3, out.stride(0), out.stride(1),
            lse.stride(0), NUM_HEADS=3, HEADS=2, DV=size, DV_PAD=max(32, size), STEP=step,
            HAS_SINK=sink is not None, HAS_LSE=True, num_warps=2,
        )  # fmt: skip
        for token, group in enumerate(rows[:3]):
            values = torch.where(lses[group].isfinite()[..., None], parts[group], 0.0)
            total = lses[group].logsumexp(0)
            if sink is not None:
                total = torch.logaddexp(total, sink)
            want = (torch.exp(lses[group] - total)[..., None] * values).sum(0)
            torch.testing.assert_close(out[token].float().cpu(), want, rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(lse[token].cpu(), total, rtol=1e-4, atol=1e-4)
        assert not out[3:].any() and (lse[3:] == -torch.inf).all()


@torch.inference_mode()
def test_values_of_one_request_do_not_reach_others() -> None:
    """Requests of one item: NaN and infinities of a request's own tokens stay in its rows."""
    spec = spec_of(num_heads=32, num_kv_heads=8, needs_lse=True)
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel needs compute capability 9.0")
    found = backend_or_skip("triton", spec)
    pair = merge_attention(found, found, EVERY_PREFIX)
    layer = attnlib.Attention(spec, backend=pair, device="cuda")
    for seed, value in ((0, torch.nan), (4, torch.inf), (5, torch.nan)):
        torch.manual_seed(seed)
        tree = Tree(spec, seed)
        metadata: Any = pair.make_builder(spec, "cuda").build(0, tree.common)
        want, want_lse = layer(*tree.rows, tree.cache, metadata, return_lse=True)
        spoiled = list(range(0, tree.common.num_reqs, 3))
        blocks = [tree.last_blocks[request] for request in spoiled]
        tree.cache.key_cache[blocks] = value
        tree.cache.value_cache[blocks] = value
        got, lse = layer(*tree.rows, tree.cache, metadata, return_lse=True)
        rest = torch.ones(tree.common.num_reqs, dtype=torch.bool)
        rest[spoiled] = False
        assert torch.equal(got[rest], want[rest]) and torch.equal(lse[rest], want_lse[rest])


@torch.inference_mode()
def test_tensors_that_it_cannot_read() -> None:
    """Queries off 16-byte boundaries: the backend computes the prefixes with each request."""
    spec = spec_of(num_heads=8, num_kv_heads=2)
    found = backend_or_skip("triton", spec)
    pair = merge_attention(found, found, EVERY_PREFIX)
    tree = Tree(spec, 3)
    outputs = []
    for backend in (pair, found):
        layer = attnlib.Attention(spec, backend=backend, device="cuda")
        metadata = backend.make_builder(spec, "cuda").build(0, tree.common)
        query, *rest = tree.rows
        moved = torch.empty(query.numel() + 1, dtype=query.dtype, device="cuda")[1:].view_as(query)
        moved.copy_(query)
        outputs.append(layer(moved, *rest, tree.cache, metadata))
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


@torch.inference_mode()
def test_one_graph_serves_batches_with_and_without_prefixes() -> None:
    """G3: replays of one captured step, whose items every batch fills."""
    spec = spec_of(num_heads=32, num_kv_heads=8, cudagraph=CudaGraphSupport.ALWAYS)
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel needs compute capability 9.0")
    found = backend_or_skip("triton", spec)
    pair: Any = merge_attention(found, found, replace(EVERY_PREFIX, captured_parts=8))
    limits = attnlib.BatchLimits(max_num_reqs=40, max_num_tokens=40, max_seq_len=4096)
    layer = attnlib.Attention(spec, backend=pair, device="cuda")
    builder = pair.make_builder(spec, "cuda", limits=limits)
    state = pair.get_state_cls()(builder, limits)
    trees = [Tree(spec, seed) for seed in range(1, 10)]
    trees = [tree for tree in trees if tree.common.num_reqs <= 40]
    blocks = max(tree.cache.key_cache.shape[0] for tree in trees)
    cache = attnlib.PagedKVCache.allocate(spec, blocks, "cuda")
    rows = [torch.zeros(40, heads, 128, device="cuda", dtype=spec.dtype) for heads in (32, 8, 8)]
    captured: Any = state.graph_capture_get_metadata_for_batch(40)
    assert captured.items is not None
    for _ in range(2):
        layer(*rows, cache, captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layer(*rows, cache, captured)
    plain = attnlib.Attention(spec, backend=found, device="cuda")
    assert len(trees) >= 3
    for tree in (*trees, trees[0]):
        count, pool = tree.common.num_reqs, tree.cache
        cache.key_cache[: pool.key_cache.shape[0]] = pool.key_cache
        cache.value_cache[: pool.value_cache.shape[0]] = pool.value_cache
        for static, given in zip(rows, tree.rows, strict=True):
            static[:count] = given
        metadata = builder.build(0, state.begin_forward(tree.common, 40))
        assert metadata.shared_prefixes
        graph.replay()
        flat = found.make_builder(spec, "cuda").build(0, tree.common)
        want = plain(*tree.rows, pool, flat)
        torch.testing.assert_close(got[:count].float(), want.float(), rtol=2e-2, atol=1e-2)
        assert not got[count:].any()
