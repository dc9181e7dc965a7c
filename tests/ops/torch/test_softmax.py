"""Weights of merged states sum to 1 at any magnitude of the log-sum-exps.

A sum near 6e4 is rounded to multiples of 0.004, and weights that are measured from it are wrong by
as much. States that all hold the value 1 must merge to 1.
"""

from __future__ import annotations

import pytest
import torch

from attnlib.compat import flashinfer
from attnlib.ops.params import AttentionParams
from attnlib.ops.shared_decode import DecodeItems
from attnlib.ops.torch import shared_decode
from attnlib.ops.torch.fused import _combine
from attnlib.ops.torch.merge_states import merge_partial_rows, merge_states
from attnlib.ops.torch.softmax import add_sink

LARGE = [-6e4, -1e4, 3e4, 6e4]
GAPS = torch.tensor([[0.0, 0.3, 1.7, 5.1]])


def _assert_one(out: torch.Tensor) -> None:
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=2e-6)


@pytest.mark.parametrize("large", LARGE)
def test_two_states(large: float) -> None:
    ones, out = torch.ones(1, 4, 8), torch.empty(1, 4, 8)
    a, b = large + GAPS, torch.full((1, 4), large)
    merge_states(ones, a, ones, b, out)
    _assert_one(out)
    _assert_one(_combine([(ones, a), (ones, b)])[0])


@pytest.mark.parametrize("large", LARGE)
def test_weights_follow_the_difference(large: float) -> None:
    """One state is 0: the other's weight is the logistic function of the difference."""
    out, lse = torch.empty(1, 4, 8), torch.empty(1, 4)
    a, b = large + GAPS, torch.full((1, 4), large)
    merge_states(torch.ones(1, 4, 8), a, torch.zeros(1, 4, 8), b, out, lse)
    wanted = torch.sigmoid((a - b).double()).float()
    torch.testing.assert_close(out[..., 0], wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(lse, torch.logaddexp(a.double(), b.double()).float())


@pytest.mark.parametrize("large", LARGE)
def test_partial_rows(large: float) -> None:
    out, lse = torch.ones(1, 4, 8), large + GAPS
    merge_partial_rows(
        out,
        lse,
        torch.ones(3, 4, 8),
        large + 0.37 * torch.arange(12.0).view(3, 4),
        torch.tensor([0, 3], dtype=torch.int32),
        torch.tensor([2, 0, 1], dtype=torch.int32),
    )
    _assert_one(out)


@pytest.mark.parametrize("large", LARGE)
def test_sinks(large: float) -> None:
    """A sink takes its share, which follows from the difference."""
    lse, sinks = torch.full((4, 1), large), large - GAPS[0]
    out, _ = add_sink(torch.ones(4, 1, 8), lse, sinks)
    wanted = torch.sigmoid((lse[:, 0] - sinks).double()).float()
    torch.testing.assert_close(out[:, 0, 0], wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("large", LARGE)
def test_shared_decode(large: float) -> None:
    out, lse = torch.ones(1, 4, 8), large + GAPS
    shared_decode._add(out, lse, torch.ones(1, 4, 8), torch.full((1, 4), large))
    _assert_one(out)
    items = DecodeItems.__new__(DecodeItems)
    for name, value in (
        ("partial_starts", torch.tensor([0, 3])),
        ("partial_rows", torch.tensor([0, 1, 2])),
        ("num_tokens", 1),
    ):
        object.__setattr__(items, name, value)
    result = torch.empty(1, 4, 8)
    states = large + 0.37 * torch.arange(12.0).view(3, 4)
    shared_decode._merge(
        torch.ones(3, 4, 8), states, items, AttentionParams(scale=1.0), result, None
    )
    _assert_one(result)


@pytest.mark.parametrize("large", LARGE)
def test_flashinfer_names(large: float) -> None:
    """Base-2 log-sum-exps: differences are formed before they are converted."""
    ones = torch.ones(1, 2, 4, 8)
    s = torch.stack([large + GAPS, torch.full((1, 4), large)], 1)
    wanted = 1 / (1 + torch.exp2((s[:, 1] - s[:, 0]).double())).float()
    halves = torch.cat([ones[:, :1], 0 * ones[:, :1]], 1)
    for v, check in ((ones, torch.ones(1, 4)), (halves, wanted)):
        for out, lse in (
            flashinfer.merge_states(v, s),
            flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1]),
        ):
            torch.testing.assert_close(out[..., 0], check, rtol=1e-6, atol=2e-6)
            exact = torch.logaddexp2(s[:, 0].double(), s[:, 1].double()).float()
            torch.testing.assert_close(lse, exact)
