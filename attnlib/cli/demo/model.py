"""The models of the demo: a given one, the example model, or a decoder with random weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlib import example_model
from attnlib.errors import ContractError

__all__ = ["SEEDED", "DemoModel", "load_model", "pretrained_model", "seeded_model"]

SEEDED = "seeded"
"""`--model` for the small decoder with random weights."""


@dataclass(frozen=True)
class DemoModel:
    """A model and its tokenizer.

    Attributes:
        name: name for the output.
        model: a causal language model of transformers, in eval mode.
        encode: text to token ids.
        decode: token ids to text; None for a model without a tokenizer, whose tokens mean nothing.
        end_tokens: tokens that end a text.
        line_ends: tokens that end a line.
    """

    name: str
    model: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str] | None
    end_tokens: frozenset[int] = frozenset()
    line_ends: frozenset[int] = frozenset()


def load_model(
    name: str | None, device: torch.device, dtype: torch.dtype, *, seed: int = 0, tiny: bool = False
) -> DemoModel:
    """The model of `--model`: a folder or name, `seeded`, or by default the example model.

    Without the extra `attnlib[model]` the default is the small decoder with random weights, after a
    line that says so; with `tiny` it always is.

    Raises:
        ContractError: the model cannot be loaded.
    """
    if name == SEEDED or (name is None and tiny):
        return seeded_model(device, dtype, seed, tiny=tiny)
    if name is not None:
        return pretrained_model(name, device, dtype)
    if example_model.is_installed():
        loaded = pretrained_model(str(example_model.checkpoint()), device, dtype)
        return replace(loaded, name=example_model.NAME)
    print(
        "no language model is installed: a small decoder with random weights, which writes no "
        f"text, takes its place; for a real one: {example_model.INSTALL}",
        file=sys.stderr,
    )
    return seeded_model(device, dtype, seed, tiny=False)


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
    name = f"small decoder, {shape}, seed {seed}"
    return DemoModel(name, model, lambda text: list(text.encode()), None)


def pretrained_model(path: str, device: torch.device, dtype: torch.dtype) -> DemoModel:
    """A causal language model that transformers can load, from a folder or by name.

    Raises:
        ContractError: transformers cannot load it; the message contains its error.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    part = "tokenizer"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
            raise ValueError("the folder has no tokenizer files")  # transformers makes an empty one
        part = "model"
        model = (
            AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
            .eval()
            .to(device)
        )
    except Exception as error:  # of many types, from the files of the folder
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ContractError(
            f"--model {path}: transformers cannot load its {part}; give a folder that has a causal "
            f"language model and its tokenizer, or a name on the Hugging Face Hub ({reason})"
        ) from error
    return DemoModel(
        path,
        model,
        lambda text: list(tokenizer(text)["input_ids"]),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        _end_tokens(model),
        _line_ends(tokenizer),
    )


def _end_tokens(model: Any) -> frozenset[int]:
    end = model.generation_config.eos_token_id
    return frozenset(end if isinstance(end, list) else [] if end is None else [end])


def _line_ends(tokenizer: Any) -> frozenset[int]:
    """The token of a line break, if the tokenizer has one."""
    ids = tokenizer.encode("\n", add_special_tokens=False)
    return frozenset(ids) if len(ids) == 1 and tokenizer.decode(ids) == "\n" else frozenset()
