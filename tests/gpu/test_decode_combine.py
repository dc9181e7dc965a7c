"""The Hopper decode that combines splits itself equals a separate combine kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.devices import needs_gpu
from tests.ops.calls import call_operation

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
        reason="needs compute capability 9.0",
    ),
]

LENGTHS: dict[str, list[int]] = {
    "even": [4096] * 16,
    "one-long": [30_000] + [5] * 30,
    "ragged": [1 + 577 * index % 6000 for index in range(70)],
    "many": [1 + 37 * index % 900 for index in range(300)],
}
KINDS: dict[str, dict[str, Any]] = {
    "usual": {},
    "sinks": {"num_heads": 64, "head_size": 64, "sinks": True},
    "verify": {"query_len": 4},
    "mha": {"num_heads": 8},
    "blocks-of-1": {"block_size": 1},
    "blocks-of-4-verify": {"block_size": 4, "query_len": 4},
    "wide": {"num_heads": 16, "head_size": 256, "logits_soft_cap": 30.0},
}
EMPTY = 3
"""Rows past the last request."""


class Step:
    """A decode step over random blocks, whose lengths may be replaced."""

    def __init__(
        self,
        lengths: list[int],
        num_heads: int = 32,
        head_size: int = 128,
        query_len: int = 1,
        sinks: bool = False,
        block_size: int = 16,
        **params: Any,
    ) -> None:
        torch.manual_seed(0)
        reqs, heads, columns = len(lengths), 8, -(-max(lengths) // 16)
        blocks = sum(-(-length // 16) for length in lengths)
        self.cache = [
            torch.randn(blocks, 16, heads, head_size, dtype=torch.bfloat16, device="cuda")
            for _ in range(2)
        ]
        table, order, used = (
            torch.zeros(reqs, columns, dtype=torch.int32),
            torch.randperm(blocks).int(),
            0,
        )
        for row, length in enumerate(lengths):
            pages = -(-length // 16)
            table[row, :pages], used = order[used : used + pages], used + pages
        # The rows of a block of 16 are those of consecutive smaller blocks.
        parts = 16 // block_size
        self.cache = [cache.view(-1, block_size, heads, head_size) for cache in self.cache]
        table = table.repeat_interleave(parts, 1) * parts + torch.arange(parts).repeat(columns)
        self.table = table.int().cuda()
        self.starts = torch.arange(reqs + 1, dtype=torch.int32, device="cuda") * query_len
        self.lens = torch.tensor(
            [max(length, query_len) for length in lengths], dtype=torch.int32, device="cuda"
        )
        self.query = torch.randn(
            reqs * query_len + EMPTY, num_heads, head_size, dtype=torch.bfloat16, device="cuda"
        )
        self.out, self.lse = (
            torch.empty_like(self.query),
            torch.empty(self.query.shape[:2], device="cuda"),
        )
        own = torch.randn(num_heads, device="cuda") if sinks else None
        self.options: dict[str, Any] = {
            "max_query_len": query_len, "max_seq_len": max(lengths), "scale": head_size**-0.5,
            "sinks": own, "kernels": "hopper", **params,
        }  # fmt: skip
        self.workspace = torch.full((1 << 24,), float("nan"), device="cuda")

    def __call__(self, counters: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))
        self.attend(counters)
        return self.out.clone(), self.lse.clone()

    def attend(self, counters: torch.Tensor | None) -> None:
        from attnlib.ops.triton.paged_decode import paged_decode

        key_cache, value_cache = self.cache
        call_operation(
            paged_decode, self.query, key_cache, value_cache, self.table, self.starts, self.lens,
            out=self.out, lse=self.lse, workspace=self.workspace, counters=counters,
            **self.options,
        )  # fmt: skip


def _counters() -> torch.Tensor:
    from attnlib.ops.triton.heuristics.device import limits_of
    from attnlib.ops.triton.hopper.dispatch import num_counters

    return torch.zeros(
        num_counters(limits_of(torch.empty(1, device="cuda"))), dtype=torch.int32, device="cuda"
    )


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_splits_are_combined_as_by_a_second_kernel(lengths: str, kind: str) -> None:
    from attnlib.ops.triton.hopper.decode_launches import HopperDecode
    from attnlib.ops.triton.launch.cache import LAUNCHES

    step, counters = Step(LENGTHS[lengths], **KINDS[kind]), _counters()
    LAUNCHES.clear()
    first = step(counters)
    (found,) = (value for value in LAUNCHES.values() if isinstance(value, HopperDecode))
    assert found.combine is None, "no second kernel"
    for ours, theirs in zip(first, step(None), strict=True):
        assert not ours.isnan().any()
        torch.testing.assert_close(ours.float(), theirs.float(), atol=1e-2, rtol=1e-2)
    assert not first[0][-EMPTY:].any() and bool((first[1][-EMPTY:] == float("-inf")).all()), (
        "rows past the last request"
    )

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            captured = step(counters)
    for _ in range(20):
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(captured, first, strict=True)), (
            "equal bits, whichever CTA finishes last"
        )
    assert not counters.any(), "counters are reset"

    step.lens.copy_(step.lens.flip(0).clamp(max=1500))  # a replay reads the current lengths
    graph.replay()
    torch.cuda.synchronize()
    replayed = [tensor.clone() for tensor in captured]
    for ours, theirs in zip(replayed, step(None), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), atol=1e-2, rtol=1e-2)
    assert not counters.any()


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("query_len", [1, 8])
def test_gathered_rows_equal_those_of_larger_blocks(
    lengths: str, block_size: int, query_len: int
) -> None:
    """Blocks below 8 tokens are read by other loaders, and the products are the same."""
    small = Step(LENGTHS[lengths], query_len=query_len, block_size=block_size)
    large = Step(LENGTHS[lengths], query_len=query_len)
    for counters in (_counters(), None):
        assert all(
            torch.equal(*pair) for pair in zip(small(counters), large(counters), strict=True)
        )


@pytest.mark.parametrize("kinds", [("usual", "sinks"), ("sinks", "sinks"), ("usual", "wide")])
@pytest.mark.parametrize("lengths", [("even", "many"), ("one-long", "few"), ("few", "few")])
def test_two_streams_at_a_time(kinds: tuple[str, str], lengths: tuple[str, str]) -> None:
    """Each stream has a workspace and counters; the results do not change."""
    steps = [
        Step(LENGTHS.get(which, [1024] * 2), **KINDS[kind])
        for kind, which in zip(kinds, lengths, strict=True)
    ]
    counters, graphs, expected = [_counters() for _ in steps], [], []
    streams = [torch.cuda.Stream() for _ in steps]  # type: ignore[no-untyped-call]  # untyped in torch
    for step, own in zip(steps, counters, strict=True):
        expected.append(step(own))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                step.attend(own)
        graphs.append(graph)
    for _ in range(10):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                for _ in range(10):
                    graph.replay()
        torch.cuda.synchronize()
        for step, (out, lse) in zip(steps, expected, strict=True):
            assert torch.equal(step.out, out) and torch.equal(step.lse, lse)
    assert not any(own.any() for own in counters)
