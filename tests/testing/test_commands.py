"""`attnlib verify`, `parity` and `replay`: exit codes, filters, JSON, invalid arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from attnlib.debug.record import save_recording
from attnlib.testing.case import Case
from attnlib.testing.commands import parity_main, replay_main, verify_main
from attnlib.testing.progress import ProgressBar

TOY = "tests.testing.toy_backend:ToyBackend"
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "one_file_backend.py") + ":OneFileBackend"


def test_verify_prints_a_table_and_returns_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_main([TOY, "--device", "cpu", "--only", "W2,V2/batch-*", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "which keys each query sees" in out
    assert out.rstrip().endswith("PASSED")


def test_verify_takes_a_file_and_other_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        verify_main([EXAMPLE, "--device", "cpu", "--against", TOY, "--only", "K2", "--quick"]) == 0
    )
    assert "2 unsupported" in capsys.readouterr().out


def test_verify_tests_a_score_function_of_the_user(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """M10: a function in a file; wrong bounds are found by a backend that uses them."""
    file = tmp_path / "user_score_function.py"
    file.write_text(
        "def halved(score, q_pos, k_pos, head, request, aux):\n    return score * 0.5\n"
    )
    given = ["torch", "--device", "cpu", "--quick", "--score", f"{file}:halved"]
    assert verify_main(given) == 0
    assert "10 cases · 10 passed" in capsys.readouterr().out
    assert verify_main([*given[:-1], f"{file}:absent"]) == 2
    assert "absent" in capsys.readouterr().err


def test_verify_returns_one_when_it_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "bad.py"
    path.write_text(
        "from tests.testing.toy_backend import toy_with\n"
        "from tests.testing.wrong_backends import TopLeftCausal\n"
        "Bad = toy_with(TopLeftCausal)\n"
    )
    assert verify_main([f"{path}:Bad", "--device", "cpu", "--only", "W2", "--quick"]) == 1
    out = capsys.readouterr().out
    assert "expected 0-" in out
    assert f"reproduce: attnlib verify {path}:Bad --only W2/" in out


def test_verify_json_goes_to_stdout_or_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = [TOY, "--device", "cpu", "--only", "D2", "--json"]
    assert verify_main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["pass"] == 4
    target = tmp_path / "report.json"
    assert verify_main([*arguments, str(target), "--seeds", "2"]) == 0
    assert [report["seed"] for report in json.loads(target.read_text())] == [0, 1]
    assert "PASSED" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ["triton"],
            "triton is unavailable on cpu: a CPU needs Triton's interpreter (slow, for tests): "
            "set TRITON_INTERPRET=1",
        ),
        (
            ["torch", "--device", "cuda"],
            "torch is unavailable on cuda: no CUDA device 0 is visible",
        ),
    ],
)
def test_verify_prints_one_line_for_an_unavailable_backend(
    arguments: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No report; the reason with its next action, and exit code 3."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert verify_main(arguments) == 3
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"attnlib verify: {reason}") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no_such_backend"], "no_such_backend"),
        (["no_such_module:Backend"], "no_such_module"),
        (["tests.testing.toy_backend:Missing"], "Missing"),
        (["tests.testing.toy_backend:ToyImpl"], "must be a subclass of attnlib.AttentionBackend"),
        (["nowhere.py:Backend"], "nowhere.py does not exist in "),
        (["./my.py"], "without a class: write ./my.py:CLASS"),
        ([TOY, "--device", "cpu", "--only", "Z9"], "no case matches --only Z9"),
    ],
)
def test_invalid_arguments_are_named_and_return_two(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify_main(arguments) == 2
    assert text in capsys.readouterr().err


def test_parity_prints_the_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    assert parity_main([TOY, EXAMPLE, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "writes \\ reads" in out
    assert "one_file" in out


def test_commands_refuse_an_unavailable_backend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert parity_main(["torch", "triton", "--device", "cpu"]) == 3
    assert verify_main(["torch", "--against", "triton", "--device", "cpu", "--only", "K2"]) == 3
    recording = save_recording(Case(batch="q2").materialize(), tmp_path / "call.pt")
    assert replay_main([str(recording), "triton"]) == 3
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 3
    assert err.count("triton is unavailable on cpu: a CPU needs Triton's interpreter") == 3


def test_parity_refuses_a_repeated_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert parity_main(["torch", "torch", "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert "torch is given more than once: drop the repetition" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "class Impl(TorchBackend.get_impl_cls()):\n"
            "    def forward(self, q, cache, metadata, output, lse=None): ...\n",
            "Impl.forward(self, q, cache, metadata, output, lse=None) does not fit",
        ),
        ("class Impl: ...\n", "must return a subclass of attnlib.AttentionImpl"),
    ],
)
def test_verify_checks_the_interface_as_registration_does(
    body: str, reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / f"interface_{len(body)}.py"
    file.write_text(
        "from attnlib.backends.torch import TorchBackend\n" + body + "class Bad(TorchBackend):\n"
        "    @staticmethod\n    def get_name(): return 'bad'\n"
        "    @staticmethod\n    def get_impl_cls(): return Impl\n"
    )
    assert verify_main([f"{file}:Bad", "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and reason in err and err.count("\n") == 1


def test_replay_runs_and_shrinks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recording = save_recording(
        Case(batch="q5s20_q1s9", sliding_window=3).materialize(), tmp_path / "call.pt"
    )
    assert replay_main([str(recording), TOY]) == 0
    assert "within the error budget" in capsys.readouterr().out
    bad = tmp_path / "bad.py"
    bad.write_text(
        "from tests.testing.toy_backend import toy_with\n"
        "from tests.testing.wrong_backends import OffByOneWindow\n"
        "Bad = toy_with(OffByOneWindow)\n"
    )
    small = tmp_path / "small.pt"
    assert replay_main([str(recording), f"{bad}:Bad", "--shrink", str(small)]) == 1
    assert "smallest failing batch: q1s" in capsys.readouterr().out
    assert replay_main([str(small), f"{bad}:Bad"]) == 1
    with pytest.raises(SystemExit, match="2"):
        replay_main([str(tmp_path / "none.pt"), TOY])


def test_the_progress_bar_shows_counts_and_the_case() -> None:
    bar = ProgressBar(4, enabled=False)
    bar.advance("W2/causal")
    bar.advance("W2/chunk", failed=True)
    assert bar.line("W2/chunk") == "[##############--------------] 2/4, 1 failed  W2/chunk"
