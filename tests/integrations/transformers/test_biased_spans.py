"""A position bias over the keys that single queries see."""

from __future__ import annotations

import pytest
import torch

from attnlib.integrations.transformers.biased_spans import BiasedSpans, attend_biased
from attnlib.integrations.transformers.decode_spans import Spans

KEYS, END = 9, 8


def states(kv_heads: int = 4) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 1, 8), (2, kv_heads, KEYS, 8), (2, kv_heads, KEYS, 8)
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value


def spans(*starts: int) -> Spans:
    """The keys from `starts` on, but the last one; many bytes, which ask for several calls."""
    return Spans(list(starts), END, 1 << 24, torch.float32, in_one_call=True)


def added(seed: int = 0, rows: int = 1, heads: int = 4) -> torch.Tensor:
    """A bias whose heads are adjacent, as the models make it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, KEYS, 1, heads, generator=generator).permute(0, 3, 2, 1)


@pytest.mark.parametrize("starts", [(0, 0), (3, 3), (0, 4)], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("heads", [1, 4])
def test_values(starts: tuple[int, int], rows: int, heads: int) -> None:
    """Layers with one bias, and with another one."""
    query, key, value = states()
    biased, first, second = (
        BiasedSpans(spans(*starts)),
        added(0, rows, heads),
        added(1, rows, heads),
    )
    hidden = torch.arange(KEYS) < torch.tensor(starts)[:, None]
    hidden[:, END:] = True
    for bias in (first, first, second, first):
        assert biased.take(bias, query, key)
        found = attend_biased(query, key, value, biased, 0.3, None, None)
        scores = (query @ key.mT * 0.3 + bias).masked_fill(hidden[:, None, None], -torch.inf)
        expected = (scores.softmax(-1) @ value).transpose(1, 2)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_layers_that_share_a_bias_combine_it_once() -> None:
    (query, key, _), biased, bias = states(), BiasedSpans(spans(0, 4)), added()
    assert biased.take(bias, query, key)
    combined = biased.added
    assert biased.take(bias, query, key) and biased.added is combined
    bias.add_(1)
    assert biased.take(bias, query, key) and biased.added is not combined


@pytest.mark.parametrize(
    "bias",
    [None, added()[0], added()[..., :8], added().double(), added(rows=3), added(heads=2)],
    ids=["none", "3 sizes", "keys", "dtype", "rows", "heads"],
)
def test_others_are_not_added(bias: torch.Tensor | None) -> None:
    query, key, _ = states()
    assert not BiasedSpans(spans(0, 0)).take(bias, query, key)
    grouped = states(kv_heads=2)
    assert not BiasedSpans(spans(0, 0)).take(added(), *grouped[:2])
