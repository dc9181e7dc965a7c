"""Blocks of rows read no keys that an explicit bias hides from all of their rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch import request
from attnlib.ops.torch.request import KeySpan, QueryRows, attend_rows

TOKENS, DOCUMENT = 512, 128


def _documents(history: int = 0) -> Tensor:
    """The causal bias of packed documents after a history, `[T, history + T]`."""
    tokens = torch.arange(TOKENS)
    own = (tokens[:, None] // DOCUMENT == tokens // DOCUMENT) & (tokens[:, None] >= tokens)
    seen = torch.cat([torch.ones(TOKENS, history, dtype=torch.bool), own], 1)
    return torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, **fields: float) -> Tensor:
    params = AttentionParams(scale=0.25, causal=False, **fields)  # type: ignore[arg-type]  # a cap
    keys, out = key.shape[0], torch.full((*query.shape[:2], value.shape[2]), math.nan)
    rows = QueryRows(query, keys - len(query), keys, keys - bias.shape[1], False, bias)
    attend_rows(rows, KeySpan(key, value), params, out, None)
    return out


@pytest.mark.parametrize("fields", [{}, {"logits_soft_cap": 2.0}], ids=["fused", "general"])
@pytest.mark.parametrize("history", ["none", "in the bias", "before the bias"])
def test_documents_of_one_request(history: str, fields: dict[str, float]) -> None:
    """Each document as if it were alone, with the history that all see."""
    before = 0 if history == "none" else 40
    query = torch.randn(TOKENS, 4, 16)
    key, value = torch.randn(TOKENS + before, 2, 16), torch.randn(TOKENS + before, 2, 16)
    bias = _documents(before if history == "in the bias" else 0)
    out = _attend(query, key, value, bias, **fields)
    for start in range(0, TOKENS, DOCUMENT):
        rows = torch.arange(start, start + DOCUMENT)
        keys = torch.cat([torch.arange(before), rows + before])
        own = bias[rows][:, -TOKENS:][:, rows]
        alone = _attend(query[rows], key[keys], value[keys], own, **fields)
        torch.testing.assert_close(out[rows], alone, atol=2e-6, rtol=1e-5)


def test_hidden_keys_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the four blocks gets the keys of its own document only."""
    ranges = []
    attend = request._attend_fused

    def recording(
        rows: QueryRows, span: KeySpan, params: AttentionParams, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ranges.append((span.start, span.start + span.key.shape[0]))
        return attend(rows, span, params, dtype)

    monkeypatch.setattr(request, "_attend_fused", recording)
    states = torch.randn(TOKENS, 2, 16)
    _attend(states, states, states, _documents())
    assert ranges == [(start, start + DOCUMENT) for start in range(0, TOKENS, DOCUMENT)]


def test_rows_without_a_key_are_0() -> None:
    """M5, for a block and for its neighbors."""
    bias, states = _documents(), torch.randn(TOKENS, 2, 16)
    bias[DOCUMENT : 2 * DOCUMENT] = -math.inf
    out = _attend(states, states, states, bias)
    empty = (out == 0).all(-1).all(-1)
    assert empty.tolist() == [DOCUMENT <= row < 2 * DOCUMENT for row in range(TOKENS)]
