"""`attnlib tune`: the cases that its arguments select, and the whole command on a CPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from attnlib.cli import main
from attnlib.cli.tune.main import parser
from attnlib.cli.tune.plan import plan_cases
from attnlib.errors import ContractError

SMALL = ["--num-heads", "4", "--num-kv-heads", "2", "--head-size", "32", "--dtype", "float32"]
TUNE = ["tune", "--device", "cpu"]


def _options(*words: str) -> argparse.Namespace:
    return parser().parse_args(list(words))


def test_cases_come_from_flags_a_config_or_names(tmp_path: Path) -> None:
    cases, left_out = plan_cases(_options(*SMALL, "--shapes", "q1s64,2q8"), "cpu")
    assert [(case.name, str(case.batch), case.spec.head_size) for case in cases] == [
        ("q1s64@spec", "q1s64", 32),
        ("2q8@spec", "2q8", 32),
    ]
    assert not left_out
    assert [case.name for case in plan_cases(_options("cpu-decode-*"), "cpu")[0]] == [
        "cpu-decode-1x512",
        "cpu-decode-8x256",
        "cpu-decode-ragged",
    ]
    config = {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 512,
        "torch_dtype": "bfloat16",
        "model_type": "llama4",
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    cases, left_out = plan_cases(_options("--config", str(tmp_path), "--quick"), "cuda")
    assert [case.name for case in cases] == ["8q1s8k@full_attention", "q4k@full_attention"]
    assert left_out == [
        "chunked_attention has attention_chunk_size=64, which a case cannot express: it keeps the "
        "shipped parameters and ranking"
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("q1s8", "--head-size", "32"), "a CASE includes its layer"),
        (("--shapes", "q1x8"), "does not parse"),
        (("--has-alibi",), "nothing can be measured: this layer has has_alibi=True"),
    ],
)
def test_arguments_without_a_measurable_case_are_errors(
    words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        plan_cases(_options(*words), "cpu")


@pytest.mark.slow
def test_the_whole_command_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured, checked, written, and used: explain names the table."""
    out = tmp_path / "cpu.json"
    monkeypatch.setenv("ATTNLIB_TUNING", "off")
    words = [*TUNE, *SMALL, "--shapes", "q1s24,q9", "--backends", "torch", "--out", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "no backend has tunable parameters on cpu" in printed
    assert f"wrote 0 parameter lines and 1 rankings to {out}" in printed
    (rank,) = json.loads(out.read_text())["backends"]
    assert rank["ranking"] == ["torch"]
    assert set(rank["microseconds"]) == {"q1s24@spec", "q9@spec"}
    assert rank["microseconds"]["q9@spec"]["torch"] > 0
    (facts,) = json.loads(out.read_text())["provenance"].values()
    assert facts["command"].startswith("attnlib tune --device cpu")
    assert facts["torch"] == torch.__version__ and facts["date"]
    monkeypatch.setenv("ATTNLIB_TUNING", str(out))
    assert main(["explain", "--device", "cpu", *SMALL]) == 0
    message = f"measured fastest of torch for such layers on this chip: {out}"
    assert message in " ".join(capsys.readouterr().out.split()), "the report wraps its lines"


def test_the_time_limit_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cpu.json"
    words = [*TUNE, *SMALL, "--shapes", "q1s24", "--backends", "torch", "--out", str(out)]
    assert main([*words, "--limit-seconds", "0"]) == 1 and not out.exists()
    assert "not run, the limit of 0 s was reached: q1s24@spec" in capsys.readouterr().out


@pytest.mark.slow
def test_rankings_can_come_from_bench_results_of_this_chip(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, out = tmp_path / "bench.json", tmp_path / "cpu.json"
    words = ["bench", "q1s24@heads=4/2,d=32,dtype=float32", "--device", "cpu"]
    assert main([*words, "--backends", "torch", "--json", str(results)]) == 0
    assert main([*TUNE, "--from-bench", str(results), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["backends"][0]["ranking"] == ["torch"]
    document = json.loads(results.read_text())
    document["runs"][0]["provenance"]["gpu"] = "NVIDIA H200"
    results.write_text(json.dumps(document))
    capsys.readouterr()
    assert main([*TUNE, "--from-bench", str(results), "--out", str(out)]) == 2
    assert "was measured on 'NVIDIA H200' and this is 'cpu'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ops", "decode"], "--ops decode: no backend has tunable operations on cpu"),
        (["--shapes", "q1s8"], "ATTNLIB_TUNING=off: there is no table to write; unset it, or"),
        (["--backends", "tirton"], "Did you mean 'triton'"),
        (["nosuch"], "batch spec 'nosuch'"),
    ],
)
def test_impossible_requests_are_errors(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("ATTNLIB_TUNING", "off")
    table = [] if "--shapes" in words else ["--out", str(tmp_path / "x.json")]
    assert main([*TUNE, *words, *table]) == 2
    out, err = capsys.readouterr()
    assert message in err and not out, "nothing is printed before the arguments are checked"
