"""Arguments of the commands: each wrong value is refused in one line, with exit status 2."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest
import torch

from attnlib.cli import main
from tests.cli.parsers import parsers

FILES = {
    "LIST": "[1, 2]",
    "TEXT": "this is no JSON and no recording",
    "HEADS": '{"num_attention_heads": "many", "hidden_size": 64}',
    "WINDOW": '{"num_attention_heads": 4, "hidden_size": 64, "sliding_window": [4]}',
}
WRONG = [
    "list --device gpu",
    "list --device cuda:x",
    "explain --device gpu",
    "explain --config MISSING",
    "explain --config LIST",
    "explain --config TEXT",
    "explain --config HEADS",
    "explain --config WINDOW",
    "explain --config FOLDER",
    "explain --kv-cache-layout XYZ",
    "explain --kv-cache-dtype fp9",
    "explain --kv-scale-kind row",
    "explain --dtype int32",
    "explain --head-size 0",
    "explain --sliding-window -5",
    "explain --logits-soft-cap nan",
    "explain --key-selection a:b:c",
    "explain --compressed-entries 4",
    "explain --backend auto,torch",
    "explain --backend ,",
    "explain --backend nowhere:Backend",
    "explain --backend prefil:torch,decode:torch",
    "verify torch --device tpu",
    "verify torch --device sm_90",
    "verify torch --device cpu --jobs -1",
    "verify torch --device cpu --jobs 0",
    "verify torch --device cpu --seed -1",
    "verify torch --device cpu --seeds 0",
    "verify torch --device cpu --only W2,F9/xx",
    "verify torch --device cpu --only W2,",
    "verify torch --device cpu --score nowhere:f",
    "verify torch --device cpu --score torch:nn",
    "verify torch --device cpu --score TEXT",
    "verify torch --device cpu --against nothing",
    "verify torch --device cpu --json FOLDER",
    "verify torch --device cpu --json TEXT/out.json",
    "verify torch --device cpu --certify batch-invariance --only W2",
    "verify torch --device cpu --commit abc --only D2",
    "verify auto --device cpu",
    "verify -- -torch",
    "parity --device tpu",
    "parity nothing",
    "parity --seed x",
    "replay FOLDER torch",
    "replay MISSING torch",
    "replay TEXT torch",
    "replay TEXT torch --device tpu",
    "replay TEXT torch --shrink FOLDER",
    "audit-kv --recordings MISSING",
    "audit-kv --recordings TEXT",
    "audit-kv --recordings FOLDER",
    "audit-kv --max-tokens -5",
    "audit-kv --dtype float12",
    "audit-kv --device tpu",
    "audit-kv --prompts MISSING",
    "audit-kv --prompts BYTES --device cpu",
    "audit-kv --backend nothing --device cpu",
    "audit-kv --formats fp3",
    "audit-kv --json FOLDER",
    "bench --device tpu",
    "bench --block-size 0 --device cpu",
    "bench --limit-seconds nan --device cpu",
    "bench --limit-seconds -1 --device cpu",
    "bench --backends , --device cpu q1s8",
    "bench --backends torch[x --device cpu q1s8",
    "bench --json FOLDER --device cpu",
    "bench --figures TEXT --device cpu",
    "bench --from-json TEXT",
    "bench --from-json LIST",
    "bench --from-json LIST q1s8",
    "bench --workloads TEXT --device cpu",
    "bench --workloads FOLDER --device cpu",
    "bench --solutions FOLDER",
    "bench q1s8@heads=3/2 --device cpu",
    "bench q9s8 --device cpu",
    "tune --device tpu",
    "tune --out FOLDER --device cpu",
    "tune --ops nothing --device cpu --out NEW",
    "tune --shapes q1x8 --device cpu --out NEW",
    "tune --from-bench TEXT --device cpu --out NEW",
    "tune --out TEXT --device cpu q1s8",
    "demo --device sm_90",
    "demo --dtype float12",
    "demo --backend nothing --device cpu",
    "demo --num-blocks -1",
    "demo --seed 1.5",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files that no command can use."""
    for name in ("ATTNLIB_BACKEND", "ATTNLIB_TUNING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "BYTES").write_bytes(b"\xff\xfe\x00\xd8")
    (tmp_path / "FOLDER").mkdir()
    return tmp_path


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_value_is_answered_in_one_line(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D5"""
    before = sorted(os.listdir(folder))
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"attnlib {command.split()[0]}: ") and err.count("\n") == 1, err
    assert "Traceback" not in err and len(err) < 1000
    assert sorted(os.listdir(folder)) == before and "PASSED" not in out


def test_an_output_file_may_be_in_a_new_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "verify torch --device cpu --quick --only D2 --json new/folder/report.json"
    assert main(command.split()) == 0
    assert json.loads((folder / "new/folder/report.json").read_text())["counts"]["fail"] == 0


@pytest.mark.parametrize("name", sorted(parsers()))
def test_every_argument_has_help(name: str) -> None:
    """D6: no flag and no position without a line of help, and a description without markup."""
    parser = parsers()[name]
    assert parser.description and "\n" not in parser.description and "`" not in parser.description
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            assert action.help, f"{name}: {action.option_strings or action.dest}"
    assert parser.prog == f"attnlib {name}" and len(parser.format_help()) > 100


def test_a_missing_gpu_is_a_wrong_value(capsys: pytest.CaptureFixture[str]) -> None:
    missing = f"cuda:{torch.cuda.device_count() + 7}"
    for command in ("bench", "demo", "parity", "replay FILE torch", "audit-kv", "tune"):
        words = command.replace("FILE", __file__).split()
        assert main([*words, "--device", missing]) == 2
        assert f"{missing} is not available" in capsys.readouterr().err
