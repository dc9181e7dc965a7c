"""Choice of the best parameters from trials, and rankings from rows of `attnlib bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from attnlib import tuning
from attnlib.bench.case import BenchCase
from attnlib.bench.case_text import parse_case
from attnlib.bench.inputs import make_inputs
from attnlib.bench.results import Row
from attnlib.tuning import measure
from attnlib.tuning.measure import Trial, best_parameters
from attnlib.tuning.rank import rank_rows
from attnlib.tuning.tuner import Parameters
from tests.tuning.toy_backend import ToyTuner, current


def _best(times: dict[str, list[float | None]]) -> str | None:
    """The choice for one group: case -> times of candidates a, b and c; a is current."""
    trials = [
        Trial("group", case, {"name": name}, us, name == "a", "" if us else "wrong")
        for case, values in times.items()
        for name, us in zip("abc", values, strict=True)
    ]
    best = best_parameters(trials)
    return str(best["group"].parameters["name"]) if best else None


def test_the_fastest_candidate_over_all_cases_wins() -> None:
    assert _best({"x": [10.0, 9.0, 12.0]}) == "b"
    assert _best({"x": [10.0, 9.0, 7.0], "y": [10.0, 9.0, 12.0]}) == "b"


def test_the_current_parameters_stay_unless_they_are_beaten_by_a_margin_on_every_case() -> None:
    assert _best({"x": [10.0, 9.9, None]}) == "a"
    assert _best({"x": [10.0, None, 11.0]}) == "a"
    assert _best({"x": [10.0, 5.0, 11.0], "y": [10.0, None, 9.0]}) == "a"


def test_without_a_time_of_the_current_parameters_there_is_no_result() -> None:
    assert _best({"x": [None, 5.0, 4.0]}) is None


def test_groups_are_independent_and_hold_the_times_before_and_after() -> None:
    trials = [
        Trial(group, "x", {"name": name}, us, name == "a")
        for group, values in (("one", (10.0, 5.0)), ("two", (10.0, 20.0)))
        for name, us in zip("ab", values, strict=True)
    ]
    one, two = best_parameters(trials).values()
    assert one.parameters == {"name": "b"} and two.parameters == {"name": "a"}
    assert one.measured == {"x": {"us": 5.0, "before_us": 10.0}}


class _DriftingTuner(ToyTuner):
    """Three candidates by name."""

    def candidates(self, case: BenchCase, operation: str) -> Sequence[Parameters]:
        return [{"name": name} for name in "abc"]


def test_faster_candidates_are_measured_again_beside_the_current_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow first measurement of the current parameters does not replace them."""
    first = {"a": 100.0, "b": 90.0, "c": 99.0}
    rounds = {"a": 91.0, "b": 90.5, "c": 0.0}
    asked: list[list[str]] = []

    def alternating(tuner: Any, op: str, trials: Sequence[Trial], inputs: Any) -> list[float]:
        asked.append([str(trial.parameters["name"]) for trial in trials])
        return [rounds[name] for name in asked[-1]]

    monkeypatch.setattr(
        measure, "_measure", lambda tuner, op, named, *rest: (first[named["name"]], "")
    )
    monkeypatch.setattr(measure, "_alternating", alternating)
    case, seen = parse_case("q1s40@heads=2/1,d=16,dtype=float32"), list[Trial]()
    trials = measure.measure_operation(
        _DriftingTuner(), case, "attend", torch.device("cpu"), on_trial=seen.append
    )
    assert asked == [["a", "b"]] and len(seen) == 5
    assert [trial.us for trial in trials] == [91.0, 90.5, 99.0]
    (best,) = best_parameters(trials).values()
    assert best.parameters == {"name": "a"}


def test_the_rounds_of_trials_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round runs with its own parameters, and the times are medians of seven rounds."""
    order: list[int] = []

    class Timer:
        def __init__(self, call: Any, copies: int, device: Any, expected: float) -> None:
            self.passes = int(current["passes"])

        def round(self) -> tuple[float, None]:
            assert current["passes"] == self.passes, "the parameters of the trial are bound"
            order.append(self.passes)
            return float(self.passes * 10 + len(order)), None

    monkeypatch.setattr(measure, "EagerTimer", Timer)
    case = parse_case("q1s40@heads=2/1,d=16,dtype=float32")
    inputs = make_inputs(case, torch.device("cpu"))
    trials = [Trial("g", case.name, {"passes": count}, 1.0, False) for count in (2, 1)]
    times = measure._alternating(ToyTuner(), "attend", trials, inputs)
    assert order == [2, 1] * 7 and times == [20.0 + 7, 10.0 + 8]


def _row(case: BenchCase, backend: str, us: float | None, **changes: Any) -> Row:
    fields = {
        "case": case.name,
        "kind": case.kind,
        "batch": str(case.batch),
        "shape": case.shape,
        "settings": case.to_json(),
        "backend": backend,
    }
    return Row(**{**fields, "status": "ok", "checked": True, "us": us, **changes})


def test_backends_are_ranked_by_layer_class_over_all_their_cases() -> None:
    one, two, other = parse_case("q1s64"), parse_case("8q1s64"), parse_case("q1s64@d=64")
    rows = [
        _row(one, "a", 10.0),
        _row(one, "b", 5.0),
        _row(two, "a", 10.0),
        _row(two, "b", 80.0),
        _row(other, "a", 9.0),
        _row(other, "b", 3.0),
        _row(one, "c", None, status="wrong", reason="max error"),
        _row(two, "c", 1.0),
        _row(one, "d", 1.0, checked=False),
    ]
    first, second = rank_rows(rows, "now")
    assert first["ranking"] == ["a", "b"] and first["relative"] == {"a": 1.0, "b": 2.0}
    assert first["left_out"] == {"c": "wrong on q1s64: max error", "d": "ok on q1s64: not checked"}
    assert second["ranking"] == ["b", "a"] and second["layer"] == tuning.layer_class(other.spec)
    assert first["microseconds"]["8q1s64"] == {"a": 10.0, "b": 80.0, "c": 1.0}
