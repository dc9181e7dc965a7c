"""Decodes with the torch backend on a CPU: which steps read keys in place, and their tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import attnlib
from attnlib.instrumentation import OBSERVERS
from attnlib.integrations.transformers import attention, plain
from tests.integrations.tiny_models import decoder, generated, llama4, padded, prompts


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether keys were read in place, for each attention call of one query; no validation."""
    monkeypatch.setenv("ATTNLIB_VALIDATE", "0")
    found: list[bool] = []
    attend = plain.attend_decode

    def recording(call: Any, step: Any, *others: Any) -> torch.Tensor | None:
        out = attend(call, step, *others)
        if step.q_length == 1:
            found.append(out is not None)
        return out

    def repeated(*args: Any) -> torch.Tensor | None:
        out = known(*args)
        if out is not None and out.shape[1] == 1:
            found.append(True)
        return out

    known = attention.attend_known
    monkeypatch.setattr(plain, "attend_decode", recording)
    monkeypatch.setattr(attention, "attend_known", repeated)
    return found


def _equals_eager(model: Any, batch: dict[str, torch.Tensor], **kwargs: Any) -> bool:
    return torch.equal(
        generated(model, "attnlib", batch, 10, **kwargs),
        generated(model, "eager", batch, 10, **kwargs),
    )


@pytest.mark.parametrize("lengths", [(7,), (7, 7), (9, 5, 2)])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3", "llama4"])
def test_keys_are_read_in_place(name: str, lengths: tuple[int, ...], served: list[bool]) -> None:
    """With and without padding, windows, and chunks in a cache that drops keys."""
    model = llama4(attn_temperature_tuning=False) if name == "llama4" else decoder(name)
    assert _equals_eager(model, padded(prompts(*lengths), "left"))
    assert served and all(served)


def test_unwritten_slots_are_not_read(served: list[bool]) -> None:
    """P5: a static cache is longer than its contents."""
    batch = padded(prompts(8, 3), "left")
    assert _equals_eager(decoder("mistral"), batch, cache_implementation="static")
    assert served and all(served)


@pytest.mark.parametrize("lengths", [(7,), (9, 5)])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_soft_caps_and_sinks(name: str, lengths: tuple[int, ...], served: list[bool]) -> None:
    """The fused operator computes neither; the scores of a single query are few."""
    assert _equals_eager(decoder(name), padded(prompts(*lengths), "left"))
    assert served and all(served)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "llama4"])
def test_padding_between_tokens(name: str, served: list[bool]) -> None:
    """A bias hides it, also where a window ends in it; later turns of a padded chat have some."""
    model = llama4(attn_temperature_tuning=False) if name == "llama4" else decoder(name)
    batch = padded(prompts(9, 8), "left")
    batch["attention_mask"][0, 3:5] = batch["attention_mask"][1, 4:8] = 0
    assert _equals_eager(model, batch)
    assert served and all(served)


@torch.no_grad()
def test_padding_that_changes(served: list[bool]) -> None:
    """Between steps: more and less padding between tokens, a hidden new token, and no token."""
    model, masks = decoder("llama"), torch.ones(5, 2, 13, dtype=torch.long)
    masks[1, 0, 2:4] = masks[2, 0, 2:4] = masks[2, 1, 6] = masks[3, 1, -1] = masks[4, 1] = 0
    found = {}
    for name in ("eager", "attnlib"):
        model.set_attn_implementation(name)
        cache = DynamicCache()
        model(torch.tensor(prompts(8, 8)), past_key_values=cache)
        logits = []
        for tokens, mask in enumerate(masks, 9):
            padding = torch.cat([mask[:, : tokens - 1], mask[:, -1:]], 1)
            out = model(torch.tensor([[5], [6]]), attention_mask=padding, past_key_values=cache)
            logits.append(out.logits[:, -1])
        found[name] = torch.stack(logits)
    error = (found["eager"] - found["attnlib"]).abs().amax(-1)
    assert float(error[:4].max()) < 1e-4 and float(error[4, 0]) < 1e-4
    assert served[:-2] and all(served[:-2]) and not any(served[-2:])


@pytest.mark.parametrize("how", ["another backend", "validation", "an observer"])
def test_calls_that_need_a_layer(
    how: str, served: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A required backend is not replaced, and debugging tools see every call."""
    seen: list[Any] = []
    if how == "another backend":
        pytest.importorskip("triton")
        monkeypatch.setenv("ATTNLIB_BACKEND", "triton")
    elif how == "validation":
        monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    else:
        OBSERVERS.append(lambda *call: seen.append(call))
    try:
        generated(decoder("llama"), "attnlib", padded(prompts(5, 3), "left"), 3)
    finally:
        OBSERVERS.clear()
    assert served and not any(served)
    assert bool(seen) == (how == "an observer")


def test_the_backend_can_change_between_steps(served: list[bool]) -> None:
    """Selection runs in every step."""
    pytest.importorskip("triton")
    model, batch = decoder("llama"), padded(prompts(5, 3), "left")
    expected = generated(model, "eager", batch, 3)
    for name, in_place in (("torch", True), ("triton", False), ("torch", True)):
        served.clear()
        with attnlib.use_backend(name):
            assert torch.equal(generated(model, "attnlib", batch, 3), expected)
        assert set(served) == {in_place}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_dtypes(dtype: torch.dtype, served: list[bool]) -> None:
    """The logits in 16 bits agree with eager within the resolution of the dtype."""
    model, batch = decoder("llama").to(dtype), padded(prompts(9, 5), "left")
    kwargs = {"return_dict_in_generate": True, "output_logits": True}
    found, expected = (
        torch.stack(generated(model, name, batch, 2, **kwargs).logits)[1]
        for name in ("attnlib", "eager")
    )
    assert served and all(served)
    assert float((found - expected).abs().max()) < 64 * torch.finfo(dtype).eps
