"""What a probe is: an id, a question, and checks that are made when they are asked for.

A probe is a function of a subject that yields checks. A check is a case id and something to call: it returns "" or
says what is wrong, raises `Refused` where the backend declared that it cannot, `NotRun` where this machine cannot, and
whatever else it raises is a failure.
"""

from __future__ import annotations

import fnmatch
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from attnlib.testing.backend_under_test import Subject
from attnlib.testing.case import Case
from attnlib.testing.coverage import capability_uses
from attnlib.testing.outcome import NotRun, Outcome, Refused, Verdict, reproduction_line
from attnlib.testing.runner import check_supported

__all__ = ["Check", "Probe", "matches", "run_check", "run_probe", "select_checks"]


@dataclass(frozen=True)
class Check:
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
class Probe:
    """One question to a backend.

    Attributes:
        id: the requirement's id, such as "F1".
        title: the question in a few words.
        checks: a function of the subject that yields its checks.
        needs_gpu: without a GPU the probe is reported as not run.
    """

    id: str
    title: str
    checks: Callable[[Subject], Iterator[Check]]
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


def select_checks(probe: Probe, subject: Subject, only: str | None = None) -> list[Check]:
    """The checks of a probe that are asked for; a GPU probe without a GPU has one, which says so."""
    if probe.needs_gpu and not subject.on_gpu:

        def not_here() -> str:
            raise NotRun(f"needs a GPU, runs on {subject.device}")

        asked = only is None or any(
            pattern.split("/")[0].strip() == probe.id for pattern in only.split(",")
        )
        return [Check("all", not_here)] if asked else []
    return [check for check in probe.checks(subject) if matches(probe.id, check.id, only)]


def run_probe(
    probe: Probe,
    subject: Subject,
    only: str | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Run a probe's checks, each to an outcome; nothing that a backend raises stops the exam."""
    outcomes = []
    for check in select_checks(probe, subject, only):
        outcomes.append(run_check(probe, check, subject))
        if on_outcome is not None:
            on_outcome(outcomes[-1])
    return outcomes


def run_check(probe: Probe, check: Check, subject: Subject) -> Outcome:
    """Run one check to its outcome."""
    started = time.perf_counter()
    uses: tuple[str, ...] = ()
    try:
        if check.case is not None:
            check_supported(subject.backend, check.case, subject.device)
            uses = capability_uses(check.case, subject.device.type)
        message = check.run()
        verdict = Verdict.FAIL if message else Verdict.PASS
    except Refused as refusal:
        verdict, message = Verdict.REFUSED, str(refusal)
    except NotRun as reason:
        verdict, message = Verdict.NOT_RUN, str(reason)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        case = f" | case: {check.case}" if check.case is not None else ""
        text = f"raised {type(error).__name__}: {error} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno}){case}"
        verdict, message = Verdict.FAIL, text
    line = reproduction_line(
        subject.label, probe.id, check.id, subject.seed, str(subject.device), subject.quick
    )
    return Outcome(probe.id, check.id, verdict, message, line, uses, time.perf_counter() - started)
