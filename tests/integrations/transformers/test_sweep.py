"""A short list of the architectures that `python -m tests.integrations.transformers_sweep` runs."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.generated_pages import generator
from tests.integrations.transformers_sweep.architectures import KINDS, architectures
from tests.integrations.transformers_sweep.runner import sweep
from tests.integrations.transformers_sweep.trial import OUTCOMES

SHORT_LIST = {
    ("decoder", "llama"),
    ("decoder", "gemma3_text"),  # sliding and full layers
    ("decoder", "gpt_oss"),  # sinks
    ("decoder", "deepseek_v3"),  # values smaller than keys
    ("decoder", "qwen2_moe"),  # a window that the module does not pass
    ("decoder", "hy_v4"),  # keys selected per query
    ("decoder", "mamba"),  # no attention
    ("encoder", "modernbert"),  # bidirectional windows
    ("encoder", "vit"),
    ("encoder-decoder", "bart"),
    ("encoder-decoder", "t5"),  # a position bias
    ("vision-language", "gemma3"),  # bidirectional attention among image tokens
}


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    """The records of the short list, from one worker process."""
    chosen = [one for one in architectures() if (one.kind, one.model_type) in SHORT_LIST]
    facts = {"commit": "", "date": "", "transformers": "", "torch": ""}
    return sweep(chosen, processes=1, seconds=120, facts=facts)


@pytest.mark.slow
def test_the_short_list(records: list[dict[str, Any]]) -> None:
    """Nothing is wrong or crashes; refusals name their cause; other attention is left alone."""
    assert {(r["kind"], r["model_type"]) for r in records} == SHORT_LIST
    outcomes = {r["model_type"]: r["outcome"] for r in records if r["outcome"] != "correct"}
    assert outcomes == {"mamba": "unaffected"}
    cases = {name: c["outcome"] for r in records for name, c in r["cases"].items()}
    assert set(cases) == {
        *("forward", "left padding", "right padding", "autocast", "generate", "generate_batch")
    }


@pytest.mark.slow
def test_the_page_names_what_is_not_correct(records: list[dict[str, Any]]) -> None:
    generate = generator("transformers_models")
    assert tuple(generate.KINDS) == tuple(KINDS) and generate.OUTCOMES == OUTCOMES
    text = generate.page(records)
    others = [record["model_type"] for record in records if record["outcome"] != "correct"]
    assert others == ["mamba"] and "- **unaffected** (1): `mamba`" in text
    assert "| all | 0 | 0 | 11 | 0 | 1 | 0 | 0 | 12 |" in text


@pytest.mark.slow
def test_wrong_attention_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that is one key too wide is reported as wrong, also in padded forwards."""
    from attnlib.integrations.transformers import patterns
    from tests.integrations.transformers_sweep.trial import installed, run_architecture

    captured = patterns._captured

    def wider(function: Any, name: str) -> Any:
        found = captured(function, name)
        return found + 1 if name == "sliding_window" else found

    monkeypatch.setitem(os.environ, "ATTNLIB_BACKEND", "torch")
    monkeypatch.setattr(patterns, "_captured", wider)
    with installed():
        record = run_architecture("mistral", "MistralForCausalLM", "encoder")
    assert record["outcome"] == "wrong"
    assert record["cases"]["left padding"]["outcome"] == "wrong"
