"""One case on several backends: who gets a time, who gets a reason, and that the others go on."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from attnlib.backends._foreign.outputs import is_capturing
from attnlib.bench import measure
from attnlib.bench import timer as stopwatch
from attnlib.bench.backends import find_contenders, split_names
from attnlib.bench.case import parse_case
from attnlib.bench.measure import measure_case
from attnlib.bench.peaks import Ceilings
from attnlib.bench.results import Row
from attnlib.errors import ContractError, UnknownBackendError

CPU = torch.device("cpu")
CEILINGS = Ceilings(copy_gbps=10.0, read_gbps=10.0, matmul_tflops=0.1, matmul="none")
CASE = parse_case("3q1s40_q9s30@heads=4/2,d=16,dtype=float32")
HERE = "tests.bench.backends"


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopwatch, "_ROUND_US", 200.0)


def rows_of(*names: str, text: str | None = None, **options: Any) -> list[Row]:
    contenders = find_contenders(list(names), CPU)
    return measure_case(parse_case(text) if text else CASE, contenders, CPU, CEILINGS, **options)


def test_a_right_backend_gets_all_its_times() -> None:
    (row,) = rows_of("torch")
    assert (row.status, row.how, row.checked, row.rounds, row.copies) == ("ok", "eager", True, 7, 1)
    times = (
        row.us,
        row.low_us,
        row.high_us,
        row.eager_us,
        row.host_us,
        row.write_us,
        row.build_us,
        row.layer_us,
        row.first_call_s,
    )
    assert all(time is not None and time > 0 for time in times)
    assert (
        row.us is not None
        and row.gbps is not None
        and row.tflops is not None
        and row.share is not None
    )
    assert (
        row.low_us is not None and row.high_us is not None and row.low_us <= row.us <= row.high_us
    )
    assert row.gbps == pytest.approx((3 * 40 + 30) * 2 * 2 * 16 * 4 / row.us / 1e3)
    assert row.tflops == pytest.approx((3 * 40 + sum(range(22, 31))) * 4 * 4 * 16 / row.us / 1e6)
    assert 0 < row.share < 1 and row.error is not None and row.error <= 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("WrongRow", "out over budget: max error"),
        ("WrongHole", "1 rows hold NaN or infinity, or were never written, the first is 1"),
        ("WrongWrite", "keys and values are not in their slots"),
    ],
)
def test_a_wrong_backend_gets_no_time_and_the_others_go_on(name: str, reason: str) -> None:
    right, wrong, after = rows_of("torch", f"{HERE}:{name}", f"{HERE}:Right")
    assert wrong.status == "wrong" and reason in wrong.reason
    assert (wrong.us, wrong.eager_us, wrong.write_us, wrong.gbps) == (None,) * 4
    assert right.status == after.status == "ok" and right.us and after.us


def test_a_backend_that_is_wrong_where_nobody_looked_is_found_by_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Row 1 of 12 is not among the chosen ones here; two backends disagree there, so it is judged."""
    monkeypatch.setattr(
        "attnlib.bench.correctness.choose_rows", lambda query_lens, most, seed=0: [0]
    )
    (alone,) = rows_of(f"{HERE}:WrongRow")
    assert alone.status == "ok"
    right, wrong = rows_of("torch", f"{HERE}:WrongRow")
    assert (right.status, wrong.status) == ("ok", "wrong")


def test_without_the_gate_rows_say_so() -> None:
    (row,) = rows_of(f"{HERE}:WrongRow", check=False)
    assert row.status == "ok" and not row.checked and row.us and row.error is None


def test_what_fails_says_why_in_one_line() -> None:
    broken, right = rows_of(f"{HERE}:Broken", "torch")
    assert (broken.status, broken.reason) == (
        "failed",
        "RuntimeError: no kernel image",
    ) and right.us


def test_what_fails_beside_the_main_time_is_a_note() -> None:
    (row,) = rows_of(f"{HERE}:HalfBroken")
    assert row.status == "ok" and row.us and row.eager_us and row.build_us
    assert row.write_us is None and row.layer_us is None
    assert (
        "no time for the cache write: RuntimeError: writes once only" in row.note
        and "layer call" in row.note
    )


def test_refusals_and_absences_are_rows() -> None:
    rows = rows_of("torch", "flashinfer", "flash_attn", text="q1s20@heads=4/2,d=16,dtype=float64")
    assert [row.status for row in rows] == ["ok", "unavailable", "unavailable"]
    assert "flashinfer" in rows[1].reason and rows[2].reason
    refused, right = rows_of(
        f"{HERE}:NoSinks", "torch", text="q1s20@heads=4/2,d=16,dtype=float32,sinks"
    )
    assert (
        refused.status == "refused"
        and "sink" in refused.reason
        and refused.us is None
        and right.status == "ok"
    )


def test_a_case_that_does_not_fit_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 TiB")

    monkeypatch.setattr(measure, "make_material", too_large)
    (row,) = rows_of("torch")
    assert (
        row.status == "failed" and "no tensors: OutOfMemoryError: CUDA out of memory" in row.reason
    )


def test_a_failing_round_costs_only_the_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = stopwatch.EagerWatch.round

    def fails_for_two(self: Any) -> Any:
        if self._call.__self__.label == "two":
            raise RuntimeError("illegal instruction")
        return honest(self)

    monkeypatch.setattr(stopwatch.EagerWatch, "round", fails_for_two)
    monkeypatch.setattr(measure, "_beside", lambda entry, graphs, device: {})
    contenders = [
        type(one)(label, one.backend)
        for label, one in zip(("one", "two"), find_contenders(["torch"], CPU) * 2, strict=True)
    ]
    one, two = measure_case(CASE, contenders, CPU, CEILINGS)
    assert (
        one.status == "ok"
        and one.us
        and (two.status, two.reason) == ("failed", "RuntimeError: illegal instruction")
    )


