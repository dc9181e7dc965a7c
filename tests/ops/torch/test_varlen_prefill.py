"""Unpaged attention compared with the float64 reference (M1 to M8)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.varlen_prefill import varlen_prefill
from tests.ops.calls import call_operation
from tests.ops.naive import naive_varlen_attention

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.06])
FEATURES: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "causal": {"causal": True},
    "causal_per_request": {"causal": torch.tensor([True, False, True])},
    "symmetric_window": {"window": (2, 2)},
    "window_0": {"window": (0, 0)},
    "chunk": {"attention_chunk_size": 4, "causal": True},
    "cap": {"logits_soft_cap": 1.0},
    "alibi_and_sinks": {"alibi_slopes": SLOPES, "sinks": SLOPES * 4 - 1},
}


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(
    "lens", [((6, 9, 3), (6, 9, 3)), ((2, 5, 3), (9, 5, 1)), ((0, 4, 2), (3, 0, 7))]
)
def test_features(
    lens: tuple[tuple[int, ...], tuple[int, ...]], feature: str, batch_invariant: bool
) -> None:
    """Self- and cross-attention of encoders, with strided inputs and rows past the batch (M6)."""
    starts, key_starts = (torch.tensor([0, *part]).cumsum(0).int() for part in lens)
    num_tokens = int(starts[-1]) + 2
    query = torch.randn(num_tokens, 6, 16)[:, 1:5]
    packed = torch.randn(int(key_starts[-1]), 2, 28)
    key, value = packed[..., :16], packed[..., 16:]
    bias = torch.randn(num_tokens, 10).masked_fill(torch.rand(num_tokens, 10) < 0.2, -math.inf)
    for query_bias in (None, bias):
        out, lse = torch.full((num_tokens, 4, 12), math.nan), torch.full((num_tokens, 4), math.nan)
        arguments = {
            "scale": 0.25,
            "causal": False,
            "max_seqlen_q": 9,
            "max_seqlen_k": 9,
            "query_bias": query_bias,
            **FEATURES[feature],
        }
        call_operation(
            varlen_prefill,
            query,
            key,
            value,
            starts,
            key_starts,
            **arguments,
            out=out,
            lse=lse,
            batch_invariant=batch_invariant,
        )
        wanted = naive_varlen_attention(query, key, value, starts, key_starts, **arguments)  # type: ignore[arg-type]
        torch.testing.assert_close(out.double(), wanted[0], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse.double(), wanted[1], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_elements_that_are_not_adjacent(position: int) -> None:
    """The fused operator of torch would read other memory."""
    tensors = [torch.randn(7, heads, 8) for heads in (4, 2, 2)]
    starts, out = torch.tensor([0, 5, 7], dtype=torch.int32), torch.empty(7, 4, 8)
    wanted = naive_varlen_attention(*tensors, starts, starts, scale=0.3, causal=True)
    tensors[position] = torch.stack([tensors[position]] * 2, dim=-1)[..., 0]
    options = {"scale": 0.3, "causal": True, "max_seqlen_q": 5, "max_seqlen_k": 5}
    call_operation(varlen_prefill, *tensors, starts, starts, **options, out=out)
    torch.testing.assert_close(out.double(), wanted[0], atol=2e-5, rtol=2e-5)


def test_no_requests() -> None:
    """M7: no requests."""
    starts = torch.zeros(1, dtype=torch.int32)
    out = torch.full((2, 4, 8), math.nan)
    varlen_prefill(
        torch.randn(2, 4, 8), torch.randn(0, 2, 8), torch.randn(0, 2, 8), starts, starts,
        AttentionParams(scale=1.0), max_seqlen_q=0, max_seqlen_k=0, out=out,
    )  # fmt: skip
    assert torch.equal(out, torch.zeros_like(out))
