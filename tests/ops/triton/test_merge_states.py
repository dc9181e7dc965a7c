"""Merging partial attention results over disjoint keys."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnlib.ops.torch.merge_states import merge_partial_rows as reference_merge_partial_rows
from attnlib.ops.triton.merge_states import merge_partial_rows, merge_states
from tests.ops.triton.paged_inputs import DTYPES, assert_close

Merge = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]


def _states(
    parts: int, device: torch.device, dtype: torch.dtype, size: int = 24
) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(parts)
    outs = [torch.randn(7, 3, size, generator=generator).to(dtype).to(device) for _ in range(parts)]
    return outs, [(3 * torch.randn(7, 3, generator=generator)).to(device) for _ in range(parts)]


def _expected(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    stacked = torch.stack([lse.double().cpu() for lse in lses])
    merged = torch.logsumexp(stacked, 0)
    weights = torch.exp(stacked - merged)[..., None]
    return (weights * torch.stack([out.double().cpu() for out in outs])).sum(0), merged


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 24, 128])
def test_merges_by_natural_logarithm(device: torch.device, dtype: torch.dtype, size: int) -> None:
    """L1, M5: weights are exp(lse - merged lse); base-2 LSEs would give very different results."""
    (a, b), (la, lb) = _states(2, device, dtype, size)
    out, lse = torch.full_like(a, float("nan")), torch.full_like(la, float("nan"))
    merge_states(a, la, b, lb, out, lse)
    want_out, want_lse = _expected([a, b], [la, lb])
    assert_close(out, want_out, dtype)
    assert_close(lse, want_lse, torch.float32, "lse")


def test_in_place_and_without_lse(device: torch.device) -> None:
    """The output may be one of the inputs; the LSE is optional."""
    (a, b), (la, lb) = _states(2, device, torch.float32)
    want_out, want_lse = _expected([a, b], [la, lb])
    second = b.clone()
    merge_states(a, la, second, lb, second)
    merge_states(a, la, b, lb, a, la)
    assert_close(second, want_out, torch.float32)
    assert_close(a, want_out, torch.float32)
    assert_close(la, want_lse, torch.float32, "lse")


def test_three_results_in_any_order(device: torch.device) -> None:
    """L2: merging is associative."""
    outs, lses = _states(3, device, torch.float32)
    want_out, want_lse = _expected(outs, lses)
    for first, second, third in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        out, lse = outs[first].clone(), lses[first].clone()
        merge_states(out, lse, outs[second], lses[second], out, lse)
        merge_states(out, lse, outs[third], lses[third], out, lse)
        assert_close(out, want_out, torch.float32)
        assert_close(lse, want_lse, torch.float32, "lse")


@pytest.mark.parametrize("empty", [-math.inf, math.inf], ids=["minus_inf", "plus_inf"])
def test_empty_sides(device: torch.device, empty: float) -> None:
    """M5: an empty side changes nothing, even if it holds NaN; two empty sides give 0 and -inf."""
    (a, b), (la, lb) = _states(2, device, torch.float32)
    a[0], la[0] = float("nan"), empty
    b[1], lb[1] = float("nan"), empty
    a[2], la[2], b[2], lb[2] = float("nan"), empty, float("nan"), empty
    out, lse = torch.full_like(a, float("nan")), torch.full_like(la, float("nan"))
    merge_states(a, la, b, lb, out, lse)
    assert torch.equal(out[0], b[0]) and torch.equal(out[1], a[1])
    assert torch.equal(out[2], torch.zeros_like(out[2])) and bool((lse[2] == -math.inf).all())
    assert_close(lse[:2], torch.stack([lb[0], la[1]]), torch.float32, "lse")


def test_strided_inputs(device: torch.device) -> None:
    """P9: any strides on tokens and heads."""
    (a, b), (la, lb) = _states(2, device, torch.float32)
    want_out, _ = _expected([a, b], [la, lb])
    wide = torch.full((3, 7, 30), float("nan"), device=device)
    out = wide.transpose(0, 1)[..., 3:27]
    merge_states(a.transpose(0, 1).contiguous().transpose(0, 1), la, b, lb, out)
    assert_close(out, want_out, torch.float32)
    assert wide[..., :3].isnan().all() and wide[..., 27:].isnan().all()


def test_no_tokens(device: torch.device) -> None:
    """M7: zero tokens."""
    out, lse = torch.empty(0, 3, 16, device=device), torch.empty(0, 3, device=device)
    merge_states(out, lse, out, lse, out, lse)


@pytest.mark.parametrize("operation", [merge_partial_rows, reference_merge_partial_rows])
@pytest.mark.parametrize("dtype", DTYPES)
def test_partial_rows(device: torch.device, dtype: torch.dtype, operation: Merge) -> None:
    """L2: each token gets its own partial states, in any number, from any rows."""
    (own, parts), (lse_own, lse_parts) = _states(2, device, dtype)
    rows = [[], [3], [6, 0], [1, 2, 5], [], [4], []]
    lse_own[2, 1] = -math.inf  # a state without keys, whose output is not read
    own[2, 1] = math.nan
    lse_parts[2, 0] = math.inf
    parts[2, 0] = math.nan
    lse_own[5, 2] = lse_parts[4, 2] = -math.inf
    starts = torch.tensor([0, *torch.tensor([len(r) for r in rows]).cumsum(0)], dtype=torch.int32)
    index = torch.tensor([row for group in rows for row in group], dtype=torch.int32)
    out, lse = own.clone(), lse_own.clone()
    operation(out, lse, parts, lse_parts, starts.to(device), index.to(device))
    for token, group in enumerate(rows):
        states = [(own, lse_own, token), *((parts, lse_parts, row) for row in group)]
        for head in range(own.shape[1]):
            live = [(o[i, head], s[i, head]) for o, s, i in states if s[i, head].isfinite()]
            if not live:
                assert lse[token, head] == -math.inf and not out[token, head].any()
                continue
            want, merged = _expected([o[None] for o, _ in live], [s[None] for _, s in live])
            assert_close(out[token, head], want[0], dtype)
            assert_close(lse[token, head], merged[0], torch.float32, "lse")
