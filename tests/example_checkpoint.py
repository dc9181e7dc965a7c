"""A tiny model in place of the one of `attnlib[model]`, and a tokenizer of letters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnlib import example_model

LETTERS = "?\nabcdefghijklmnopqrstuvwxyzHTWNLY.,! "


def save(model: Any, folder: Path, letters: str = LETTERS) -> None:
    """A model and a tokenizer with a token for each letter; `?` is the unknown token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    numbers = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", pad_token="?")
    fast.save_pretrained(folder)


def install(monkeypatch: pytest.MonkeyPatch, home: Path) -> list[Path]:
    """Let the extra seem to be installed, with a tiny model and a cache below `home`.

    Returns:
        The folders to which a model was converted, one for each conversion.
    """
    from tests.integrations.tiny_models import decoder

    converted: list[Path] = []

    def convert(scratch: Path, made: Path) -> None:
        save(decoder("gemma3"), made)
        converted.append(made)

    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(example_model, "_missing", list)
    monkeypatch.setattr(example_model, "version", lambda package: "9.9")
    monkeypatch.setattr(example_model, "_convert", convert)
    return converted


def uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the extra seem not to be installed."""
    monkeypatch.setattr(example_model, "_missing", lambda: ["gguf"])
