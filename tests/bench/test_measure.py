"""One case on several backends: times, reasons, and isolation of failures."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from attnlib.backends._foreign.outputs import is_capturing
from attnlib.bench import measure, timer, timing
from attnlib.bench.backends import find_backends, split_names
from attnlib.bench.case_text import parse_case
from attnlib.bench.measure import measure_case
from attnlib.bench.peaks import Peaks
from attnlib.bench.results import Row
from attnlib.errors import ContractError, UnknownBackendError
from attnlib.kv_formats import register_kv_format, unregister_kv_format
from tests.kv_formats.device_formats import SQUARES

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
PEAKS = Peaks(copy_gbps=10.0, read_gbps=10.0, matmul_tflops=0.1, matmul="none")
CASE = parse_case("3q1s40_q9s30@heads=4/2,d=16,dtype=float32")
HERE = "tests.bench.backends"


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "_ROUND_US", 200.0)


def rows_of(*names: str, text: str | None = None, **options: Any) -> list[Row]:
    backends = find_backends(list(names), CPU)
    return measure_case(parse_case(text) if text else CASE, backends, CPU, PEAKS, **options)


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_error_outside_the_sample_is_found_by_comparing_backends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wrong row is not in the sample; two backends differ there, so it is checked."""
    monkeypatch.setattr(
        "attnlib.bench.correctness.sample_rows", lambda query_lens, limit, seed=0: [0]
    )
    (alone,) = rows_of(f"{HERE}:WrongRow")
    assert alone.status == "ok"
    right, wrong = rows_of("torch", f"{HERE}:WrongRow")
    assert (right.status, wrong.status) == ("ok", "wrong")


def test_an_open_format_is_checked() -> None:
    """P16: the page layout and the numbers of the format that the case names."""
    register_kv_format(SQUARES)
    try:
        (row,) = rows_of("torch", text=f"{CASE.name},kv={SQUARES.name}", kernels_only=True)
    finally:
        unregister_kv_format(SQUARES.name)
    assert (row.status, row.checked) == ("ok", True), row.reason


def test_rows_record_that_the_check_was_off() -> None:
    (row,) = rows_of(f"{HERE}:WrongRow", check=False)
    assert row.status == "ok" and not row.checked and row.us and row.error is None


def test_kernels_only_leaves_out_the_other_times() -> None:
    (row,) = rows_of("torch", kernels_only=True)
    assert row.status == "ok" and row.checked and row.us and row.gbps
    assert (row.eager_us, row.host_us, row.write_us, row.build_us, row.layer_us) == (None,) * 5


def test_a_failure_is_one_line() -> None:
    broken, right = rows_of(f"{HERE}:Broken", "torch")
    assert (broken.status, broken.reason) == (
        "failed",
        "RuntimeError: no kernel image",
    ) and right.us


def test_a_failure_of_a_secondary_time_is_a_note() -> None:
    (row,) = rows_of(f"{HERE}:HalfBroken")
    assert row.status == "ok" and row.us and row.eager_us and row.build_us
    assert row.write_us is None and row.layer_us is None
    assert (
        "no time for the cache write: RuntimeError: writes once only" in row.note
        and "layer call" in row.note
    )


def test_unsupported_and_unavailable_backends_have_rows() -> None:
    rows = rows_of("torch", "flashinfer", "flash_attn", text="q1s20@heads=4/2,d=16,dtype=float64")
    assert [row.status for row in rows] == ["ok", "unavailable", "unavailable"]
    assert "flashinfer" in rows[1].reason and rows[2].reason
    unsupported, right = rows_of(
        f"{HERE}:NoSinks", "torch", text="q1s20@heads=4/2,d=16,dtype=float32,sinks"
    )
    assert (
        unsupported.status == "unsupported"
        and "sink" in unsupported.reason
        and unsupported.us is None
        and right.status == "ok"
    )


def test_a_case_that_exceeds_the_memory_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 TiB")

    monkeypatch.setattr(measure, "make_inputs", too_large)
    (row,) = rows_of("torch")
    assert (
        row.status == "failed" and "no tensors: OutOfMemoryError: CUDA out of memory" in row.reason
    )


def test_a_failing_round_affects_one_backend_only(monkeypatch: pytest.MonkeyPatch) -> None:
    original = timer.EagerTimer.round

    def fails_for_two(self: Any) -> Any:
        if self._call.__self__.label == "two":
            raise RuntimeError("illegal instruction")
        return original(self)

    monkeypatch.setattr(timer.EagerTimer, "round", fails_for_two)
    monkeypatch.setattr(timing, "_secondary_times", lambda runner, graphs, device: {})
    backends = [
        type(one)(label, one.backend)
        for label, one in zip(("one", "two"), find_backends(["torch"], CPU) * 2, strict=True)
    ]
    one, two = measure_case(CASE, backends, CPU, PEAKS)
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
    pairs = "prefill:a.b:C,decode:triton,torch,prefix:torch, suffix:triton"
    assert split_names(pairs) == [
        "prefill:a.b:C,decode:triton", "torch", "prefix:torch,suffix:triton",
    ]  # fmt: skip
    four, two = find_backends(split_names("flash_attn[fa_version=4;x=y],TORCH"), CPU)
    assert (
        four.label == "flash_attn[fa_version=4;x=y]"
        and four.backend is not None
        and four.backend.config == {"fa_version": 4, "x": "y"}
    )
    assert four.unavailable_reasons and two.label == "torch" and not two.unavailable_reasons
    assert [one.label for one in find_backends(None, CPU)] == ["torch"]
    with pytest.raises(UnknownBackendError, match="Did you mean 'triton'"):
        find_backends(["tirton"], CPU)
    with pytest.raises(UnknownBackendError, match="No module named 'nowhere'"):
        find_backends(["nowhere:Backend"], CPU)
    with pytest.raises(ContractError, match="'fast' is not a setting; write KEY=VALUE"):
        find_backends(["torch[fast]"], CPU)


