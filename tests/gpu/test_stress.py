"""Long random runs on a GPU: a serving loop with poisoned memory, streams, devices, graphs.

`python tests/gpu/stress.py` runs these tests and the conformance suite under compute-sanitizer.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from attnlib.cache.allocator import BlockAllocator
from attnlib.cache.storage import PagedKVCache
from attnlib.layer import Attention
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import AttentionSpec, CudaGraphSupport
from attnlib.testing.poison import poisoned_allocations
from tests.gpu.devices import backend_or_skip, batch_of, needs_gpu, spec_of
from tests.gpu.test_graphs import REQUESTS, Captured

pytestmark = [pytest.mark.gpu, needs_gpu]

STEPS = int(os.environ.get("ATTNLIB_STRESS_STEPS", "200"))
KINDS = {
    "bfloat16": spec_of(),
    "sinks-window": spec_of(has_sink=True, sliding_window=70, needs_lse=True),
    "float32": spec_of(dtype=torch.float32, head_size=64, logits_soft_cap=20.0, has_alibi=True),
    "fp8": spec_of(kv_cache_dtype="fp8", num_kv_heads=1),
    "multi-head": spec_of(dtype=torch.float16, num_kv_heads=8, block_size=32),
}


class Server:
    """One layer that serves requests which arrive, grow and leave at random.

    Freed blocks and scratch memory are filled with NaN, so that a read of stale memory shows.
    """

    def __init__(self, spec: AttentionSpec, seed: int, device: str = "cuda") -> None:
        backend = backend_or_skip("triton", spec)
        self.spec, self.device, self.rng = spec, device, random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)
        slopes = [2.0 ** -(head + 1) for head in range(spec.num_heads)] if spec.has_alibi else None
        sinks = torch.randn(spec.num_heads, generator=self.numbers) if spec.has_sink else None
        layers = []
        for chosen in (backend, "torch"):
            tensors = {"sinks": None if sinks is None else sinks.to(device), "alibi_slopes": slopes}
            layers.append(Attention(spec, backend=chosen, device=device, **tensors))
        self.layer, self.reference = layers
        self.builder = backend.make_builder(spec, device)
        self.reference_builder = self.reference.backend.make_builder(spec, device)
        scales = {"k_scale": 0.05, "v_scale": 0.05} if spec.is_kv_quantized else {}
        self.cache = PagedKVCache.allocate(spec, 400, device, **scales)
        self.poison(range(400))
        self.pool = BlockAllocator(400, spec.block_size, prefix_caching=False)
        self.lengths: list[int] = []
        self.blocks: list[list[int]] = []

    def poison(self, blocks: Any) -> None:
        """Fill blocks with NaN."""
        index = torch.tensor(list(blocks), device=self.device)
        for view in (self.cache.key_cache, self.cache.value_cache):
            if view.element_size() == 1:
                view.view(torch.uint8)[index] = 0x7F
            else:
                view[index] = float("nan")

    def next_batch(self) -> CommonAttentionMetadata:
        """Requests leave and arrive; the others get a few new tokens, or a chunk of a prompt."""
        rng = self.rng
        for request in reversed(range(len(self.lengths))):
            if rng.random() < 0.08 or self.lengths[request] > 900:
                self.poison(self.blocks[request])
                self.pool.free(self.blocks.pop(request))
                self.lengths.pop(request)
        while len(self.lengths) < rng.choice([1, 4, 12]):
            self.lengths.append(0)
            self.blocks.append([])
        kind = rng.choice(["decode", "mixed", "mixed", "verify"])
        queries = []
        for length in self.lengths:
            chunk = rng.choice([1, 17, 64, 130])
            decodes = kind == "decode" or (kind == "mixed" and rng.random() < 0.7)
            new = chunk if length == 0 else 1 if decodes else 5 if kind == "verify" else chunk
            queries.append(0 if length and rng.random() < 0.05 else new)
        order = sorted(range(len(queries)), key=lambda r: queries[r] > 8)
        if rng.random() < 0.2:
            rng.shuffle(order)  # decodes behind prefills
        queries = [queries[r] for r in order]
        self.lengths = [self.lengths[r] for r in order]
        self.blocks = [self.blocks[r] for r in order]
        for request, new in enumerate(queries):
            self.lengths[request] += new
            needed = -(-self.lengths[request] // self.spec.block_size)
            self.blocks[request] += self.pool.allocate(needed - len(self.blocks[request]))
        return CommonAttentionMetadata.from_lengths(
            queries, self.lengths, self.blocks, self.spec.block_size, self.device
        )

    def inputs(self, tokens: int) -> list[torch.Tensor]:
        """q, k and v."""
        heads = (self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads)
        return [
            torch.randn(tokens, count, self.spec.head_size, generator=self.numbers)
            .to(self.spec.dtype)
            .to(self.device)
            for count in heads
        ]

    def step(self) -> torch.Tensor:
        """One batch; returns the largest difference to the torch backend over its limit."""
        common = self.next_batch()
        q, k, v = self.inputs(common.num_actual_tokens)
        with poisoned_allocations():
            metadata = self.builder.build(0, common)
            fill_scratch(metadata)
            out = self.layer(q, k, v, self.cache, metadata)
        if metadata.counters is not None:
            assert not metadata.counters.any(), "counters are zero between calls"
        expected = self.reference(
            q, None, None, self.cache, self.reference_builder.build(0, common)
        )
        limit = {torch.float32: 1e-4}.get(self.spec.dtype, 3e-2)
        error = (out.float() - expected.float()).abs() / (1.0 + expected.float().abs())
        worst: torch.Tensor = error.nan_to_num(float("inf")).max() if error.numel() else error.sum()
        return worst / limit


def fill_scratch(metadata: Any) -> None:
    """Scratch memory holds NaN before each step: no kernel may read what it did not write."""
    if metadata.workspace is not None:
        metadata.workspace.view(torch.float32).fill_(float("nan"))


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_long_serving_run_with_poisoned_memory(kind: str) -> None:
    """P5, G4: stale scratch memory and freed blocks change nothing."""
    server = Server(KINDS[kind], seed=sum(kind.encode()))
    for step in range(STEPS):
        worst = float(server.step())
        assert worst < 1.0, f"step {step}: {worst:.2f} times the limit"


def _prepared(server: Server, steps: int) -> list[tuple[Any, list[torch.Tensor], torch.Tensor]]:
    """Batches of a server with their expected outputs, computed one after the other."""
    found = []
    for _ in range(steps):
        common = server.next_batch()
        tensors = server.inputs(common.num_actual_tokens)
        metadata = server.builder.build(0, common)
        found.append((common, tensors, server.layer(*tensors, server.cache, metadata)))
    torch.cuda.synchronize(server.device)
    return found


@torch.inference_mode()
def test_two_streams_with_a_builder_each() -> None:
    """Steps of two models overlap on the device; each gives the bits of a run on its own."""
    servers = [Server(KINDS["bfloat16"], 1), Server(KINDS["sinks-window"], 2)]
    prepared = [_prepared(server, STEPS) for server in servers]
    for server in servers:
        server.poison(range(400))
    streams = [torch.cuda.Stream() for _ in servers]
    torch.cuda.synchronize()
    outs: list[list[torch.Tensor]] = [[], []]
    for number in range(STEPS):
        for which, (server, stream) in enumerate(zip(servers, streams, strict=True)):
            common, tensors, _ = prepared[which][number]
            with torch.cuda.stream(stream):
                metadata = server.builder.build(0, common)
                outs[which].append(server.layer(*tensors, server.cache, metadata))
    torch.cuda.synchronize()
    for found, steps in zip(outs, prepared, strict=True):
        for number, (out, (_, _, expected)) in enumerate(zip(found, steps, strict=True)):
            assert torch.equal(out, expected), f"step {number} differs"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@torch.inference_mode()
def test_two_devices_take_turns() -> None:
    """One process, one spec, two GPUs: plans, launches and tables of one never reach the other."""
    servers = [Server(KINDS["bfloat16"], 3, f"cuda:{index}") for index in range(2)]
    for step in range(STEPS):
        for server in servers:
            with torch.cuda.device(server.device):
                worst = float(server.step())
            assert worst < 1.0, f"step {step} on {server.device}: {worst:.2f} times the limit"


@torch.inference_mode()
def test_graphs_replay_while_other_batches_run() -> None:
    """A captured step on one stream, eager steps of another builder on a second stream."""
    level = CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
    captured = Captured("triton", spec_of(needs_lse=True, cudagraph=level), 1)
    server = Server(KINDS["bfloat16"], 4)
    prepared = _prepared(server, 60)
    server.poison(range(400))
    rng = random.Random(0)
    eager, outs, side = [], [], torch.cuda.Stream()
    torch.cuda.synchronize()
    for common, tensors, expected in prepared:
        with torch.cuda.stream(side):
            metadata = server.builder.build(0, common)
            eager.append((server.layer(*tensors, server.cache, metadata), expected))
        lengths = [rng.randint(1, 500) for _ in range(rng.randint(1, REQUESTS))]
        batch = batch_of(captured.spec, [1] * len(lengths), lengths, 400, rng.randint(0, 99))
        for static in (captured.query, captured.key, captured.value):
            static.normal_()
        captured.builder.build(0, captured.state.begin_forward(batch, REQUESTS, 1))
        captured.graph.replay()
        rows = len(lengths)
        replayed = captured.out[:rows].clone()
        own = captured.layer.backend.make_builder(captured.spec, "cuda").build(0, batch)
        again, _ = captured.layer(
            captured.query[:rows], captured.key[:rows], captured.value[:rows], captured.cache,
            own, True,
        )  # fmt: skip
        outs.append((replayed, again))
    torch.cuda.synchronize()
    for out, expected in eager:
        assert torch.equal(out, expected)
    for out, expected in outs:
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
