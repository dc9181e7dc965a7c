"""Position biases by distance reach the kernels; other biases are computed densely."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from attnlib.integrations.transformers import plain
from attnlib.integrations.transformers.attention import attnlib_attention
from tests.integrations.tiny_models import generated, padded, prompts, run, t5, umt5


@pytest.fixture
def dense_queries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Numbers of queries of the calls that were computed densely."""
    found: list[int] = []
    attend_dense = plain.attend_dense

    def counted(call: Any, *args: Any) -> torch.Tensor:
        found.append(call.query.shape[2])
        return attend_dense(call, *args)

    monkeypatch.setattr(plain, "attend_dense", counted)
    yield found


@pytest.mark.parametrize("make", [t5, umt5])
def test_encoder_and_decoder_of_t5(make: Any, backend: str, dense_queries: list[int]) -> None:
    """Padded rows in the encoder, several tokens in the decoder; UMT5 has a table per layer."""
    model, batch = make(), padded(prompts(7, 4), "right")
    ids = torch.tensor([[0, 5, 9, 11, 3], [0, 8, 4, 21, 6]])

    def logits(model: Any) -> torch.Tensor:
        out: torch.Tensor = model(**batch, decoder_input_ids=ids).logits
        return out

    torch.testing.assert_close(
        run(model, "attnlib", logits), run(model, "eager", logits), rtol=1e-4, atol=1e-4
    )
    assert dense_queries == []


@pytest.mark.parametrize("padding", [True, False])
def test_tokens_of_t5(padding: bool, dense_queries: list[int]) -> None:
    """A decode step over a padded encoder is computed densely: it does not read the padding."""
    model, batch = t5(), padded(prompts(7, 4 if padding else 7), "right")
    kwargs: dict[str, Any] = {"min_new_tokens": 6}
    assert torch.equal(
        generated(model, "attnlib", batch, 6, **kwargs),
        generated(model, "eager", batch, 6, **kwargs),
    )
    assert set(dense_queries) <= {1}


def _attend(bias: torch.Tensor) -> torch.Tensor:
    module = nn.Module()
    module.is_causal = False
    states = torch.randn(3, 2, 4, 9, 8, generator=torch.Generator().manual_seed(0))
    out, _ = attnlib_attention(module, *states, scaling=1.0, position_bias=bias, is_causal=False)
    scores = states[0] @ states[1].transpose(2, 3) + bias
    expected = (torch.softmax(scores, -1) @ states[2]).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    return out


def test_a_bias_is_read_again_after_a_change(dense_queries: list[int]) -> None:
    """One element makes the bias depend on more than the distance."""
    table = torch.randn(4, 17, generator=torch.Generator().manual_seed(1))
    distance = torch.arange(9)[:, None] - torch.arange(9) + 8
    bias = table[:, distance][None]
    _attend(bias)
    assert dense_queries == []
    bias[0, 2, 5, 3] += 1.0
    _attend(bias)
    assert dense_queries == [9]
    _attend(torch.zeros(1, 4, 9, 9))
    _attend(bias.expand(2, -1, -1, -1))
    assert dense_queries == [9, 9]
