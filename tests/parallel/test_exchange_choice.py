"""Which exchange a layer uses (X6)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from attnlib import AttentionSpec
from attnlib.errors import ContractError, RankLostError, UnsupportedConfigError
from attnlib.ops.peer_buffers import PeerBuffers
from attnlib.ops.triton.kernels.peer_waits import QUERIES, RESULTS, TWICE
from attnlib.parallel import (
    ExchangeMethod,
    ParallelAttention,
    RankGroup,
    explain_parallel,
    group,
    peers,
    setup_checks,
)
from attnlib.parallel.between import leaves_splits
from attnlib.parallel.divisions import Interleaved

SPEC = AttentionSpec(num_heads=8, num_kv_heads=1, head_size=128, dtype=torch.bfloat16)
CUDA = torch.device("cuda", 0)
REASON = "the ranks are on several hosts"


class Ranks:
    """Two ranks, and what they find when they try to share memory."""

    world_size, rank = 2, 0

    def __init__(self, *, share: bool) -> None:
        self.share, self.asked = share, 0
        self.facts: object = None

    def check_device(self, device: torch.device) -> None:
        pass

    def agreed(self, agreement: str, name: str, attempt: Callable[[], tuple[Any, Any]]) -> Any:
        self.facts, result = attempt()
        return result

    def peers(self, device: torch.device) -> PeerBuffers | list[str]:
        self.asked += 1
        buffer = torch.zeros(PeerBuffers.num_bytes(), dtype=torch.uint8)
        return PeerBuffers.of([buffer, buffer], 0) if self.share else [REASON]


def choice(group: Any, exchange: str | None, spec: AttentionSpec = SPEC) -> ExchangeMethod:
    return setup_checks.exchange_of(group, spec, exchange, CUDA).method


def test_memory_comes_first_where_it_is_possible() -> None:
    assert choice(Ranks(share=True), None) is ExchangeMethod.PEER_MEMORY
    assert choice(Ranks(share=False), None) is ExchangeMethod.ALL_TO_ALL


@pytest.mark.parametrize("exchange", ["all_to_all", "reduce_scatter"])
def test_messages_that_are_asked_for_share_no_memory(exchange: str) -> None:
    ranks = Ranks(share=True)
    assert choice(ranks, exchange) is ExchangeMethod(exchange)
    assert not ranks.asked


def test_ranks_agree_whether_they_share_memory() -> None:
    """A rank that asks for the memory of another one, which does not, would wait."""
    facts = []
    with mock.patch.object(setup_checks, "tries_memory", lambda *_: True):
        for exchange in (None, "all_to_all"):
            ranks: Any = Ranks(share=False)
            layer = ParallelAttention(SPEC, ranks, Interleaved(2), exchange=exchange, device="cpu")
            assert layer.exchange.method is ExchangeMethod.ALL_TO_ALL
            assert ranks.asked == (exchange is None)
            facts.append(ranks.facts)
    assert facts[0] != facts[1]


def test_a_layer_on_a_cpu_does_not_decide_for_those_on_gpus() -> None:
    """And the layers of a process group share memory once, however often it is wrapped."""
    process_group: Any = Ranks(share=False)
    first, second = (RankGroup.__new__(RankGroup) for _ in range(2))
    for ranks in (first, second):
        ranks.world_size, ranks.rank, ranks._group = 2, 0, process_group
    found = first.peers(torch.device("cpu"))
    assert isinstance(found, list) and "device=cpu" in found[0]
    with mock.patch.object(group, "connect", return_value=[REASON]) as connect:
        assert first.peers(CUDA) == first.peers(CUDA) == second.peers(CUDA) == [REASON]
    connect.assert_called_once()


def test_why_layers_exchange_by_messages_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "attnlib"):
        assert peers.report([REASON], Ranks(share=False)) is None
    assert f"exchange by messages: {REASON}" in caplog.text


def test_an_exchange_that_does_not_end_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """While the engine waits for its GPU; and a group that has gone is not watched."""
    buffer = torch.zeros(PeerBuffers.num_bytes(), dtype=torch.uint8)
    buffers = PeerBuffers.of([buffer] * 3, 1, limit=timedelta(seconds=9))
    process_group = Ranks(share=True)
    lives, gone = (peers.report(buffers, each) for each in (process_group, Ranks(share=True)))
    assert lives is not None and gone is not None
    gone.join(5)
    assert lives.is_alive() and not gone.is_alive() and not caplog.records
    buffers.record.value = RESULTS.value << 48 | 2 << 32 | 77
    lives.join(5)
    wanted = "rank 1 of 3 waited 9 s for rank 2 in exchange 77 of results by memory"
    assert wanted in caplog.text
    with pytest.raises(RankLostError, match=wanted):
        buffers.check()
    buffers.record.value = (QUERIES.value + TWICE.value) << 48 | 1 << 32 | 2**32 - 1
    with pytest.raises(ContractError, match="exchange 4294967295 of queries by memory ran at"):
        buffers.check()


@pytest.mark.parametrize("fails", ["reach", "_allocate", "_rendezvous", "_buffers", ""])
def test_ranks_agree_when_one_cannot_share(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for each other only where all have memory."""
    met: list[int] = []
    gathered: dict[int, Any] = {}
    barrier = Barrier(2, timeout=30)
    zeros = torch.zeros(PeerBuffers.num_bytes(), dtype=torch.uint8)

    def part(name: str, number: int) -> None:
        if name == fails and number == 1:
            raise RuntimeError("out of memory\nin many lines")

    def allocate(device: torch.device) -> torch.Tensor:
        part("_allocate", device.index)
        return zeros

    def rendezvous(own: torch.Tensor, process_group: int) -> Any:
        met.append(process_group)
        part("_rendezvous", process_group)
        return SimpleNamespace(buffer_ptrs=[own.data_ptr()] * 2)

    def buffers(handle: Any, own: torch.Tensor, offsets: list[int], rank: int, _: Any) -> Any:
        part("_buffers", rank)
        assert offsets == [0, 0]
        return PeerBuffers.of([own, own], rank)

    def gather_of(rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            gathered[rank] = value
            barrier.wait()
            found = [gathered[0], gathered[1]]
            barrier.wait()
            return found

        return gather

    def can_reach(own: int, other: int) -> bool:
        return fails != "reach" or own == 0

    of_cuda = {
        "device_count": lambda: 2,
        "get_device_properties": lambda index: SimpleNamespace(uuid=index),
        "can_device_access_peer": can_reach,
        "synchronize": lambda device: None,
    }
    for name, function in of_cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(peers, "_allocate", allocate)
    monkeypatch.setattr(peers, "_rendezvous", rendezvous)
    monkeypatch.setattr(peers, "_buffers", buffers)

    def connect(rank: int) -> PeerBuffers | list[str]:
        return peers.connect(torch.device("cuda", rank), 2, rank, gather_of(rank), rank)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(connect, range(2))
    assert sorted(met) == ([0, 1] if fails in ("_rendezvous", "_buffers", "") else [])
    if not fails:
        assert isinstance(first, PeerBuffers) and isinstance(second, PeerBuffers)
        return
    assert isinstance(first, list) and first == second
    found = "cannot write" if fails == "reach" else "cannot be shared: RuntimeError: out of memory"
    assert found in first[0] and "lines" not in first[0]


def test_buffers_inside_larger_blocks() -> None:
    """torch takes memory that ranks share from a pool, and may give each rank another part of its
    block. What is beside the buffers stays as it is."""
    size, offsets = PeerBuffers.num_bytes(), [512, 0, 1024]
    blocks = [torch.full((size + 2048,), 7, dtype=torch.uint8) for _ in offsets]

    def get_buffer(rank: int, shape: tuple[int], dtype: torch.dtype, offset: int) -> torch.Tensor:
        return blocks[rank][offset : offset + shape[0]].view(dtype)

    handle = SimpleNamespace(get_buffer=get_buffer)
    options = SimpleNamespace(_timeout=timedelta(seconds=10))
    process_group = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=options))
    for rank, offset in enumerate(offsets):
        own = blocks[rank][offset : offset + size].zero_()
        found = peers._buffers(handle, own, offsets, rank, process_group)
        starts = [block.data_ptr() + each for block, each in zip(blocks, offsets, strict=True)]
        assert found.distances.tolist() == [start - own.data_ptr() for start in starts]
        assert found.limit == timedelta(seconds=9) and not found.share_counts.any()
        beside = torch.cat((blocks[rank][:offset], blocks[rank][offset + size :]))
        assert bool((beside == 7).all())


