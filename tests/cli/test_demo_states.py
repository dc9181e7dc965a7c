"""`attnlib demo` and `attnlib audit-kv` over saved models with state layers."""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from attnlib.cli.main import main
from attnlib.integrations.transformers.state_calls import FUNCTIONS
from tests.example_checkpoint import LETTERS, save
from tests.integrations.transformers.test_state_mixers import built, skip_in_older_releases
from tests.integrations.transformers.test_state_mixers import pytestmark as has_state_functions


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "lfm2", "mamba2", "minimax"])
def test_all_tokens_are_those_of_the_model(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In chunks, mixed batches and after preemption, from a folder, whose configuration has lists
    where that of a new model has tuples."""
    skip_in_older_releases(name)
    save(built(name), tmp_path, LETTERS.replace("\n", ""))  # with which a request would end
    assert main(["demo", "--device", "cpu", "--model", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "PASSED: 288/288 tokens" in shown  # 12 requests of 24 tokens
    reused = re.search(r", (\d+) of them reused from the cache; preemptions: (\d+)", shown)
    assert reused is not None and (int(reused[1]) > 0) is (name != "mamba2")  # which has no keys
    assert " tokens or a state at peak" in shown or name == "mamba2"


@has_state_functions
def test_a_prefix_of_a_model_with_states_is_a_hit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save(built("lfm2"), tmp_path)
    sizes = ["--requests", "7", "--max-new-tokens", "3", "--num-blocks", "120"]
    assert main(["demo", "--device", "cpu", "--json", "--model", str(tmp_path), *sizes]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["result"]["passed"] and result["reused_prompt_tokens"] >= 128
    assert result["block"] == "16 tokens or a state"


@has_state_functions
def test_the_keys_of_a_model_with_states_are_audited(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`attnlib audit-kv`: its step has a slot for the states of the prompt."""
    save(built("lfm2"), tmp_path)
    (tmp_path / "text.txt").write_text("a paged cache " * 4)
    arguments = ["audit-kv", "--device", "cpu", "--model", str(tmp_path), "--perplexity"]
    formats = ["--formats", "int8_per_token_head;int4_per_group"]
    assert main([*arguments, "--prompts", str(tmp_path / "text.txt"), *formats]) == 0
    rows = re.findall(r"^(int\d)_per_\w+ +\d+ ", capsys.readouterr().out, re.M)
    assert rows[:2] == ["int8", "int4"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "kimi_linear", "lfm2"])
def test_on_a_gpu(
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Keys, latents and states as strided blocks of one pool, in the Triton kernels. The reference
    computes in float32 of full precision, without the packages that round to TF32."""
    skip_in_older_releases(name)
    model = built(name)
    module = sys.modules[type(model).__module__]
    for function in FUNCTIONS.keys() & vars(module).keys():
        monkeypatch.setattr(module, function, inspect.unwrap(getattr(module, function)))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    save(model, tmp_path)
    sizes = ["--requests", "7", "--max-new-tokens", "6", "--num-blocks", "120"]
    options = ["--device", "cuda", "--dtype", "float32", "--json", "--model", str(tmp_path)]
    assert main(["demo", *options, *sizes]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["result"]["passed"] and result["reused_prompt_tokens"] > 0
    assert result["backends"] == ["triton"]
