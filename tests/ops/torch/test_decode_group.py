"""Lengths over several blocks of fused attention (512 keys, 512 rows) and several groups."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlib.ops.torch import gather, group_buffer
from attnlib.ops.torch.paged_decode import paged_decode
from attnlib.ops.torch.paged_prefill import paged_prefill
from tests.ops.naive import gather_positions
from tests.ops.paged_case import make_case


def dense(case: Any, window: int | None = None) -> tuple[Tensor, Tensor]:
    """Causal attention of every request with one mask per request, in float64."""
    query, key_cache, value_cache, table, starts, lengths = case.tensors
    out, lse = [], []
    for request, seq_len in enumerate(lengths.tolist()):
        rows = query[starts[request] : starts[request + 1]].double().transpose(0, 1)
        key, value = (
            gather_positions(cache, table[request].tolist(), seq_len, cache.shape[1]).transpose(
                0, 1
            )
            for cache in (key_cache, value_cache)
        )
        group = query.shape[1] // key.shape[0]
        key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
        distance = (torch.arange(rows.shape[1]) + seq_len - rows.shape[1])[:, None] - torch.arange(
            seq_len
        )
        hidden = (distance < 0) | (distance >= (window or seq_len))
        scores = (rows @ key.transpose(1, 2) * case.kwargs["scale"]).masked_fill(hidden, -math.inf)
        out.append((torch.softmax(scores, -1) @ value).transpose(0, 1))
        lse.append(torch.logsumexp(scores, -1).transpose(0, 1))
    return torch.cat(out), torch.cat(lse)


def long_case(
    query_lens: tuple[int, ...], seq_lens: tuple[int, ...], monkeypatch: Any, **kwargs: Any
) -> Any:
    monkeypatch.setattr("tests.ops.paged_case.naive_attention", lambda *args, **ignored: None)
    return make_case(query_lens, seq_lens, head_size=8, block_size=16, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
@pytest.mark.parametrize("window", [None, 40, 700])
@pytest.mark.parametrize(
    "lens", [((1, 2, 1), (1300, 1100, 600)), ((1100,), (1100,)), ((520, 70), (1300, 70))]
)
def test_across_blocks(
    operation: Any, window: int | None, lens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M1, M2, M5: output and LSE do not depend on where blocks end."""
    kwargs = {} if window is None else {"window": (window - 1, -1)}
    case = long_case(*lens, monkeypatch, **kwargs)
    out, lse = case.run(operation)
    wanted_out, wanted_lse = dense(case, window)
    torch.testing.assert_close(out.double(), wanted_out, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("budget", [1, 1 << 11, 1 << 13])
@pytest.mark.parametrize(
    "sinks", [None, torch.tensor([0.3, -1.0, 2.0, 0.0, -math.inf, 4.0, 1.0, -2.0])]
)
def test_gather_budget(budget: int, sinks: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """M4, M8: half precision is split by heads, with equal bits; float32 by keys, then combined."""
    for dtype, tolerance in ((torch.bfloat16, 0.0), (torch.float16, 0.0), (torch.float32, 1e-6)):
        monkeypatch.setattr(group_buffer, "_GATHER_BYTES", 1 << 20)
        case = long_case(
            (1,) * 5, (90,) * 5, monkeypatch, num_kv_heads=4, num_heads=8, sinks=sinks, dtype=dtype
        )
        whole = case.run(paged_decode)
        monkeypatch.setattr(group_buffer, "_GATHER_BYTES", budget)
        for got, wanted in zip(case.run(paged_decode), whole, strict=True):
            torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("budget", [1, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unused_scratch_memory_is_not_read(
    budget: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5, M8: NaN in the scratch memory outside the gathered blocks changes no bit."""
    monkeypatch.setattr(group_buffer, "_GATHER_BYTES", budget)
    case = long_case((1, 2, 1, 1, 2), (90, 41, 83, 33, 40), monkeypatch, dtype=dtype)
    clean = [case.run(operation) for operation in (paged_decode, paged_prefill)]
    take, taken = gather.Scratch.take, []

    def filled_with_nan(scratch: gather.Scratch, num_bytes: int) -> Tensor:
        taken.append(take(scratch, num_bytes).fill_(0xFF))
        return taken[-1]

    monkeypatch.setattr(gather.Scratch, "take", filled_with_nan)
    for operation, wanted in zip((paged_decode, paged_prefill), clean, strict=True):
        taken.clear()
        out, lse = case.run(operation)
        assert taken and torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])


@pytest.mark.parametrize("budget", [1, 1 << 12])
def test_gather_budget_with_ragged_lengths(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups split by budget, query length and length differences: every row is correct."""
    monkeypatch.setattr(group_buffer, "_GATHER_BYTES", budget)
    query_lens, seq_lens = (1, 3, 1, 1, 2, 1, 1), (70, 9, 5, 200, 44, 190, 16)
    slopes, scales = torch.tensor([0.5, 0.3, 0.2, 0.1]), torch.tensor([0.5, 2.0])
    case = make_case(
        query_lens,
        seq_lens,
        alibi_slopes=slopes,
        k_scale=scales,
        v_scale=scales,
        sinks=slopes * 3,
        head_size=8,
    )
    case.check(paged_decode)


def test_keys_before_the_window_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in the first gathered block, before the window of every row, changes no bit."""
    case = long_case((1, 2, 1), (90, 71, 83), monkeypatch, window=(20, -1))
    wanted = case.run(paged_decode)
    _, key_cache, value_cache, table, starts, lengths = case.tensors
    for request, seq_len in enumerate(lengths.tolist()):
        first = seq_len - int(starts[request + 1] - starts[request]) - 20
        block, before = int(table[request, first // 16]), first % 16
        assert before
        for cache in (key_cache, value_cache):
            cache[block, :before] = math.nan
    for got, clean in zip(case.run(paged_decode), wanted, strict=True):
        assert torch.equal(got, clean)