class FakeCuda:
    """The CUDA streams, events and graphs that a timer uses.

    A replay takes `call_us` per captured call.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call_us: float = 10.0) -> None:
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
                fake.clock += fake.captured * call_us * 1e-3

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
    """The arithmetic of graph timing with a fake CUDA whose calls take 10 us."""
    monkeypatch.setattr(timer, "_ROUND_US", 3000.0)
    fake, used = FakeCuda(monkeypatch), []

    class OnGpu:
        is_cuda = True

    def call(copy: int) -> None:
        fake.captured += 1
        used.append((copy, is_capturing(OnGpu())))  # type: ignore[arg-type]  # a fake tensor

    graph_timer = timer.GraphTimer(call, copies=7, device=torch.device("cuda"), expected_us=60.0)
    measurement = timer.measure_in_turn({"call": graph_timer}, {"call": 60.0})["call"]
    assert (
        measurement.us == pytest.approx(10.0)
        and measurement.host_us is None
        and measurement.rounds == 7
    )
    assert [copy for copy, _ in used[:7]] == list(range(7)), "each copy once before the capture"
    captured = used[7:]
    assert len(captured) == 56 and all(
        sum(copy == each for copy, _ in captured) == 8 for each in range(7)
    )
    assert captured[-1][0] == 0, "a replay ends with the output of copy 0, which is checked"
    assert graph_timer.calls == 56 * 17, "17 replays of 560 us fill a round of 10 ms"
    assert not any(capturing for _, capturing in used), "adapters do not clear rows"
    fake.capturing = True
    assert is_capturing(OnGpu()), "but they do in other captures"  # type: ignore[arg-type]


@pytest.mark.parametrize(("call_us", "calls"), [(900.0, 9), (4000.0, 25), (150_000.0, 1)])
def test_rounds_of_long_calls_outlast_changes_of_the_clock(
    monkeypatch: pytest.MonkeyPatch, call_us: float, calls: int
) -> None:
    """Calls of a millisecond and more fill rounds of 100 ms, shorter ones of 10 ms."""
    fake = FakeCuda(monkeypatch, call_us)

    def call(copy: int) -> None:
        fake.captured += 1

    graph_timer = timer.GraphTimer(call, 1, torch.device("cuda"), call_us)
    assert graph_timer.calls == pytest.approx(calls, abs=3)
    assert graph_timer.round() == (pytest.approx(call_us), None)


def test_every_other_round_reverses_the_order() -> None:
    order: list[str] = []

    class Timer(timer.EagerTimer):
        def __init__(self, name: str) -> None:
            self.name, self.calls = name, 1

        def round(self) -> tuple[float, float | None]:
            order.append(self.name)
            return 1.0, None

    timer.measure_in_turn({name: Timer(name) for name in "abc"}, dict.fromkeys("abc", 1.0))
    assert "".join(order) == "abc" + "cbaabc" * 3


def test_a_failed_capture_restores_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch)

    def call(copy: int) -> None:
        if fake.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        timer.GraphTimer(call, 1, torch.device("cuda"), 60.0)
    assert len(fake.streams) == 1


class FakeGraph(timer.EagerTimer):
    """A graph whose replay is one call."""

    def replay(self) -> None:
        self._call(self._copies - 1)


def test_graph_times_are_the_main_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "GraphTimer", FakeGraph)
    (row,) = rows_of("torch", graphs=True)
    assert (
        (row.status, row.how, row.note) == ("ok", "graph", "")
        and row.us
        and row.write_us
        and row.eager_us
    )


def test_the_output_of_a_graph_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stale(FakeGraph):
        def replay(self) -> None:
            pass  # nothing is written

    monkeypatch.setattr(timing, "GraphTimer", Stale)
    (row,) = rows_of("torch", graphs=True)
    assert (
        row.status == "wrong"
        and row.reason.startswith("replayed from a CUDA graph: out: 12 rows hold NaN")
        and row.us is None
    )


def test_backends_without_capture_are_timed_eagerly_with_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoGraph(FakeGraph):
        def __init__(self, *args: Any) -> None:
            try:
                raise RuntimeError("cannot sync while capturing\nlong trace")
            except RuntimeError as root:
                raise RuntimeError("capture_end failed") from root

    monkeypatch.setattr(timing, "GraphTimer", NoGraph)
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
