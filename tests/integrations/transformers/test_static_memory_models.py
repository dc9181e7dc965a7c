"""The static caches of one model after the other are in the same memory, once it is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnlib.integrations.transformers import static_memory
from attnlib.integrations.transformers.static_memory import keep_static_memory
from tests.integrations.tiny_models import (
    DECODERS,
    decoder,
    deepseek_v3,
    gemma3_with_images,
    gemma3n,
    generated,
    llama4,
    padded,
    prompts,
)
from tests.integrations.transformers.test_state_mixers import built
from tests.integrations.transformers.test_traced import VERSION

MODELS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: decoder(name) for name in DECODERS},
    **{name: lambda name=name: built(name) for name in ("falcon_h1", "lfm2")},
    "deepseek_v3": deepseek_v3,
    "gemma3n": gemma3n,
    "with images": gemma3_with_images,
}
if VERSION >= (5, 24):  # before, no implementation has a static cache of it
    MODELS["llama4"] = llama4


@pytest.mark.parametrize("name", MODELS)
def test_each_generate_has_the_memory_of_the_one_before(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, chunks, latents, shared layers, states: all that transformers declares static."""
    batch = padded(prompts(9, 5), "left")
    model, places = MODELS[name](), list[list[int]]()
    take = static_memory._take

    def noted(layer: Any, owner: Any) -> None:
        take(layer, owner)
        places[-1] += [x.data_ptr() for _, _, x in static_memory._static_tensors(layer)]

    monkeypatch.setattr(static_memory, "_take", noted)
    expected = generated(model, "eager", batch, 7)
    model.register_forward_hook(
        lambda *_: keep_static_memory(torch.device("cpu"))
    )  # as a recording does
    memory = []
    for _ in range(3):
        places.append([])
        found = generated(model, "attnlib", batch, 7, cache_implementation="static")
        assert torch.equal(found, expected)
        memory += [torch.empty(size) for size in (64, 300, 700, 1500, 3000) for _ in range(9)]
    assert places[0] and places[0] == places[1] == places[2]
