"""Which exchange a layer uses (X6)."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from attnlib import AttentionSpec
from attnlib.errors import UnsupportedConfigError
from attnlib.ops.peer_buffers import PeerBuffers
from attnlib.parallel import ExchangeMethod, explain_parallel, setup_checks
from attnlib.parallel.divisions import Interleaved

SPEC = AttentionSpec(num_heads=8, num_kv_heads=1, head_size=128, dtype=torch.bfloat16)
CUDA = torch.device("cuda", 0)
REASON = "the ranks are on several hosts"


class Ranks:
    """Two ranks, and what they find when they try to share memory."""

    world_size = 2

    def __init__(self, *, share: bool) -> None:
        self.share, self.asked = share, 0

    def peers(self, device: torch.device) -> PeerBuffers | list[str]:
        self.asked += 1
        buffer = torch.zeros(PeerBuffers.num_bytes(), dtype=torch.uint8)
        return PeerBuffers.of([buffer, buffer], 0) if self.share else [REASON]


def choice(group: Any, exchange: str | None, spec: AttentionSpec = SPEC) -> ExchangeMethod:
    with mock.patch.object(setup_checks, "PEER_MEMORY_FIRST", True):
        return setup_checks.exchange_of(group, spec, exchange, CUDA).method


def test_memory_comes_first_where_it_is_possible() -> None:
    assert choice(Ranks(share=True), None) is ExchangeMethod.PEER_MEMORY
    assert choice(Ranks(share=False), None) is ExchangeMethod.ALL_TO_ALL


@pytest.mark.parametrize("exchange", ["all_to_all", "reduce_scatter"])
def test_messages_that_are_asked_for_share_no_memory(exchange: str) -> None:
    ranks = Ranks(share=True)
    assert choice(ranks, exchange) is ExchangeMethod(exchange)
    assert not ranks.asked


def test_no_memory_for_float64() -> None:
    ranks = Ranks(share=True)
    assert choice(ranks, None, SPEC.replace(dtype=torch.float64)) is ExchangeMethod.ALL_TO_ALL
    assert not ranks.asked


def test_memory_that_is_asked_for_is_not_replaced() -> None:
    with pytest.raises(UnsupportedConfigError, match=f"{REASON}: use 'all_to_all'"):
        choice(Ranks(share=False), "peer_memory")


@pytest.mark.parametrize("first", [True, False])
def test_explain_names_what_layers_try(first: bool) -> None:
    with mock.patch.object(setup_checks, "PEER_MEMORY_FIRST", first):
        on_gpu, on_cpu = (
            explain_parallel(SPEC, Interleaved(2), device=device) for device in ("H200", "cpu")
        )
    assert ("exchange  peer_memory, or all_to_all:" in on_gpu) == first
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
