"""The decoder benchmark on a tiny model: correct tokens, wrong tokens, near ties and failures."""

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


@pytest.mark.slow
def test_a_correct_backend_gives_the_tokens_of_the_reference(model: Any) -> None:
    """V3: with the backend of the environment variable."""
    expected = decoder.generate(model, "eager", PROMPTS, 8, **SETTINGS)
    ours = decoder.generate(model, "attnlib", PROMPTS, 8, graphs=False, **SETTINGS)
    assert ours.tokens == expected.tokens and decoder.served_by(model) == ["torch"]
    assert ours.tokens_per_second > 0 and ours.step_ms > 0 and ours.graphs == "(False, False)"
    assert len({token for row in ours.tokens for token in row}) > 20, (
        "degenerate tokens would hide errors"
    )
    assert decoder.compare(model, "attnlib", PROMPTS, ours.tokens, expected.tokens) == []


def test_weights_and_prompts_are_reproducible(model: Any) -> None:
    """Each backend makes the model in its own process."""
    again = decoder.make_model(decoder.make_config(2, **TINY), "cpu", torch.float32)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )
    assert decoder.make_prompts(5, TINY["vocab_size"], 5, 60) == PROMPTS


def test_a_wrong_token_is_not_a_near_tie(model: Any) -> None:
    """A small error does not explain another token or a missing one."""
    expected = decoder.generate(model, "sdpa", PROMPTS, 4, **SETTINGS).tokens
    wrong = [list(row) for row in expected]
    wrong[2][1] = (wrong[2][1] + 1) % TINY["vocab_size"]
    wrong[4].pop()
    second, fourth = decoder.compare(model, "attnlib", PROMPTS, wrong, expected)
    assert (second["prompt"], second["step"], second["explained"]) == (2, 1, False)
    assert second["margin"] >= second["top2"] > 0 and second["error"] < 1e-4
    assert (fourth["prompt"], fourth["step"], fourth["explained"]) == (4, 3, False)


def test_large_errors_do_not_explain_a_difference(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error far above the noise of the reference is not rounding."""
    exact = decoder._logits

    def off(model: Any, implementation: str, prefix: list[int]) -> torch.Tensor:
        noise = {"sdpa": 0.0, "eager": 1e-3, "attnlib": 5.0}[implementation]
        return exact(model, "sdpa", prefix) + noise * torch.linspace(-1, 1, TINY["vocab_size"])

    monkeypatch.setattr(decoder, "_logits", off)
    found = decoder._compare_logits(
        model, "attnlib", PROMPTS[0], 7, int(exact(model, "sdpa", PROMPTS[0]).argmax())
    )
    assert found["error"] == pytest.approx(5.0, rel=1e-3) and not found["explained"]


def test_near_ties_are_explained(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second choice of the reference, within the distance of its two implementations."""
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
    found = decoder._compare_logits(model, "attnlib", [1], 2, 1)
    assert found["explained"] and found["margin"] == pytest.approx(0.001, abs=1e-6)


def test_a_failed_generation_raises_its_error(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_table_has_a_row_for_every_backend() -> None:
    """The row of a failed backend has the reason."""
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


def test_a_process_that_ends_is_a_failed_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run goes on."""
    script = load("decoder_tokens")
    options = argparse.Namespace(
        backends=["hf:sdpa"], jobs=1, limit_seconds=30.0, backend_seconds=30.0, layers=1
    )
    results = script.run(options, ["--no-such-option"], tmp_path)
    assert "process ended" in results[0]["failed"] and "no-such-option" in results[0]["failed"]
    assert (tmp_path / "decoder_tokens.json").is_file() and "FAILED" in capsys.readouterr().out
