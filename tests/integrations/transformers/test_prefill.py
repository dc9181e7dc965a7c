"""Prefills with the torch backend on a CPU: which of them are one call of torch's operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import attnlib
from attnlib.instrumentation import OBSERVERS
from attnlib.integrations.transformers import decode_again, plain, prefill
from tests.integrations.tiny_models import decoder, deepseek_v3, padded, prompts, randomized, run


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the operator was called, for each attention call that asked; no validation."""
    monkeypatch.setenv("ATTNLIB_VALIDATE", "0")
    monkeypatch.setattr(decode_again, "_local", decode_again._Local())
    found: list[bool] = []
    attend = plain.attend_prefill

    def recording(call: Any, step: Any, kwargs: Any) -> torch.Tensor | None:
        out = attend(call, step, kwargs)
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


@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("gemma2", 2), ("gpt_oss", 2)])
def test_one_layer_of_a_kind_asks(
    name: str, kinds: int, served: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later layers of a prefill take what the first one of their mask has found. A forward runs
    other code between two layers, so that finding it again took 0.4 ms of each."""
    monkeypatch.delenv("ATTNLIB_VALIDATE")
    config = decoder(name).config
    config.num_hidden_layers = 4
    if kinds == 2:
        config.layer_types = ["sliding_attention", "full_attention"] * 2
    torch.manual_seed(0)
    model = randomized(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    assert _equals_eager(model, padded(prompts(5), "left"))
    assert served == [True] * kinds
    # A causal prompt of another length takes what an earlier one has found, those with a bias not.
    assert _equals_eager(model, padded(prompts(4), "left"))
    assert served == [True] * (1 if kinds == 1 else 4)
    for lengths in ((4, 4), (4, 3), (4,)):
        assert _equals_eager(model, padded(prompts(*lengths), "left"))
    weights = run(model, "attnlib", lambda m: m(torch.tensor(prompts(5)), output_attentions=True))
    assert len(weights.attentions) == 4


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
