"""Timing of the runners of one case: timers in turn, then host times. Failures stay in one row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from attnlib.bench.peaks import Peaks
from attnlib.bench.results import NO_GRAPH, Row
from attnlib.bench.runner import Runner, error_line, unmeasured
from attnlib.bench.state_case import AnyCase
from attnlib.bench.state_runner import StateRunner
from attnlib.bench.timer import (
    EagerTimer,
    GraphTimer,
    Measurement,
    host_us,
    measure_in_turn,
    warm_up,
)

__all__ = ["DeviceLostError", "Rows", "device_works", "guarded", "time_runners"]

Rows = dict[str, Row | None]

AnyRunner = Runner | StateRunner


class DeviceLostError(RuntimeError):
    """A kernel broke the context of the device; nothing more can be measured in this process."""


@contextmanager
def guarded(case: AnyCase, label: str, rows: Rows, device: torch.device) -> Iterator[None]:
    """Record any error of a backend in its row; raise only if the device is lost."""
    try:
        yield
    except Exception as error:  # the other backends keep their times
        rows[label] = unmeasured(case, label, "failed", error_line(error))
        if not device_works(device):
            raise DeviceLostError(
                f"{label} on {case.name} broke the device: {error_line(error)}"
            ) from error


def device_works(device: torch.device) -> bool:
    """False after an illegal access of a kernel, until the process ends."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception:  # torch raises errors of several types for it
        return False
    return True


def time_runners(
    runners: Sequence[AnyRunner],
    rows: Rows,
    device: torch.device,
    graphs: bool,
    peaks: Peaks,
    *,
    kernels_only: bool = False,
) -> None:
    """Prepare the timers of all runners, run them in turn, then measure eager calls, cache writes
    and host times unless `kernels_only`."""
    timers: dict[str, EagerTimer | GraphTimer] = {}
    for runner in runners:
        with guarded(runner.case, runner.label, rows, device):
            runner.expected_us = warm_up(runner.attend, device)
            timer = _timer(runner, graphs, device)
            if not isinstance(timer, GraphTimer) or _replay_is_correct(runner, timer, rows):
                timers[runner.label] = timer
    ready = [runner for runner in runners if runner.label in timers]
    measurements = _measure_all(ready, timers, rows, device)
    timers.clear()
    for runner in ready:
        found = measurements.get(runner.label)
        if found is None:
            continue
        runner.row = replace(
            runner.row,
            us=found.us,
            low_us=found.low,
            high_us=found.high,
            calls=found.calls,
            rounds=found.rounds,
        )
        rows[runner.label] = runner.rated(runner.row, peaks)
        if not kernels_only:
            _add_secondary_times(runner, rows, graphs, device)


def _measure_all(
    ready: Sequence[AnyRunner],
    timers: dict[str, EagerTimer | GraphTimer],
    rows: Rows,
    device: torch.device,
) -> dict[str, Measurement]:
    """All timers in turn.

    If one of them fails, each one is measured alone, so that the others keep their times.
    """
    expected = {runner.label: runner.expected_us for runner in ready}
    try:
        return measure_in_turn(timers, expected)
    except Exception:  # measuring each one alone shows which backend failed
        found: dict[str, Measurement] = {}
        for runner in ready:
            with guarded(runner.case, runner.label, rows, device):
                found.update(measure_in_turn({runner.label: timers[runner.label]}, expected))
        return found


def _timer(runner: AnyRunner, graphs: bool, device: torch.device) -> EagerTimer | GraphTimer:
    copies = runner.copies
    if graphs and not runner.can_capture:
        runner.row = replace(runner.row, note=f"{NO_GRAPH}: declared by the backend")
    elif graphs:
        try:
            timer = GraphTimer(runner.attend, copies, device, runner.expected_us)
            runner.row = replace(runner.row, how="graph")
            return timer
        except Exception as error:  # not capturable: the row shows the eager time
            if not device_works(device):
                raise
            note = f"{NO_GRAPH}: {error_line(error.__context__ or error)}"
            runner.row = replace(runner.row, note=note)
    runner.row = replace(runner.row, how="eager")
    return EagerTimer(runner.attend, copies, device, runner.expected_us)


def _replay_is_correct(runner: AnyRunner, timer: GraphTimer, rows: Rows) -> bool:
    """Check the output of the graph, which is what will be timed."""
    found = runner.replayed(timer)
    if not found.passed:
        reason = f"replayed from a CUDA graph: {found}"
        rows[runner.label] = replace(runner.row, status="wrong", reason=reason)
    return found.passed


def _add_secondary_times(runner: AnyRunner, rows: Rows, graphs: bool, device: torch.device) -> None:
    """Add the other times to the row. A failure becomes a note, because the main time is valid."""
    for name, measure in _secondary_times(runner, graphs, device).items():
        kept, failed = rows[runner.label], Rows()
        assert kept is not None  # the main time is there
        with guarded(runner.case, runner.label, failed, device):
            times = measure()
            rows[runner.label] = replace(kept, **times)  # type: ignore[arg-type]  # keys are float fields
        broken = failed.get(runner.label)
        if broken is not None:
            note = f"no time for the {name}: {broken.reason}"
            rows[runner.label] = replace(kept, note="; ".join(filter(None, (kept.note, note))))


def _secondary_times(
    runner: AnyRunner, graphs: bool, device: torch.device
) -> dict[str, Callable[[], dict[str, float | None]]]:
    """Name -> measurement of row fields: eager calls, the cache write, and host times."""
    copies, expected = runner.copies, runner.expected_us
    layer_calls = max(min(int(20_000 / max(expected, 1.0)), 20), 1)

    def eager() -> dict[str, float | None]:
        timer = EagerTimer(runner.attend, copies, device, expected)
        found = measure_in_turn({"call": timer}, {"call": expected})["call"]
        return {"eager_us": found.us, "host_us": found.host_us}

    def write() -> dict[str, float | None]:
        assert isinstance(runner, Runner)  # states are written by the step
        took = warm_up(runner.write, device)
        timer = (GraphTimer if graphs else EagerTimer)(runner.write, copies, device, took)
        return {"write_us": measure_in_turn({"call": timer}, {"call": took})["call"].us}

    writes = {"cache write": write} if runner.writes_apart else {}
    return {
        "eager call": eager,
        **writes,
        "build": lambda: {"build_us": host_us(runner.build, device, 5)},
        "layer call": lambda: {"layer_us": host_us(runner.call, device, layer_calls)},
    }
