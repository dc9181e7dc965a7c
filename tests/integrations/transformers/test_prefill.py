"""Prefills with the torch backend on a CPU: which of them are one call of torch's operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnlib
from attnlib.instrumentation import OBSERVERS
from attnlib.integrations.transformers import plain
from tests.integrations.tiny_models import decoder, padded, prompts, run


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
        ("gemma2", (7,), False),
        ("gpt_oss", (3,), False),
    ],
)
def test_which_prefills(
    name: str, lengths: tuple[int, ...], expected: bool, served: list[bool]
) -> None:
    """Not those with a window that hides keys, padding, soft caps or sinks."""
    assert _equals_eager(decoder(name), padded(prompts(*lengths), "left"))
    assert served and set(served) == {expected}


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
