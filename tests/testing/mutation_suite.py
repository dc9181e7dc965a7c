"""The suite up to its first failure, and the lines that it executes: one run of `mutation_runs`.

Nothing of attnlib is imported before a run begins.
"""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType
from typing import Any

__all__ = ["first_failure", "record_lines"]


def first_failure(form: str, checks: str | None, first: tuple[str, ...] = ()) -> tuple[str, str]:
    """Outcome and detail of `attnlib verify torch`, which ends at the first failed case."""
    try:
        from attnlib.testing.check import run_check
        from attnlib.testing.checks import CHECKS
        from attnlib.testing.conformance import make_target
        from attnlib.testing.outcome import CaseResult, Outcome

        class Failed(BaseException):
            """Not an `Exception`: nothing in the suite catches it."""

        def stop(result: CaseResult) -> None:
            if result.outcome is Outcome.FAIL:
                raise Failed(result.id)

        try:
            target = make_target("torch", device="cpu", against=[], quick=form == "quick")
            passed = 0
            early = {name.split("/")[0] for name in first}
            for check in CHECKS:
                if check.id in early:
                    run_check(check, target, ",".join(first), on_result=stop)
            for check in CHECKS:
                results = run_check(check, target, checks, on_result=stop)
                passed += sum(result.outcome is Outcome.PASS for result in results)
            return ("survives", "") if passed else ("check", "no case passed")
        except Failed as failed:
            return "check", str(failed)
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"[:200]


def record_lines(folders: tuple[str, ...]) -> dict[str, set[int]]:
    """Record the executed lines of the files in `folders` from now on, by file."""
    lines: dict[str, set[int]] = {}
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is None:
        _trace(folders, lines)
        return lines

    def on_line(code: CodeType, number: int) -> object:
        if code.co_filename.startswith(folders):
            lines.setdefault(code.co_filename, set()).add(number)
        return monitoring.DISABLE  # each line once: runs are as fast as without

    monitoring.use_tool_id(monitoring.COVERAGE_ID, "mutation")
    monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, on_line)
    monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)
    return lines


def _trace(folders: tuple[str, ...], lines: dict[str, set[int]]) -> None:
    """As `record_lines`, for Python 3.11 and before."""

    def local(frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            lines.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
        return local

    def enter(frame: FrameType, _event: str, _argument: object) -> Any:
        return local if frame.f_code.co_filename.startswith(folders) else None

    threading.settrace(enter)
    sys.settrace(enter)
