"""Exchanges by memory in one process: a stream and a buffer for each rank, on all GPUs in turn,
whose kernels wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from attnlib.ops.peer_buffers import PeerBuffers
from attnlib.ops.split_states import SplitStates
from attnlib.ops.triton.peer_words import merge_words, share_words
from tests.gpu.devices import needs_gpu
from tests.ops.triton.hopper.early_decodes import combine_splits

pytestmark = [pytest.mark.gpu, needs_gpu]

SIZES = (
    # Tokens, KV heads, query heads of one for each rank, sizes of keys and values.
    (1, 1, 16, 128, 128),
    (3, 4, 2, 128, 128),
    (16, 4, 2, 128, 128),
    (2, 2, 1, 96, 64),
    (5, 1, 8, 576, 512),
    (48, 4, 4, 128, 128),
)
"""Two ranks may have one GPU, which then holds all programs of both: otherwise those wait for
programs that cannot start. A rank with a GPU of its own has no such limit."""


@dataclass
class Step:
    """One exchange: what each rank has, on its GPU, and what it gets."""

    kv_heads: int
    queries: list[Tensor]
    partial: list[Tensor]
    lses: list[Tensor]
    sinks: list[Tensor | None]
    shared: list[Tensor]
    out: list[Tensor]
    lse: list[Tensor]
    splits: list[SplitStates | None]

    @classmethod
    def of(cls, ranks: Ranks, sizes: tuple[int, ...], dtype: torch.dtype, has_sink: bool) -> Step:
        tokens, kv_heads, per_kv, size, size_v = sizes
        heads, world = kv_heads * per_kv, len(ranks.devices)

        def each(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
            return [torch.randn(*shape, device=device).to(dtype) for device in ranks.devices]

        # Sinks of a rank as a column of those of all.
        sinks = [found[:, 0] if has_sink else None for found in each(heads, world)]
        step = cls(
            kv_heads,
            each(tokens, heads, size, dtype=dtype),
            each(tokens, world * heads, size_v, dtype=dtype),
            each(tokens, world * heads),
            sinks,
            each(1),
            each(tokens, heads, size_v, dtype=dtype),
            each(tokens, heads),
            [None] * world,
        )
        step.draw()
        return step

    def draw(self) -> None:
        for tensor in (*self.queries, *self.partial, *self.lses):
            tensor.normal_()
        self.lses[0][0, 0] = -torch.inf  # no keys: the output may be anything
        self.partial[0][0, 0] = torch.nan
        for tensor in (*self.out, *self.lse):
            tensor.fill_(torch.nan)

    def share(self, rank: int, peers: PeerBuffers) -> None:
        query = self.queries[rank]
        self.shared[rank] = share_words(query.view(query.shape[0] * self.kv_heads, -1), peers)

    def merge(self, rank: int, peers: PeerBuffers) -> None:
        merge_words(
            self.partial[rank],
            self.lses[rank],
            self.out[rank],
            self.lse[rank],
            peers,
            num_kv_heads=self.kv_heads,
            sinks=self.sinks[rank],
            splits=self.splits[rank],
        )

    def check(self) -> None:
        world, tokens = len(self.queries), self.queries[0].shape[0]
        queries, partial, given = (
            torch.stack([each.cpu() for each in x]) for x in (self.queries, self.partial, self.lses)
        )
        rows = queries.view(world, tokens * self.kv_heads, -1).transpose(0, 1)
        # [ranks of keys, T, Hkv, ranks of heads, heads of each, Dv]
        parts = partial.view(world, tokens, self.kv_heads, world, -1, partial.shape[-1])
        lses = given.view(world, tokens, self.kv_heads, world, -1)
        for rank in range(world):
            assert torch.equal(self.shared[rank].cpu(), rows)
            states = parts[:, :, :, rank].flatten(2, 3).float()
            logits, sinks = lses[:, :, :, rank].flatten(2, 3), self.sinks[rank]
            if sinks is not None:
                states = torch.cat((states, torch.zeros_like(states[:1])))
                logits = torch.cat((logits, sinks.cpu().expand_as(logits[:1])))
            weights = logits.softmax(0).unsqueeze(-1)
            wanted = torch.where(weights == 0, 0.0, states * weights).sum(0)
            out, lse = self.out[rank].cpu(), self.lse[rank].cpu()
            tolerance = {torch.float32: 1e-5}.get(out.dtype, 2e-2)
            torch.testing.assert_close(out.float(), wanted, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(lse, logits.logsumexp(0), atol=1e-5, rtol=1e-5)


class Ranks:
    """Buffers and streams of ranks; rank i on the i-th GPU, and from the first one on again."""

    def __init__(self, world: int) -> None:
        count = torch.cuda.device_count()
        if world > 2 * count:
            pytest.skip("a GPU does not hold the programs of three ranks")
        self.devices = [torch.device("cuda", rank % count) for rank in range(world)]
        for one in self.devices:
            for other in self.devices:  # torch lets a GPU read another one at the first copy
                torch.zeros(1, device=one).to(other)
        size = PeerBuffers.num_bytes()
        buffers = [torch.zeros(size, dtype=torch.uint8, device=each) for each in self.devices]
        self.peers = [PeerBuffers.of(buffers, rank) for rank in range(world)]
        self.streams = [torch.cuda.Stream(device) for device in self.devices]

    def wait(self) -> None:
        for device in self.devices:
            torch.cuda.synchronize(device)

    def run(self, *calls: Callable[[int, PeerBuffers], None]) -> None:
        """Make each call for all ranks before the next one: what waits for the GPU while a kernel
        is loaded or memory is allocated would wait for a kernel that waits for another rank."""
        self.wait()
        for call in calls:
            for rank, (stream, peers) in enumerate(zip(self.streams, self.peers, strict=True)):
                with torch.cuda.stream(stream):
                    call(rank, peers)
        self.wait()

    def exchange(self, step: Step) -> None:
        for stream, query in zip(self.streams, step.queries, strict=True):
            with torch.cuda.stream(stream):  # memory for what is shared
                query.new_empty(len(self.devices), *query.shape)
        self.run(step.share, step.merge)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_exchanges_of_changing_sizes(world: int, dtype: torch.dtype) -> None:
    """X5, X6: words of an exchange are not taken for those of another."""
    ranks = Ranks(world)
    for number in range(2 * len(SIZES)):
        sizes = SIZES[number % len(SIZES)]
        tokens, kv_heads, per_kv, *both = sizes
        num_bytes = both[0] * dtype.itemsize, both[1] * dtype.itemsize
        if not ranks.peers[0].fit(tokens, kv_heads, kv_heads * per_kv, num_bytes):
            assert dtype == torch.float32 and both[1] > 256
            continue
        step = Step.of(ranks, sizes, dtype, number % 2 == number // len(SIZES))
        ranks.exchange(step)
        step.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("world", [2, 4])
def test_states_in_splits(world: int, dtype: torch.dtype) -> None:
    """X5: splits that a decode has left are combined before they are sent."""
    ranks, counts = Ranks(world), (20, 1, 40, 3)
    for _ in range(3):
        step = Step.of(ranks, (len(counts) + 1, 4, 2, 128, 128), dtype, True)
        whole = [leave_splits(step, rank, counts) for rank in range(world)]
        ranks.exchange(step)
        step.partial, step.lses = [out.to(dtype) for out, _ in whole], [lse for _, lse in whole]
        step.check()


def leave_splits(step: Step, rank: int, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Let the states of a rank be in so many splits; those of the last token are of none. Returns
    what they are combined to."""
    partial, lses, kv_heads = step.partial[rank], step.lses[rank], step.kv_heads
    rows, size = partial.shape[1] // kv_heads, partial.shape[2]
    headers = torch.zeros(len(counts) + 1, kv_heads, dtype=torch.int32)
    for token, count in enumerate(counts):
        for kv_head in range(kv_heads):
            first = 2 * (kv_head + kv_heads * 50 * token) + 1
            headers[token, kv_head] = first << 15 | count
    space = 2 * kv_heads * 50 * len(counts) * rows
    outs, of_splits = torch.randn(space * size), 3 * torch.randn(space)
    starts = torch.arange(len(counts) + 1, dtype=torch.int32)
    splits = SplitStates(outs, of_splits, headers.flatten(), starts, rows)
    found = partial.float().cpu(), lses.cpu()
    combine_splits(splits, *found, kv_heads)
    on_device = (x.to(partial.device) for x in splits[:-1])
    step.splits[rank] = SplitStates(*on_device, rows)
    for token, count in enumerate(counts):
        if count > 1:
            partial[token], lses[token] = torch.nan, torch.nan
    return found


