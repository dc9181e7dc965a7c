"""Conformance reports as text and as JSON."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from attnlib.testing.checks import CHECKS
from attnlib.testing.coverage import Coverage
from attnlib.testing.kv_formats import KV_FORMAT_CHECKS
from attnlib.testing.outcome import CaseResult, Outcome

__all__ = [
    "ConformanceReport",
    "format_table",
    "render_report",
    "report_to_json",
    "report_versions",
]

_TITLES = {check.id: check.title for check in (*CHECKS, *KV_FORMAT_CHECKS)}


@dataclass(frozen=True)
class ConformanceReport:
    """The result of one conformance run.

    Attributes:
        backend: the backend's name as given by the caller.
        backend_class: "module:Class" of the backend.
        device, seed, quick, only: the arguments of the run.
        base_case: the case that the checks varied.
        results: the result of each case, in order.
        coverage: the coverage of the declared capabilities.
        seconds: run time.
        versions: versions of Python, torch, Triton and the name of the GPU.
        kv_format: the KV format that was tested over the backend, or None.
    """

    backend: str
    backend_class: str
    device: str
    seed: int
    quick: bool
    only: str | None
    base_case: str
    results: tuple[CaseResult, ...]
    coverage: Coverage
    seconds: float
    versions: dict[str, str]
    kv_format: str | None = None

    @property
    def passed(self) -> bool:
        """True if no case failed and at least one passed."""
        return not self.failures and self.count(Outcome.PASS) > 0

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        """The failed cases."""
        return tuple(result for result in self.results if result.outcome is Outcome.FAIL)

    def count(self, outcome: Outcome) -> int:
        """Number of cases with this outcome."""
        return sum(result.outcome is outcome for result in self.results)

    def failed_checks(self) -> tuple[str, ...]:
        """Ids of the checks with a failed case, in order."""
        return tuple(dict.fromkeys(result.check for result in self.failures))

    def __str__(self) -> str:
        """The report as text, see `render_report`."""
        return render_report(self)


def format_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Align the columns of a table; numbers are right-aligned."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def pad(cell: str, column: int) -> str:
        return cell.rjust(widths[column]) if cell.isdigit() else cell.ljust(widths[column])

    return "\n".join(
        "  ".join(pad(cell, c) for c, cell in enumerate(line)).rstrip() for line in lines
    )


def _row(check: str, results: list[CaseResult]) -> tuple[str, ...]:
    counts = [sum(o.outcome is outcome for o in results) for outcome in Outcome]
    return (
        check,
        _TITLES.get(check, ""),
        *(str(count) for count in counts),
        f"{sum(o.seconds for o in results):.1f}",
    )


def render_report(report: ConformanceReport) -> str:
    """The report as text: settings, one line per check, failures, skipped cases, coverage, summary.

    Each failed check has two lines, for its first failed case. Specific checks come first, in the
    order of `CHECKS`.
    """
    by_check: dict[str, list[CaseResult]] = {}
    for result in report.results:
        by_check.setdefault(result.check, []).append(result)
    header = ("check", "requirement", *(outcome.value for outcome in Outcome), "seconds")
    lines = [
        f"attnlib verify {_tested(report)}: {report.backend_class} on {report.device}, "
        f"seed {report.seed}{', quick' if report.quick else ''}, "
        f"{', '.join(f'{name} {version}' for name, version in report.versions.items())}",
        f"base case: {report.base_case}",
        "",
        format_table(header, (_row(check, results) for check, results in by_check.items())),
        *_failures(report),
        "",
        *_skips(report),
        *(_coverage(report) if report.kv_format is None and report.only is None else ()),
        "",
        *_start_here(report),
        summary_line(report),
    ]
    return "\n".join(lines)


def _tested(report: ConformanceReport) -> str:
    chosen = report.kv_format
    return report.backend if chosen is None else f"--kv-format {chosen} {report.backend}"


def _first_failures(report: ConformanceReport) -> list[tuple[CaseResult, int]]:
    """The first failed case of each check and the number of its failed cases, specific first."""
    by_check: dict[str, list[CaseResult]] = {}
    for result in report.failures:
        by_check.setdefault(result.check, []).append(result)
    order = list(_TITLES)
    known = sorted(by_check, key=lambda check: order.index(check) if check in order else len(order))
    return [(by_check[check][0], len(by_check[check])) for check in known]


def _failures(report: ConformanceReport) -> list[str]:
    lines = []
    for result, count in _first_failures(report):
        more = f" and {count - 1} more of {result.check}" if count > 1 else ""
        lines += [
            "",
            f"FAIL {result.id}{more}: {result.message}",
            f"     reproduce: {result.reproduce}",
        ]
    return lines


def _start_here(report: ConformanceReport) -> list[str]:
    """The line that names the exception that all failed cases raise, or else the most specific of
    the failed checks; none without a failure."""
    failures = _first_failures(report)
    if not failures:
        return []
    first, title = failures[0][0], _TITLES.get(failures[0][0].check, "")
    errors = {result.message.partition(" | case: ")[0] for result in report.failures}
    if len(report.failures) > 1 and len(errors) == 1 and first.message.startswith("raised "):
        count = len(report.failures)
        return [f"start here: all {count} failed cases {errors.pop()}; the first is {first.id}"]
    others = len(failures) - 1
    of = f"; the most specific of {len(failures)} failed checks" if others else ""
    return [f"start here: {first.id}{f' ({title})' if title else ''}{of}"]


def _skips(report: ConformanceReport) -> list[str]:
    """Unsupported cases and cases not run, grouped by reason."""
    case_ids: dict[tuple[str, str], list[str]] = {}
    for result in report.results:
        if result.outcome in (Outcome.UNSUPPORTED, Outcome.NOT_RUN):
            for reason in result.message.split("; "):
                case_ids.setdefault((result.outcome.value, reason), []).append(result.id)
    return [
        f"{outcome}: {reason} ({', '.join(ids[:3])}"
        f"{f' and {len(ids) - 3} more' if len(ids) > 3 else ''})"
        for (outcome, reason), ids in case_ids.items()
    ]


def _coverage(report: ConformanceReport) -> list[str]:
    coverage = report.coverage
    lines = [str(coverage)]
    for label, names in (
        ("declared but not exercised", coverage.not_exercised),
        ("declared as not supported", coverage.not_supported),
        ("not stated", coverage.not_stated),
    ):
        if names:
            lines.append(f"  {label}: {', '.join(names)}")
    return lines


def summary_line(report: ConformanceReport) -> str:
    """Number of cases by outcome, run time, and PASSED or FAILED."""
    counts = [report.count(outcome) for outcome in Outcome]
    return (
        f"{len(report.results)} cases · {counts[0]} passed · {counts[1]} failed · "
        f"{counts[2]} unsupported · {counts[3]} not run · {report.seconds:.0f} s · "
        f"{'PASSED' if report.passed else 'FAILED'}"
    )


def report_to_json(report: ConformanceReport) -> str:
    """The report as JSON; `version` changes with the names and meanings of the keys."""
    data: dict[str, Any] = {
        "version": 2,
        "backend": report.backend,
        "backend_class": report.backend_class,
        "passed": report.passed,
        "device": report.device,
        "seed": report.seed,
        "quick": report.quick,
        "kv_format": report.kv_format,
        "only": report.only,
        "base_case": report.base_case,
        "seconds": round(report.seconds, 3),
        "versions": report.versions,
        "counts": {outcome.value: report.count(outcome) for outcome in Outcome},
        "coverage": {
            "exercised": list(report.coverage.exercised),
            "declared_not_exercised": list(report.coverage.not_exercised),
            "not_supported": list(report.coverage.not_supported),
            "not_stated": list(report.coverage.not_stated),
        },
        "results": [result.to_json() for result in report.results],
    }
    return json.dumps(data, indent=1)


def report_versions() -> dict[str, str]:
    """The versions that results depend on, and the GPU."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    triton = sys.modules.get("triton")
    if triton is not None:
        versions["triton"] = str(triton.__version__)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        versions["gpu"] = torch.cuda.get_device_name()
    return versions
