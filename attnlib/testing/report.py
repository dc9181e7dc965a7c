"""Reports for people and for machines: a table that fits a terminal, and JSON that keeps every number."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from attnlib.testing.conformance import ConformanceReport
from attnlib.testing.outcome import Outcome, Verdict
from attnlib.testing.probes import PROBES

__all__ = ["format_table", "render_report", "report_to_json"]

_TITLES = {probe.id: probe.title for probe in PROBES}


def format_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Columns as wide as their widest cell; numbers to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def pad(cell: str, column: int) -> str:
        return cell.rjust(widths[column]) if cell.isdigit() else cell.ljust(widths[column])

    return "\n".join(
        "  ".join(pad(cell, c) for c, cell in enumerate(line)).rstrip() for line in lines
    )


def _row(probe: str, outcomes: list[Outcome]) -> tuple[str, ...]:
    counts = [sum(o.verdict is verdict for o in outcomes) for verdict in Verdict]
    return (
        probe,
        _TITLES.get(probe, ""),
        *(str(count) for count in counts),
        f"{sum(o.seconds for o in outcomes):.1f}",
    )


def render_report(report: ConformanceReport, *, failures: int = 20) -> str:
    """The whole report: what ran, a line per probe, failures with their reproduction, coverage, the verdict.

    Args:
        failures: how many failures to print in full.
    """
    by_probe: dict[str, list[Outcome]] = {}
    for outcome in report.outcomes:
        by_probe.setdefault(outcome.probe, []).append(outcome)
    header = ("probe", "question", "pass", "fail", "refused", "not run", "seconds")
    parts = [
        f"attnlib verify {report.backend}: {report.backend_class} on {report.device}, seed {report.seed}"
        f"{', quick' if report.quick else ''}, {', '.join(f'{k} {v}' for k, v in report.versions.items())}",
        f"base case: {report.base_case}",
        "",
        format_table(header, (_row(probe, outcomes) for probe, outcomes in by_probe.items())),
    ]
    for outcome in report.failures[:failures]:
        parts += [
            "",
            f"FAIL {outcome.id}: {outcome.message}",
            f"     reproduce: {outcome.reproduce}",
        ]
    if len(report.failures) > failures:
        parts += ["", f"and {len(report.failures) - failures} more failures; --json lists them all"]
    return "\n".join([*parts, "", *_skips(report), *_coverage(report), "", summary_line(report)])


def _skips(report: ConformanceReport) -> list[str]:
    """Refusals and cases not run, grouped by reason: a skip is never silent."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for outcome in report.outcomes:
        if outcome.verdict in (Verdict.REFUSED, Verdict.NOT_RUN):
            grouped.setdefault((outcome.verdict.value, outcome.message), []).append(outcome.id)
    return [
        f"{verdict}: {reason} ({', '.join(ids[:4])}{f' and {len(ids) - 4} more' if len(ids) > 4 else ''})"
        for (verdict, reason), ids in grouped.items()
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
    """Cases by verdict, coverage, time and the verdict."""
    counts = [report.count(verdict) for verdict in Verdict]
    return (
        f"{len(report.outcomes)} cases · {counts[0]} pass · {counts[1]} fail · {counts[2]} refused with a reason · "
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
        "counts": {verdict.value: report.count(verdict) for verdict in Verdict},
        "coverage": {
            "exercised": list(report.coverage.exercised),
            "declared_not_exercised": list(report.coverage.not_exercised),
            "not_supported": list(report.coverage.not_supported),
            "not_stated": list(report.coverage.not_stated),
        },
        "outcomes": [outcome.to_json() for outcome in report.outcomes],
    }
    return json.dumps(data, indent=1)
