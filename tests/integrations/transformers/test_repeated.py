"""Later layers of a step use the plan of the first one, and only where it is their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from attnlib.integrations.transformers import attention, decode_again, devices, repeated
from tests.integrations.tiny_models import (
    VOCABULARY,
    generated,
    padded,
    prompts,
    randomized,
    run,
)

NEW_TOKENS = 6
LAYERS = 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "eos_token_id": None,
}
_WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZES, **_WINDOWS)),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**SIZES, **_WINDOWS, num_local_experts=2, num_experts_per_tok=1)
    ),
}


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans also on a CPU, where another path serves decodes."""
    monkeypatch.setenv("ATTNLIB_BACKEND", "torch")
    monkeypatch.delenv("ATTNLIB_VALIDATE")  # which is asked for in every call
    monkeypatch.setattr(devices, "kind_of", lambda device: "another")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[bool, int]:
    """How many calls of layers were repeated, and how many were not."""
    found = {True: 0, False: 0}

    def counted(*args: Any) -> Any:
        out = repeated.attend_again(*args)
        found[out is not None] += 1
        return out

    monkeypatch.setattr(attention, "attend_again", counted)
    return found


@pytest.mark.parametrize("lengths", [(9,), (9, 5)], ids=["one", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_eager(name: str, lengths: tuple[int, ...], counts: dict[bool, int]) -> None:
    """Windows, soft caps and sinks of other layers have plans of their own."""
    model = randomized(MODELS[name]())
    batch = padded(prompts(*lengths), "left")
    expected = generated(model, "eager", batch, NEW_TOKENS)
    assert torch.equal(generated(model, "attnlib", batch, NEW_TOKENS), expected)
    # A module is known from its second decode on; each step plans the first layer of a kind.
    kinds = 1 if name == "llama" else 2
    assert counts[True] >= (NEW_TOKENS - 2) * (LAYERS - kinds)


def test_changed_sinks_are_noticed(counts: dict[bool, int]) -> None:
    """Sinks that are modified in place between two steps are not those of the plan."""
    model = randomized(MODELS["gpt_oss"]())
    ids = torch.tensor(prompts(7))

    def two_steps(model: Any) -> torch.Tensor:
        caches = model(ids, use_cache=True).past_key_values
        found = []
        for step in range(4):
            if step == 2:
                for layer in model.model.layers:
                    layer.self_attn.sinks.add_(3.0)
            out = model(ids[:, :1], past_key_values=caches, use_cache=True)
            found.append(out.logits)
        for layer in model.model.layers:
            layer.self_attn.sinks.sub_(3.0)
        return torch.cat(found)

    expected = run(model, "eager", two_steps)
    torch.testing.assert_close(run(model, "attnlib", two_steps), expected, atol=1e-4, rtol=1e-4)
    assert counts[True] > 0


def test_another_scale_is_noticed(counts: dict[bool, int]) -> None:
    """A module whose scale changes between two steps gets another layer."""
    model = randomized(MODELS["llama"]())
    ids = torch.tensor(prompts(7))

    def steps(model: Any) -> torch.Tensor:
        caches, found = model(ids, use_cache=True).past_key_values, []
        for step in range(4):
            for layer in model.model.layers:
                layer.self_attn.scaling = 0.5 if step == 2 else 8**-0.5
            out = model(ids[:, :1], past_key_values=caches, use_cache=True)
            found.append(out.logits)
        return torch.cat(found)

    expected = run(model, "eager", steps)
    torch.testing.assert_close(run(model, "attnlib", steps), expected, atol=1e-4, rtol=1e-4)
    assert counts[True] > 0


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_second_generation_repeats_as_the_first(
    name: str, mode: Any, counts: dict[bool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules that are known already move to growing buffers in the same step as the first layer:
    with other strides than its keys, no layer would be repeated. Layers of a prefill are repeated,
    too."""
    monkeypatch.setattr(decode_again, "_local", decode_again._Local())
    model = randomized(MODELS[name]())
    model.set_attn_implementation("attnlib")
    kinds = 1 if name == "llama" else 2
    for _ in range(2):
        counts[True] = counts[False] = 0
        with mode():
            model.generate(**padded(prompts(9), "left"), max_new_tokens=12, do_sample=False)
    assert counts[True] >= 12 * (LAYERS - kinds)


@pytest.mark.parametrize("name", ["position_bias", "cu_seq_lens_q", "indices"])
def test_arguments_that_are_tensors_are_not_repeated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor of several elements has no truth value."""
    found = []

    def kept(*args: Any) -> Any:
        out = repeated.attend_again(*args)
        if out is not None:
            found.append(repeated.attend_again(*args[:-1], {**args[-1], name: torch.ones(3)}))
        return out

    monkeypatch.setattr(attention, "attend_again", kept)
    generated(randomized(MODELS["llama"]()), "attnlib", padded(prompts(9), "left"), NEW_TOKENS)
    assert found and all(out is None for out in found)


def test_weights_that_a_later_step_collects() -> None:
    """By hooks of transformers, which no argument tells: no layer of that step is repeated."""
    sizes = {"n_layer": LAYERS, "n_head": 4, "n_embd": 32, "n_positions": 64}
    model = randomized(hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, **sizes)))

    def steps(model: Any) -> list[torch.Tensor]:
        cache, found = model(torch.tensor(prompts(5)), use_cache=True).past_key_values, []
        for step in range(8):
            given = {"output_attentions": step in (4, 6), "past_key_values": cache}
            out = model(torch.tensor([[5 + step]]), use_cache=True, **given)
            found.append(out.logits)
            if step in (4, 6):
                assert len(out.attentions) == LAYERS
                found += out.attentions
        return found

    found, expected = (run(model, name, steps) for name in ("attnlib", "eager"))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
