"""One case on all backends: prepare, check, then time in turn.

A backend that fails gets a reason; the others go on.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

import torch

from attnlib.bench.backends import BenchBackend
from attnlib.bench.case import BenchCase
from attnlib.bench.correctness import CorrectnessCheck, contested_rows
from attnlib.bench.inputs import make_inputs
from attnlib.bench.peaks import Peaks
from attnlib.bench.results import Row
from attnlib.bench.runner import Runner, error_line, make_runner, unmeasured
from attnlib.bench.state_case import AnyCase, StateCase
from attnlib.bench.state_check import StateCheck
from attnlib.bench.state_runner import StateRunner
from attnlib.bench.timing import Rows, guarded, time_runners
from attnlib.testing.budget import Comparison

__all__ = ["measure_case"]

_CONTESTED_ROWS = 8


@torch.inference_mode()
def measure_case(
    case: AnyCase,
    backends: Sequence[BenchBackend],
    device: torch.device,
    peaks: Peaks | None,
    *,
    graphs: bool = False,
    check: bool = True,
    kernels_only: bool = False,
) -> list[Row]:
    """The rows of one case, one for each backend, in their order.

    Args:
        case: the case.
        backends: the backends to compare.
        device: where to measure.
        peaks: peak rates of this run; None to make the first calls and time nothing.
        graphs: time replays of CUDA graphs instead of eager calls.
        check: check outputs before timing. Rows record whether they were checked.
        kernels_only: leave out eager calls, cache writes and host times.

    Raises:
        DeviceLostError: a kernel broke the context of the device.
    """
    rows = {one.label: _not_run(case, one, device) for one in backends}
    able = [one for one in backends if rows[one.label] is None]
    runners: Sequence[Runner | StateRunner] = (
        _state_runners(case, able, rows, device, check=check)
        if isinstance(case, StateCase)
        else _runners(case, able, rows, device, check=check)
    )
    if peaks is not None:
        time_runners(runners, rows, device, graphs, peaks, kernels_only=kernels_only)
    no_result = [unmeasured(case, one.label, "failed", "no result") for one in backends]
    result = [rows[one.label] or row for one, row in zip(backends, no_result, strict=True)]
    runners = ()
    _release(device)
    return result


def _runners(
    case: BenchCase, able: list[BenchBackend], rows: Rows, device: torch.device, *, check: bool
) -> list[Runner]:
    """The runners of an attention layer that take part in the timing."""
    if not able:
        return []
    try:
        inputs = make_inputs(case, device)
    except Exception as error:  # most likely out of memory; other cases may be smaller
        for one in able:
            reason = f"no tensors: {error_line(error)}"
            rows[one.label] = unmeasured(case, one.label, "failed", reason)
        return []
    runners: list[Runner] = []
    for one in able:
        with guarded(case, one.label, rows, device):
            runners.append(make_runner(case, one, inputs))
    if check:
        checker = CorrectnessCheck(inputs)
        for runner in runners:
            runner.check = checker
        runners = _correct(runners, checker, rows, device)
    for runner in runners:
        runner.output = None
    return runners


def _state_runners(
    case: StateCase, able: list[BenchBackend], rows: Rows, device: torch.device, *, check: bool
) -> list[StateRunner]:
    """The same for a state layer."""
    runners: list[StateRunner] = []
    checker = StateCheck(case) if check else None
    for one in able:
        with guarded(case, one.label, rows, device):
            runner = StateRunner(case, one, device, checker)
            found = runner.first_calls()
            if not check or _passes(runner, found, rows):
                runners.append(runner)
    return runners


def _not_run(case: AnyCase, one: BenchBackend, device: torch.device) -> Row | None:
    """The row of a backend that is unavailable or does not support the case.

    Returns None if it takes part.
    """
    if one.unavailable_reasons or one.backend is None:
        return unmeasured(case, one.label, "unavailable", "; ".join(one.unavailable_reasons))
    try:
        reasons = one.backend.validate_configuration(case.spec, device)
    except Exception as error:  # a defect of the backend must not end the run
        return unmeasured(case, one.label, "failed", f"validate_configuration: {error_line(error)}")
    return unmeasured(case, one.label, "unsupported", "; ".join(reasons)) if reasons else None


def _correct(
    runners: list[Runner], check: CorrectnessCheck, rows: Rows, device: torch.device
) -> list[Runner]:
    """The runners whose output is correct; the rows of the others hold the reason."""
    passed: list[Runner] = []
    for runner in runners:
        with guarded(runner.inputs.case, runner.label, rows, device):
            assert runner.output is not None  # made by make_runner
            if _passes(runner, check.output(runner.output), rows) and _passes(
                runner, check.cache_write(runner.layer.impl), rows
            ):
                passed.append(runner)
    if len(passed) < 2:
        return passed
    first = passed[0].output
    contested: dict[int, None] = {}
    for runner in passed[1:]:
        if first is not None and runner.output is not None:
            contested.update(dict.fromkeys(contested_rows(first, runner.output, _CONTESTED_ROWS)))
    chosen = sorted(contested)
    agreed: list[Runner] = []
    for runner in passed:
        with guarded(runner.inputs.case, runner.label, rows, device):
            if runner.output is not None and _passes(
                runner, check.output(runner.output, chosen), rows
            ):
                agreed.append(runner)
    return agreed


def _passes(runner: Runner | StateRunner, found: Comparison, rows: Rows) -> bool:
    if not found.passed:
        rows[runner.label] = replace(runner.row, status="wrong", reason=str(found))
        return False
    if found.max_allowed:
        error = max(runner.row.error or 0.0, found.max_error / found.max_allowed)
        runner.row = replace(runner.row, error=error)
    runner.row = replace(runner.row, checked=True)
    return True


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
