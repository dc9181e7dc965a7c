"""The decoder benchmark on a tiny model: a right backend gives the reference's tokens, a wrong one is told from a near tie, a failure is a row."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.scripts import load

pytest.importorskip("transformers", reason="the benchmark runs a transformers model")
if importlib.util.find_spec("psutil") is None:
    from transformers import ContinuousBatchingConfig

    if "page_size" not in ContinuousBatchingConfig.__dataclass_fields__:
        pytest.skip(
            "without psutil this version of transformers finds no memory for the cache on a CPU",
            allow_module_level=True,
        )

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
SETTINGS: dict[str, Any] = {"page_size": 16, "num_blocks": 40, "max_batch_tokens": 48}


decoder = load("decoder_model")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import attnlib.integrations.transformers as integration

    monkeypatch.setenv("ATTNLIB_BACKEND", "torch")
    integration.register()
    yield
    integration.unregister()


@pytest.fixture(scope="module")
def model() -> Any:
    return decoder.make_model(decoder.make_config(2, **TINY), "cpu", torch.float32)


PROMPTS = decoder.make_prompts(5, TINY["vocab_size"], 5, 60)


def test_a_backend_gives_the_references_tokens(model: Any) -> None:
    """V3: and it is the backend of the environment variable that has run."""
    expected = decoder.generate(model, "eager", PROMPTS, 8, **SETTINGS)
    ours = decoder.generate(model, "attnlib", PROMPTS, 8, graphs=False, **SETTINGS)
    assert ours.tokens == expected.tokens and decoder.served_by(model) == ["torch"]
    assert ours.tokens_per_second > 0 and ours.step_ms > 0 and ours.graphs == "(False, False)"
    assert len({token for row in ours.tokens for token in row}) > 20, (
        "degenerate tokens would notice nothing"
    )
    assert decoder.judge(model, "attnlib", PROMPTS, ours.tokens, expected.tokens) == []


def test_weights_and_prompts_are_the_same_again(model: Any) -> None:
    """Each backend makes the model in a process of its own."""
    again = decoder.make_model(decoder.make_config(2, **TINY), "cpu", torch.float32)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )
    assert decoder.make_prompts(5, TINY["vocab_size"], 5, 60) == PROMPTS


def test_a_wrong_token_is_not_a_near_tie(model: Any) -> None:
    """A token that the reference would not take is not explained by an error that small; nor is a missing one."""
    expected = decoder.generate(model, "sdpa", PROMPTS, 4, **SETTINGS).tokens
    wrong = [list(row) for row in expected]
    wrong[2][1] = (wrong[2][1] + 1) % TINY["vocab_size"]
    wrong[4].pop()
    second, fourth = decoder.judge(model, "attnlib", PROMPTS, wrong, expected)
    assert (second["prompt"], second["step"], second["explained"]) == (2, 1, False)
    assert second["gap"] >= second["top2"] > 0 and second["error"] < 1e-4
    assert (fourth["prompt"], fourth["step"], fourth["explained"]) == (4, 3, False)


def test_a_wrong_backend_is_not_excused_by_its_own_error(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits far from the reference's make every gap small; the noise of the reference says that they are wrong."""
    exact = decoder._logits

    def off(model: Any, implementation: str, prefix: list[int]) -> torch.Tensor:
        noise = {"sdpa": 0.0, "eager": 1e-3, "attnlib": 5.0}[implementation]
        return exact(model, "sdpa", prefix) + noise * torch.linspace(-1, 1, TINY["vocab_size"])

    monkeypatch.setattr(decoder, "_logits", off)
    found = decoder._judged(
        model, "attnlib", PROMPTS[0], 7, int(exact(model, "sdpa", PROMPTS[0]).argmax())
    )
    assert found["error"] == pytest.approx(5.0, rel=1e-3) and not found["explained"]


def test_a_near_tie_is_one(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's second choice, as near as its own two implementations are to each other."""
    logits = {
        "sdpa": [0.0, 1.0, 0.999],
        "eager": [0.002, 1.0, 0.999],
        "attnlib": [0.0, 0.998, 0.999],
    }
    monkeypatch.setattr(
        decoder,
        "_logits",
        lambda model, implementation, prefix: torch.tensor(logits[implementation]),
    )
    found = decoder._judged(model, "attnlib", [1], 2, 1)
    assert found["explained"] and found["gap"] == pytest.approx(0.001, abs=1e-6)


def test_a_failed_generation_says_why(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """S1: the batching thread's error reaches the caller."""
    monkeypatch.setenv("ATTNLIB_BACKEND", "nonsense")
    with pytest.raises(
        RuntimeError, match="5 of 5 prompts failed.*unknown attention backend 'nonsense'"
    ):
        decoder.generate(model, "attnlib", PROMPTS, 2, **SETTINGS)


def test_suffixes() -> None:
    assert decoder.split_name("triton") == ("triton", True)
    assert decoder.split_name("prefill:flash_attn,decode:triton@nographs") == (
        "prefill:flash_attn,decode:triton",
        False,
    )
    with pytest.raises(ValueError, match="@nographs"):
        decoder.split_name("triton@fast")


def test_the_table_has_a_row_for_everybody() -> None:
    """A failed backend is a row with its reason, not a missing one."""
    script = load("decoder_tokens")
    measured = {
        "served_by": ["triton"],
        "tokens_per_second": [10.0, 12.0],
        "ms_per_step": 1.5,
        "graphs": "(True, True)",
        "peak_gib": 20.0,
    }
    rows = script.table(
        [
            {"backend": "hf:sdpa", "reference": True, **measured},
            {
                "backend": "triton",
                **measured,
                "same": 3,
                "prompts": 5,
                "differences": [{"explained": True}, {"explained": False}],
            },
            {"backend": "flashinfer", "failed": "RuntimeError: no nvcc\nmore"},
        ]
    ).splitlines()
    assert "| reference | - | - | 12 | 1.50 |" in rows[2]
    assert "| 3/5 | 1 | 1 | 12 |" in rows[3] and "failed: RuntimeError: no nvcc |" in rows[4]
    assert len({row.count("|") for row in rows}) == 1


def test_children_answer_or_are_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A child that cannot start is a failed result, and the run goes on."""
    script = load("decoder_tokens")
    options = argparse.Namespace(
        backends=["hf:sdpa"], jobs=1, limit_seconds=30.0, backend_seconds=30.0, layers=1
    )
    results = script.run(options, ["--no-such-option"], tmp_path)
    assert "process died" in results[0]["failed"] and "no-such-option" in results[0]["failed"]
    assert (tmp_path / "decoder_tokens.json").is_file() and "FAILED" in capsys.readouterr().out