@pytest.mark.parametrize("alternate", [True, False])
def test_replays_of_graphs(alternate: bool) -> None:
    """X9: a graph of ten exchanges for each rank, replayed with other inputs: queries and results
    in turn, or those of all layers after each other, where a rank is a step ahead of another."""
    ranks = Ranks(4)
    steps = [Step.of(ranks, SIZES[2], torch.bfloat16, True) for _ in range(10)]
    for step in steps[:2]:  # compiles
        ranks.exchange(step)
    graphs = []
    for rank, (stream, peers) in enumerate(zip(ranks.streams, ranks.peers, strict=True)):
        calls = [call for step in steps for call in (step.share, step.merge)]
        if not alternate:
            calls = [*calls[::2], *calls[1::2]]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(stream.device), torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call(rank, peers)
        graphs.append(graph)
    for _ in range(20):
        for step in steps:
            step.draw()
        ranks.run(lambda rank, _: graphs[rank].replay())
        for step in steps:
            step.check()


def test_states_that_arrive_before_their_lses() -> None:
    """X6: warps of a program that merges a large head see an LSE at different times, and go on
    together. The words of the others are written while this rank waits for them."""
    ranks = Ranks(4)
    step = Step.of(ranks, (40, 1, 8, 576, 512), torch.bfloat16, True)
    ranks.exchange(step)
    assert not late_arrivals(ranks, step)


