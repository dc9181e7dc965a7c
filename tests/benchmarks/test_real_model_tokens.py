"""The comparison of greedy tokens, on a tiny model in place of the real one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks import real_model_tokens  # noqa: E402
from tests import example_checkpoint  # noqa: E402


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    example_checkpoint.install(monkeypatch, tmp_path)
    monkeypatch.setattr(real_model_tokens, "RESULTS", tmp_path / "results.json")
    return tmp_path / "results.json"


def _main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["real_model_tokens.py", *arguments])
    real_model_tokens.main()


def test_runs_are_recorded_side_by_side(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results.write_text('{"another run": {}}')
    _main(monkeypatch, "--tokens", "3", "--short", "4")
    document = json.loads(results.read_text())
    assert set(document) == {"another run", "torch cpu float32"}
    made = document["torch cpu float32"]
    for name in ("sdpa", "attnlib"):
        found = made["compared_with_eager"][name]
        assert found["prompts"] == found["identical_prompts"] == 4
        assert found["tokens"] == found["identical_tokens"] == 12 and not found["differences"]
    assert len(made["prompts"]) == 4 and all(row["text"] for row in made["prompts"])


def test_tokens_that_differ_are_found(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third token of the second prompt of attnlib is another one."""
    original = real_model_tokens.Run.generate

    def wrong(self: real_model_tokens.Run, name: str, texts: list[str]) -> list[list[int]]:
        found = original(self, name, texts)
        if name == "attnlib":
            found[1][2] = (found[1][2] + 1) % 30
        return found

    monkeypatch.setattr(real_model_tokens.Run, "generate", wrong)
    _main(monkeypatch, "--tokens", "3", "--short", "4")
    found = json.loads(results.read_text())["torch cpu float32"]["compared_with_eager"]["attnlib"]
    assert found["identical_prompts"] == 3 and found["identical_tokens"] == 11
    (difference,) = found["differences"]
    assert difference["prompt"] == 1 and difference["token"] == 2
    assert 0 < difference["relative_margin"] <= 2


def test_long_prompts_fill_the_windows() -> None:
    short, long = real_model_tokens.all_prompts(16)
    assert len(short) == len(set(short)) == 16 and len(set(long)) == 4
    assert all(len(text) == 2800 for text in long), "more than 512 tokens of Gemma"
    assert not real_model_tokens.all_prompts(4)[1]


def test_the_committed_runs_found_no_difference() -> None:
    document = json.loads(real_model_tokens.RESULTS.read_text())
    whole = document["torch cpu float32"]
    assert len(whole["prompts"]) == 20 and whole["prompts"][-1]["prompt_tokens"] > 512
    for label, made in document.items():
        for found in made["compared_with_eager"].values():
            assert found["tokens"] > 0
            assert found["identical_tokens"] == found["tokens"] or "float32" not in label
