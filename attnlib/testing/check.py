"""What a probe is: an id, a question, and checks that are made when they are asked for.

A probe is a function of a target that yields checks. A check is a case id and something to call: it returns "" or
says what is wrong, raises `UnsupportedCase` where the backend declared that it cannot, `NotRun` where this machine cannot, and
whatever else it raises is a failure.
"""

from __future__ import annotations

import fnmatch
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.coverage import capability_uses
from attnlib.testing.outcome import CaseResult, NotRun, Outcome, UnsupportedCase, reproduction_line
from attnlib.testing.runner import check_supported

__all__ = ["CheckCase", "Check", "matches", "run_check_case", "run_check", "select_cases"]


@dataclass(frozen=True)
class CheckCase:
    """One case of a probe.

    Attributes:
        id: unique within the probe; part of the reproduction line.
        run: returns "" or what is wrong.
        case: what it runs, if that is one case: refusals and coverage are read off it.
    """

    id: str
    run: Callable[[], str]
    case: Case | None = None


@dataclass(frozen=True)
class Check:
    """One question to a backend.

    Attributes:
        id: the requirement's id, such as "F1".
        title: the question in a few words.
        checks: a function of the target that yields its checks.
        needs_gpu: without a GPU the probe is reported as not run.
    """

    id: str
    title: str
    cases: Callable[[BackendUnderTest], Iterator[CheckCase]]
    needs_gpu: bool = False


def matches(probe: str, case: str, only: str | None) -> bool:
    """Whether PROBE/CASE is asked for; `only` is comma-separated PROBE or PROBE/CASE patterns with * and ?."""
    if not only:
        return True
    patterns = [pattern.strip() for pattern in only.split(",")]
    return any(
        fnmatch.fnmatchcase(f"{probe}/{case}", pattern) or fnmatch.fnmatchcase(probe, pattern)
        for pattern in patterns
    )


def select_cases(
    probe: Check, target: BackendUnderTest, only: str | None = None
) -> list[CheckCase]:
    """The checks of a probe that are asked for; a GPU probe without a GPU has one, which says so."""
    if probe.needs_gpu and not target.on_gpu:

        def not_here() -> str:
            raise NotRun(f"needs a GPU, runs on {target.device}")

        asked = only is None or any(
            pattern.split("/")[0].strip() == probe.id for pattern in only.split(",")
        )
        return [CheckCase("all", not_here)] if asked else []
    return [check for check in probe.cases(target) if matches(probe.id, check.id, only)]


def run_check(
    probe: Check,
    target: BackendUnderTest,
    only: str | None = None,
    on_result: Callable[[CaseResult], None] | None = None,
) -> list[CaseResult]:
    """Run a probe's checks, each to an result; nothing that a backend raises stops the exam."""
    results = []
    for check in select_cases(probe, target, only):
        results.append(run_check_case(probe, check, target))
        if on_result is not None:
            on_result(results[-1])
    return results


def run_check_case(probe: Check, check: CheckCase, target: BackendUnderTest) -> CaseResult:
    """Run one check to its result."""
    started = time.perf_counter()
    uses: tuple[str, ...] = ()
    try:
        if check.case is not None:
            check_supported(target.backend, check.case, target.device)
            uses = capability_uses(check.case, target.device.type)
        message = check.run()
        outcome = Outcome.FAIL if message else Outcome.PASS
    except UnsupportedCase as refusal:
        outcome, message = Outcome.UNSUPPORTED, str(refusal)
    except NotRun as reason:
        outcome, message = Outcome.NOT_RUN, str(reason)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        case = f" | case: {check.case}" if check.case is not None else ""
        text = f"raised {type(error).__name__}: {error} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno}){case}"
        outcome, message = Outcome.FAIL, text
    line = reproduction_line(
        target.label, probe.id, check.id, target.seed, str(target.device), target.quick
    )
    return CaseResult(
        probe.id, check.id, outcome, message, line, uses, time.perf_counter() - started
    )