def test_names_and_settings() -> None:
    assert split_names("triton, flash_attn[fa_version=3],a.b:C,") == [
        "triton",
        "flash_attn[fa_version=3]",
        "a.b:C",
    ]
    four, two = find_contenders(split_names("flash_attn[fa_version=4;x=y],TORCH"), CPU)
    assert (
        four.label == "flash_attn[fa_version=4;x=y]"
        and four.backend is not None
        and four.backend.config == {"fa_version": 4, "x": "y"}
    )
    assert four.absent and two.label == "torch" and not two.absent
    assert [one.label for one in find_contenders(None, CPU)] == ["torch"]
    with pytest.raises(UnknownBackendError, match="Did you mean 'triton'"):
        find_contenders(["tirton"], CPU)
    with pytest.raises(ContractError, match="No module named 'nowhere'"):
        find_contenders(["nowhere:Backend"], CPU)
    with pytest.raises(ContractError, match="'fast' is no setting; write KEY=VALUE"):
        find_contenders(["torch[fast]"], CPU)


class FakeCuda:
    """CUDA's streams, events and graphs as far as a stopwatch uses them; a replay takes 10 us for each captured call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.captured, self.capturing, self.streams = 0.0, 0, False, []
        fake, cuda = self, torch.cuda

        class Stream:
            def __init__(self, device: Any = None) -> None:
                pass

            def wait_stream(self, other: Any) -> None:
                pass

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = fake.clock

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        class CUDAGraph:
            def replay(self) -> None:
                fake.clock += fake.captured * 10e-3

        @contextmanager
        def graph(captured: Any, capture_error_mode: str) -> Any:
            fake.captured, fake.capturing = 0, True
            yield
            fake.capturing = False

        @contextmanager
        def stream(which: Any) -> Any:
            yield

        for name, value in (
            ("Stream", Stream),
            ("Event", Event),
            ("CUDAGraph", CUDAGraph),
            ("graph", graph),
            ("stream", stream),
        ):
            monkeypatch.setattr(cuda, name, value)
        monkeypatch.setattr(cuda, "current_stream", lambda device=None: Stream())
        monkeypatch.setattr(cuda, "set_stream", self.streams.append)
        monkeypatch.setattr(cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: self.capturing)


def test_graphs_are_timed_per_call_and_use_every_copy_equally_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The arithmetic of graph timing, on a stand-in for CUDA whose calls take 10 us; the real one is timed on GPUs only."""
    monkeypatch.setattr(stopwatch, "_ROUND_US", 3000.0)
    fake, used = FakeCuda(monkeypatch), []

    class OnGpu:
        is_cuda = True

    def call(copy: int) -> None:
        fake.captured += 1
        used.append((copy, is_capturing(OnGpu())))  # type: ignore[arg-type]  # a stand-in for a tensor

    watch = stopwatch.GraphWatch(call, copies=7, device=torch.device("cuda"), expected_us=60.0)
    reading = stopwatch.take_turns({"it": watch}, {"it": 60.0})["it"]
    assert reading.us == pytest.approx(10.0) and reading.host_us is None and reading.rounds == 7
    assert [copy for copy, _ in used[:7]] == list(range(7)), "every copy once before the capture"
    captured = used[7:]
    assert len(captured) == 56 and all(
        sum(copy == each for copy, _ in captured) == 8 for each in range(7)
    )
    assert watch.calls == 56 * 17, "17 replays of 560 us fill a round of 10 ms"
    assert not any(told for _, told in used), "adapters add no clearing of rows to what is timed"
    fake.capturing = True
    assert is_capturing(OnGpu()), "but they do in anybody else's capture"  # type: ignore[arg-type]


def test_a_capture_that_fails_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch)

    def call(copy: int) -> None:
        if fake.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        stopwatch.GraphWatch(call, 1, torch.device("cuda"), 60.0)
    assert len(fake.streams) == 1


class FakeGraph(stopwatch.EagerWatch):
    """A graph whose replay is one call."""

    def replay(self) -> None:
        self._call(self._copies - 1)


def test_graphs_are_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "GraphWatch", FakeGraph)
    (row,) = rows_of("torch", graphs=True)
    assert (
        (row.status, row.how, row.note) == ("ok", "graph", "")
        and row.us
        and row.write_us
        and row.eager_us
    )


def test_what_a_graph_computes_is_judged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stale(FakeGraph):
        def replay(self) -> None:
            pass  # nothing is written

    monkeypatch.setattr(measure, "GraphWatch", Stale)
    (row,) = rows_of("torch", graphs=True)
    assert (
        row.status == "wrong"
        and row.reason.startswith("replayed from a CUDA graph: out: 12 rows hold NaN")
        and row.us is None
    )


def test_what_cannot_be_captured_is_timed_eagerly_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoGraph(FakeGraph):
        def __init__(self, *args: Any) -> None:
            try:
                raise RuntimeError("cannot sync while capturing\nlong trace")
            except RuntimeError as root:
                raise RuntimeError("capture_end failed") from root

    monkeypatch.setattr(measure, "GraphWatch", NoGraph)
    (row,) = rows_of("torch", graphs=True)
    assert (row.status, row.how, row.note.split(";")[0]) == (
        "ok",
        "eager",
        "no graph: RuntimeError: cannot sync while capturing",
    )
    assert (
        row.us
        and row.layer_us
        and row.write_us is None
        and "no time for the cache write" in row.note
    )
