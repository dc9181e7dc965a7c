"""What engines should generate, and cases that several test files run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.hosts.install import VLLM


def attnlib_name(version: str) -> str:
    """attnlib's name in a release of vLLM."""
    return "CUSTOM" if version == VLLM[0] else "ATTNLIB"


def expected_tokens(models: Path, name: str) -> list[list[int]]:
    expected = json.loads((models / name / "expected.json").read_text())
    found: list[list[int]] = expected["tokens"]
    return found


def page_tokens(models: Path, stored: str) -> list[list[int]]:
    """Tokens of transformers over a cache with the round trip of a format."""
    expected = json.loads((models / "llama" / "expected.json").read_text())
    found: list[list[int]] = expected["page_tokens"][stored]
    return found


def verifying(
    models: Path, name: str = "loops", repeat: int = 2, **arguments: Any
) -> dict[str, Any]:
    """A case whose tokens are drafted by the n-grams of its prompt, four at a time."""
    drafts = {
        "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3,
        "prompt_lookup_min": 2,
    }  # fmt: skip
    more = {"speculative_config": drafts, "disable_log_stats": False, **arguments}
    return {"model": str(models / name), "repeat": repeat, "arguments": more}


def hearing_or_seeing(models: Path, version: str, **arguments: Any) -> dict[str, Any]:
    """Cases of models with audio and with images."""
    media = {"skip_tokenizer_init": False, "max_num_batched_tokens": 512, **arguments}
    if version == VLLM[1]:  # an environment variable in 0.26
        media["mm_hasher_algorithm"] = "sha256"
    lengths = {"whisper": 128, "gemma3-images": 512}
    return {
        name: {"model": str(models / name), "arguments": {**media, "max_model_len": length}}
        for name, length in lengths.items()
    }
