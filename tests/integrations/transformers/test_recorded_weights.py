"""Attention weights for callers of models that do not ask the attention function for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from attnlib.integrations.transformers.recorded_weights import weights_are_recorded
from tests.integrations.tiny_models import VOCABULARY, padded, prompts, randomized, run


def gpt2(**fields: Any) -> Any:
    """A model that takes `output_attentions` out of the arguments of its layers."""
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64}
    return randomized(hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, **sizes, **fields)))


def _same_weights(model: Any, call: Any) -> None:
    found, expected = (run(model, name, call) for name in ("attnlib", "eager"))
    assert len(found) == len(expected) == 2
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_weights_of_gpt2_equal_those_of_eager() -> None:
    batch = padded(prompts(7, 7), "left")
    _same_weights(gpt2(), lambda m: m(**batch, output_attentions=True).attentions)


def test_weights_of_every_step_of_generate() -> None:
    batch = padded(prompts(6), "left")

    def attentions(model: Any) -> list[torch.Tensor]:
        out = model.generate(
            **batch, max_new_tokens=4, do_sample=False, output_attentions=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        return [
            torch.cat([w.flatten() for w in layer]) for layer in zip(*out.attentions, strict=True)
        ]

    _same_weights(gpt2(), attentions)


def test_assisted_decoding_with_weights() -> None:
    """It indexes the weights of each step."""
    model, assistant = gpt2(), gpt2()
    ids = torch.tensor(prompts(6))
    out = run(
        model,
        "attnlib",
        lambda m: m.generate(
            ids, assistant_model=assistant, max_new_tokens=5, do_sample=False,
            output_attentions=True, return_dict_in_generate=True,
        ),
    )  # fmt: skip
    assert len(out.attentions) == out.sequences.shape[1] - 6


def test_nothing_is_recorded_otherwise() -> None:
    """Weights are a dense computation: nobody pays for it unasked."""
    seen = []
    model = gpt2()
    model.transformer.h[0].attn.register_forward_hook(
        lambda module, args, output: seen.append((output[1], weights_are_recorded({})))
    )
    batch = padded(prompts(7), "left")
    run(model, "attnlib", lambda m: m(**batch))
    run(model, "attnlib", lambda m: m(**batch, output_hidden_states=True))
    run(model, "attnlib", lambda m: m(**batch, output_attentions=True))
    assert [recorded for _, recorded in seen] == [False, False, True]
    assert [weights is not None for weights, _ in seen] == [False, False, True]
