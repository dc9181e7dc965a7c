"""Decodes on a CPU: layers of a step after the first one call the operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.instrumentation import OBSERVERS
from attnlib.integrations.transformers import decode, plain
from attnlib.integrations.transformers.decode_again import DecodeAgain
from attnlib.integrations.transformers.layers import Call
from tests.integrations.tiny_models import decoder, generated, padded, prompts


def states(**changes: Any) -> tuple[torch.Tensor, ...]:
    sizes = {"batch": 2, "heads": 4, "keys": 9, "size": 8, "dtype": torch.float32} | changes
    generator = torch.Generator().manual_seed(0)
    shapes = (sizes["heads"], 1), (2, sizes["keys"]), (2, sizes["keys"])
    made = (
        torch.randn(sizes["batch"], *shape, sizes["size"], generator=generator) for shape in shapes
    )
    return tuple(tensor.to(sizes["dtype"]) for tensor in made)


def made(start: int, kwargs: dict[str, Any]) -> DecodeAgain:
    call = Call(torch.nn.Identity(), *states(), 0.3, None, None, None, True)
    return DecodeAgain(call, kwargs, start, 9)


@pytest.mark.parametrize("start", [0, 3])
def test_values(start: int) -> None:
    query, key, value = states()
    found = made(start, {}).attend(query, key, value, 0.3, {})
    key, value = (x[:, :, start:].repeat_interleave(2, 1) for x in (key, value))
    expected = ((query @ key.mT * 0.3).softmax(-1) @ value).transpose(1, 2)
    assert found is not None and float((found - expected).abs().max()) < 1e-6


@pytest.mark.parametrize(
    "change",
    [
        {"keys": 10},
        {"batch": 1},
        {"size": 16},
        {"dtype": torch.bfloat16},
        {"scale": 0.4},
        {"kwargs": {"use_cache": True}},
        {"kwargs": {"position_bias": torch.zeros(1)}},
        {"kwargs": {"position_bias": None, "sinks": torch.zeros(4)}},
        {"autocast": True},
        {"observer": True},
    ],
    ids=str,
)
def test_a_call_that_differs_takes_the_whole_way(change: dict[str, Any]) -> None:
    kwargs = change.get("kwargs", {"position_bias": None})
    sizes = {k: v for k, v in change.items() if k in ("keys", "batch", "size", "dtype")}
    again = made(0, {"position_bias": None})
    if change.get("observer"):
        OBSERVERS.append(lambda *call: None)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=change.get("autocast", False)):
            assert again.attend(*states(**sizes), change.get("scale", 0.3), kwargs) is None
    finally:
        OBSERVERS.clear()
    assert again.attend(*states(), 0.3, {"position_bias": None}) is not None


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_only_the_first_layer_of_a_mask_takes_the_whole_way(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3 has two masks, one for each of its two layers."""
    monkeypatch.setenv("ATTNLIB_VALIDATE", "0")
    calls: list[Any] = []
    attend = decode.attend_decode

    def counted(call: Any, step: Any, kwargs: Any) -> torch.Tensor | None:
        if step.q_length == 1:
            calls.append(step)
        return attend(call, step, kwargs)

    monkeypatch.setattr(plain, "attend_decode", counted)
    model, batch = decoder(name), padded(prompts(7, 7), "left")
    expected = generated(model, "eager", batch, 10)
    assert torch.equal(generated(model, "attnlib", batch, 10), expected)
    assert len(calls) == 9 * (2 if name == "gemma3" else 1)