def test_gpus_that_a_rank_does_not_see() -> None:
    """Launchers may show each process its own GPU only."""
    assert "CUDA_VISIBLE_DEVICES" in peers._out_of_reach(0, ["a"], ["a", "b"])
    with mock.patch.object(torch.cuda, "can_device_access_peer", lambda own, other: True):
        assert not peers._out_of_reach(0, ["a", "b"], ["b", "a"])


@pytest.mark.parametrize("change", [{"dtype": torch.float64}, {"batch_invariant": True}])
def test_layers_that_share_no_memory(change: dict[str, Any]) -> None:
    """float64 has no kernel, and large batches are merged in other arithmetic."""
    ranks = Ranks(share=True)
    assert choice(ranks, None, SPEC.replace(**change)) is ExchangeMethod.ALL_TO_ALL
    assert not ranks.asked


def test_memory_that_is_asked_for_is_not_replaced() -> None:
    with pytest.raises(UnsupportedConfigError, match=f"{REASON}: use 'all_to_all'"):
        choice(Ranks(share=False), "peer_memory")


def test_explain_names_what_layers_try() -> None:
    on_gpu, on_cpu = (
        explain_parallel(SPEC, Interleaved(2), device=device) for device in ("H200", "cpu")
    )
    assert "exchange  peer_memory, or all_to_all:" in on_gpu
    assert "exchange  all_to_all:" in on_cpu


def test_sizes_that_fit() -> None:
    """A rank with 8 heads of 128 merges in 8 programs per token; 8192 times ranks have words."""
    peers = Ranks(share=True).peers(CUDA)
    assert isinstance(peers, PeerBuffers)
    sizes = (256, 256)
    assert peers.fit(256, 1, 8, sizes)
    assert not peers.fit(1024, 1, 8, sizes)
    assert not peers.fit(1, 1, 8, (254, 256)), "no whole words"
    assert not peers.fit(1, 1, 8, (256, 2048)), "a head of 512 words"


@pytest.mark.parametrize("method", ["forward", "plan"])
def test_methods_of_a_subclass_are_not_bypassed(method: str) -> None:
    """An impl that replaces what it inherits is called, and combines its own splits."""
    pytest.importorskip("triton")
    from attnlib.backends.triton.impl import TritonImpl

    assert leaves_splits(TritonImpl(SPEC, scale=1.0))
    replaced = type("Impl", (TritonImpl,), {method: lambda *given: None})
    assert not leaves_splits(replaced(SPEC, scale=1.0))
    assigned = TritonImpl(SPEC, scale=1.0)
    setattr(assigned, method, lambda *given: None)
    assert not leaves_splits(assigned)
