"""Merging of attention states (M4, M5)."""

from __future__ import annotations

import math

import pytest
import torch

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.merge_states import merge_states
from attnlib.ops.torch.varlen_prefill import varlen_prefill
from tests.ops.naive import naive_varlen_attention


@pytest.mark.parametrize("in_place", [False, True])
def test_merge_of_two_splits(in_place: bool) -> None:
    """M4, M5: keys split in two, a sink on one side only, natural logs."""
    query, key, value = torch.randn(3, 4, 8), torch.randn(11, 2, 8), torch.randn(11, 2, 6)
    sinks, starts = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([0, 3])
    parts = []
    for keys, sink in ((slice(0, 4), sinks), (slice(4, 11), None)):
        out, lse = torch.empty(3, 4, 6), torch.empty(3, 4)
        ends = torch.tensor([0, keys.stop - keys.start])
        params = AttentionParams(scale=0.3, causal=False, sinks=sink)
        varlen_prefill(
            query, key[keys], value[keys], starts, ends, params, max_seqlen_q=3, max_seqlen_k=7,
            out=out, lse=lse,
        )  # fmt: skip
        parts.append((out, lse))
    (out_a, lse_a), (out_b, lse_b) = parts
    out, lse = (out_a, lse_a) if in_place else (torch.empty_like(out_a), torch.empty_like(lse_a))
    merge_states(out_a, lse_a, out_b, lse_b, out, lse)
    wanted = naive_varlen_attention(
        query, key, value, starts, torch.tensor([0, 11]), scale=0.3, sinks=sinks
    )
    torch.testing.assert_close(out.double(), wanted[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), wanted[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("empty", [-math.inf, math.inf])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 3.0])
def test_empty_states(empty: float, garbage: float) -> None:
    """M5: -inf and +inf mark a state without keys, of which the output is not used."""
    out_a, out_b = torch.randn(2, 1, 4), torch.full((2, 1, 4), garbage)
    lse_a, lse_b = torch.tensor([[1.0], [empty]]), torch.full((2, 1), empty)
    out, lse = torch.empty(2, 1, 4), torch.empty(2, 1)
    merge_states(out_a, lse_a, out_b, lse_b, out, lse)
    assert torch.equal(out[0], out_a[0]) and torch.equal(out[1], torch.zeros(1, 4))
    assert lse.flatten().tolist() == [1.0, -math.inf]
    merge_states(out_b, lse_b, out_a, lse_a, out, lse)
    assert torch.equal(out[0], out_a[0]) and torch.equal(out[1], torch.zeros(1, 4))


def test_large_logits_and_half_precision() -> None:
    """Large logits do not overflow; half states are merged in float32 and rounded once; 0 rows."""
    out_a, out_b = torch.randn(1, 2, 8).bfloat16(), torch.randn(1, 2, 8).bfloat16()
    out = torch.empty_like(out_a)
    merge_states(out_a, torch.full((1, 2), 900.0), out_b, torch.full((1, 2), 899.0), out)
    share = 1 / (1 + math.exp(-1))
    exact = out_a.double() * share + out_b.double() * (1 - share)
    # half a step of bfloat16, from rounding once, and float32's own error where the two states
    # cancel
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    merge_states(
        out_a[:0], torch.empty(0, 2), out_b[:0], torch.empty(0, 2), out[:0], torch.empty(0, 2)
    )


def test_no_host_sync() -> None:
    """No synchronization: meta tensors would raise."""
    with torch.device("meta"):
        out, lse = torch.empty(3, 2, 4), torch.empty(3, 2)
        merge_states(out, lse, out.clone(), lse.clone(), out, lse)
