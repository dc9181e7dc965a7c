"""Checks and their cases.

A check covers one requirement, such as "F1". It is a generator function of a backend under test
that yields cases. Each case is a callable that returns an error message, or "" for a pass. It
raises `UnsupportedCase` if the backend declares that it does not support the case and `NotRun` if
the machine cannot run it. Any other exception is a failure.
"""

from __future__ import annotations

import fnmatch
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from attnlib.errors import ContractError
from attnlib.spec import StateSpec
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.coverage import capability_uses
from attnlib.testing.outcome import (
    CaseResult,
    NotRun,
    Outcome,
    UnsupportedCase,
    reproduction_line,
)
from attnlib.testing.runner import check_supported
from attnlib.testing.state_coverage import check_state_supported, state_uses

__all__ = [
    "Check",
    "CheckCase",
    "matches_filter",
    "run_check",
    "run_check_case",
    "select_cases",
    "without_validation",
]


@dataclass(frozen=True)
class CheckCase:
    """One case of a check.

    Attributes:
        id: unique within the check; part of the reproduction line.
        run: returns "" for a pass, otherwise the error message.
        case: the `Case` that `run` executes, or None. With a `Case`, unsupported features and
            capability coverage are derived from it.
        state_spec: the same for a case over a state layer.
    """

    id: str
    run: Callable[[], str]
    case: Case | None = None
    state_spec: StateSpec | None = None


@dataclass(frozen=True)
class Check:
    """One requirement of the conformance suite.

    Attributes:
        id: id of the requirement, such as "F1".
        title: short description for reports.
        cases: function of the backend under test that yields the cases.
        needs_gpu: report the check as not run on machines without a GPU.
        kind: "attention" or "state"; the check has no cases for a backend without such layers.
    """

    id: str
    title: str
    cases: Callable[[BackendUnderTest], Iterator[CheckCase]]
    needs_gpu: bool = False
    kind: str = "attention"


def matches_filter(check: str, case: str, only: str | None) -> bool:
    """True if CHECK/CASE is selected.

    Args:
        check: id of the check.
        case: id of the case.
        only: comma-separated CHECK or CHECK/CASE patterns with * and ?; None selects everything.
    """
    if not only:
        return True
    patterns = [pattern.strip() for pattern in only.split(",")]
    return any(
        fnmatch.fnmatchcase(f"{check}/{case}", pattern) or fnmatch.fnmatchcase(check, pattern)
        for pattern in patterns
    )


def select_cases(
    check: Check, target: BackendUnderTest, only: str | None = None
) -> list[CheckCase]:
    """The selected cases of a check.

    A GPU check without a GPU yields a single case "all" that is reported as not run.
    """
    if check.kind not in target.kinds:
        return []
    if check.needs_gpu and not target.on_gpu:

        def report_missing_gpu() -> str:
            raise NotRun(f"needs a GPU, runs on {target.device}")

        selected = only is None or any(
            pattern.split("/")[0].strip() == check.id for pattern in only.split(",")
        )
        return [CheckCase("all", report_missing_gpu)] if selected else []
    return [case for case in check.cases(target) if matches_filter(check.id, case.id, only)]


def check_filter(checks: Iterable[Check], target: BackendUnderTest, only: str | None) -> None:
    """Check that each part of a filter selects a case.

    Raises:
        ContractError: a part selects none.
    """
    for part in () if only is None else [part.strip() for part in only.split(",")]:
        name = part.split("/")[0]
        matching = [check for check in checks if fnmatch.fnmatchcase(check.id, name)]
        if not part or not any(select_cases(check, target, part) for check in matching):
            ids = ", ".join(check.id for check in matching or checks)
            raise ContractError(
                f"no case matches --only {part or repr(only)}: "
                + (f"{ids} has no such case" if matching else f"the checks are {ids}")
            )


def run_check(
    check: Check,
    target: BackendUnderTest,
    only: str | None = None,
    on_result: Callable[[CaseResult], None] | None = None,
) -> list[CaseResult]:
    """Run the selected cases of a check. An exception in one case does not stop the others.

    Args:
        check: the check to run.
        target: the backend under test.
        only: case filter, see `matches_filter`.
        on_result: called after each case, for progress bars.
    """
    results = []
    for case in select_cases(check, target, only):
        results.append(run_check_case(check, case, target))
        if on_result is not None:
            on_result(results[-1])
    return results


@contextmanager
def without_validation() -> Iterator[None]:
    """Unset ATTNLIB_VALIDATE: cases also cover what it refuses and kernels must serve, such as
    queries before the first key (M5) and parts of a sequence."""
    level = os.environ.pop("ATTNLIB_VALIDATE", None)
    try:
        yield
    finally:
        if level is not None:
            os.environ["ATTNLIB_VALIDATE"] = level


def run_check_case(check: Check, check_case: CheckCase, target: BackendUnderTest) -> CaseResult:
    """Run one case and return its result; exceptions become failures."""
    started = time.perf_counter()
    uses: tuple[str, ...] = ()
    try:
        if check_case.case is not None:
            check_supported(target.backend, check_case.case, target.device)
            uses = capability_uses(check_case.case, target.device.type)
        if check_case.state_spec is not None:
            check_state_supported(target, check_case.state_spec)
            uses = state_uses(check_case.state_spec, target.device.type)
        with without_validation():
            message = check_case.run()
        outcome = Outcome.FAIL if message else Outcome.PASS
    except UnsupportedCase as error:
        outcome, message = Outcome.UNSUPPORTED, str(error)
    except NotRun as reason:
        outcome, message = Outcome.NOT_RUN, str(reason)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        location = f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
        case = f" | case: {check_case.case}" if check_case.case is not None else ""
        message = f"raised {type(error).__name__}: {error} ({location}){case}"
        outcome = Outcome.FAIL
    return CaseResult(
        check=check.id,
        case=check_case.id,
        outcome=outcome,
        message=message,
        reproduce=reproduction_line(
            target.label,
            check.id,
            check_case.id,
            target.seed,
            str(target.device),
            target.quick,
            target.score,
            target.kv_format,
        ),
        uses=uses,
        seconds=time.perf_counter() - started,
    )
