"""The suite of state layers: bytes of a step, runs, checks of outputs and slots, and targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlib.backends.torch import TorchBackend
from attnlib.backends.torch.states import TorchStateImpl
from attnlib.backends.triton import TritonBackend
from attnlib.bench import command, state_case, timer
from attnlib.bench.backends import BenchBackend
from attnlib.bench.measure import measure_case
from attnlib.bench.peaks import Peaks
from attnlib.bench.results import Row, case_of_row, read_document
from attnlib.bench.runner import unmeasured
from attnlib.bench.state_case import StateCase
from attnlib.bench.state_cases import STATE_TARGETS, STATES
from attnlib.bench.state_runner import StateRunner
from attnlib.bench.targets import target_lines
from attnlib.bench.work import step_bytes, surrounding_bytes
from attnlib.cli import main
from attnlib.tuning.rank import rank_rows
from tests.backends.cpu_backend import H200

BY_NAME = {case.name: case for case in STATES}
GDN = BY_NAME["qwen3-next-decode-64x1"].spec
STATE = 32 * 128 * 128 * 4
ROW = 2 * (16 + 32) * 128 + 2 * 32 * 4
OUTER = 2 * (16 + 32) * 128
PEAKS = Peaks(100.0, 100.0, 1.0, "none")
CPU = torch.device("cpu")
SMALL = {
    "qwen3-next": {"num_heads": 2, "key_size": 16, "value_size": 16, "qk_norm": True},
    "kimi-linear": {"num_heads": 2, "key_size": 16, "value_size": 16, "decay": "channel"},
    "nemotron-h": {
        "num_heads": 2, "num_key_heads": 1, "key_size": 16, "value_size": 16, "update": "add",
    },
}  # fmt: skip


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "measure_peaks", lambda device: PEAKS)
    monkeypatch.setattr(timer, "_ROUND_US", 100.0)
    monkeypatch.setattr(state_case, "MODELS", SMALL)


def test_bytes_of_a_step() -> None:
    """A decode reads the state and half a chunk; each sixteenth one writes the state."""
    spec = GDN.replace(chunk_size=16)
    assert step_bytes(spec, 32, 1) == STATE + 2 * ROW + OUTER
    assert step_bytes(spec, 36, 1) == STATE + 6 * ROW + OUTER
    assert step_bytes(spec, 47, 1) == 2 * STATE + 16 * ROW + OUTER
    assert step_bytes(spec, 0, 32) == STATE + 32 * ROW + 32 * OUTER
    mean = sum(step_bytes(spec, 32 + n, 1) for n in range(16)) / 16
    assert mean == STATE * 17 / 16 + (7.5 + 1 + 15 / 16) * ROW + OUTER
    verified = spec.replace(max_rollback=3)
    assert step_bytes(verified, 32, 4) == STATE + 8 * ROW + 4 * OUTER


def test_bytes_around_a_recurrence() -> None:
    """A window of three rows is read, one row is written, and the output gate is read."""
    spec = BY_NAME["qwen3-next-step-64x1"].spec
    assert spec.conv_channels == 8192
    assert surrounding_bytes(spec, 1) == 2 * (4 * 8192 + 32 * 128)


def test_the_suite_has_the_rows_of_its_targets() -> None:
    assert len(BY_NAME) == len(STATES) == 3 * 24 and STATE_TARGETS.keys() <= BY_NAME.keys()
    others = {target.other for targets in STATE_TARGETS.values() for target in targets} - {""}
    assert others <= BY_NAME.keys()
    for case in STATES:
        assert not TritonBackend.validate_configuration(case.spec, H200), case.name


def _row(name: str, backend: str, us: float, **fields: Any) -> Row:
    row = replace(unmeasured(BY_NAME[name], backend, "ok", ""), how="graph", us=us)
    eager = {} if backend == "triton" else {"how": "eager", "note": "no graph: declared"}
    return replace(row, **{**eager, **fields})


def test_targets_compare_with_peers_on_other_rows() -> None:
    """A verification with a decode of as many tokens, a batch-invariant prefill with the plain one,
    one launch with separate ones; a decode has two targets."""
    decode, verify = "kimi-linear-decode-32x1", "kimi-linear-verify-32x4"
    prefill, step = "kimi-linear-prefill-8x1024", "kimi-linear-step-64x1"
    rows = [
        _row(decode, "triton", 10.0, share=0.76),
        _row(decode, "fla", 10.1),
        _row(verify, "triton", 7.0),
        _row("kimi-linear-decode-32x4", "fla", 10.0),
        _row(f"{prefill}-invariant", "triton", 13.0),
        _row(prefill, "fla", 10.0, how="graph", note=""),
        _row(step, "triton", 6.0),
        _row("kimi-linear-separate-64x1", "triton", 9.0),
    ]
    found = [line.split(";")[0].split() for line in target_lines(rows, STATE_TARGETS)[1:-1]]
    assert found == [
        ["met", decode, "0.990", "of", "fla", "(eager)"],
        ["met", decode, "76.0%"],
        ["missed", verify, "0.700", "of", "fla", "(eager)"],
        ["met", f"{prefill}-invariant", "1.300", "of", "fla"],
        ["met", step, "0.667", "of", "kimi-linear-separate-64x1"],
    ]


@pytest.mark.usefixtures("_small")
def test_a_run_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Globs choose, rows are checked and written in the form of the other suites."""
    target = tmp_path / "rows.json"
    arguments = ["bench", "*-decode-1x1", "qwen3-next-verify-1x4", "kimi-linear-s*-1x1"]
    arguments += ["--suite", "states", "--device", "cpu", "--commit", "abc1234"]
    assert main([*arguments, "--kernels-only", "--json", str(target)]) == 0
    document = read_document(target)
    assert document.runs[0].provenance["commit"] == "abc1234"
    names = [row.case for row in document.rows]
    models = ("qwen3-next", "kimi-linear", "nemotron-h")
    assert names == [f"{model}-decode-1x1" for model in models] + [
        "qwen3-next-verify-1x4", "kimi-linear-step-1x1", "kimi-linear-separate-1x1",
    ]  # fmt: skip
    for row in document.rows:
        assert (row.backend, row.status, row.checked, row.how) == ("torch", "ok", True, "eager")
        assert row.us and row.gbps and row.share == pytest.approx(row.gbps / 100.0)
        assert row.error is not None and row.error <= 1 and row.copies == 16
        assert case_of_row(row) == BY_NAME[row.case]
    ranked = rank_rows(document.rows, "")
    assert ranked and all(layer["ranking"] == ["torch"] for layer in ranked)
    assert {case for layer in ranked for case in layer["microseconds"]} <= set(names)
    shown = capsys.readouterr().out
    assert "qwen3-next-verify-1x4: q4s1028 · 2/2 heads, states 16 x 16, update delta" in shown
    assert main(["bench", "--from-json", str(target)]) == 0


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list", "--suite", "states", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(STATES)
    (line,) = (line for line in lines if line.startswith("qwen3-next-step-64x1 "))
    assert line.endswith("at most 0.70 x the time of qwen3-next-separate-64x1")
    assert main(["bench", "--list", "*-verify-*", "--suite", "states", "--device", "cpu"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "'nothing' is neither one of the 72 names that --list shows nor a batch"),
        (
            ["*-decode-1x1", "--block-size", "16"],
            "--block-size 16: qwen3-next-decode-1x1 has states",
        ),
        (["*-decode-1x1", "--figures", "nowhere"], "--figures draws attention layers"),
        (["--workloads", "."], "--suite and --workloads both choose the cases"),
        (["--solutions", "nowhere"], "--solutions needs --workloads"),
    ],
)
def test_other_options_are_refused(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "_require_matplotlib", lambda: None)
    assert main(["bench", *arguments, "--suite", "states", "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_the_time_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str], _small: None) -> None:
    target = tmp_path / "rows.json"
    chosen = ["*-decode-1x1", "--suite", "states", "--device", "cpu", "--json", str(target)]
    assert main(["bench", *chosen, "--limit-seconds", "0"]) == 0
    assert (
        "not run (the limit of 0 s was reached): qwen3-next-decode-1x1" in capsys.readouterr().out
    )
    assert {row.status for row in read_document(target).rows} == {"not run"}


def _changed(name: str, change: Callable[[Any, torch.Tensor], None]) -> BenchBackend:
    """The `torch` backend with a change after each step."""

    class Impl(TorchStateImpl):
        def step(self, inputs: Any, cache: Any, metadata: Any, output: torch.Tensor) -> None:
            super().step(inputs, cache, metadata, output)
            change(cache, output)

    body = {"get_state_impl_cls": staticmethod(lambda: Impl), "__module__": __name__}
    return BenchBackend(name, type(name, (TorchBackend,), body))


def _scale_last(cache: Any, output: torch.Tensor) -> None:
    output[-1] *= 1.1


def _leave_row(cache: Any, output: torch.Tensor) -> None:
    output[1] = torch.nan


def _lose_state(cache: Any, output: torch.Tensor) -> None:
    cache.tensors.state.mul_(0.9)


_WRONG = (
    (_scale_last, "out over budget"),
    (_leave_row, "1 rows hold NaN or infinity, or were never written, the first is 1"),
    (_lose_state, "the state of request 0 differs by"),
)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(("change", "reason"), _WRONG)
def test_a_wrong_backend_gets_no_time(change: Any, reason: str) -> None:
    case = StateCase(model="qwen3-next", work="decode", num_reqs=4, query_len=1)
    backends = [_changed("Wrong", change), BenchBackend("torch", TorchBackend)]
    wrong, right = measure_case(case, backends, CPU, PEAKS, kernels_only=True)
    assert wrong.status == "wrong" and reason in wrong.reason and wrong.us is None
    assert right.status == "ok" and right.us
    (unchecked,) = measure_case(case, backends[:1], CPU, PEAKS, kernels_only=True, check=False)
    assert unchecked.status == "ok" and not unchecked.checked and unchecked.us


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("query_len", [1, 4])
def test_repeated_calls_do_the_same_work(query_len: int) -> None:
    """A call that fills a chunk begins with the state before it again, whenever it is repeated."""
    work = "decode" if query_len == 1 else "verify"
    case = StateCase(model="qwen3-next", work=work, num_reqs=2, query_len=query_len)
    tail = BenchBackend("tail", TorchBackend)
    runner = StateRunner(case, tail, CPU)
    runner.first_calls()
    positions = runner.cache.tensors.positions
    assert positions is not None
    seen = []
    for copy in range(runner.copies):
        for reset, before in runner._set_back[copy]:
            reset.copy_(before)
        seen.append(positions[runner.slots(copy), 0, 0].tolist())
    assert seen == [[[1024 + copy] * 2] * 2 for copy in range(16)]
