"""The models and prompts of the demo.

The default model is a small decoder with seeded weights; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attnlib.errors import ContractError

__all__ = ["DemoModel", "seeded_model", "pretrained_model", "prompts"]

_PREFIX = (
    "You are a patient assistant who answers in one short sentence and never invents a figure. "
)
_QUESTIONS = (
    "Why is the sky blue?",
    "Name three uses of a paged cache.",
    "How many keys does a window of four show to the tenth query, and which are they, counted from "
    "zero?",
    "What is a block table?",
    "Tell me a story about a scheduler that never let a running request wait for a prompt, and "
    "what happened when memory was short.",
    "Hello!",
    "Translate 'attention' into any language you like.",
    "List the first eight prime numbers, then their sum, then the sum of their squares, each on a "
    "line of its own.",
)


@dataclass(frozen=True)
class DemoModel:
    """A model and its tokenizer.

    Attributes:
        name: name for the output.
        model: a causal language model of transformers, in eval mode.
        encode: text to token ids.
        decode: token ids to text; None for a model without a tokenizer, whose tokens mean nothing.
    """

    name: str
    model: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str] | None


def seeded_model(device: torch.device, dtype: torch.dtype, seed: int, *, tiny: bool) -> DemoModel:
    """A Llama decoder over bytes with seeded random weights.

    Its output is the same noise in every run.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, hidden, heads, kv_heads = (2, 64, 4, 2) if tiny else (4, 256, 8, 2)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        attn_implementation="eager",
        initializer_range=0.08,  # the default of 0.02 gives logits so flat that many tokens tie
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval().to(device=device, dtype=dtype)
    shape = f"{layers} layers, {heads}/{kv_heads} heads of {hidden // heads}"
    name = f"embedded decoder, {shape}, seed {seed}"
    return DemoModel(name, model, lambda text: list(text.encode()), None)


def pretrained_model(path: str, device: torch.device, dtype: torch.dtype) -> DemoModel:
    """A causal language model that transformers can load, from a folder or by name.

    Raises:
        ContractError: transformers cannot load it; the message contains its error.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = (
            AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
            .eval()
            .to(device)
        )
    except (OSError, ValueError) as error:
        raise ContractError(
            f"--model {path}: transformers cannot load a causal language model with its tokenizer; "
            f"give a folder that has one, or a name on the Hugging Face Hub: {error}"
        ) from error
    return DemoModel(
        path,
        model,
        lambda text: list(tokenizer(text)["input_ids"]),
        lambda ids: str(tokenizer.decode(ids)),
    )


def prompts(count: int, *, tiny: bool) -> list[str]:
    """Prompts of mixed lengths with a common prefix."""
    prefix = _PREFIX[:35] if tiny else _PREFIX
    questions = [question[:24] for question in _QUESTIONS] if tiny else _QUESTIONS
    return [
        prefix + questions[index % len(questions)] * (1 + index // len(questions))
        for index in range(count)
    ]
