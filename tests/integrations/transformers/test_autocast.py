"""Models under `torch.autocast`: queries and keys in float32, values in 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.cache_utils import StaticLayer

import attnlib
from attnlib.integrations.transformers.paged_model import PagedModel
from tests.integrations.tiny_models import DECODERS, decoder, padded, prompts, run

LOW = [torch.bfloat16, torch.float16]


def _logits(model: Any, implementation: str, low: torch.dtype, batch: Any) -> torch.Tensor:
    with torch.autocast(batch["input_ids"].device.type, low):
        return run(model, implementation, lambda m: m(**batch).logits).float()


def errors_of_a_forward(model: Any, low: torch.dtype, batch: Any) -> tuple[float, float]:
    """The mean errors of eager and of attnlib under autocast, next to eager in float32."""
    seen = batch["attention_mask"].bool()
    exact = run(model, "eager", lambda m: m(**batch).logits)
    eager, ours = (
        float((_logits(model, implementation, low, batch) - exact)[seen].abs().mean())
        for implementation in ("eager", "attnlib")
    )
    return eager, ours


def generated_under_autocast(model: Any, low: torch.dtype, batch: Any, cache: str) -> torch.Tensor:
    """The tokens of `generate` with a dynamic or a static cache."""
    static: dict[str, Any] = {}
    if cache == "static":
        static["cache_implementation"] = "static"
        if not _static_caches_keep_both_dtypes():
            pytest.skip("the static caches of this transformers refuse values of another dtype")
    with torch.autocast(batch["input_ids"].device.type, low):
        tokens: torch.Tensor = run(
            model,
            "attnlib",
            lambda m: m.generate(**batch, max_new_tokens=5, do_sample=False, **static),
        )
    return tokens


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", DECODERS)
def test_a_forward_is_as_close_to_float32_as_eager(name: str, low: torch.dtype) -> None:
    eager, ours = errors_of_a_forward(decoder(name), low, padded(prompts(9, 5), "left"))
    assert ours <= 2 * eager, (ours, eager)


def _static_caches_keep_both_dtypes() -> bool:
    """False before transformers 5.24, where eager fails, too: keys are float32 after rotation."""
    layer = StaticLayer(max_cache_len=4)
    layer.lazy_initialization(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2).bfloat16())
    return layer.values.dtype == torch.bfloat16


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate_runs(name: str, cache: str, low: torch.dtype) -> None:
    tokens = generated_under_autocast(decoder(name), low, padded(prompts(9, 5), "left"), cache)
    assert tokens.shape[1] == 14


def test_the_output_has_the_dtype_of_eager() -> None:
    model, batch = decoder("llama"), padded(prompts(6), "left")
    found: dict[str, Any] = {}
    hook = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda module, args: found.update(dtype=args[0].dtype)
    )
    for implementation in ("eager", "attnlib"):
        found.clear()
        _logits(model, implementation, torch.bfloat16, batch)
        assert found["dtype"] == torch.bfloat16
    hook.remove()


@pytest.mark.parametrize("first", [True, False], ids=["autocast first", "float32 first"])
def test_paged_steps_with_and_without_autocast(first: bool) -> None:
    model = decoder("llama")
    paged = PagedModel(model, num_blocks=8, block_size=4)
    ids, positions = torch.tensor(prompts(6)[0]), torch.arange(6)
    batch = attnlib.CommonAttentionMetadata.from_lengths([6], [6], [[1, 2]], 4, "cpu")
    exact = run(model, "eager", lambda m: m(ids[None]).logits[0])
    with paged.attached():
        for enabled in (first, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                logits = paged.step(ids, positions, batch).float()
            assert float((logits - exact).abs().max()) < 0.05 * float(exact.abs().max())