@pytest.mark.parametrize("size", [64, 128])
def test_words_that_arrive_for_all_warps(size: int) -> None:
    """X6: a program that combines splits has more threads than its heads have words. One of two
    warps with the same words saw them arrive, and the other went on with older ones."""
    ranks, counts = Ranks(2), (20,) * 12
    step = Step.of(ranks, (len(counts) + 1, 2, 4, size, size), torch.bfloat16, True)
    whole = [leave_splits(step, rank, counts) for rank in range(2)]
    ranks.exchange(step)
    step.partial, step.lses = [out.bfloat16() for out, _ in whole], [lse for _, lse in whole]
    assert not late_arrivals(ranks, step)


def late_arrivals(ranks: Ranks, step: Step) -> int:
    """Repeat the merge of the first rank after an exchange, whose words are written again while it
    waits for them. Returns how many of 50 repetitions have other results."""
    peers, stream = ranks.peers[0], ranks.streams[0]
    step.check()
    found = [words.clone() for words in (peers.merged, peers.merged_lses)]
    out, before, wrong = step.out[0].clone(), peers.merge_counts - 1, 0
    writer = torch.cuda.Stream(ranks.devices[0])
    torch.cuda._sleep(1)  # a kernel that is loaded while another one waits would wait for it
    for _ in range(50):
        step.out[0].fill_(torch.nan)
        for words in (peers.merged, peers.merged_lses):
            words.zero_()
        peers.merge_counts.copy_(before.clamp(min=0))
        ranks.wait()
        with torch.cuda.stream(stream):
            step.merge(0, peers)
        with torch.cuda.stream(writer), torch.cuda.device(ranks.devices[0]):
            torch.cuda._sleep(200_000)
            for words, last in zip((peers.merged, peers.merged_lses), found, strict=True):
                words.copy_(last)
        ranks.wait()
        wrong += not torch.equal(step.out[0], out)
    return wrong
