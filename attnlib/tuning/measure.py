"""Measurement of tunable parameters on one device.

Each candidate of a `Tuner` computes a case, its output is checked against the oracle, and only then
is it timed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from attnlib.bench.case import BenchCase
from attnlib.bench.correctness import CorrectnessCheck
from attnlib.bench.inputs import CaseInputs, make_inputs
from attnlib.bench.timer import ROUNDS, EagerTimer, GraphTimer, measure_in_turn, warm_up
from attnlib.tuning.tuner import Best, Parameters, Tuner

__all__ = ["Trial", "best_parameters", "geometric_mean", "measure_operation"]

MARGIN = 0.98
"""A candidate replaces the current parameters if it takes less than this share of their time.

Two runs of one kernel differ by about as much.
"""
QUICK_CANDIDATES = 5


@dataclass(frozen=True)
class Trial:
    """One candidate on one case.

    Attributes:
        group: the group of the case, from `Tuner.group`.
        case: the name of the case.
        parameters: the candidate.
        us: time of one call in microseconds; None if the candidate failed or its output is wrong.
        is_current: True for the parameters that are in use without this measurement.
        reason: why there is no time.
    """

    group: Hashable
    case: str
    parameters: Parameters
    us: float | None
    is_current: bool
    reason: str = ""


@torch.inference_mode()
def measure_operation(
    tuner: Tuner,
    case: BenchCase,
    operation: str,
    device: torch.device,
    *,
    quick: bool = False,
    expired: Callable[[], bool] = lambda: False,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """Measure every candidate of an operation on one case, the current parameters first.

    Clocks change between two candidates by more than `MARGIN`. Those that were faster by that much
    are therefore measured again, in rounds that alternate with those of the current parameters.
    Their trials have the times of these rounds.

    Args:
        tuner: the backend's tuner.
        case: a case that `operation` serves.
        operation: one of `tuner.operations`.
        device: where to measure.
        quick: measure five candidates only.
        expired: stop before the next candidate if this returns True.
        on_trial: called after each candidate, and again for those that are measured again.
    """
    inputs = make_inputs(case, device)
    check, group = CorrectnessCheck(inputs), tuner.group(case, operation)
    candidates = tuner.candidates(case, operation)
    trials: list[Trial] = []
    for number, parameters in enumerate(candidates[:QUICK_CANDIDATES] if quick else candidates):
        if number and expired():
            break
        us, reason = _measure(tuner, operation, parameters, inputs, check)
        trials.append(Trial(group, case.name, parameters, us, number == 0, reason))
        on_trial(trials[-1])
    measured_again: set[int] = set()
    while faster := _faster(trials) - measured_again:
        numbers = [0, *sorted(faster)]
        chosen = [trials[number] for number in numbers]
        times = _alternating(tuner, operation, chosen, inputs)
        for number, us in zip(numbers, times, strict=True):
            trials[number] = replace(trials[number], us=us)
            on_trial(trials[number])
        measured_again |= faster
    return trials


def _faster(trials: Sequence[Trial]) -> set[int]:
    """The trials that beat the current parameters, which are the first ones, by `MARGIN`."""
    current = trials[0].us
    if current is None:
        return set()
    return {
        number
        for number, trial in enumerate(trials)
        if trial.us is not None and trial.us < MARGIN * current
    }


def _alternating(
    tuner: Tuner, operation: str, trials: Sequence[Trial], inputs: CaseInputs
) -> list[float]:
    """Median microseconds of each trial; the rounds of all trials alternate."""
    device = inputs.device
    kind = GraphTimer if device.type == "cuda" else EagerTimer
    timers, found = [], [list[float]() for _ in trials]
    for trial in trials:
        with tuner.bind(inputs, operation, trial.parameters) as call:
            timers.append(kind(call, len(inputs.caches), device, warm_up(call, device)))
    for _ in range(ROUNDS):
        for trial, timer, times in zip(trials, timers, found, strict=True):
            with tuner.bind(inputs, operation, trial.parameters):
                times.append(timer.round()[0])
    return [statistics.median(times) for times in found]


def _measure(
    tuner: Tuner,
    operation: str,
    parameters: Parameters,
    inputs: CaseInputs,
    check: CorrectnessCheck,
) -> tuple[float | None, str]:
    """(microseconds, why there are none)."""
    device = inputs.device
    try:
        inputs.output.fill_(float("nan"))
        with tuner.bind(inputs, operation, parameters) as call:
            expected = warm_up(call, device)
            call(0)
            found = check.output(inputs.output)
            if not found.passed:
                return None, f"wrong: {found}"
            kind = GraphTimer if device.type == "cuda" else EagerTimer
            timer = kind(call, len(inputs.caches), device, expected)
            return measure_in_turn({"call": timer}, {"call": expected})["call"].us, ""
    except Exception as error:  # does not fit the chip or does not compile; others may
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # raises if the device itself is lost
        first_line = str(error).partition("\n")[0]
        return None, f"{type(error).__name__}: {first_line}"


def best_parameters(trials: Iterable[Trial]) -> dict[Hashable, Best]:
    """The fastest parameters of each group.

    A candidate counts if it has a time on every case of its group. Its score is the geometric mean
    of its time divided by that of the current parameters, which stay unless a candidate beats them
    by `MARGIN`.

    Returns:
        group -> result. Groups without a time of the current parameters on each case, or without a
        valid candidate, are left out.
    """
    groups: dict[Hashable, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.group, []).append(trial)
    found = {group: _best(members) for group, members in groups.items()}
    return {group: best for group, best in found.items() if best is not None}


def _best(trials: Sequence[Trial]) -> Best | None:
    current = {trial.case: trial.us for trial in trials if trial.is_current}
    candidates: dict[str, list[tuple[Trial, float]]] = {}  # with times
    for trial in trials:
        if trial.us:
            key = repr(sorted(trial.parameters.items()))
            candidates.setdefault(key, []).append((trial, trial.us))
    complete = [each for each in candidates.values() if {t.case for t, _ in each} == set(current)]
    before = {case: us for case, us in current.items() if us}
    if not complete or len(before) < len(current):
        return None

    def score(timed: Sequence[tuple[Trial, float]]) -> float:
        return geometric_mean([us / before[trial.case] for trial, us in timed])

    fastest = min(complete, key=score)
    if score(fastest) >= MARGIN:
        fastest = next((each for each in complete if each[0][0].is_current), fastest)
    times = {
        trial.case: {"us": round(us, 2), "before_us": round(before[trial.case], 2)}
        for trial, us in fastest
    }
    return Best(dict(fastest[0][0].parameters), times)


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean; 1 of none."""
    return math.exp(sum(map(math.log, values)) / max(len(values), 1))
