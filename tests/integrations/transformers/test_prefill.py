"""Prefills with the torch backend on a CPU: which of them are one call of torch's operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import attnlib
from attnlib.instrumentation import OBSERVERS
from attnlib.integrations.transformers import plain, prefill
from tests.integrations.tiny_models import decoder, deepseek_v3, padded, prompts, run


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the operator was called, for each attention call; no validation."""
    monkeypatch.setenv("ATTNLIB_VALIDATE", "0")
    found: list[bool] = []
    attend = plain.attend_prefill

    def recording(call: Any, step: Any) -> torch.Tensor | None:
        out = attend(call, step)
        found.append(out is not None)
        return out

    monkeypatch.setattr(plain, "attend_prefill", recording)
    return found


def _equals_eager(model: Any, batch: dict[str, torch.Tensor]) -> bool:
    real = batch["attention_mask"].bool()
    found, expected = (
        run(model, name, lambda m: m(**batch, use_cache=False).logits)[real]
        for name in ("attnlib", "eager")
    )
    return bool((found - expected).abs().max() < 2e-5)


@pytest.mark.parametrize(
    ("name", "lengths", "expected"),
    [
        ("llama", (7,), True),
        ("qwen3", (7, 7), True),
        ("mistral", (3,), True),
        ("mistral", (20,), False),
        ("llama", (9, 5), False),
        ("gemma2", (20,), True),
        ("gemma2", (190,), False),
        ("gpt_oss", (20, 20), True),
        ("gpt_oss", (9, 5), False),
    ],
)
def test_which_prefills(
    name: str, lengths: tuple[int, ...], expected: bool, served: list[bool]
) -> None:
    """Not those with padding, a window that hides keys, or many keys and soft caps or sinks."""
    assert _equals_eager(decoder(name), padded(prompts(*lengths), "left"))
    assert served and set(served) == {expected}


@pytest.mark.parametrize("limit", [1 << 20, 20])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3"])
@torch.no_grad()
def test_queries_behind_other_keys(
    name: str, limit: int, served: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of a chat, over all keys and in windows of 5, below the limit of scores and above."""
    for name_of_limit in ("_MAX_SCORES", "_MAX_OWN_SCORES"):
        monkeypatch.setattr(prefill, name_of_limit, limit)
    model, found = deepseek_v3() if name == "deepseek_v3" else decoder(name), {}
    for implementation in ("eager", "attnlib"):
        model.set_attn_implementation(implementation)
        cache, logits = DynamicCache(config=model.config), []
        for tokens in (3, 2, 4, 9):
            ids = torch.tensor(prompts(tokens, tokens))
            logits.append(model(ids, past_key_values=cache).logits)
        found[implementation] = torch.cat(logits, 1)
    assert float((found["eager"] - found["attnlib"]).abs().max()) < 2e-5
    # The values of latents are smaller than their keys.
    assert name == "deepseek_v3" or all(served) == (limit > 20)


@pytest.mark.parametrize("how", ["another backend", "validation", "an observer"])
def test_calls_that_need_a_layer(
    how: str, served: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    backend = "torch"
    if how == "validation":
        monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    elif how == "an observer":
        OBSERVERS.append(lambda *given: seen.append(given))
    else:
        pytest.importorskip("triton")
        backend = "triton"
    try:
        with attnlib.use_backend(backend):
            assert _equals_eager(decoder("llama"), padded(prompts(7), "left"))
    finally:
        OBSERVERS.clear()
    assert served and not any(served)
    assert bool(seen) == (how == "an observer")
