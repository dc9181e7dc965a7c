"""Exchanges by memory on one GPU: a stream and a buffer for each rank, whose kernels wait for each
other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from attnlib.ops.peer_buffers import PeerBuffers
from attnlib.ops.triton.peer_words import merge_words, share_words
from tests.gpu.devices import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

SIZES = (
    # Tokens, KV heads, query heads of one for each rank, sizes of keys and values.
    (1, 1, 16, 128, 128),
    (3, 4, 2, 128, 128),
    (16, 4, 2, 128, 128),
    (2, 2, 1, 96, 64),
    (5, 1, 8, 576, 512),
)


@dataclass
class Step:
    """One exchange: what the ranks have, `[world_size, ...]`, and what they get."""

    queries: Tensor
    partial: Tensor
    lses: Tensor
    sinks: Tensor | None
    shared: list[Tensor]
    out: Tensor
    lse: Tensor

    @classmethod
    def of(cls, world: int, sizes: tuple[int, ...], dtype: torch.dtype, has_sink: bool) -> Step:
        tokens, kv_heads, per_kv, size, size_v = sizes
        heads = kv_heads * per_kv
        made = {"device": "cuda"}
        step = cls(
            torch.empty(world, tokens, heads, size, dtype=dtype, **made),
            torch.empty(world, tokens, world * heads, size_v, dtype=dtype, **made),
            torch.empty(world, tokens, world * heads, **made),
            torch.randn(world, heads, **made) if has_sink else None,
            [torch.empty(0)] * world,
            torch.empty(world, tokens, heads, size_v, dtype=dtype, **made),
            torch.empty(world, tokens, heads, **made),
        )
        step.draw()
        return step

    def draw(self) -> None:
        for tensor in (self.queries, self.partial, self.lses):
            tensor.normal_()
        self.lses[0, 0, 0] = -torch.inf  # no keys: the output may be anything
        self.partial[0, 0, 0] = torch.nan
        self.out.fill_(torch.nan)
        self.lse.fill_(torch.nan)

    def share(self, rank: int, peers: PeerBuffers, kv_heads: int) -> None:
        rows = self.queries[rank].view(self.queries.shape[1] * kv_heads, -1)
        self.shared[rank] = share_words(rows, peers)

    def merge(self, rank: int, peers: PeerBuffers, kv_heads: int) -> None:
        merge_words(
            self.partial[rank],
            self.lses[rank],
            self.out[rank],
            self.lse[rank],
            peers,
            num_kv_heads=kv_heads,
            sinks=None if self.sinks is None else self.sinks[rank],
        )

    def check(self, kv_heads: int) -> None:
        world, tokens = self.queries.shape[:2]
        rows = self.queries.view(world, tokens * kv_heads, -1).transpose(0, 1)
        # [ranks of keys, T, Hkv, ranks of heads, heads of each, Dv]
        parts = self.partial.view(world, tokens, kv_heads, world, -1, self.partial.shape[-1])
        lses = self.lses.view(world, tokens, kv_heads, world, -1)
        for rank in range(world):
            assert torch.equal(self.shared[rank], rows)
            states = parts[:, :, :, rank].flatten(2, 3).float()
            logits = lses[:, :, :, rank].flatten(2, 3)
            if self.sinks is not None:
                states = torch.cat((states, torch.zeros_like(states[:1])))
                logits = torch.cat((logits, self.sinks[rank].expand_as(logits[:1])))
            weights = logits.softmax(0).unsqueeze(-1)
            wanted = torch.where(weights == 0, 0.0, states * weights).sum(0)
            tolerance = {torch.float32: 1e-5}.get(self.out.dtype, 2e-2)
            torch.testing.assert_close(
                self.out[rank].float(), wanted, atol=tolerance, rtol=tolerance
            )
            torch.testing.assert_close(self.lse[rank], logits.logsumexp(0), atol=1e-5, rtol=1e-5)


class Ranks:
    """Buffers and streams of ranks on one GPU."""

    def __init__(self, world: int) -> None:
        size = PeerBuffers.num_bytes()
        buffers = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(world)]
        self.peers = [PeerBuffers.of(buffers, rank) for rank in range(world)]
        self.streams = [torch.cuda.Stream() for _ in range(world)]

    def run(self, *calls: Callable[[int], None]) -> None:
        """Make each call for all ranks before the next one: a kernel that is loaded then has none
        beside it that waits for another rank."""
        torch.cuda.synchronize()
        for call in calls:
            for rank, stream in enumerate(self.streams):
                with torch.cuda.stream(stream):
                    call(rank)
        torch.cuda.synchronize()

    def exchange(self, step: Step, kv_heads: int) -> None:
        self.run(
            lambda rank: step.share(rank, self.peers[rank], kv_heads),
            lambda rank: step.merge(rank, self.peers[rank], kv_heads),
        )


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_exchanges_of_changing_sizes(world: int, dtype: torch.dtype) -> None:
    """X5, X6: words of an exchange are not taken for those of another."""
    ranks = Ranks(world)
    for number in range(4 * len(SIZES)):
        sizes = SIZES[number % len(SIZES)]
        if dtype == torch.float32 and sizes[-1] > 256:
            continue
        step = Step.of(world, sizes, dtype, number % 2 == 1)
        for peers in ranks.peers:
            assert peers.fit(
                sizes[0],
                sizes[1],
                sizes[1] * sizes[2],
                (sizes[3] * dtype.itemsize, sizes[4] * dtype.itemsize),
            )
        ranks.exchange(step, sizes[1])
        step.check(sizes[1])


def test_replays_of_graphs() -> None:
    """X9: a graph of ten exchanges for each rank, replayed with other inputs."""
    ranks = Ranks(4)
    steps = [Step.of(4, SIZES[2], torch.bfloat16, True) for _ in range(10)]
    for step in steps:  # compiles
        ranks.exchange(step, 4)
    graphs = []
    for rank, stream in enumerate(ranks.streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for step in steps:
                step.share(rank, ranks.peers[rank], 4)
                step.merge(rank, ranks.peers[rank], 4)
        graphs.append(graph)
    for _ in range(20):
        for step in steps:
            step.draw()
        ranks.run(lambda rank: graphs[rank].replay())
        for step in steps:
            step.check(4)
