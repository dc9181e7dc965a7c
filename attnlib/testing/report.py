"""Reports for people and for machines: a table that fits a terminal, and JSON that keeps every number."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from attnlib.testing.checks import CHECKS
from attnlib.testing.conformance import ConformanceReport
from attnlib.testing.outcome import CaseResult, Outcome

__all__ = ["format_table", "render_report", "report_to_json"]

_TITLES = {probe.id: probe.title for probe in CHECKS}


def format_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Columns as wide as their widest cell; numbers to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def pad(cell: str, column: int) -> str:
        return cell.rjust(widths[column]) if cell.isdigit() else cell.ljust(widths[column])

    return "\n".join(
        "  ".join(pad(cell, c) for c, cell in enumerate(line)).rstrip() for line in lines
    )


def _row(probe: str, results: list[CaseResult]) -> tuple[str, ...]:
    counts = [sum(o.outcome is outcome for o in results) for outcome in Outcome]
    return (
        probe,
        _TITLES.get(probe, ""),
        *(str(count) for count in counts),
        f"{sum(o.seconds for o in results):.1f}",
    )


def render_report(report: ConformanceReport, *, failures: int = 20) -> str:
    """The whole report: what ran, a line per probe, failures with their reproduction, coverage, the outcome.

    Args:
        failures: how many failures to print in full.
    """
    by_check: dict[str, list[CaseResult]] = {}
    for result in report.results:
        by_check.setdefault(result.probe, []).append(result)
    header = ("probe", "question", "pass", "fail", "refused", "not run", "seconds")
    parts = [
        f"attnlib verify {report.backend}: {report.backend_class} on {report.device}, seed {report.seed}"
        f"{', quick' if report.quick else ''}, {', '.join(f'{k} {v}' for k, v in report.versions.items())}",
        f"base case: {report.base_case}",
        "",
        format_table(header, (_row(probe, results) for probe, results in by_check.items())),
    ]
    for result in report.failures[:failures]:
        parts += [
            "",
            f"FAIL {result.id}: {result.message}",
            f"     reproduce: {result.reproduce}",
        ]
    if len(report.failures) > failures:
        parts += ["", f"and {len(report.failures) - failures} more failures; --json lists them all"]
    return "\n".join([*parts, "", *_skips(report), *_coverage(report), "", summary_line(report)])


def _skips(report: ConformanceReport) -> list[str]:
    """Refusals and cases not run, grouped by reason: a skip is never silent."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for result in report.results:
        if result.outcome in (Outcome.UNSUPPORTED, Outcome.NOT_RUN):
            grouped.setdefault((result.outcome.value, result.message), []).append(result.id)
    return [
        f"{outcome}: {reason} ({', '.join(ids[:4])}{f' and {len(ids) - 4} more' if len(ids) > 4 else ''})"
        for (outcome, reason), ids in grouped.items()
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
    """Cases by outcome, coverage, time and the outcome."""
    counts = [report.count(outcome) for outcome in Outcome]
    return (
        f"{len(report.results)} cases · {counts[0]} pass · {counts[1]} fail · {counts[2]} refused with a reason · "
        f"{counts[3]} not run · {report.seconds:.0f} s · {'PASSED' if report.passed else 'FAILED'}"
    )


def report_to_json(report: ConformanceReport) -> str:
    """Everything, with stable keys; `version` changes when their meaning does."""
    data: dict[str, Any] = {
        "version": 1,
        "backend": report.backend,
        "backend_class": report.backend_class,
        "passed": report.passed,
        "device": report.device,
        "seed": report.seed,
        "quick": report.quick,
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
