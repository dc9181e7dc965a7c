"""Attention weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.ops.torch.scores import attention_scores
from tests.ops.calls import split_options
from tests.ops.naive import gather_positions
from tests.ops.paged_case import PagedCase, make_case

SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])


def scores(case: PagedCase) -> list[torch.Tensor]:
    return attention_scores(*case.tensors, split_options(case.kwargs)[0])


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"window": (2, -1)},
        {"sinks": SINKS, "logits_soft_cap": 2.0},
        {"causal": False, "v_scale": 0.5},
    ],
)
def test_weights_times_values_is_the_output(kwargs: dict[str, Any]) -> None:
    """One float32 tensor `[Hq, query_len, seq_len]` per request; weights @ values is the output."""
    case = make_case((1, 0, 3, 2), (9, 4, 7, 0), **kwargs)
    _, _, value_cache, table, starts, lengths = case.tensors
    weights = scores(case)
    assert [tuple(part.shape) for part in weights] == [(4, 1, 9), (4, 0, 4), (4, 3, 7), (4, 2, 0)]
    for request, part in enumerate(weights):
        assert part.dtype == torch.float32
        seq_len = int(lengths[request])
        values = gather_positions(
            value_cache, table[request].tolist(), seq_len, 4
        ).repeat_interleave(2, 1)
        out = torch.einsum("hqk,khd->qhd", part.double(), values) * kwargs.get("v_scale", 1.0)
        wanted = case.expected[0][starts[request] : starts[request + 1]]
        torch.testing.assert_close(out, wanted, atol=2e-5, rtol=2e-5)


def test_hidden_keys_weigh_nothing() -> None:
    """Hidden keys have weight 0; rows sum to 1 without a sink and to less with one."""
    plain = scores(make_case((3,), (7,), window=(2, -1)))[0]
    assert torch.equal(
        plain[:, 0] != 0, torch.tensor([0, 0, 1, 1, 1, 0, 0], dtype=torch.bool).expand(4, 7)
    )
    torch.testing.assert_close(plain.sum(-1), torch.ones(4, 3))
    sunk = scores(make_case((3,), (7,), sinks=SINKS))[0]
    assert (sunk.sum(-1) < 1).all()
